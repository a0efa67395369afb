"""Many arrays of one shape in one message, which are rows of a block."""

from __future__ import annotations

import os
import pickle
from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import shmreduce
from shmreduce import (
    AlreadyLoadedError,
    ConfigurationError,
    InvalidHandleError,
    LeaseTimeoutError,
    Message,
    OutOfLeasesError,
    SegmentError,
    pickling,
)
from shmreduce.memory import parts, runtime
from shmreduce.memory.handle import Handle, find_mark
from shmreduce.memory.heap import Heap
from shmreduce.memory.layout import BY_VALUE
from shmreduce_numpy import rebuild, rows
from tests.arrays.ways import PICKLES, WAYS, dumps, sizes_out, transfer
from tests.memory.forks import Forks

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.conftest import Children

COUNT = 1500
SMALL, LARGE = 250, 2500
"""Numbers per array: those of LARGE stay in their block, where a message has many bytes."""
MOST_AXES = 64 if np.lib.NumpyVersion(np.__version__) >= "2.0.0" else 32


def many(length: int = SMALL, number: int = 0, count: int = COUNT) -> list[Any]:
    return [np.full(length, number + each, np.float64) for each in range(count)]


def check(found: list[Any], sent: list[Any]) -> None:
    assert len(found) == len(sent)
    for array, original in zip(found, sent, strict=True):
        assert type(array) is type(original)
        assert (array.dtype, array.shape) == (original.dtype, original.shape)
        assert array.flags.writeable == original.flags.writeable
        np.testing.assert_array_equal(array, original)


