"""Large pickles: where they are written when a message of their kind was sent before."""

from __future__ import annotations

import os
import pickle
from typing import Any

import numpy as np
import pytest

import shmreduce
from shmreduce import packets, presized_pickle
from shmreduce.memory import runtime
from shmreduce.memory.layout import BY_VALUE
from tests.born.allocator import needs_allocator
from tests.memory.forks import Forks


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of pickles that were made in ordinary memory and copied."""
    sizes: list[int] = []
    move = packets._move_to_block

    def counted(body: memoryview, message: Any) -> Any:
        sizes.append(body.nbytes)
        return move(body, message)

    monkeypatch.setattr(packets, "_move_to_block", counted)
    return sizes


def texts(number: int, size: int, count: int = 100) -> list[Any]:
    return [f"{number}.{each}".ljust(size, "x") for each in range(count)]


def exchange(ends: tuple[Any, Any], obj: Any) -> Any:
    reader, writer = ends
    writer.send(obj)
    return reader.recv()


def blocks() -> set[tuple[bytes, int]]:
    heap = runtime.current().heap(BY_VALUE)
    heap.collect()
    return {(segment.token, block) for segment in heap.segments for block in segment.out}


_before: set[tuple[bytes, int]] = set()


@pytest.fixture(autouse=True)
def _what_others_have_left() -> None:
    # Messages to children that were killed, say, keep theirs for a while.
    _before.clear()
    _before.update(blocks())


def blocks_out() -> int:
    return len(blocks() - _before)


def test_the_second_of_a_kind_is_not_copied(ends: tuple[Any, Any], copied: list[int]) -> None:
    """Lists of as many items are of one kind; their pickles may differ in length by a little."""
    for number in range(5):
        sent = texts(number, 5_000 + 10 * number)
        assert exchange(ends, sent) == sent
    assert len(copied) == 1


def test_one_that_is_longer_than_expected_arrives(
    ends: tuple[Any, Any], copied: list[int]
) -> None:
    """It is copied, and the next is expected to be as long."""
    for size in (2_000, 9_000, 9_000):
        sent = texts(1, size)
        assert exchange(ends, sent) == sent
        assert blocks_out() == 0
    assert len(copied) == 2


def test_one_that_is_much_shorter_gets_a_block_of_its_own(
    ends: tuple[Any, Any], copied: list[int]
) -> None:
    """Memory that nobody needs does not travel."""
    for size in (50_000, 5_000):
        sent = texts(1, size)
        assert exchange(ends, sent) == sent
    assert len(copied) == 2


def test_one_that_needs_no_block_gets_none(ends: tuple[Any, Any]) -> None:
    """It stands in the packet, and no block is made for the next."""
    exchange(ends, texts(1, 5_000))
    for _ in range(2):
        reader, writer = ends
        writer.send(texts(2, 10))
        assert blocks_out() == 0
        assert reader.recv() == texts(2, 10)
    assert presized_pickle.expected_size(texts(3, 10)) == 0


class Buffers:
    """Pickles as buffers of several kinds, which are not large enough for a block of their own."""

    def __init__(self, number: int) -> None:
        self.parts: list[Any] = [
            bytes([number]) * 90_000,
            bytearray([number]) * 91_000,
            np.full(9_000, number),
            "text" * 30_000,
        ]

    def __reduce_ex__(self, _protocol: Any) -> Any:
        data, mutable, array, text = self.parts
        return _collect, (data, mutable, pickle.PickleBuffer(array), text, [1, 2])


def _collect(*parts: Any) -> list[Any]:
    return [bytes(part) if not isinstance(part, str | list) else part for part in parts]


def test_whatever_the_pickler_writes_is_written(ends: tuple[Any, Any], copied: list[int]) -> None:
    """Large bytes, bytearrays and buffers are handed on as they are, of any format."""
    for number in range(3):
        source = Buffers(number)
        found = exchange(ends, source)
        data, mutable, array, text = source.parts
        assert found == [data, bytes(mutable), array.tobytes(), text, [1, 2]]
    assert len(copied) == 1


def test_arrays_in_it_travel_as_ever(ends: tuple[Any, Any], copied: list[int]) -> None:
    """By value and shared; the shared one is the same at both ends."""
    shared = shmreduce.share(np.zeros(1000))
    for number in range(3):
        sent = [*texts(number, 5_000), np.full(50_000, number), shared]
        *found, by_value, again = exchange(ends, sent)
        assert found == sent[:-2]
        assert (by_value == number).all()
        shared[7] = number
        assert again[7] == number
    assert len(copied) == 1


def test_buffers_out_of_band_get_their_block(ends: tuple[Any, Any]) -> None:
    """If objects of a kind offer buffers this time, which they did not the last."""
    sent: list[Any] = texts(1, 5_000)
    assert exchange(ends, sent) == sent
    large = np.arange(40_000.0)
    sent[5] = _Offered(large)
    found = exchange(ends, sent)
    assert (found[5] == large).all()
    del found[5], sent[5]
    assert found == sent
    assert blocks_out() == 0


class _Offered:
    def __init__(self, array: Any) -> None:
        self.array = array

    def __reduce_ex__(self, _protocol: Any) -> Any:
        return np.frombuffer, (pickle.PickleBuffer(self.array),)


class Unpicklable:
    def __reduce__(self) -> Any:
        raise ZeroDivisionError


def test_one_that_fails_leaves_nothing(ends: tuple[Any, Any]) -> None:
    """Not the block that it was being written to either."""
    exchange(ends, texts(1, 5_000))
    _, writer = ends
    with pytest.raises(ZeroDivisionError):
        writer.send([*texts(2, 5_000, 99), Unpicklable()])
    assert blocks_out() == 0


def test_without_room_for_what_is_expected_there_may_be_for_what_is_needed(
    ends: tuple[Any, Any], copied: list[int]
) -> None:
    """The budget refuses the block that is expected, and grants a smaller one."""
    # Other tests may have left memory idle.
    with shmreduce.install(budget=runtime.current().family.reserved + (8 << 20)):
        presized_pickle.remember_size(texts(1, 5_000), 100 << 20)
        sent = texts(1, 5_000)
        assert exchange(ends, sent) == sent
    assert len(copied) == 1


def test_its_bytes_are_the_pickle_and_no_more(ends: tuple[Any, Any]) -> None:
    """``recv_bytes`` does not bring what else is in the block."""
    reader, writer = ends
    for number in range(2):
        sent = texts(number, 5_000)
        writer.send(sent)
        data = reader.recv_bytes()
        assert len(data) == len(pickle.dumps(sent, 5))
        assert pickle.loads(data) == sent


def test_one_that_is_not_sent_gives_its_block_back(ends: tuple[Any, Any]) -> None:
    """A packet that is discarded, with the arrays in it."""
    for _ in range(2):
        packet = packets.pack_last([[*texts(1, 5_000), np.ones(50_000)]])
        assert blocks_out() == 2
        packet.discard()
        del packet
        assert blocks_out() == 0


def test_with_arrays_that_are_moved_or_not(ends: tuple[Any, Any], copied: list[int]) -> None:
    """A pickle that changes once it is known what moves leaves the block."""
    needs_allocator()
    reader, writer = ends
    with shmreduce.shared_allocations():
        for number in range(4):
            stays = np.full(60_000, number)
            writer.send_last([[*texts(number, 5_000), stays, np.full(50_000, number)]])
            *found, again, alone = reader.recv()
            assert found == texts(number, 5_000)
            assert (again == number).all()
            assert (alone == number).all()
            assert (stays == number).all()
            del again, alone, stays
            assert blocks_out() == 0
    # The array that stays is copied, its handle in the pickle replaced: so the
    # pickle is another one each time.
    assert len(copied) == 4


def test_a_child_that_is_forked_meanwhile_does_not_write_into_the_message(
    ends: tuple[Any, Any],
) -> None:
    """It pickles on from there; what its parent has sent by then stays what it was."""
    reader, writer = ends
    exchange(ends, [texts(1, 5_000), texts(2, 5_000), texts(3, 5_000)])
    rest = texts(5, 5_000)

    def change() -> None:
        rest[:] = texts(99, 5_000, len(rest))

    forks = Forks(change)
    parent = os.getpid()
    try:
        packet = packets.pack_last([[texts(4, 5_000), forks, rest]])
    finally:
        if os.getpid() != parent:
            os._exit(0)
    writer.transmit(packet)
    del packet
    forks.let_child_go_on()
    assert reader.recv() == [texts(4, 5_000), "forked", texts(5, 5_000)]
