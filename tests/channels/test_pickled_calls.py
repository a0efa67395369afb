"""The pickles of calls that reducers ask for."""

from __future__ import annotations

import pickle
import sys
import types
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import shmreduce
from shmreduce import pickled_calls
from shmreduce.pickled_calls import CallOnLoad, pickle_of_call
from tests.conftest import registered

IN_PYTHON: Any = vars(pickle)["_loads"]
ATOMS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
ARGUMENTS = st.lists(
    ATOMS | st.binary(max_size=300) | st.lists(ATOMS, max_size=4).map(tuple), max_size=6
).map(tuple)


def together(*arguments: Any) -> Any:
    return arguments


class Holder:
    @staticmethod
    def together(*arguments: Any) -> Any:
        return arguments


@pytest.mark.parametrize("function", [together, Holder.together], ids=["function", "in a class"])
@pytest.mark.parametrize("loads", [pickle.loads, IN_PYTHON], ids=["C", "Python"])
@given(arguments=ARGUMENTS)
def test_they_are_calls_as_any_pickle_of_one(function: Any, loads: Any, arguments: Any) -> None:
    """Each way to unpickle makes the same call of what the usual pickle of it does."""
    found = loads(pickle_of_call(function, arguments))
    assert found == arguments == pickle.loads(pickle.dumps(CallOnLoad(function, *arguments)))


def test_an_object_that_comes_twice_is_one() -> None:
    """What an argument refers back to is found, also in a long one."""
    shared = (1, "a" * 300)
    first, second = pickle.loads(pickle_of_call(together, (shared, [shared])))
    assert first is second[0]


@pytest.mark.parametrize("function", [int, divmod, Holder, "".join], ids=repr)
def test_what_is_no_function_of_a_module_is_pickled_as_ever(function: Any) -> None:
    """Classes, functions in C, bound methods."""
    before = dict(pickled_calls._calls)
    pickle.loads(pickle_of_call(together, ()))
    data = pickle_of_call(function, ())
    assert data == pickle.dumps(CallOnLoad(function), 5)
    assert pickled_calls._calls.keys() - before.keys() <= {together}


def test_a_function_that_nobody_finds_is_an_error() -> None:
    """As pickle says it; none is remembered."""

    def inner() -> None:
        """Stand inside another function."""

    for unknown in (inner, lambda: None):
        with pytest.raises((AttributeError, pickle.PicklingError)):
            pickle_of_call(unknown, ())
        assert unknown not in pickled_calls._calls


@pytest.mark.parametrize("name", ["no\nname", "no name", "nö"])
def test_odd_names_are_written_as_pickle_writes_them(name: str) -> None:
    """Those that would end too early among them."""
    module = types.ModuleType("shmreduce_odd_names")
    odd = types.FunctionType(together.__code__, vars(module), name)
    odd.__qualname__, odd.__module__ = name, module.__name__
    setattr(module, name, odd)
    sys.modules[module.__name__] = module
    try:
        assert pickle.loads(pickle_of_call(odd, (1, 2))) == (1, 2)
    finally:
        del sys.modules[module.__name__]


def test_not_more_are_remembered_than_there_is_room_for() -> None:
    """Whoever makes functions without end."""
    module = types.ModuleType("shmreduce_many_names")
    sys.modules[module.__name__] = module
    try:
        for number in range(3 * pickled_calls._MOST_CALLS):
            name = f"function_{number}"
            made = types.FunctionType(together.__code__, vars(module), name)
            made.__qualname__, made.__module__ = name, module.__name__
            setattr(module, name, made)
            assert pickle.loads(pickle_of_call(made, (number,))) == (number,)
            assert len(pickled_calls._calls) <= pickled_calls._MOST_CALLS
    finally:
        del sys.modules[module.__name__]
        pickled_calls._calls.clear()


class Wrapped:
    def __init__(self, data: bytes) -> None:
        self.data = data


class WrappedReducer(shmreduce.Reducer):
    types = (Wrapped,)

    def reduce(self, obj: Wrapped, message: shmreduce.Message) -> Any:
        return Wrapped, (obj.data,)


def test_reducers_that_return_classes_work() -> None:
    """Through a channel of shmreduce, beside an array, which is rebuilt by a function."""
    here, there = shmreduce.Pipe()
    with registered(WrappedReducer()):
        here.send(Wrapped(b"bytes"))
        assert there.recv().data == b"bytes"
        here.send(np.arange(100_000))
        assert there.recv()[-1] == 99_999