@pytest.fixture
def sent_as_rows(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts the arrays that are pickled as rows, by the name of the rebuild function."""
    counts: Counter[str] = Counter()
    add_row = Message.add_row

    def count(message: Message, key: Any, nbytes: int, make: Any) -> Any:
        found = add_row(message, key, nbytes, make)
        if found is not None:
            counts[found[0].rebuild.__name__] += 1
        return found

    monkeypatch.setattr(Message, "add_row", count)
    return counts


def send_back(arrays: Any) -> Any:
    return arrays, [float(array[0]) for array in arrays]


@pytest.mark.parametrize("length", [SMALL, LARGE])
def test_they_arrive_and_come_back(children: Children, length: int) -> None:
    """From one process to another and back they keep their values, and share few blocks."""
    sent = many(length)
    found, firsts = children.call(send_back, sent)
    assert firsts == [array[0] for array in sent]
    check(found, sent)
    assert len(sizes_out()) < COUNT // 10


@WAYS
@pytest.mark.usefixtures("shmreduce_no_leaks")
def test_most_of_them_are_rows(way: Callable[[Any], Any], sent_as_rows: Counter[str]) -> None:
    """Small ones are copied out of the block, larger ones stay in it, if there are many."""
    check(way(many()), many())
    assert sent_as_rows["rebuild_row_apart"] > COUNT - 100
    assert sent_as_rows["rebuild_row"] == 0
    sent_as_rows.clear()
    check(way(many(LARGE)), many(LARGE))
    assert sent_as_rows["rebuild_row"] > COUNT // 2


@WAYS
@pytest.mark.usefixtures("shmreduce_no_leaks")
def test_those_that_would_have_blocks_of_their_own_are_rows_from_some_mib_on(
    way: Callable[[Any], Any], sent_as_rows: Counter[str]
) -> None:
    """The first ones have them, since only so they can be sent on without a copy."""
    sent = many(12_500, count=200)
    first = parts.PARTS_FROM // sent[0].nbytes
    check(way(sent), sent)
    assert 200 - first - 2 * parts.ROWS_AFTER < sent_as_rows["rebuild_row"] < 200 - first


@WAYS
@pytest.mark.parametrize("kind", "?bhilqBHILQefdgFDG")
def test_any_number_and_shape(way: Callable[[Any], Any], kind: str) -> None:
    """Each kind of number, with one axis or several, in turn."""
    shapes = [(2000,), (40, 50), (1, 2000, 1), (1,)]
    numbers = np.arange(2000) % 100
    sent = [
        np.ascontiguousarray(np.resize(numbers + each, shapes[each % len(shapes)]).astype(kind))
        for each in range(400)
    ]
    check(way(sent), sent)


def each_layout() -> list[Any]:
    """Arrays that no row can be, or not without a loss."""
    square = np.arange(2500.0).reshape(50, 50)
    readonly = square + 1
    readonly.flags.writeable = False
    record = np.zeros(300, np.dtype([("a", "u1"), ("b", "<f8")], align=True))
    return [
        square.T,
        square[::2, ::-1],
        square.astype(">f8"),
        readonly,
        record,
        np.array(1.5),
        np.zeros((0, 50)),
        np.zeros((50, 50), np.uint8)[:, 1:],
        np.zeros(20_001, np.uint8)[1:].view("f8"),
        np.arange(2500).astype("m8[s]"),
        np.array(["text"] * 300),
        np.zeros((1,) * MOST_AXES),
        square.view(np.matrix),
        np.ma.masked_array(square, square > 5),
        np.array([None, 1], object),
    ]


@WAYS
@pytest.mark.usefixtures("shmreduce_no_leaks")
def test_what_is_unusual_is_kept_as_it_is(way: Callable[[Any], Any]) -> None:
    """As it is for an array that travels alone, though many like it are in the message."""
    shared = shmreduce.zeros((50, 50))
    sent = [array for _ in range(3 * parts.ROWS_AFTER) for array in (*each_layout(), shared[:])]
    alone = [way(array) for array in (*each_layout(), shared)]
    received = way([*many(), *sent])[COUNT:]
    for place, (array, original) in enumerate(zip(received, sent, strict=True)):
        other = alone[place % len(alone)]
        np.testing.assert_array_equal(array, original)
        assert (type(array), array.dtype, array.shape) == (type(other), other.dtype, other.shape)
        assert array.strides == other.strides
        assert array.flags.writeable == other.flags.writeable
        assert shmreduce.is_shared(array) == shmreduce.is_shared(original)
    received[-1][:] = 7
    assert (shared == 7).all()


@WAYS
@pytest.mark.usefixtures("shmreduce_no_leaks")
@pytest.mark.parametrize("length", [SMALL, LARGE])
def test_each_is_independent(way: Callable[[Any], Any], length: int) -> None:
    """Of its neighbours, and of what the sender does later."""
    sent = many(length)
    found = way(sent)
    for array in sent:
        array[:] = -1
    for each, array in enumerate(found):
        assert (array == each).all()
        array[:] = -2 - each
    for each, array in enumerate(found):
        assert (array == -2 - each).all()


@WAYS
def test_one_object_stays_one_object(way: Callable[[Any], Any]) -> None:
    """An array that comes twice in the message arrives once."""
    sent = many()
    found = way([sent, sent[::-1]])
    assert all(one is other for one, other in zip(found[0], found[1][::-1], strict=True))
    check(found[0], sent)


class Changes:
    """Changes arrays while it is pickled."""

    def __init__(self, arrays: list[Any]) -> None:
        self.arrays = arrays

    def __reduce__(self) -> Any:
        for array in self.arrays:
            array[:] = -1
        return str, ("changed",)


@WAYS
def test_each_is_sent_as_it_was_when_it_was_pickled(way: Callable[[Any], Any]) -> None:
    """What is pickled after it cannot change it any more."""
    sent = many()
    found, _, last = way([sent, Changes(sent), many()])
    check(found, many())
    check(last, many())


@WAYS
@pytest.mark.usefixtures("shmreduce_no_leaks")
def test_what_was_received_so_can_be_sent_on(way: Callable[[Any], Any]) -> None:
    """Again as rows, each as it is now."""
    received = way(many(LARGE))
    for array in received:
        array[:] += 1
    again = way(received)
    for array in received:
        array[:] = -1
    check(again, many(LARGE, number=1))


@WAYS
@pytest.mark.usefixtures("shmreduce_no_leaks")
def test_small_ones_keep_no_block(way: Callable[[Any], Any]) -> None:
    """They have memory of their own."""
    before = sizes_out()
    found = way(many())
    assert sizes_out() == before
    assert all(array.flags.owndata for array in found[COUNT // 2 :])


@pytest.mark.usefixtures("shmreduce_no_leaks")
def test_a_large_one_keeps_one_block() -> None:
    """Of a few MiB at most; the others are given back, and that one with its last array."""
    before = sizes_out()
    found = transfer(many(LARGE))
    kept = found[-1]
    del found
    assert sum(sizes_out()) - sum(before) == 4 << 20
    del kept
    assert sizes_out() == before


@pytest.mark.usefixtures("shmreduce_no_leaks")
def test_large_ones_keep_no_block_if_the_message_is_short() -> None:
    """Few MiB are copied out of the block, as they would be out of the pickle."""
    before = sizes_out()
    found = transfer(many(LARGE, count=100))
    assert sizes_out() == before
    check(found, many(LARGE, count=100))


@pytest.mark.usefixtures("shmreduce_no_leaks")
def test_few_are_pickled() -> None:
    """They need no block, and can be loaded often."""
    data, message = dumps(many(count=parts.ROWS_AFTER))
    assert message is None or message.is_empty
    assert all(len(pickling.loads(bytes(data))) == parts.ROWS_AFTER for _ in range(2))


@PICKLES
@pytest.mark.usefixtures("shmreduce_no_leaks")
def test_a_short_pickle_for_a_pipe_or_a_pool_has_no_rows(
    dumps_short: Callable[[Any], bytes],
) -> None:
    """It has its first 128 KiB itself, so it can be loaded often: some programs rely on it."""
    count = (128 << 10) // (SMALL * 8)
    before = sizes_out()
    data = dumps_short(many(count=count))
    assert sizes_out() == before
    for _ in range(2):
        check(pickling.loads(data), many(count=count))
    longer = dumps_short(many())
    assert len(longer) < 2 * len(data)
    check(pickling.loads(longer), many())


@pytest.mark.usefixtures("shmreduce_no_leaks")
def test_many_are_loaded_once() -> None:
    """As any array that travels in a block by value."""
    data, message = dumps(many())
    assert message is not None
    message.commit()
    check(pickling.loads(bytes(data)), many())
    with pytest.raises(AlreadyLoadedError):
        pickling.loads(bytes(data))


def test_of_many_shapes_the_first_are_looked_for() -> None:
    """Any number of shapes arrives."""
    sent = [
        np.full(1 + each % (2 * parts.MOST_SERIES), each, np.int64)
        for each in range(parts.MOST_SERIES * 100)
    ]
    check(transfer(sent), sent)


@pytest.mark.usefixtures("shmreduce_no_leaks")
@pytest.mark.parametrize("limit", [0, 1, 1000, 1 << 30])
def test_any_inline_limit(limit: int) -> None:
    """Rows are for what would be pickled otherwise, and never larger than their block."""
    with shmreduce.install(inline_limit=limit):
        for length in (1, SMALL, LARGE, 40_000):
            check(transfer(many(length, count=40)), many(length, count=40))


@pytest.mark.usefixtures("shmreduce_no_leaks")
def test_where_there_is_no_room_they_are_pickled() -> None:
    """What needs no shared memory does not fail for want of it."""
    spent = runtime.current().family.reserved
    with shmreduce.install(budget=max(spent, 1)):
        check(transfer(many(LARGE)), many(LARGE))


LACKS = [
    SegmentError("no descriptor is free", operation="open", errno=24, segment=None),
    OutOfLeasesError("all are in use", segment="", slots=1),
    LeaseTimeoutError("somebody is stopped", segment="", block=0, waited=30.0),
]


@pytest.mark.usefixtures("shmreduce_no_leaks", "long_way")
@pytest.mark.parametrize("error", LACKS, ids=lambda error: type(error).__name__)
def test_whatever_a_block_lacks_they_are_pickled(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor for want of a descriptor, of a lease or of a lock. One attempt is made."""
    attempts = []

    def fail(*_: object, **_named: object) -> None:
        attempts.append(1)
        raise error

    monkeypatch.setattr(Heap, "allocate", fail)
    check(transfer(many(LARGE)), many(LARGE))
    assert len(attempts) == 1


class Unpicklable:
    def __reduce__(self) -> Any:
        raise ZeroDivisionError


@pytest.mark.usefixtures("shmreduce_no_leaks")
def test_a_message_that_fails_leaves_nothing() -> None:
    """None of the blocks stays."""
    before = sizes_out()
    with pytest.raises(ZeroDivisionError):
        dumps([*many(), *many(LARGE), Unpicklable()])
    assert sizes_out() == before


@pytest.mark.usefixtures("shmreduce_no_leaks")
def test_a_complete_message_holds_its_blocks_by_leases_alone() -> None:
    """Nothing of the sender's keeps them, though a pickler may live on."""
    before = sizes_out()
    made: list[Any] = []

    class Kept(rows.ArrayRows):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            made.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shmreduce_numpy.reduction.ArrayRows", Kept)
        data, message = dumps([*many(), *many(LARGE)])
    assert message is not None
    message.commit()
    assert len(made) > 2
    assert not any(
        segment.records for segment in runtime.current().heap(BY_VALUE).segments if segment.out
    )
    found = pickling.loads(bytes(data))
    del found, data
    assert sizes_out() == before


def handles_in(data: bytes) -> list[Handle]:
    found = []
    start = find_mark(data, 0)
    while start != -1:
        end = start + Handle.size_at(data, start)
        found.append(Handle.unpack(data[start:end]))
        start = find_mark(data, end)
    return found


@pytest.mark.usefixtures("shmreduce_no_leaks")
def test_a_child_that_is_forked_meanwhile_goes_on_with_blocks_of_its_own() -> None:
    """What it adds to the message is in its own memory, not in its parent's block."""
    rest = many(number=7, count=40)

    def change() -> None:
        for array in rest:
            array[:] = -1

    forks = Forks(change)
    parent = os.getpid()
    try:
        # The block has room for the rest.
        data, message = dumps([many(count=100), forks, rest])
        assert message is not None
        message.commit()
        if os.getpid() != parent:
            made_here = {each.token for each in runtime.current().heap(BY_VALUE).segments}
            first, *others = [what.token in made_here for what in handles_in(bytes(data))]
            os._exit(0 if not first and others and all(others) else 1)
    finally:
        if os.getpid() != parent:
            os._exit(2)
    forks.let_child_go_on()
    first, forked, found = pickling.loads(bytes(data))
    assert forked == "forked"
    check(first, many(count=100))
    check(found, rest)


@pytest.mark.usefixtures("shmreduce_no_leaks")
def test_rows_that_do_not_fit_their_block_are_refused() -> None:
    """A damaged message makes an error, not an array over something else."""
    block = shmreduce.allocate(64)
    with pytest.raises(InvalidHandleError, match="does not fit"):
        rebuild.rebuild_rows(block, "d", (3, 3))
    with pytest.raises(IndexError):
        rebuild.rebuild_row(rebuild.rebuild_rows(block, "d", (2, 4)), 2)


class BytesRows:
    """Rows of bytes, as a third party may have them."""

    def __init__(
        self, key: object, view: memoryview, block: object, length: int, copied: bool
    ) -> None:
        self.made_of = key, view.nbytes, block, length, copied
        self.view: memoryview | None = view

    def close(self) -> None:
        self.view = None


class OtherRows(BytesRows):
    """The same, of another reducer."""


@pytest.mark.usefixtures("shmreduce_no_leaks")
def test_two_reducers_may_use_the_same_key() -> None:
    """Neither gets a row of the other's block."""
    message = Message()
    found = [
        message.add_row("key", nbytes, make)
        for _ in range(100)
        for nbytes, make in ((100, BytesRows), (200, OtherRows))
    ]
    given = [each for each in found if each is not None]
    assert {type(each) for each, _ in given} == {BytesRows, OtherRows}
    assert len({(id(each), number) for each, number in given}) == len(given)
    ours, _ = given[-2]
    assert ours.made_of[1] == 100 * ours.made_of[3]
    message.rollback()
    assert all(each.view is None for each, _ in given)


@pytest.mark.usefixtures("shmreduce_no_leaks")
def test_rows_of_one_key_have_one_size() -> None:
    """Another size is an error: the row would reach into the next."""
    message = Message()
    for _ in range(2 * parts.ROWS_AFTER):
        message.add_row("key", 100, BytesRows)
    with pytest.raises(ConfigurationError, match="100 bytes"):
        message.add_row("key", 101, BytesRows)
    message.rollback()


@pytest.mark.usefixtures("shmreduce_no_leaks")
def test_what_is_large_or_goes_to_another_host_gets_no_row() -> None:
    """The one has a block or a part of its own, the other none at all."""
    elsewhere = Message(shared_memory=False)
    assert all(elsewhere.add_row("key", 100, BytesRows) is None for _ in range(COUNT))
    message = Message()
    assert all(message.add_row("key", 0, BytesRows) is None for _ in range(COUNT))
    large = message.inline_limit
    assert all(message.add_row("large", large, BytesRows) is None for _ in range(COUNT))
    assert message.is_empty


def test_the_pickle_has_only_numbers_of_rows() -> None:
    """A pickle of many arrays is a fraction of what their descriptions took."""
    data, message = dumps(many())
    assert message is not None
    message.rollback()
    inline = parts.ROWS_AFTER * SMALL * 8
    assert inline < len(data) < inline + 20 * COUNT
    assert len(pickle.dumps(many(), 5)) > COUNT * SMALL * 8
