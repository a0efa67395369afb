"""Many arrays of one dtype in one message, which are pieces of a block."""

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
    Message,
    unpickling,
)
from shmreduce.memory import parts, runtime
from shmreduce.memory.heap import Heap
from shmreduce.memory.layout import BY_VALUE
from shmreduce.memory.loading import _handles_in
from shmreduce_numpy import pieces, rebuild
from shmreduce_numpy.blocks import find_block_of
from tests.arrays.ways import LACKS, PICKLES, WAYS, Unpicklable, dumps, sizes_out, transfer
from tests.memory.forks import Forks

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.conftest import Children

COUNT = 1500
MANY, MANY_IN_PIPE = parts.IN_BLOCK.many, parts.IN_PIPE.many
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
def sent_as_pieces(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts the arrays that are pieces: those that stay in their block, and those that do not."""
    counts: Counter[str] = Counter()

    def staying(*given: Any) -> Any:
        counts["staying"] += 1
        return rebuild_piece(*given)

    def apart(*given: Any) -> Any:
        counts["apart"] += 1
        return rebuild_piece(*given).copy()

    rebuild_piece = rebuild.rebuild_piece
    for function, name in ((staying, "rebuild_piece"), (apart, "rebuild_piece_apart")):
        function.__module__, function.__qualname__ = rebuild.__name__, name
        monkeypatch.setattr(rebuild, name, function)
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
def test_most_of_them_are_pieces(way: Callable[[Any], Any], sent_as_pieces: Counter[str]) -> None:
    """Small ones are copied out of the block, larger ones stay in it, if there are many."""
    check(way(many()), many())
    assert COUNT - sent_as_pieces["apart"] in (MANY + 3, MANY_IN_PIPE + 3)
    assert sent_as_pieces["staying"] == 0
    sent_as_pieces.clear()
    check(way(many(LARGE)), many(LARGE))
    assert sent_as_pieces["staying"] > COUNT // 4


@WAYS
@pytest.mark.usefixtures("shmreduce_no_leaks")
def test_those_that_would_have_blocks_of_their_own_are_pieces_from_some_mib_on(
    way: Callable[[Any], Any], sent_as_pieces: Counter[str]
) -> None:
    """The first ones have them, since only so they can be sent on without a copy."""
    count = MANY_IN_PIPE + 100
    sent = many(12_500, count=count)
    check(way(sent), sent)
    assert sent_as_pieces["staying"] in (count - MANY - 3, count - MANY_IN_PIPE - 3)


@WAYS
@pytest.mark.parametrize("kind", "?bhilqBHILQefdgFDG")
def test_any_number_and_shape(way: Callable[[Any], Any], kind: str) -> None:
    """Each kind of number, with one axis or several, in turn."""
    shapes = [(2000,), (40, 50), (1, 2000, 1), (300,), (1,), ()]
    numbers = np.arange(2000) % 100
    sent = [
        np.array(np.resize(numbers + each, shapes[each % len(shapes)]).astype(kind), order="C")
        for each in range(400)
    ]
    check(way(sent), sent)


def each_layout() -> list[Any]:
    """Arrays that no slice of a larger array can be, or not without a loss."""
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
        np.zeros((0, 50)),
        np.zeros((50, 50), np.uint8)[:, 1:],
        np.zeros(20_001, np.uint8)[1:].view("f8"),
        np.arange(2500).astype("m8[s]"),
        np.array(["text"] * 300),
        square.view(np.matrix),
        np.ma.masked_array(square, square > 5),
        np.array([None, 1], object),
    ]


@WAYS
@pytest.mark.usefixtures("shmreduce_no_leaks")
def test_what_is_unusual_is_kept_as_it_is(way: Callable[[Any], Any]) -> None:
    """As it is for an array that travels alone, though many like it are in the message."""
    shared = shmreduce.zeros((50, 50))
    sent = [array for _ in range(100) for array in (*each_layout(), shared[:])]
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
    """Again as pieces, each as it is now."""
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
    assert all(array.flags.owndata for array in found[MANY_IN_PIPE + 4 :])


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
    data, message = dumps(many(count=MANY))
    assert message is None or message.is_empty
    assert all(len(unpickling.loads(bytes(data))) == MANY for _ in range(2))


@PICKLES
@pytest.mark.usefixtures("shmreduce_no_leaks")
def test_a_short_pickle_for_a_pipe_or_a_pool_has_no_pieces(
    dumps_short: Callable[[Any], bytes],
) -> None:
    """So it can be loaded often: some programs rely on it."""
    count = MANY_IN_PIPE + 3
    before = sizes_out()
    data = dumps_short(many(count=count))
    assert sizes_out() == before
    for _ in range(2):
        check(unpickling.loads(data), many(count=count))
    longer = dumps_short(many())
    assert len(data) < len(longer) < len(data) + 40 * COUNT
    check(unpickling.loads(longer), many())


@pytest.mark.usefixtures("shmreduce_no_leaks")
def test_many_are_loaded_once() -> None:
    """As any array that travels in a block by value."""
    data, message = dumps(many())
    assert message is not None
    message.commit()
    check(unpickling.loads(bytes(data)), many())
    with pytest.raises(AlreadyLoadedError):
        unpickling.loads(bytes(data))


@WAYS
@pytest.mark.usefixtures("shmreduce_no_leaks")
def test_they_may_have_any_lengths(
    way: Callable[[Any], Any], sent_as_pieces: Counter[str]
) -> None:
    """Short ones are copied out of a block in which others stay."""
    lengths = np.random.default_rng(1).integers(40, 9000, COUNT)
    sent = [np.full(length, each, np.float64) for each, length in enumerate(lengths)]
    check(way(sent), sent)
    assert sent_as_pieces["staying"] > COUNT // 4
    assert sent_as_pieces["apart"] > 0
    found = way(sent)
    shorter = [array for array in found if array.nbytes < parts.IN_PIPE.smallest_part]
    assert shorter
    before = sizes_out()
    del found
    assert len(sizes_out()) < len(before)
    assert [find_block_of(array) for array in shorter] == [None] * len(shorter)


@pytest.mark.usefixtures("shmreduce_no_leaks")
@pytest.mark.parametrize("limit", [0, 1, 1000, 1 << 30])
def test_any_inline_limit(limit: int) -> None:
    """None is larger than its block."""
    with shmreduce.install(inline_limit=limit):
        for length in (1, SMALL, LARGE, 40_000):
            check(transfer(many(length, count=40)), many(length, count=40))


@pytest.mark.usefixtures("shmreduce_no_leaks")
def test_where_there_is_no_room_they_are_pickled() -> None:
    """What needs no shared memory does not fail for want of it."""
    spent = runtime.current().family.reserved
    with shmreduce.install(budget=max(spent, 1)):
        check(transfer(many(LARGE)), many(LARGE))


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

    class Kept(pieces.ArrayPieces):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            made.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shmreduce_numpy.reduction.ArrayPieces", Kept)
        data, message = dumps([*many(), *many(LARGE)])
    assert message is not None
    message.commit()
    assert len(made) > 2
    assert not any(
        segment.records for segment in runtime.current().heap(BY_VALUE).segments if segment.out
    )
    found = unpickling.loads(bytes(data))
    del found, data
    assert sizes_out() == before


@pytest.mark.usefixtures("shmreduce_no_leaks")
def test_a_child_that_is_forked_meanwhile_goes_on_with_blocks_of_its_own() -> None:
    """What it adds to the message is in its own memory, not in its parent's block."""
    rest = many(number=7, count=40)
    first = many(count=300)

    def change() -> None:
        for array in rest:
            array[:] = -1

    forks = Forks(change)
    parent = os.getpid()
    try:
        # The block has room for the rest.
        data, message = dumps([first, forks, rest])
        assert message is not None
        message.commit()
        if os.getpid() != parent:
            made_here = {each.token for each in runtime.current().heap(BY_VALUE).segments}
            before, *after = [what.token in made_here for what in _handles_in(data)]
            os._exit(0 if not before and after and all(after) else 1)
    finally:
        if os.getpid() != parent:
            os._exit(2)
    forks.let_child_go_on()
    found, forked, others = unpickling.loads(bytes(data))
    assert forked == "forked"
    check(found, first)
    check(others, rest)


@pytest.mark.usefixtures("shmreduce_no_leaks")
def test_a_piece_that_does_not_fit_its_block_is_refused() -> None:
    """A damaged message makes an error, not an array over something else."""
    block = shmreduce.allocate(64)
    whole = rebuild.rebuild_pieces(block, "d")
    for rebuild_one in (rebuild.rebuild_piece, rebuild.rebuild_piece_apart):
        for fitting in ((2, 4), (8,) + (1,) * (MOST_AXES - 1)):
            assert rebuild_one(whole, 0, 8, fitting).shape == fitting
        assert rebuild_one(whole, 3, 4, ()).shape == ()
        for start, stop, shape in ((4, 12, (2, 4)), (0, 8, (3, 3)), (4, 12, None), (8, 4, None)):
            with pytest.raises(InvalidHandleError, match="does not fit"):
                rebuild_one(whole, start, stop, shape)


class BytesPieces:
    """Pieces of bytes, as a third party may have them."""

    def __init__(self, key: object, view: memoryview, block: object, short: bool) -> None:
        self.view: memoryview | None = view
        self.nbytes = view.nbytes

    def close(self) -> None:
        self.view = None


class OtherPieces(BytesPieces):
    """The same, of another reducer."""


@pytest.mark.usefixtures("shmreduce_no_leaks")
def test_no_two_pieces_overlap() -> None:
    """Nor does one reach beyond its block, whatever their sizes, keys and reducers."""
    message = Message()
    chooser = np.random.default_rng(2)
    found = [
        (message.add_piece(key, nbytes, make), nbytes)
        for nbytes in chooser.integers(1, 70_000, 1000).tolist()
        for key, make in (("key", BytesPieces), ("key", OtherPieces), ("other", OtherPieces))
    ]
    ends: dict[int, int] = {}
    for given, nbytes in found:
        if given is not None:
            made, offset = given
            assert offset == ends.get(id(made), 0)
            ends[id(made)] = offset + nbytes
            assert ends[id(made)] <= made.nbytes
    assert len(ends) > 10
    assert {type(given[0]) for given, _ in found if given} == {BytesPieces, OtherPieces}
    message.rollback()
    assert all(given[0].view is None for given, _ in found if given)


@pytest.mark.usefixtures("shmreduce_no_leaks")
def test_what_is_large_or_goes_to_another_host_gets_no_piece() -> None:
    """The one has a block or a part of its own, the other none at all."""
    elsewhere = Message(shared_memory=False)
    assert all(elsewhere.add_piece("key", 100, BytesPieces) is None for _ in range(COUNT))
    message = Message()
    for nbytes in (0, message.inline_limit, parts.LARGEST_PART + 1):
        assert all(message.add_piece("key", nbytes, BytesPieces) is None for _ in range(COUNT))
    assert message.is_empty


@pytest.mark.parametrize("nbytes", [-1, 1.5, "8"])
@pytest.mark.usefixtures("shmreduce_no_leaks")
def test_an_impossible_size_is_an_error(nbytes: Any) -> None:
    """Before there is a block, and after."""
    message = Message()
    for _ in range(2):
        with pytest.raises(ConfigurationError, match="nbytes"):
            message.add_piece("key", nbytes, BytesPieces)
        for _ in range(2 * MANY):
            message.add_piece("key", 100, BytesPieces)
    message.rollback()


def test_the_pickle_has_only_numbers_of_pieces() -> None:
    """A pickle of many arrays is a fraction of what their descriptions took."""
    data, message = dumps(many())
    assert message is not None
    message.rollback()
    inline = MANY * SMALL * 8
    assert inline * 0.9 < len(data) < inline + 40 * COUNT
    assert len(pickle.dumps(many(), 5)) > COUNT * SMALL * 8
