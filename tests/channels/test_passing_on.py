"""A received array that its sender has dropped is passed on as it is; any other is cut off."""

from __future__ import annotations

import copyreg
import gc
import os
import pickle
import sys
from contextlib import nullcontext
from dataclasses import dataclass
from types import FunctionType
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import shmreduce
from shmreduce import ReducerError, SegmentError
from shmreduce.memory.blocks import LiveBlocks
from shmreduce.moving import Moves
from shmreduce.pickler import _Dispatch
from shmreduce.settings import get_settings, set_settings
from shmreduce.testing.processes import OtherProcess
from shmreduce_numpy.blocks import find_block_of
from tests.channels.channels import PATIENCE, context_of, within
from tests.conftest import registered
from tests.interrupter import Interrupter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.conftest import Children

LENGTH = 1 << 20

Place = tuple[bytes, int]


def filled(value: int) -> np.ndarray[Any, Any]:
    return np.full(LENGTH, value, np.uint8)


def received(ends: tuple[Any, Any], value: int = 1) -> np.ndarray[Any, Any]:
    """Return an array that has come by value."""
    ends[1].send(filled(value))
    array: np.ndarray[Any, Any] = ends[0].recv()
    return array


def record_of(array: Any) -> Any:
    block = find_block_of(np.asarray(array))
    assert block is not None
    return block._record


def place_of(array: Any) -> Place:
    """Return in which segment an array lies, and in which block of that."""
    record = record_of(array)
    return record.segment.token, record.block


def is_cut_off(array: Any) -> bool:
    return bool(record_of(array).private)


