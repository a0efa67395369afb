"""Many arrays in one message, which are parts of blocks."""

from __future__ import annotations

import os
from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import shmreduce
from shmreduce import (
    AlreadyLoadedError,
    InvalidHandleError,
    Message,
    unpickling,
)
from shmreduce.memory import parts, runtime
from shmreduce.memory.heap import Heap
from shmreduce.memory.layout import BY_VALUE
from shmreduce_numpy import rebuild
from shmreduce_numpy.blocks import find_block_of
from tests.arrays.ways import (
    LACKS,
    PICKLES,
    WAYS,
    Unpicklable,
    dumps,
    sizes_out,
    standard_pickle,
    transfer,
)
from tests.memory.forks import Forks

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.conftest import Children

LENGTH = 20_000
"""Bytes of the shortest array: too few for a block of its own."""
COUNT = 400
OTHER = np.dtype(np.uint16).newbyteorder()


def many(number: int = 0, count: int = COUNT) -> list[Any]:
    # In the other byte order: those of the machine's own are pieces.
    return [np.full(LENGTH // 2 + each, (number + each) % 251, OTHER) for each in range(count)]


def send_back(arrays: Any) -> Any:
    return arrays, [int(array.ravel()[0]) for array in arrays]


def test_they_arrive_and_come_back(children: Children) -> None:
    """From one process to another and back they keep their values, and share few blocks."""
    sent = many()
    found, firsts = children.call(send_back, sent)
    assert firsts == [array[0] for array in sent]
    assert len(sizes_out()) < COUNT // 10
    for array, original in zip(found, sent, strict=True):
        np.testing.assert_array_equal(array, original)


@WAYS
@pytest.mark.parametrize("kind", "?bhilqBHILQefdgFDG")
def test_any_number_and_none_at_all_can_be_among_them(
    way: Callable[[Any], Any], kind: str
) -> None:
    """Each kind of number, aligned or not, and an array without elements."""
    # Without a limit, the empty one is not pickled either.
    with shmreduce.install(inline_limit=0):
        misaligned = np.zeros(9000 * np.dtype(kind).itemsize + 1, np.uint8)[1:].view(kind)
        last = [np.ones((90, 100), kind), misaligned, np.zeros((0, 3), kind)]
        *_, ones, zeros, nothing = way([*many(), *last])
    assert (ones == 1).all()
    assert not zeros.any()
    assert (nothing.shape, nothing.dtype) == ((0, 3), np.dtype(kind))


@pytest.mark.parametrize("nbytes", [LENGTH, 100_000])
@WAYS
def test_what_was_received_so_and_is_sent_on_shares_blocks_again(
    way: Callable[[Any], Any], nbytes: int
) -> None:
    """Also if the arrays are large enough for blocks of their own; each is still independent."""
    sent = [np.full(nbytes // 2 + each, each % 251, OTHER) for each in range(COUNT)]
    received = way(sent)
    before = len(sizes_out())
    again = way(received)
    # The first 4 MiB of the larger ones are not put together.
    assert len(sizes_out()) - before < COUNT // 4
    for array in received:
        array[:] = 255
    assert [int(array[-1]) for array in again] == [each % 251 for each in range(COUNT)]


class Labelled(np.ndarray[Any, Any]):
    """A subclass without attributes of its own."""


def each_layout() -> list[Any]:
    square = np.arange(10_000.0).reshape(100, 100)
    readonly = square + 1
    readonly.flags.writeable = False
    record = np.zeros(3_000, np.dtype([("a", "u1"), ("b", "<f8")], align=True))
    record["b"] = np.arange(3_000)
    return [
        square,
        square.T,
        square[::2, ::-1],
        square.astype(">f4"),
        readonly,
        record,
        np.arange(4_000).astype("m8[s]"),
        np.array(["text"] * 3_000),
        np.broadcast_to(np.arange(50.0), (60, 50)),
        square.view(Labelled),
        np.ma.masked_array(square, square > 5),
        np.arange(20_000, dtype="u1").reshape(2, 1, 100, 100)[:, ::1],
    ]


@WAYS
@pytest.mark.usefixtures("shmreduce_no_leaks")
def test_layouts_types_and_flags_are_kept(way: Callable[[Any], Any]) -> None:
    """As they are for an array that travels alone."""
    alone = [way(array) for array in each_layout()]
    *_, found = way([*many(), each_layout()])
    for array, other, original in zip(found, alone, each_layout(), strict=True):
        np.testing.assert_array_equal(array, original)
        assert (type(array), array.dtype, array.shape) == (type(other), other.dtype, other.shape)
        assert array.strides == other.strides
        assert array.flags.writeable == other.flags.writeable


@WAYS
@pytest.mark.usefixtures("shmreduce_no_leaks")
def test_each_is_independent(way: Callable[[Any], Any]) -> None:
    """Of its neighbours, and of what the sender does later; it sees nothing of theirs."""
    sent = many()
    found = way(sent)
    for array in sent:
        array[:] = 255
    for each, array in enumerate(found):
        assert (array == each % 251).all()
        array[:] = 254 - each % 2
    for each, array in enumerate(found):
        assert (array == 254 - each % 2).all()
        assert memoryview(array.base).nbytes == array.nbytes


@pytest.mark.usefixtures("shmreduce_no_leaks")
def test_one_that_is_kept_keeps_one_block() -> None:
    """Of a few MiB at most; the others are given back, and that one with its last array."""
    before = sizes_out()
    found = transfer(many())
    kept = found[-1]
    del found
    assert sum(sizes_out()) - sum(before) == 4 << 20
    del kept
    assert sizes_out() == before


@pytest.mark.usefixtures("shmreduce_no_leaks")
def test_few_arrays_get_no_block() -> None:
    """They are pickled, and can be loaded often."""
    data, message = dumps(many(count=10))
    assert message is None or message.is_empty
    assert all(len(unpickling.loads(bytes(data))) == 10 for _ in range(2))


@PICKLES
@pytest.mark.usefixtures("shmreduce_no_leaks")
def test_few_are_in_a_pickle_that_no_block_takes(dumps_short: Callable[[Any], bytes]) -> None:
    """Of those without a block of their own, 128 KiB; the others are in blocks, of twice what
    there was before.
    """
    before = sizes_out()
    data = dumps_short(many(count=6))
    assert sizes_out() == before
    assert all(len(unpickling.loads(data)) == 6 for _ in range(2))
    sent = many(count=30)
    data = dumps_short(sent)
    assert 6 * LENGTH < len(data) < 7 * LENGTH
    taken = sorted((Counter(sizes_out()) - Counter(before)).elements())
    assert 7 * LENGTH * 2 <= taken[0] < taken[-1] < 2 * sum(array.nbytes for array in sent)
    found = unpickling.loads(data)
    for array, original in zip(found, sent, strict=True):
        np.testing.assert_array_equal(array, original)
    del array, found
    assert sizes_out() == before


@PICKLES
@pytest.mark.usefixtures("shmreduce_no_leaks")
def test_what_has_a_block_of_its_own_does_not_count(dumps_short: Callable[[Any], bytes]) -> None:
    """It leaves the pickle as short as it is: the mask of an image is pickled."""
    image, mask = np.ones(100_000, np.uint8), np.ones(LENGTH, np.uint8)
    data = dumps_short([image, image[1:], image[2:], mask, mask[1:]])
    assert 2 * LENGTH < len(data) < 3 * LENGTH
    *_, first, second = unpickling.loads(data)
    assert [shmreduce.find_block(each) for each in (first, second)] == [None, None]


@pytest.mark.usefixtures("shmreduce_no_leaks")
def test_many_are_loaded_once() -> None:
    """As any array that travels in a block by value."""
    data, message = dumps(many())
    assert message is not None
    message.commit()
    first = unpickling.loads(bytes(data))
    with pytest.raises(AlreadyLoadedError):
        unpickling.loads(bytes(data))
    assert (first[-1] == (COUNT - 1) % 251).all()


@pytest.mark.usefixtures("shmreduce_no_leaks")
def test_where_there_is_no_room_they_are_pickled() -> None:
    """What needs no shared memory does not fail for want of it; one attempt is made."""
    spent = runtime.current().family.reserved
    with shmreduce.install(budget=max(spent, 1)):
        found = transfer(many())
    assert all((array == each % 251).all() for each, array in enumerate(found))


@pytest.mark.usefixtures("shmreduce_no_leaks", "long_way")
@pytest.mark.parametrize("error", LACKS, ids=lambda error: type(error).__name__)
def test_whatever_a_block_lacks_they_are_pickled(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor for want of a descriptor, of a lease or of a lock."""
    attempts = []

    def fail(*_: object, **_named: object) -> None:
        attempts.append(1)
        raise error

    monkeypatch.setattr(Heap, "allocate", fail)
    found = transfer(many())
    assert all((array == each % 251).all() for each, array in enumerate(found))
    assert len(attempts) == 1


@pytest.mark.usefixtures("shmreduce_no_leaks")
def test_a_message_that_fails_leaves_nothing() -> None:
    """None of the blocks stays."""
    before = sizes_out()
    with pytest.raises(ZeroDivisionError):
        dumps([*many(), Unpicklable()])
    assert sizes_out() == before


@pytest.mark.usefixtures("shmreduce_no_leaks")
def test_a_complete_message_holds_its_blocks_by_leases_alone() -> None:
    """Nothing of the sender's keeps them."""
    before = sizes_out()
    data, message = dumps(many())
    assert message is not None
    message.commit()
    assert not any(
        segment.records for segment in runtime.current().heap(BY_VALUE).segments if segment.out
    )
    found = unpickling.loads(bytes(data))
    del found, data
    assert sizes_out() == before


@pytest.mark.usefixtures("shmreduce_no_leaks")
def test_a_child_that_is_forked_meanwhile_does_not_write_into_the_block() -> None:
    """It goes on with blocks of its own."""
    rest = many(number=7)

    def change() -> None:
        for array in rest:
            array[:] = 255

    forks = Forks(change)
    parent = os.getpid()
    try:
        data, message = dumps([many(), forks, rest])
    finally:
        if os.getpid() != parent:
            os._exit(0)
    assert message is not None
    message.commit()
    forks.let_child_go_on()
    _, forked, found = unpickling.loads(bytes(data))
    assert forked == "forked"
    assert all((array == (7 + each) % 251).all() for each, array in enumerate(found))


@pytest.mark.usefixtures("shmreduce_no_leaks")
@pytest.mark.parametrize("start", [-8, 0, 1 << 40])
def test_a_part_that_lies_outside_its_block_is_refused(start: int) -> None:
    """A damaged message makes an error, not an array over something else."""
    block = shmreduce.allocate(64)
    with pytest.raises(InvalidHandleError, match="does not fit"):
        rebuild.rebuild_part(block, start, 72, (9,), "C", "<f8", True)


@pytest.mark.usefixtures("shmreduce_no_leaks")
def test_what_is_large_or_goes_to_another_host_gets_no_part() -> None:
    """The one has a block of its own, the other none at all."""
    elsewhere = Message(shared_memory=False)
    assert all(elsewhere.allocate_part(LENGTH) is None for _ in range(COUNT))
    message = Message()
    assert all(message.allocate_part(parts.LARGEST_PART + 1) is None for _ in range(COUNT))
    assert message.is_empty


@pytest.mark.usefixtures("shmreduce_no_leaks")
def test_arrays_between_the_limits_share_blocks_in_a_pipe_as_smaller_ones_do() -> None:
    """A single one of 64 KiB has a block of its own there; of many, only the first two."""
    sent = [np.full(64 << 10, each, np.uint8) for each in range(12)]
    data = standard_pickle(sent)
    assert len(data) < sent[0].nbytes
    received = unpickling.loads(data)
    assert [int(array[-1]) for array in received] == list(range(12))
    blocks = [find_block_of(array) for array in received]
    assert all(blocks)
    assert [block.nbytes == 64 << 10 for block in blocks if block] == [True] * 2 + [False] * 10
