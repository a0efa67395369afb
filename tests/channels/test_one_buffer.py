"""A message that is one buffer takes a short way, and arrives as by the long one."""

from __future__ import annotations

import os
import pickle
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import shmreduce
from shmreduce import ReducerError, handle_calls, packets
from shmreduce.born import moving as born
from shmreduce.handle_calls import (
    LENGTH_PREFIX,
    around_handle,
    call_of,
    pickle_around,
    pickles_beside,
    place_among_atoms,
)
from shmreduce.memory import one_buffer, quick_blocks
from shmreduce.memory.one_buffer import GivenBuffer
from shmreduce.memory.runtime import current
from shmreduce_numpy.blocks import find_block_of
from tests.channels.channels import within
from tests.conftest import registered
from tests.interrupter import interrupted_everywhere
from tests.long_ways import list_slots, note_long_ways

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

LENGTH = 1 << 17
"""Elements of eight bytes."""
COMPILED = pytest.mark.skipif(
    not quick_blocks.COMPILED, reason="the short way needs the compiled modules"
)


ATOMS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
ARGUMENTS = st.lists(ATOMS | st.lists(ATOMS, max_size=4).map(tuple), max_size=6).map(tuple)
SMALL = ATOMS | st.binary(max_size=200)


def numbers() -> np.ndarray[Any, Any]:
    return np.arange(LENGTH, dtype=float)


def read_only() -> np.ndarray[Any, Any]:
    array = numbers()
    array.flags.writeable = False
    return array


