"""A pickler of shmreduce finds once for each message how objects of a class are pickled."""

from __future__ import annotations

import copyreg
import gc
import io
from decimal import Decimal
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest

from shmreduce import Message, Reducer, pickling, process_registry
from shmreduce.pickler import pickle_into
from tests.conftest import registered

pytestmark = pytest.mark.usefixtures("shmreduce_no_leaks")


def arrived(obj: Any) -> Any:
    """Send to this very process."""
    data, message = pickling.dumps(obj)
    if message is not None:
        message.rollback()
    return pickling.loads(data)


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> list[type]:
    """The classes that the registry was asked for."""
    registry = process_registry.get_registry()
    asked: list[type] = []
    find = registry.find

    def note(cls: type) -> Any:
        asked.append(cls)
        return find(cls)

    monkeypatch.setattr(registry, "find", note)
    return asked


def test_the_registry_is_asked_once_for_each_class(found: list[type]) -> None:
    """Not for each object: a message may have ten thousand numbers of another package."""
    sent = [Decimal(number) for number in range(1000)]
    assert arrived(sent) == sent
    assert found.count(Decimal) == 1


class Meta(type):
    """Makes classes that are equal if their names have the same length."""

    def __eq__(cls, other: object) -> bool:
        return isinstance(other, Meta) and len(cls.__name__) == len(other.__name__)

    def __hash__(cls) -> int:
        return len(cls.__name__)


class One(metaclass=Meta):
    """Pickled in the ordinary way."""


class Two(metaclass=Meta):
    """Pickled by a reducer."""


def rebuild_two(_: bytes) -> str:
    return "two"


class ReducerToText(Reducer):
    def reduce(self, obj: Any, message: Message) -> Any:
        return rebuild_two, (b"",)


class TwoReducer(ReducerToText):
    types = (Two,)


@pytest.mark.parametrize("order", [1, -1])
def test_equal_classes_are_two_classes(order: int) -> None:
    """A metaclass may say that they are equal, but only one of them has a reducer."""
    with registered(TwoReducer()):
        first, second, *_ = arrived([One(), Two(), One(), Two()][::order])[::order]
    assert type(first) is One
    assert second == "two"


class Named(type):
    """The class of a class."""


class Example(metaclass=Named):
    """A class that is pickled by its name."""


class NamedReducer(Reducer):
    """Claims classes, and then has them pickled in the ordinary way, or not."""

    types = (Named,)

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def reduce(self, obj: Any, message: Message) -> Any:
        return self.answer


def test_a_reducer_of_classes_is_asked() -> None:
    """Or the class is pickled by its name."""
    assert arrived([Example, Example()])[0] is Example
    with registered(NamedReducer(NotImplemented)):
        assert arrived([Example])[0] is Example
    with registered(NamedReducer((rebuild_two, (b"",)))):
        assert arrived([Example]) == ["two"]


class Strange:
    """Has a function in copyreg, which is called for it in each message."""


def reduce_strange(_: Strange) -> Any:
    return "strange"


strange = Strange()


def test_what_copyreg_has_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also a name, for an object that is a global."""
    monkeypatch.setitem(copyreg.dispatch_table, Strange, reduce_strange)
    assert arrived([strange, 1.5, {2}])[0] is strange


class Importing:
    """Registers how a class is pickled when it is pickled itself."""

    def __init__(self, how: Any) -> None:
        self.how = how

    def __reduce__(self) -> Any:
        self.how()
        return int, ()


def test_a_reducer_that_comes_with_an_object_is_asked() -> None:
    """Pickling an object may import a plugin, whose reducers hold for what comes after it."""
    reducer = TwoReducer()
    with registered(reducer):
        # So that it is registered only while the message is pickled.
        process_registry.get_registry().unregister(reducer)
        how = Importing(lambda: process_registry.get_registry().register(reducer, "this test"))
        assert arrived([how, Two()]) == [0, "two"]


class Usual:
    """A class like most, with a reducer."""


class UsualReducer(ReducerToText):
    types = (Usual,)


def test_nothing_is_left_to_the_collector_of_cycles() -> None:
    """It would keep the message until then, and what that has."""
    with registered(UsualReducer()):
        gc.collect()
        gc.disable()
        try:
            pickle_into(io.BytesIO(), [Decimal(1), Example, Usual(), Usual()])
            assert gc.collect() == 0
        finally:
            gc.enable()


def test_it_is_asked_for_nothing_while_shmreduce_is_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What install() puts into ForkingPickler is not for our own pickler."""

    def ours(_: Any, obj: Any) -> Any:
        raise AssertionError(obj)

    monkeypatch.setattr(ours, "_shmreduce_replaced_override", None, raising=False)
    monkeypatch.setattr(ForkingPickler, "reducer_override", ours, raising=False)
    assert arrived([Decimal(1)]) == [Decimal(1)]


def test_the_same_error_as_from_the_standard_pickler() -> None:
    """For an object that cannot be pickled."""
    sent = [Decimal(1), (each for each in "")]
    with pytest.raises(TypeError, match="generator") as theirs:
        ForkingPickler.dumps(sent)
    with pytest.raises(TypeError, match="generator") as ours:
        pickling.dumps(sent)
    assert str(ours.value) == str(theirs.value)