@pytest.fixture
def cuts(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The records of which pages were asked to be made private."""
    asked = []
    make_private = LiveBlocks.make_private

    def note(live: LiveBlocks, record: Any) -> bool | None:
        asked.append(record)
        return make_private(live, record)

    monkeypatch.setattr(LiveBlocks, "make_private", note)
    return asked


@dataclass
class Holder:
    array: np.ndarray[Any, Any]


CONTAINERS: dict[str, Callable[[Any], Any]] = {
    "the array": lambda array: array,
    "list": lambda array: [1, array],
    "dataclass": Holder,
    "view of most": lambda array: array[100:],
    "reshaped": lambda array: array.reshape(1024, -1),
    "subclass": lambda array: array.view(np.recarray),
    "memoryview": memoryview,
    "masked": lambda array: np.ma.masked_array(array, np.zeros(array.shape, bool)),
}


def array_in(obj: Any) -> Any:
    if isinstance(obj, list):
        return obj[1]
    if isinstance(obj, Holder):
        return obj.array
    return obj.data if isinstance(obj, np.ma.MaskedArray) else obj


@pytest.mark.parametrize("kind", CONTAINERS)
def test_what_its_sender_has_dropped_is_moved(
    ends: tuple[Any, Any], kind: str, cuts: list[Any]
) -> None:
    """The next receiver has the very block, alone: nobody's pages are private."""
    array = received(ends)
    place = place_of(array)
    held = [CONTAINERS[kind](array)]
    del array
    ends[1].send_last(held)
    assert held == []
    again = array_in(ends[0].recv())
    assert place_of(again) == place
    assert cuts == []
    assert not is_cut_off(again)
    assert (np.asarray(again).reshape(-1) == 1).all()


@pytest.mark.parametrize("kind", ["SimpleQueue", "Queue", "JoinableQueue"])
@pytest.mark.usefixtures("shmreduce_no_leaks")
def test_every_queue_passes_on(kind: str, cuts: list[Any]) -> None:
    """What put() was given, and its caller has not kept, is moved."""
    queue = getattr(shmreduce, kind)()
    queue.put(filled(2))
    place = place_of(held := within(queue.get))
    held = [held]
    queue.put(held.pop())
    again = within(queue.get)
    assert place_of(again) == place
    assert cuts == []
    assert not is_cut_off(again)
    queue.close()


def cycle_around(array: Any) -> list[Any]:
    cycle = [array]
    cycle.append(cycle)
    return cycle


KEEPERS: dict[str, Callable[[Any], Any]] = {
    "the array": lambda array: array,
    "a small view": lambda array: array[5:10],
    "a buffer": memoryview,
    "a cycle": cycle_around,
}


def write(kept: Any, value: int) -> None:
    np.asarray(kept[0] if isinstance(kept, list) else kept)[:] = value


def read(kept: Any) -> set[int]:
    return set(np.asarray(kept[0] if isinstance(kept, list) else kept).tolist())


@pytest.mark.parametrize("refused", [False, True], ids=["private pages", "no private pages"])
@pytest.mark.parametrize("kind", KEEPERS)
def test_what_somebody_keeps_is_apart_from_what_arrives(
    ends: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch, kind: str, refused: bool
) -> None:
    """Neither side sees what the other writes, whether the kernel gives private pages or the
    bytes have to be copied.
    """
    gc.disable()
    try:
        array = received(ends, 3)
        place = place_of(array)
        kept = KEEPERS[kind](array)
        if refused:
            monkeypatch.setattr(LiveBlocks, "make_private", lambda *_: False)
        ends[1].send_last(held := [array])
        del array
        assert not held
        write(kept, 9)
        again = ends[0].recv()
        assert (again == 3).all()
        assert (place_of(again) == place) == (not refused)
        again[:] = 4
        assert read(kept) == {9}
        write(kept, 8)
        assert (again == 4).all()
        del kept
    finally:
        gc.enable()
        gc.collect()


def test_both_of_two_kept_arrays_are_copied_where_they_must_be(
    ends: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pickle gets the handle of each copy in the place of the right array's."""
    ends[1].send([filled(1), filled(2), filled(3)])
    first, *others = ends[0].recv()
    monkeypatch.setattr(LiveBlocks, "make_private", lambda *_: False)
    last = others[1]
    ends[1].send_last([[first, others.pop(0), last, "text"]])
    first[:] = last[:] = 9
    found = ends[0].recv()
    assert [each if isinstance(each, str) else set(each.tolist()) for each in found] == [
        {1},
        {2},
        {3},
        "text",
    ]


def test_without_the_cut_its_keeper_would_write_into_what_was_sent(
    ends: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The guard is needed: left out, the receiver sees what is written after sending."""
    monkeypatch.setattr(Moves, "settle", lambda self, data: data)
    kept = received(ends)
    # Alone it takes a shorter way, for which see test_one_buffer.py.
    ends[1].send([kept])
    kept[:] = 9
    assert (ends[0].recv()[0] == 9).all()


def test_a_failed_message_leaves_the_array_as_it_was(
    ends: tuple[Any, Any], cuts: list[Any]
) -> None:
    """Nothing is cut off for it, and the array can be passed on afterwards."""
    held: list[Any] = [[received(ends), lambda: None]]
    place = place_of(held[0][0])
    # A PicklingError or an AttributeError: versions of Python differ.
    with pytest.raises(Exception, match="<lambda>"):
        ends[1].send_last(held)
    array = held.pop()[0]
    assert cuts == []
    assert (array == 1).all()
    ends[1].send_last(held := [array])
    del array
    again = ends[0].recv()
    assert place_of(again) == place
    again[:] = 2
    assert held == []


def test_settings_that_ask_for_pickling_have_it_cut_off_at_once(ends: tuple[Any, Any]) -> None:
    """Where memory may be lacking, nothing is put off that could need some."""
    with shmreduce.install(on_exhausted="pickle"):
        held = [received(ends)]
        place = place_of(held[0])
        ends[1].send_last(held)
        again = ends[0].recv()
        assert place_of(again) == place
        assert (again == 1).all()


class Forking:
    """Forks when it is pickled; the child says what it sees, and writes."""

    def __init__(self, array: Any) -> None:
        self.array = array
        self.reader, self.writer = os.pipe()

    def __reduce__(self) -> Any:
        pid = os.fork()
        if pid == 0:
            try:
                seen = set(self.array.tolist())
                self.array[:] = 7
                os.write(self.writer, b"well" if seen == {1} else b"wrong")
            finally:
                os._exit(0)
        assert os.read(self.reader, 8) == b"well"
        os.waitpid(pid, 0)
        os.close(self.reader)
        os.close(self.writer)
        return list, ((self.array,),)


@pytest.mark.parametrize("keeps", [False, True], ids=["dropped", "kept"])
@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_fork_in_the_middle_of_the_message(ends: tuple[Any, Any], keeps: bool) -> None:
    """Child, parent and receiver have an array each, whichever part is pickled first."""
    for order in (1, -1):
        array = received(ends)
        kept = array if keeps else None
        held = [[array, Forking(array)][::order]]
        del array
        ends[1].send_last(held)
        if kept is not None:
            kept[:] = 8
        # One array for both: the pickler knows it when it comes again.
        first, second = ends[0].recv()[::order]
        assert second[0] is first
        assert (first == 1).all()
        first[:] = 5
        assert kept is None or (kept == 8).all()
        del kept, first, second


class Filling:
    """Writes to an array when it is pickled."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def __reduce__(self) -> Any:
        self.array[:] = 9
        return int, ()


@pytest.mark.parametrize("guarded", [True, False])
@pytest.mark.parametrize("keeps", [False, True], ids=["dropped", "kept"])
def test_what_an_object_writes_while_it_is_pickled_comes_too_late(
    ends: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch, keeps: bool, guarded: bool
) -> None:
    """An array that is in the message already arrives as it was, as with the standard library;
    cutting it off before that is what makes it so.
    """
    if not guarded:
        monkeypatch.setattr(Moves, "cut_off", lambda self: None)
    array = received(ends)
    kept = array if keeps else None
    held = [[array, Filling(array)]]
    del array
    ends[1].send_last(held)
    found, number = ends[0].recv()
    assert number == 0
    assert (found == (1 if guarded else 9)).all()
    assert kept is None or (kept == 9).all()


class Deciding(shmreduce.Reducer):
    """Has each object pickled in the ordinary way after all."""

    types = (Filling,)

    def reduce(self, obj: Any, message: Any) -> Any:
        return NotImplemented


def fill_and_name(filling: Filling) -> Any:
    filling.array[:] = 9
    return int, ()


@pytest.mark.parametrize("pickled_by", ["its method", "copyreg", "no reducer after all"])
@pytest.mark.parametrize("guarded", [True, False])
def test_it_comes_too_late_though_another_of_its_class_came_before(
    ends: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch, pickled_by: str, guarded: bool
) -> None:
    """How a class is pickled is found once, and again when the first received array comes."""
    if not guarded:
        monkeypatch.setattr(_Dispatch, "take_care", lambda self: None)
        if pickled_by == "no reducer after all":
            # A reducer may call the object's methods, so it is cut off before that, too.
            monkeypatch.setattr(Moves, "cut_off", lambda self: None)
    if pickled_by == "copyreg":
        monkeypatch.setitem(copyreg.dispatch_table, Filling, fill_and_name)
    with registered(Deciding()) if pickled_by == "no reducer after all" else nullcontext():
        array = received(ends)
        before = np.zeros(3)
        held = [[Filling(before), array, Filling(array), Filling(before)]]
        del array
        ends[1].send_last(held)
        assert (before == 9).all()
        assert (ends[0].recv()[1] == (1 if guarded else 9)).all()


class Lazy:
    """Fills an array before each of its items, which are views of it."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def views(self) -> Iterator[Any]:
        for value in (2, 3, 4):
            self.array[:] = value
            yield self.array.view()

    def __reduce__(self) -> Any:
        return list, (), None, self.views()


class LazyList(list[Any]):
    """The same, as a list."""

    array: Any = None

    def __iter__(self) -> Iterator[Any]:
        yield from Lazy(self.array).views()


def items_of(arrays: list[Any]) -> list[set[int]]:
    return [set(each.tolist()) for each in list.__iter__(arrays)]


class LazyReducer(shmreduce.Reducer):
    """Pickles it as it pickles itself."""

    types = (Lazy,)

    def reduce(self, obj: Any, message: Any) -> Any:
        return obj.__reduce__()


class NamedReducer(shmreduce.Reducer):
    """Makes the pickler ask about every object."""

    types = (FunctionType,)

    def reduce(self, obj: Any, message: Any) -> Any:
        return NotImplemented


@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize("kind", ["__reduce__", "__iter__", "a reducer", "copyreg", "asked"])
def test_what_an_iterator_writes_comes_too_late(
    ends: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch, kind: str, alone: bool
) -> None:
    """It runs between two objects, when no function of the pickler is asked."""
    array = received(ends)
    monkeypatch.setattr(LazyList, "array", array)
    made: Any = LazyList() if kind == "__iter__" else Lazy(array)
    if kind == "copyreg":
        monkeypatch.setitem(copyreg.dispatch_table, Lazy, Lazy.__reduce__)
        monkeypatch.delattr(Lazy, "__reduce__")
    reducers = {"a reducer": LazyReducer, "asked": NamedReducer}
    with registered(reducers[kind]()) if kind in reducers else nullcontext():
        # Another class is met before, so that the pickler knows it already.
        ends[1].send(made if alone else [Filling(np.zeros(3)), made])
        # A pickler takes the second item before it pickles the first.
        assert items_of(pickle.loads(pickle.dumps(made))) == [{3}, {3}, {4}]
    found = ends[0].recv()
    assert items_of(found if alone else found[1]) == [{3}, {3}, {4}]


class FillingArray(np.ndarray[Any, Any]):
    """Writes to another array when it is pickled."""

    other: Any = None

    def __reduce__(self) -> Any:
        type(self).other[:] = 9
        return super().__reduce__()


def test_what_a_subclass_writes_while_a_reducer_calls_it_comes_too_late(
    ends: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reducer of arrays has a large one pickled by its own method."""
    array = received(ends)
    monkeypatch.setattr(FillingArray, "other", array)
    ends[1].send([array, filled(2).view(FillingArray)])
    found, other = ends[0].recv()
    assert (found == 1).all()
    assert (np.asarray(other) == 2).all()


class Signal:
    """Has an array, and a part that writes to it when it is pickled."""

    def __init__(self, array: Any, iterates: bool) -> None:
        self.array = array
        self.part = Lazy(array).views() if iterates else Filling(array)


def rebuild_signal(handle: bytes, part: Any = None) -> Any:
    return [np.frombuffer(shmreduce.import_block(handle).buffer, np.uint8)]


class SignalReducer(shmreduce.Reducer):
    """Passes the block of the array on."""

    types = (Signal,)

    def reduce(self, obj: Any, message: shmreduce.Message) -> Any:
        block = find_block_of(obj.array)
        assert block is not None
        handle = message.refer(block, block.nbytes)
        if isinstance(obj.part, Filling):
            return rebuild_signal, (handle, obj.part)
        return rebuild_signal, (handle,), None, obj.part


@pytest.mark.parametrize("iterates", [True, False])
@pytest.mark.parametrize("alone", [True, False])
def test_what_a_part_writes_after_its_whole_was_passed_on_comes_too_late(
    ends: tuple[Any, Any], alone: bool, iterates: bool
) -> None:
    """Also if the whole is the message: its reducer was called before there was a pickler."""
    with registered(SignalReducer()):
        signal = Signal(received(ends), iterates)
        ends[1].send(signal if alone else [signal])
    found = ends[0].recv()
    assert ((found if alone else found[0])[0] == 1).all()


def test_names_cut_nothing_off(ends: tuple[Any, Any], cuts: list[Any]) -> None:
    """Functions and classes beside an array have no methods that could write to it."""
    array = received(ends)
    place = place_of(array)
    held = [{"array": array, "names": [Holder, len, filled, {1.5: (None, b"")}]}]
    del array
    ends[1].send_last(held)
    assert place_of(ends[0].recv()["array"]) == place
    assert cuts == []


class Coded:
    """Has an array, whose handle does not stand in the pickle as it is."""

    def __init__(self, array: Any) -> None:
        self.array = array


def rebuild_coded(handle: bytes) -> Any:
    return np.frombuffer(shmreduce.import_block(handle[::-1]).buffer, np.uint8)


class CodedReducer(shmreduce.Reducer):
    """Writes the handle backwards."""

    types = (Coded,)

    def reduce(self, obj: Any, message: shmreduce.Message) -> Any:
        block = find_block_of(obj.array)
        assert block is not None
        handle = message.refer(block, block.nbytes)
        assert handle is not None
        return rebuild_coded, (handle[::-1],)


def test_a_handle_that_cannot_be_replaced_is_told_of(
    ends: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only where it has to be: an array that goes, or is cut off, travels all the same."""
    with registered(CodedReducer()):
        kept = received(ends)
        ends[1].send(Coded(kept))
        assert (ends[0].recv() == 1).all()
        kept = received(ends)
        with monkeypatch.context() as patch:
            patch.setattr(LiveBlocks, "make_private", lambda *_: False)
            with pytest.raises(ReducerError, match="unchanged, as an object of their own"):
                ends[1].send(Coded(kept))
        assert (kept == 1).all()


class Changing:
    """Changes the sharing strategy when it is pickled."""

    def __reduce__(self) -> Any:
        shmreduce.set_sharing_strategy("file_system")
        return int, ()


def test_a_strategy_that_changes_in_the_middle_is_named(
    ends: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An array that must be copied after that cannot be; the sender can send it again."""
    before = get_settings()
    try:
        shmreduce.set_sharing_strategy("file_descriptor")
        kept = received(ends)
        with monkeypatch.context() as patch:
            patch.setattr(LiveBlocks, "make_private", lambda *_: False)
            with pytest.raises(SegmentError, match="strategy changed while the message"):
                ends[1].send([kept, Changing()])
            ends[1].send([kept, Changing()])
        assert (ends[0].recv()[0] == 1).all()
    finally:
        set_settings(before)


def pass_on_without_private_pages(reader: Any, writer: Any, sends_before: bool) -> None:
    pytest.MonkeyPatch().setattr(LiveBlocks, "make_private", lambda *_: False)
    if sends_before:
        writer.send(filled(7))
    kept = reader.recv()
    writer.send([kept, "and more"])
    kept[:] = 9


@pytest.mark.parametrize("sends_before", [False, True], ids=["first", "later"])
def test_what_came_from_another_process_is_copied_where_it_must_be(
    children: Children, sends_before: bool
) -> None:
    """Its segment has no path in the process that sends it on, but that of the copy may have one,
    so the copy's handle is much longer.
    """
    context = context_of(children)
    reader, to_child = context.Pipe(duplex=False)
    from_child, writer = context.Pipe(duplex=False)
    process = children.start(pass_on_without_private_pages, reader, writer, sends_before)
    to_child.send(filled(1))
    children.join(process)
    if sends_before:
        assert within(from_child.recv).max() == 7
    array, text = within(from_child.recv)
    assert (array == 1).all()
    assert text == "and more"
    for each in (reader, to_child, from_child, writer):
        each.close()


def pass_on_and_count_cuts(reader: Any, writer: Any) -> None:
    cuts: list[Any] = []
    pytest.MonkeyPatch().setattr(LiveBlocks, "make_private", lambda *given: cuts.append(given))
    writer.send_last([[reader.recv(), "and more"]])
    writer.send(len(cuts))


def test_a_process_that_has_sent_nothing_of_its_own_cuts_nothing_off(children: Children) -> None:
    """It has no segment yet: what it receives and does not keep goes on as it came."""
    context = context_of(children)
    reader, to_child = context.Pipe(duplex=False)
    from_child, writer = context.Pipe(duplex=False)
    process = children.start(pass_on_and_count_cuts, reader, writer)
    to_child.send(filled(1))
    children.join(process)
    array, text = within(from_child.recv)
    assert (array == 1).all()
    assert text == "and more"
    assert within(from_child.recv) == 0
    for each in (reader, to_child, from_child, writer):
        each.close()


def change_and_pass_on(reader: Any, writer: Any) -> None:
    held = [reader.recv()]
    held[0][:] += 1
    writer.send_last(held)


def change_pass_on_and_change(reader: Any, writer: Any) -> None:
    array = reader.recv()
    array[:] += 1
    writer.send(array)
    array[:] = 99


@pytest.mark.parametrize("step", [change_and_pass_on, change_pass_on_and_change])
def test_from_process_to_process(children: Children, step: Any) -> None:
    """A sends, B changes it and sends it on, and ends: it is C's, with what B had written
    before; A's own array is as it was.
    """
    context = context_of(children)
    from_a, to_b = context.Pipe(duplex=False)
    from_b, to_c = context.Pipe(duplex=False)
    mine = filled(1)
    process = children.start(step, from_a, to_c)
    to_b.send(mine)
    children.join(process)
    assert from_b.poll(PATIENCE)
    array = from_b.recv()
    assert (array == 2).all()
    array[:] = 3
    assert (mine == 1).all()
    for each in (from_a, to_b, from_b, to_c):
        each.close()


def give_back(array: Any) -> Any:
    array[:] += 1
    return array


kept_by_worker: list[Any] = []


def keep_and_give_back(array: Any) -> Any:
    while kept_by_worker:
        kept_by_worker.pop()[:] = 99
    kept_by_worker.append(array)
    return array


def test_a_pool_s_worker_passes_on_what_it_was_given(children: Children) -> None:
    """A result that is the argument comes back in the block of the argument; one that the
    worker keeps is by value all the same.
    """
    with context_of(children).Pool(1) as pool:
        for _ in range(3):
            result = pool.apply(give_back, (filled(1),))
            assert (result == 2).all()
            assert record_of(result).segment.owner
            assert not is_cut_off(result)
        kept = [pool.apply(keep_and_give_back, (filled(number),)) for number in range(4)]
        assert [set(each.tolist()) for each in kept] == [{0}, {1}, {2}, {3}]
        pool.close()
        pool.join()


def interrupted(ends: tuple[Any, Any], when: int, *, keeps: bool) -> bool:
    """Send an array on, with an interrupt; return whether it came to that."""
    array = received(ends)
    kept = array if keeps else None
    held = [array]
    del array
    interrupter = Interrupter(when, "shmreduce/moving.py", "shmreduce/packets.py", "/message.py")
    sys.settrace(interrupter)
    try:
        ends[1].send_last(held)
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(None)
    if kept is not None:
        assert (kept == 1).all()
        kept[:] = 9
    while ends[0].poll():
        again = ends[0].recv()
        assert (again == 1).all()
        again[:] = 8
        del again
    assert kept is None or (kept == 9).all()
    return interrupter.fired


def interrupt_everywhere(keeps: bool) -> int:
    ends = shmreduce.Pipe(duplex=False)
    witness = received(ends, 77)
    # A prime step, so that other instructions are hit in each version of Python.
    when = 1
    while interrupted(ends, when, keeps=keeps):
        assert (witness == 77).all()
        assert not is_cut_off(witness)
        when += 7
    for end in ends:
        end.close()
    return when


@pytest.mark.parametrize("keeps", [False, True], ids=["dropped", "kept"])
def test_an_interrupt_at_any_instruction_leaves_arrays_apart(keeps: bool) -> None:
    """KeyboardInterrupt at any step of sending on: what is kept is its keeper's, what arrives
    is whole, and other arrays are as they were.
    """
    # In a process of its own: a message that was being sent may keep its block.
    with OtherProcess("spawn") as other:
        assert other.ask(interrupt_everywhere, keeps) > 70