ALONE: dict[str, Callable[[], Any]] = {
    "floats": numbers,
    "a table": lambda: numbers().reshape(256, -1),
    "an axis of one": lambda: numbers().reshape(1, -1),
    "a slice": lambda: numbers()[10:-10],
    "read-only": read_only,
    "booleans": lambda: numbers() > LENGTH / 2,
    "complex": lambda: numbers().astype(complex),
    "halves": lambda: np.arange(4 * LENGTH, dtype=np.uint16).view(np.float16),
    "long doubles": lambda: numbers().astype(np.longdouble),
    "shared": lambda: shmreduce.share(numbers()),
    "shared, reshaped": lambda: shmreduce.share(numbers()).reshape(64, -1),
    "shared, read-only here": lambda: read_only_view(shmreduce.share(numbers())),
    "shared, to be read": lambda: shmreduce.share(numbers(), mode="ro"),
    "shared, with private pages": lambda: shmreduce.share(numbers(), mode="cow"),
    "few, shared": lambda: shmreduce.share(np.arange(10)),
    "few, shared, as a table": lambda: shmreduce.share(np.arange(10)).reshape(2, 5),
    "a memoryview": lambda: memoryview(bytearray(8 * LENGTH)).cast("d", (8, LENGTH // 8)),
    "a memoryview of bytes": lambda: memoryview(bytes(8 * LENGTH)),
    "a memoryview of an array": lambda: memoryview(numbers().data),
    "a memoryview of a block": lambda: shmreduce.allocate(8 * LENGTH).buffer,
    "a memoryview of a small block": lambda: shmreduce.allocate(80).buffer,
}
OTHERWISE: dict[str, Callable[[], Any]] = {
    "Fortran order": lambda: np.asfortranarray(numbers().reshape(256, -1)),
    "with gaps": lambda: np.arange(2.0 * LENGTH)[::2],
    "backwards": lambda: numbers()[::-1],
    "broadcast": lambda: np.broadcast_to(numbers(), (3, LENGTH)),
    "another byte order": lambda: numbers().astype(">f8"),
    "dates": lambda: np.arange(LENGTH).astype("M8[s]"),
    "records": lambda: np.zeros(LENGTH, [("a", "f4"), ("b", "i4")]),
    "a subclass": lambda: numbers().view(np.recarray),
    "few": lambda: np.arange(10),
    "few of many": lambda: numbers()[:10],
    "few of a shared one": lambda: shmreduce.share(numbers())[:10],
    "none": lambda: np.zeros((0, 3)),
    "none, shared": lambda: shmreduce.zeros((0, 3)),
    "no axis": lambda: np.array(3.0),
    "a part of a shared one": lambda: shmreduce.share(numbers())[5:-5],
    "a shared one in another order": lambda: shmreduce.share(numbers().reshape(256, -1)).T,
    "a shared one backwards": lambda: shmreduce.share(numbers())[::-1],
    "a shared one with an axis of one": lambda: shmreduce.share(numbers()).reshape(-1, 1),
    "an array of a view of a shared one": lambda: np.asarray(
        memoryview(shmreduce.share(numbers()))
    ),
    "bytes that are no block": lambda: np.frombuffer(bytes(8 * LENGTH)),
    "a memoryview of a shared array": lambda: memoryview(shmreduce.share(numbers())),
    "a memoryview of a part of a block": lambda: shmreduce.allocate(8 * LENGTH).buffer[8:],
    "a memoryview with gaps": lambda: memoryview(bytearray(2 * LENGTH))[::2],
}


def read_only_view(array: Any) -> Any:
    view = array.view()
    view.flags.writeable = False
    return view


@pytest.fixture
def ends(shmreduce_no_leaks: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, Any]]:
    # Where arrays were ever born in shared memory, read-only ones are sent the long way.
    monkeypatch.setattr(born, "started", False)
    list_slots()
    here, there = shmreduce.Pipe()
    yield here, there
    here.close()
    there.close()


@pytest.fixture
def long_ways(monkeypatch: pytest.MonkeyPatch) -> list[type]:
    """What was pickled the long way."""
    return note_long_ways(monkeypatch)


def facts(obj: Any) -> tuple[Any, ...]:
    """Return all that must be the same of what was sent and what has arrived."""
    array = np.asarray(obj)
    told: tuple[Any, ...] = (type(obj), array.dtype, array.shape, array.tobytes())
    if isinstance(obj, memoryview):
        return (*told, obj.format, obj.readonly)
    told = (*told, array.flags.writeable)
    return (*told, array.strides) if shmreduce.is_shared(obj) else told


@COMPILED
@pytest.mark.parametrize("kind", ALONE)
def test_what_is_one_buffer_takes_the_short_way(
    ends: tuple[Any, Any], long_ways: list[Any], kind: str
) -> None:
    """It arrives as in a list, which takes the long way, and the second time as the first."""
    for number in range(4):
        obj = ALONE[kind]()
        ends[0].send([obj])
        expected = facts(within(ends[1].recv)[0])
        long_ways.clear()
        ends[0].send(obj)
        assert facts(within(ends[1].recv)) == expected
        # The first two make the heap, and a warm block of the size.
        assert number < 2 or long_ways == []
        assert facts(obj)[:4] == expected[:4]


@pytest.mark.parametrize("kind", OTHERWISE)
def test_what_is_not_takes_the_long_way(
    ends: tuple[Any, Any], long_ways: list[Any], kind: str
) -> None:
    """It arrives as in a list."""
    obj = OTHERWISE[kind]()
    ends[0].send([obj])
    expected = facts(within(ends[1].recv)[0])
    long_ways.clear()
    ends[0].send(obj)
    assert facts(within(ends[1].recv)) == expected
    assert len(long_ways) == 1


BESIDE: dict[str, Callable[[Any], Any]] = {
    "a number": lambda array: (1, array),
    "nothing": lambda array: (array,),
    "atoms on both sides": lambda array: (True, "name", array, None, 2.5, b"bytes", -(10**30)),
}
BESIDE_OTHERWISE: dict[str, Callable[[Any], Any]] = {
    "itself": lambda array: (array, array),
    "a list": lambda array: ([1], array),
    "in a list": lambda array: [1, array],
    "in a tuple": lambda array: (1, (2, array)),
    "in a named tuple": lambda array: Pair(1, array),
    "a long text": lambda array: ("x" * 1000, array),
    "a long number": lambda array: (array, 1 << 2_000_000),
    "many": lambda array: (*range(20), array),
}


class Pair(NamedTuple):
    number: int
    array: Any


def parts(obj: Any) -> list[Any]:
    """Return all that is in an object, in order, with the facts of arrays."""
    if isinstance(obj, np.ndarray):
        return [facts(obj)]
    if isinstance(obj, tuple | list):
        return [type(obj), *(part for each in obj for part in parts(each))]
    return [type(obj), obj]


@COMPILED
@pytest.mark.parametrize("shared", [False, True], ids=["by value", "shared"])
@pytest.mark.parametrize("kind", BESIDE)
def test_so_does_a_tuple_of_one_buffer_and_atoms(
    ends: tuple[Any, Any], long_ways: list[Any], kind: str, shared: bool
) -> None:
    """An array with its number, say: it arrives as by the long way."""
    for number in range(4):
        obj = BESIDE[kind](shmreduce.share(numbers()) if shared else numbers())
        expected = parts(obj)
        long_ways.clear()
        ends[0].send(obj)
        assert parts(within(ends[1].recv)) == expected
        assert number < 2 or long_ways == []


@pytest.mark.parametrize("kind", BESIDE_OTHERWISE)
def test_other_containers_take_the_long_way(
    ends: tuple[Any, Any], long_ways: list[Any], kind: str
) -> None:
    """Their parts arrive as they are, and what was one object is one."""
    obj = BESIDE_OTHERWISE[kind](numbers())
    ends[0].send(obj)
    found = within(ends[1].recv)
    assert parts(found) == parts(obj)
    assert len(long_ways) == 1
    if kind == "itself":
        assert found[0] is found[1]


@given(before=st.lists(SMALL, max_size=4), after=st.lists(SMALL, max_size=3))
def test_the_pickle_of_a_tuple_is_read_by_anybody(before: list[Any], after: list[Any]) -> None:
    """With any atoms beside the call."""
    obj = (*before, [], *after)
    place = place_among_atoms(obj)
    assert place == len(before)
    around = around_handle(together, ("same", "same"))
    assert around is not None
    start, end = pickles_beside(obj, place)
    for loads in (pickle.loads, vars(pickle)["_loads"]):
        found = loads(start + pickle_around(b"handle", around)[2:-1] + end)
        assert repr(found) == repr((*before, (b"handle", "same", "same"), *after))


@pytest.mark.parametrize("keeps", [False, True], ids=["dropped", "kept"])
def test_a_received_array_is_passed_on_in_a_tuple(ends: tuple[Any, Any], keeps: bool) -> None:
    """It is moved where its sender has dropped it, and cut off where not."""
    ends[0].send((0, numbers()))
    held = [within(ends[1].recv)]
    block = find_block_of(held[0][1])
    assert block is not None
    place = block._record.block
    del block
    kept = held[0][1] if keeps else None
    ends[0].send_last(held)
    assert held == []
    if kept is not None:
        kept[:] = 9
    _, again = within(ends[1].recv)
    found = find_block_of(again)
    assert found is not None
    assert found._record.block == place
    assert (again == numbers()).all()


def test_an_array_that_is_written_back_later_travels_as_it_is_now(ends: tuple[Any, Any]) -> None:
    """Its memory is its own, though its base is a block as long as itself."""
    block = shmreduce.share(np.zeros(LENGTH))
    options: Any = {"op_flags": [["readwrite", "updateifcopy"]], "casting": "equiv"}
    with np.nditer(block.view(">f8"), op_dtypes=[np.dtype(float)], **options) as later:
        copy: Any = later.operands[0]
        assert copy.flags.owndata
        assert copy.base is not None
        assert copy.dtype is np.dtype(float)
        copy[...] = 7
        for sent in (copy, copy.reshape(8, -1)):
            ends[0].send(sent)
            assert (within(ends[1].recv) == 7).all()
        del copy, sent


def test_a_block_below_the_limit_that_was_received_by_value_is_copied(
    ends: tuple[Any, Any],
) -> None:
    """Its sender may have had a lower limit; it stays by value."""
    ends[0].send(numbers())
    kept = within(ends[1].recv)
    assert find_block_of(kept) is not None
    with shmreduce.install(inline_limit=2 * kept.nbytes):
        ends[0].send(kept)
        kept[:] = 7
        assert (within(ends[1].recv) == numbers()).all()


def test_a_shared_array_stays_one_memory(ends: tuple[Any, Any]) -> None:
    """What the sender writes afterwards the receiver sees, and the other way round."""
    array = shmreduce.share(numbers())
    ends[0].send(array)
    arrived = within(ends[1].recv)
    array[0], arrived[1] = 5, 6
    assert (arrived[0], array[1]) == (5, 6)


def test_an_array_over_a_view_of_a_shared_array_stays_one_memory(ends: tuple[Any, Any]) -> None:
    """Its memory is of a memoryview, which is of an array itself: the block is below that."""
    array = shmreduce.share(numbers())
    for over in (np.asarray(memoryview(array)), np.frombuffer(memoryview(array))):
        for sent in ([over], over):
            ends[0].send(sent)
            arrived = within(ends[1].recv)
            found = arrived[0] if isinstance(arrived, list) else arrived
            array[0] += 1
            assert found[0] == array[0]


@pytest.mark.parametrize("origin", ["NumPy's memory", "received"])
def test_what_is_sent_by_value_stays_by_value(ends: tuple[Any, Any], origin: str) -> None:
    """What the sender writes afterwards the receiver does not see, nor the other way round."""
    array = numbers()
    for _ in range(3):
        ends[0].send(array)
        arrived = within(ends[1].recv)
        array[0] += 1
        arrived[1] += 1
        assert arrived[0] == array[0] - 1
        assert arrived[1] == array[1] + 1
        if origin == "received":
            array = arrived


@COMPILED
def test_without_the_cut_its_keeper_would_write_into_what_was_sent(
    ends: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The guard is needed: left out, the receiver sees what is written after sending."""
    ends[0].send(numbers())
    kept = within(ends[1].recv)
    monkeypatch.setattr(GivenBuffer, "settle", lambda *_: None)
    ends[0].send(kept)
    kept[:] = 9
    assert (within(ends[1].recv) == 9).all()


def test_an_entry_of_another_root_is_not_taken_for_it(
    ends: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where an object has the identity of a root before it, the table says nothing of it."""
    array = numbers()
    block = find_block_of(shmreduce.share(np.zeros(LENGTH)))
    assert block is not None
    roots = current().live._roots
    monkeypatch.setitem(roots, id(array), roots[id(block._root)])
    ends[0].send(array)
    arrived = within(ends[1].recv)
    assert not shmreduce.is_shared(arrived)
    assert (arrived == array).all()


@COMPILED
def test_a_child_that_is_forked_in_the_middle_leaves_the_message_to_its_parent(
    ends: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It commits nothing of its parent's, and takes nothing back."""
    for _ in range(2):
        ends[0].send(numbers())
        within(ends[1].recv)
    children = []
    kept: list[None] = []
    keep_leases: Any = vars(packets)["keep_leases"]

    def copy_and_fork(target: Any, source: Any) -> None:
        target[:] = source.cast("B")
        children.append(os.fork())

    monkeypatch.setattr(packets, "keep_leases", lambda leases: kept.append(keep_leases(leases)))
    with monkeypatch.context() as patch:
        patch.setattr(one_buffer, "copy_run", copy_and_fork)
        try:
            packet = packets.pack_last([numbers()])
            if children == [0]:
                packet.discard()
        finally:
            if children == [0]:
                os._exit(len(kept))
    (child,) = children
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert len(kept) == 1
    ends[0].transmit(packet)
    assert (within(ends[1].recv) == numbers()).all()


@COMPILED
@pytest.mark.parametrize("kind", ["by value", "received"])
def test_what_is_raised_in_a_child_that_is_forked_in_the_middle_arrives_there(
    ends: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """What the message has is its parent's to take back; the child does not even try."""
    for _ in range(2):
        # While the first is held, the second gets another block; then the first one's is free.
        ends[0].send(numbers())
        received = within(ends[1].recv)
    ours = os.getpid()
    children: list[int] = []
    settle = GivenBuffer.settle

    def fork_and_settle(given: GivenBuffer, leases: Any) -> None:
        children.append(os.fork())
        if os.getpid() != ours:
            raise KeyboardInterrupt
        settle(given, leases)

    monkeypatch.setattr(GivenBuffer, "settle", fork_and_settle)
    try:
        ends[0].send(numbers() if kind == "by value" else received)
    except BaseException as error:
        if os.getpid() != ours:
            os._exit(not isinstance(error, KeyboardInterrupt))
        raise
    assert os.waitstatus_to_exitcode(os.waitpid(children[0], 0)[1]) == 0
    assert (within(ends[1].recv) == numbers()).all()


@COMPILED
@pytest.mark.parametrize("kind", ["by value", "shared", "received", "in a tuple"])
def test_ctrl_c_at_any_instruction_loses_nothing(ends: tuple[Any, Any], kind: str) -> None:
    """The message is sent, or all that it took is taken back: the fixture counts it."""

    def make() -> Any:
        if kind == "shared":
            return shmreduce.share(numbers())
        if kind == "received":
            ends[0].send(numbers())
            return within(ends[1].recv)
        return (5, numbers()) if kind == "in a tuple" else numbers()

    held: list[Any] = []
    made: list[Any] = []

    def pack() -> None:
        made.append(packets.pack_last(held))

    held.append(make())
    steps = 0
    for _ in interrupted_everywhere(pack, packets.__file__, one_buffer.__file__):
        steps += 1
        # The sender's own, if it was not given away yet.
        whole = [each[1] if kind == "in a tuple" else each for each in held]
        assert all((each == numbers()).all() for each in whole)
        while made:
            made.pop().discard()
        held[:] = [make()]
    assert made
    made.pop().discard()
    assert steps > 5


class Named:
    """Has one buffer, and a name of any type."""

    def __init__(self, name: Any) -> None:
        self.name = name
        self.memory = memoryview(bytearray(100_000))


def rebuild_named(handle: bytes, name: Any) -> Any:
    shmreduce.import_block(handle)
    return name


def rebuild_named_twice(handle: bytes, name: Any) -> Any:
    return 2 * _rebuild_named(handle, name)


_rebuild_named = rebuild_named


class NamedReducer(shmreduce.Reducer):
    types = (Named,)

    def reduce(self, obj: Named, message: shmreduce.Message) -> Any:
        handle = message.carry(obj.memory)
        return NotImplemented if handle is None else (rebuild_named, (handle, obj.name))

    def buffer_of(self, obj: Named, at_least: int) -> Any:
        return obj.memory, rebuild_named, (obj.name,)


def test_values_that_are_equal_are_told_apart(ends: tuple[Any, Any]) -> None:
    """True, 1 and 1.0 arrive as what they are; what is not an atom takes the long way."""
    with registered(NamedReducer()):
        for name in (1, True, 1.0, -0.0, 0.0, (1, True), (True, 1), "1", None, [1], {"a": 1}):
            ends[0].send(Named(name))
            assert repr(within(ends[1].recv)) == repr(name)


@pytest.mark.parametrize("shared", [False, True])
def test_a_reducer_that_offers_a_buffer_with_gaps_is_told_so(
    ends: tuple[Any, Any], shared: bool
) -> None:
    """Also where the buffer has as many bytes as a block: they would arrive in another order."""
    sent = Named("a")
    if shared:
        sent.memory = shmreduce.allocate(sent.memory.nbytes).buffer
    sent.memory = sent.memory[::-1]
    with registered(NamedReducer()):
        for _ in range(2):
            ends[0].send(Named("a"))
            within(ends[1].recv)
            with pytest.raises(shmreduce.ConfigurationError):
                ends[0].send(sent)


class Kept:
    """Keeps an array over its memory."""

    def __init__(self, array: Any) -> None:
        self.array = array


def rebuild_kept(handle: bytes) -> Kept:
    return Kept(np.frombuffer(shmreduce.import_block(handle).buffer, np.uint8))


class KeptReducer(shmreduce.Reducer):
    types = (Kept,)

    def reduce(self, obj: Kept, message: shmreduce.Message) -> Any:
        handle = message.carry(obj.array)
        return NotImplemented if handle is None else (rebuild_kept, (handle,))

    def buffer_of(self, obj: Kept, at_least: int) -> Any:
        return obj.array, rebuild_kept, ()


@pytest.mark.parametrize("nbytes", [3000, 300_000])
def test_an_array_over_a_shared_block_is_the_block(ends: tuple[Any, Any], nbytes: int) -> None:
    """Of a type that keeps an array over its block, and offers that: it is not copied."""
    # Makes a warm block of the size, which a copy would get.
    ends[0].send(np.zeros(nbytes, np.uint8))
    within(ends[1].recv)
    block = shmreduce.allocate(nbytes)
    with registered(KeptReducer()):
        ends[0].send(Kept(np.frombuffer(block.buffer, np.uint8)))
        received = within(ends[1].recv)
    received.array[:2] = 7, 8
    assert bytes(block.buffer[:2]) == bytes([7, 8])


@COMPILED
@pytest.mark.parametrize(
    "answer", [3, b"abc", (b"abc", rebuild_named), (b"abc", rebuild_named, (), 1), ("a", list, ())]
)
def test_a_wrong_answer_of_a_reducer_names_it(ends: tuple[Any, Any], answer: Any) -> None:
    """As a wrong answer of ``reduce`` does."""
    reducer = NamedReducer()
    reducer.buffer_of = lambda obj, at_least: answer  # type: ignore[method-assign]
    with registered(reducer), pytest.raises(ReducerError, match=r"NamedReducer.*buffer") as caught:
        ends[0].send(Named("a"))
    assert caught.value.type_name == f"{__name__}.Named"


@pytest.mark.parametrize(("nbytes", "limit"), [(9, 10), (0, 0)])
def test_a_small_buffer_that_a_reducer_offers_all_the_same_takes_the_long_way(
    ends: tuple[Any, Any], nbytes: int, limit: int
) -> None:
    """Its answer does not matter: reduce() is asked, which says that it is better pickled."""
    sent = Named("a")
    sent.memory = sent.memory[:nbytes]
    # Makes a warm block of the size.
    message = shmreduce.Message()
    message.allocate(nbytes)
    message.rollback()
    with registered(NamedReducer()), shmreduce.install(inline_limit=limit):
        ends[0].send(sent)
        assert within(ends[1].recv).memory == sent.memory


def test_bytes_are_told_from_what_has_the_same_bytes(ends: tuple[Any, Any]) -> None:
    """A bytearray, or a number of NumPy's, in the place where another message had bytes."""
    two = np.float64(2)
    with registered(NamedReducer()):
        for name in (two.tobytes(), two, bytearray(two.tobytes()), (b"a",), (bytearray(b"a"),)):
            ends[0].send(Named(name))
            assert repr(within(ends[1].recv)) == repr(name)


@pytest.mark.parametrize("length", [100_000, 150_000, 200_000, 1_000_000])
def test_a_long_argument_arrives(ends: tuple[Any, Any], length: int) -> None:
    """It may have no room in a packet, and is not remembered."""
    with registered(NamedReducer()):
        ends[0].send(Named("a" * length))
        assert within(ends[1].recv) == "a" * length
    assert all(len(arguments) < 10_000 for _, arguments in handle_calls._around)


def test_a_function_that_was_replaced_is_not_called_any_more(
    ends: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its module was loaded again, say: messages get what has the name now, and then again."""
    with registered(NamedReducer()):
        ends[0].send(Named("a"))
        assert within(ends[1].recv) == "a"
        for _ in range(2):
            ends[0].send(Named("a"))
        with monkeypatch.context() as patch:
            patch.setitem(globals(), "rebuild_named", rebuild_named_twice)
            assert within(ends[1].recv) == "aa"
        assert within(ends[1].recv) == "a"


def test_mutable_arguments_are_not_shared_between_messages(ends: tuple[Any, Any]) -> None:
    """What one receiver does to an argument the next does not see."""
    with registered(NamedReducer()):
        for _ in range(3):
            ends[0].send(Named([1]))
            found = within(ends[1].recv)
            assert found == [1]
            found.append(2)


def together(*arguments: Any) -> Any:
    return arguments


@given(handle=st.binary(max_size=400), arguments=ARGUMENTS)
def test_the_pickle_of_a_call_is_read_by_anybody(handle: bytes, arguments: Any) -> None:
    """By pickle it makes the call; by parts, function and arguments are the same."""
    around = around_handle(together, arguments)
    assert around is not None
    data = pickle_around(handle, around)
    assert repr(pickle.loads(data)) == repr((handle, *arguments))
    start = len(around[0]) + LENGTH_PREFIX
    assert data[start : start + len(handle)] == handle
    function, found = call_of(data[: len(around[0])], data[start + len(handle) :]) or (None, ())
    assert function is together
    assert repr(found) == repr(arguments)


def test_arguments_that_can_be_changed_are_not_remembered() -> None:
    """Each message has its own, whoever has made the pickle."""
    around = around_handle(together, (1,))
    assert around is not None
    start, end = around
    assert call_of(start, pickle.EMPTY_LIST + end) is None
    assert call_of(start, end[:-1]) is None


def test_only_so_many_calls_are_remembered() -> None:
    """Shape after shape does not fill the memory."""
    for number in range(3 * handle_calls._MOST):
        around = around_handle(together, (number,))
        assert around is not None
        call_of(*around)
    assert len(handle_calls._around) <= handle_calls._MOST
    assert len(handle_calls._calls) <= handle_calls._MOST


def rebuild_none(handle: Any, name: Any) -> Any:
    return shmreduce.import_block(handle)


class CarelessReducer(shmreduce.Reducer):
    types = (Named,)

    def reduce(self, obj: Named, message: shmreduce.Message) -> Any:
        return rebuild_none, (message.carry(obj.memory[:10]), obj.name)


def test_a_handle_that_is_none_points_at_the_reducer(ends: tuple[Any, Any]) -> None:
    """Which has not looked what ``carry`` returned for a small object."""
    with registered(CarelessReducer()):
        ends[0].send(Named("a"))
        with pytest.raises(shmreduce.InvalidHandleError, match=r"None is not a handle.*carry"):
            within(ends[1].recv)
