"""Small objects are pickled by the quickest pickler, unless somebody is to be asked about them."""

from __future__ import annotations

import io
import pickle
from multiprocessing.reduction import ForkingPickler
from types import FunctionType
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import shmreduce
from shmreduce import Reducer
from shmreduce.pickler import pickle_into
from shmreduce.pickling import dumps
from shmreduce.plain_objects import is_plain
from tests.conftest import registered
from tests.pool.work import square

if TYPE_CHECKING:
    from collections.abc import Iterator

ATOMS = st.none() | st.booleans() | st.integers() | st.text() | st.binary()
OBJECTS = st.recursive(
    ATOMS | st.just(square) | st.just(len) | st.sets(st.integers()),
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(ATOMS, inner),
    max_leaves=30,
)


def cube(x: int) -> int:
    return x**3


class CubeReducer(Reducer):
    """Sends :func:`cube` instead of :func:`square`."""

    types = (FunctionType,)

    def reduce(self, obj: Any, message: Any) -> Any:
        return (take_cube, ()) if obj is square else NotImplemented


def take_cube() -> Any:
    return cube


@pytest.fixture
def reducer() -> Iterator[CubeReducer]:
    """A reducer for functions, registered."""
    with registered(CubeReducer()) as reducer:
        yield reducer


@given(OBJECTS)
def test_what_is_plain_is_pickled_as_by_the_pickler_that_asks(obj: Any) -> None:
    """The bytes are the same."""
    if is_plain(obj):
        file = io.BytesIO()
        pickle_into(file, obj)
        assert pickle.dumps(obj, 5) == file.getvalue() == dumps(obj).data


def test_calls_are_plain_and_what_may_have_a_reducer_is_not() -> None:
    """A function with a few words is; a class, an object of one, or many items are not."""
    assert is_plain((0, square, (1, "a", [None]), {"b": 2.0}))
    assert is_plain(({1}, frozenset("ab")))
    assert not is_plain((0, square, ({1, (1,)},), {}))
    assert not is_plain(Reducer)
    assert not is_plain((square,) * 17)


def test_a_reducer_of_functions_is_asked(reducer: CubeReducer) -> None:
    """In a message and as a pool's task."""
    assert not is_plain((square, (3,)))
    here, there = shmreduce.Pipe()
    with here, there:
        here.send((square, 3))
        assert there.recv() == (cube, 3)
    with shmreduce.get_context("fork").Pool(1) as pool:
        assert pool.map(square, [3], chunksize=1) == [27]
    pool.join()


def test_an_override_of_others_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who has given ForkingPickler a ``reducer_override`` sees functions, installed or not."""

    def override(_: Any, obj: Any) -> Any:
        return (take_cube, ()) if obj is square else NotImplemented

    monkeypatch.setattr(ForkingPickler, "reducer_override", override, raising=False)
    assert not is_plain((square, (3,)))
    data, message = dumps((square, (3,)))
    assert message is None
    assert pickle.loads(data) == (cube, (3,))
