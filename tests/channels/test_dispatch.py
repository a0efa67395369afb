"""A pickler of shmreduce finds once how objects of a class are pickled, and is used again."""

from __future__ import annotations

import copyreg
import gc
import io
import pickle
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from decimal import Decimal
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest

from shmreduce import Message, Reducer, pickler, pickling, process_registry, unpickling
from shmreduce.pickler import pickle_into
from tests.conftest import registered

pytestmark = pytest.mark.usefixtures("shmreduce_no_leaks")


def arrived(obj: Any) -> Any:
    """Send to this very process."""
    data, message = pickling.dumps(obj)
    if message is not None:
        message.rollback()
    return unpickling.loads(data)


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> list[type]:
    """The classes that the registry was asked for, by picklers that were made since."""
    monkeypatch.setattr(pickling, "_spare", [])
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


def test_an_override_that_is_gone_is_asked_for_nothing(
    monkeypatch: pytest.MonkeyPatch, found: list[type]
) -> None:
    """A pickler that was made for it is not used again: it would ask for every object."""

    def override(_pickler: Any, _obj: Any) -> Any:
        return NotImplemented

    with monkeypatch.context() as patch:
        patch.setattr(ForkingPickler, "reducer_override", override, raising=False)
        assert arrived([Decimal(1)]) == [Decimal(1)]
    assert type(pickling._spare[-1].run._pickler) is not pickle.Pickler
    for _ in range(2):
        assert arrived([Decimal(1)]) == [Decimal(1)]
        assert [type(each.run._pickler) for each in pickling._spare] == [pickle.Pickler]


def test_the_next_message_asks_for_none(found: list[type]) -> None:
    """The pickler is the same, and so are its answers."""
    for _ in range(3):
        assert arrived([Decimal(1)]) == [Decimal(1)]
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
            with suppress(TypeError):
                pickle_into(io.BytesIO(), [Decimal(1), Usual(), (each for each in "")])
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


@dataclass
class Late:
    """A class for which something is registered after it was pickled."""


class LateReducer(ReducerToText):
    types = (Late,)


def late(_: Any) -> Any:
    return str, ("late",)


def override_late(_: Any, obj: Any) -> Any:
    return late(obj) if isinstance(obj, Late) else NotImplemented


@pytest.mark.parametrize("how", ["copyreg", "ForkingPickler", "registry", "reducer_override"])
def test_what_is_registered_later_is_asked(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what is taken away again is not asked any more."""
    assert arrived([Late()]) == [Late()]
    if how == "registry":
        with registered(LateReducer()):
            assert arrived([Late()]) == ["two"]
    else:
        with monkeypatch.context() as patch:
            if how == "copyreg":
                patch.setitem(copyreg.dispatch_table, Late, late)
            elif how == "ForkingPickler":
                patch.setitem(pickler._registered(), Late, late)
            else:
                patch.setattr(ForkingPickler, "reducer_override", override_late, raising=False)
            assert arrived([Late()]) == ["late"]
    assert arrived([Late()]) == [Late()]


def test_one_registration_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if there are as many as before."""
    table = copyreg.dispatch_table
    monkeypatch.setitem(table, Strange, reduce_strange)
    assert arrived([strange, Late()]) == [strange, Late()]
    monkeypatch.delitem(table, Strange)
    monkeypatch.setitem(table, Late, late)
    assert arrived([Late()]) == ["late"]
    monkeypatch.setitem(table, Late, lambda _: (str, ("later",)))
    assert arrived([Late()]) == ["later"]


@pytest.mark.parametrize("beside", [Decimal, Usual])
def test_what_was_pickled_is_not_kept(beside: type) -> None:
    """A pickler remembers all that it has pickled, to find what comes twice."""
    sent = [beside(), Late()]
    watched = weakref.ref(sent[1])
    with registered(UsualReducer()):
        arrived(sent)
    del sent
    assert watched() is None


class Rebuilt:
    """Pickles as something else, whatever its class is called."""

    def __reduce__(self) -> Any:
        return int, ()


def test_a_class_that_no_module_has_is_not_kept() -> None:
    """Such as one that was made in a function."""
    made = type("Made", (Rebuilt,), {})
    assert arrived([made(), Decimal(1)]) == [0, Decimal(1)]
    watched = weakref.ref(made)
    del made
    gc.collect()
    assert watched() is None


def test_a_failed_message_leaves_nothing_for_the_next() -> None:
    """Neither bytes nor what was remembered."""
    sent = [Decimal(1), "text", (each for each in "")]
    with pytest.raises(TypeError, match="generator"):
        pickling.dumps(sent)
    assert arrived([Decimal(1), "text"]) == [Decimal(1), "text"]


class Sending:
    """Sends another message while it is pickled."""

    def __reduce__(self) -> Any:
        return tuple, (arrived([Decimal(2), Decimal(3)]),)


def test_a_message_in_a_message() -> None:
    """Each has a pickler of its own."""
    sent = [Decimal(1), Sending(), Decimal(1)]
    for _ in range(3):
        assert arrived(sent) == [Decimal(1), (Decimal(2), Decimal(3)), Decimal(1)]


def test_threads_have_picklers_of_their_own() -> None:
    """More threads than picklers that are kept."""

    def send(number: int) -> bool:
        sent = [[Decimal(number), each, Late()] for each in range(200)]
        return all(arrived(each) == each for each in sent)

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(send, range(32)))
    assert len(pickling._spare) <= pickling._MOST_SPARE
