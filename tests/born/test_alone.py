"""An array that was born in shared memory and is a message by itself takes a shorter way."""

from __future__ import annotations

import os
from typing import Any

import pytest

import shmreduce
from shmreduce import moving, packets
from shmreduce.born import moving as born_moving
from shmreduce.born.heap import BornHeap, get_heap
from shmreduce.compiled import BLOCKS
from shmreduce.memory import one_buffer
from shmreduce.memory.one_buffer import GivenBuffer
from tests.born.allocator import filled, received_in_place
from tests.compiler import needs_module
from tests.interrupter import interrupted_everywhere
from tests.long_ways import list_slots, note_long_ways
from tests.memory.waiting import wait_for_exit

pytestmark = pytest.mark.usefixtures("allocator", "shmreduce_no_leaks")


@pytest.fixture(autouse=True)
def _ready(pipe: tuple[Any, Any]) -> None:
    """Send the first message of the segment, which takes the long way."""
    needs_module(BLOCKS)
    with shmreduce.shared_allocations():
        pipe[0].send(filled(0))
    assert received_in_place(pipe[1].recv())
    list_slots()


@pytest.fixture
def long_ways(_ready: None, monkeypatch: pytest.MonkeyPatch) -> list[type]:
    """What was pickled the long way."""
    return note_long_ways(monkeypatch)


def test_it_is_moved(pipe: tuple[Any, Any], long_ways: list[Any]) -> None:
    """What arrives lies where the array was born."""
    with shmreduce.shared_allocations():
        for value in range(5):
            pipe[0].send(filled(value))
            received = pipe[1].recv()
            assert received_in_place(received)
            assert (received == value).all()
    assert long_ways == []


def test_beside_atoms_in_a_tuple_it_is_moved_too(
    pipe: tuple[Any, Any], long_ways: list[Any]
) -> None:
    """A number, or a name, beside it makes no difference."""
    with shmreduce.shared_allocations():
        pipe[0].send((7, filled(7), "seven"))
    number, received, name = pipe[1].recv()
    assert (number, name) == (7, "seven")
    assert received_in_place(received)
    assert (received == 7).all()
    assert long_ways == []


def test_what_somebody_keeps_is_copied(pipe: tuple[Any, Any], long_ways: list[Any]) -> None:
    """The receiver has what it was, and neither sees what the other writes."""
    with shmreduce.shared_allocations():
        kept = filled(1)
    for value in (1, 2, 3):
        kept[:] = value
        pipe[0].send(kept)
        received = pipe[1].recv()
        assert not received_in_place(received)
        kept[:] = 50
        assert (received == value).all()
        received[:] = 60
        assert (kept == 50).all()
    assert long_ways == []


def test_without_the_trial_its_keeper_would_write_into_what_was_sent(
    pipe: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The guard is needed: left out, the receiver sees what is written after sending."""
    with shmreduce.shared_allocations():
        kept = filled(1)

    def settle_nothing(given: GivenBuffer, _leases: Any) -> None:
        given.give_up()

    monkeypatch.setattr(GivenBuffer, "settle", settle_nothing)
    pipe[0].send(kept)
    kept[:] = 9
    assert (pipe[1].recv() == 9).all()


def test_an_array_in_other_memory_is_copied(pipe: tuple[Any, Any], long_ways: list[Any]) -> None:
    """One that is older than the block, say; the first time there is no block for it."""
    older = filled(1)
    with shmreduce.shared_allocations():
        for value in range(4):
            older[:] = value
            pipe[0].send(older)
            assert (pipe[1].recv() == value).all()
    assert len(long_ways) <= 1


def test_a_part_of_one_takes_the_long_way(pipe: tuple[Any, Any], long_ways: list[Any]) -> None:
    """Of most of an array all of it is moved, which the rebuilt part has to be found in."""
    with shmreduce.shared_allocations():
        pipe[0].send_last([filled(1)[:-1]])
        pipe[0].send_last([filled(2)[1:]])
    for value in (1, 2):
        received = pipe[1].recv()
        assert received_in_place(received)
        assert (received == value).all()
    assert len(long_ways) == 2


def test_ctrl_c_at_any_instruction_loses_nothing(pipe: tuple[Any, Any]) -> None:
    """The array is still the sender's, or in the message; no entry stays a move's."""
    heap = get_heap()
    held: list[Any] = []
    made: list[Any] = []

    def pack() -> None:
        made.append(packets.pack_last(held))

    files = [each.__file__ for each in (packets, one_buffer, moving, born_moving)]
    with shmreduce.shared_allocations():
        held.append(filled(5))
        steps = 0
        for _ in interrupted_everywhere(pack, *map(str, files)):
            steps += 1
            assert all((each == 5).all() for each in held)
            assert not heap.moving
            while made:
                made.pop().discard()
            held[:] = [filled(5)]
        assert steps > 20
        pipe[0].transmit(made.pop())
    received = pipe[1].recv()
    assert received_in_place(received)
    assert (received == 5).all()


def test_a_child_that_is_forked_in_the_middle_leaves_the_message_to_its_parent(
    pipe: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It moves nothing, and takes nothing back."""
    children: list[int] = []
    same: list[bool] = []
    settle = GivenBuffer.settle

    def fork_and_settle(given: GivenBuffer, leases: Any) -> None:
        children.append(os.fork())
        before = given.handle, list(leases)
        settle(given, leases)
        same.append(before == (given.handle, leases))

    with shmreduce.shared_allocations():
        held = [filled(3)]
        with monkeypatch.context() as patch:
            patch.setattr(GivenBuffer, "settle", fork_and_settle)
            try:
                packet = packets.pack_last(held)
                if children == [0]:
                    packet.finish()
                    packet.discard()
            finally:
                if children == [0]:
                    os._exit(0 if same == [True] else 1)
        assert wait_for_exit(children[0]) == 0
        pipe[0].transmit(packet)
    assert (pipe[1].recv() == 3).all()


def test_it_is_used_again_when_its_receiver_has_dropped_it(pipe: tuple[Any, Any]) -> None:
    """The heap is tended once the message was sent: so few blocks do for many messages."""
    heap = get_heap()
    with shmreduce.shared_allocations():
        before = heap.block_bytes
        for value in range(50):
            pipe[0].send(filled(value))
            received = pipe[1].recv()
            assert received_in_place(received)
            del received
        assert heap.block_bytes - before <= 4 * filled(0).nbytes


@pytest.mark.parametrize("make", [shmreduce.Queue, shmreduce.JoinableQueue])
def test_what_fails_when_it_was_sent_does_not_count_as_not_sent(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The heap is tended then: an error of that is told, and the message arrives, once."""
    queue: Any = make(2)
    with shmreduce.shared_allocations():
        queue.put(filled(0))
        assert received_in_place(queue.get())
        held = filled(1)

        def fail(_heap: BornHeap) -> None:
            raise ZeroDivisionError

        with monkeypatch.context() as patch:
            patch.setattr(BornHeap, "tend", fail)
            with pytest.raises(ZeroDivisionError):
                queue.put(held)
    assert queue.qsize() == 1
    assert (queue.get() == 1).all()
    assert queue.empty()
    assert queue.qsize() == 0
    queue.close()
    queue.join_thread()
