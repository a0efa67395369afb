"""An array that nobody else has is moved; any other is copied, and by value all the same."""

from __future__ import annotations

import gc
import pickle
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import shmreduce
from shmreduce.born.heap import get_heap
from shmreduce.born.library import load
from shmreduce.born.moving import BornMove, name_array
from shmreduce.memory.process_memory import Runtime
from shmreduce.memory.runtime import current
from shmreduce.testing.leaks import find_leaks, take_census
from tests.born.allocator import (
    LARGE,
    address_of,
    counters,
    entry_of,
    filled,
    received_in_place,
)
from tests.plugins.numpy_samples import written_back_to

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.usefixtures("allocator", "shmreduce_no_leaks")

SENT = 1
"""As in the allocator's source."""


def tend() -> None:
    """Let the heap take note of what was freed and released."""
    get_heap().tend()


def test_an_array_that_nobody_has_any_more_is_moved(pipe: tuple[Any, Any]) -> None:
    """The receiver's array lies in the very block that the sender's was born in."""
    here, there = pipe
    with shmreduce.shared_allocations():
        here.send(filled(3))
        received = there.recv()
    assert received_in_place(received)
    assert (received == 3).all()
    received[:] = 4
    assert (received == 4).all()


def named(array: Any, message: shmreduce.Message) -> BornMove:
    """Put an array into a message, as a channel does that may move it."""
    moves: list[BornMove] = []
    assert name_array(address_of(array), array.nbytes, message.add_lease, moves.append)
    return moves[0]


@pytest.mark.parametrize("when", ["before", "behind"])
def test_an_array_that_is_in_a_message_stays_in_it_when_another_one_is_taken_back(
    when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though other threads free the one, and send the other with its number, in the middle."""
    failed, sent = shmreduce.Message(), shmreduce.Message()
    moves: list[BornMove] = []
    arrays: list[Any] = []
    unsend = load().unsend

    def send_another() -> None:
        arrays.clear()
        tend()
        arrays.append(filled(2))
        moves.append(named(arrays[0], sent))

    def while_others_run(number: int) -> None:
        monkeypatch.undo()
        if when == "behind":
            unsend(number)
        send_another()
        if when == "before":
            unsend(number)

    with shmreduce.shared_allocations():
        tend()
        arrays.append(filled(1))
        move = named(arrays[0], failed)
        if when == "before":
            arrays.clear()
        failed.rollback()
        monkeypatch.setattr(load(), "unsend", while_others_run)
        move.stay()
        move.stay()
        assert entry_of(arrays[0]).flags & SENT
        assert moves[0].number in get_heap().moving
        sent.rollback()
        moves[0].stay()
        assert not entry_of(arrays[0]).flags & SENT
        assert not get_heap().moving


def test_what_is_sent_after_the_process_has_left_is_handed_over(
    pipe: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As any array that a function of ``atexit`` sends: its reader may come later."""
    here, there = pipe
    left: list[Runtime] = []

    def leave(runtime: Runtime) -> None:
        left.append(runtime)

    monkeypatch.setattr(current(), "has_left", True)
    monkeypatch.setattr(Runtime, "leave", leave)
    with shmreduce.shared_allocations():
        here.send(filled(3))
    assert left == [current()]
    assert (there.recv() == 3).all()


def test_a_block_of_another_strategy_is_no_new_arrays(pipe: tuple[Any, Any]) -> None:
    """Nothing could be moved in it: it goes back to its heap when its array is freed."""
    here, there = pipe
    for strategy in ("file_system", "file_descriptor", "file_system", "file_descriptor"):
        with shmreduce.install(strategy=strategy):
            with shmreduce.shared_allocations():
                older = filled(1)
            other = {"file_system": "file_descriptor"}.get(strategy, "file_system")
            with shmreduce.install(strategy=other), shmreduce.shared_allocations():
                del older
                for value in range(3):
                    here.send(filled(value))
                    received = there.recv()
                    assert received_in_place(received)
                    assert (received == value).all()


def test_after_a_block_of_another_strategy_arrays_are_moved_as_before(
    pipe: tuple[Any, Any],
) -> None:
    """They are born in the heap of the block that is still open."""
    here, there = pipe
    with shmreduce.install(strategy="file_descriptor"), shmreduce.shared_allocations():
        with shmreduce.install(strategy="file_system"), shmreduce.shared_allocations():
            filled(1)
        here.send(filled(2))
        received = there.recv()
        assert received_in_place(received)
        assert (received == 2).all()


@dataclass
class Holder:
    array: np.ndarray[Any, Any]


def objects(array: Any) -> np.ndarray[Any, Any]:
    """Return what the reducer for arrays leaves to the ordinary way, with the array in it."""
    made = np.empty(1, object)
    made[0] = array
    return made


CONTAINERS: dict[str, Callable[[Any], Any]] = {
    "list": lambda array: [1, array],
    "dict": lambda array: {"a": [array]},
    "dataclass": Holder,
    "fortran": lambda array: np.asfortranarray(array.reshape(1024, -1)),
    "reshaped": lambda array: array.reshape(1024, -1),
    "view of most": lambda array: array[100:],
    "subclass": lambda array: array.view(np.recarray),
    "array of objects": objects,
    "masked": lambda array: np.ma.masked_array(array, np.zeros(array.shape, bool)),
}


def array_in(obj: Any) -> np.ndarray[Any, Any]:
    if isinstance(obj, np.ma.MaskedArray):
        return np.asarray(obj.data)
    if isinstance(obj, np.ndarray):
        return obj[0] if obj.dtype == object else np.asarray(obj)
    if isinstance(obj, Holder):
        return obj.array
    return array_in(obj[-1] if isinstance(obj, list) else next(iter(obj.values())))


@pytest.mark.parametrize("kind", CONTAINERS)
def test_containers_and_views_are_moved_too(kind: str, pipe: tuple[Any, Any]) -> None:
    """An array inside something, or a contiguous view of most of one, is moved."""
    here, there = pipe
    make = CONTAINERS[kind]
    with shmreduce.shared_allocations():
        held = [make(filled(5))]
        here.send_last(held)
        received = there.recv()
    assert received_in_place(array_in(received))
    assert type(received) is type(make(filled(5)))
    assert (array_in(received) == 5).all()


def test_what_somebody_keeps_is_copied(pipe: tuple[Any, Any]) -> None:
    """A variable, a view, a buffer or a cycle that still has the array: the receiver gets a copy
    of what it was, and neither sees the other's writes.
    """
    here, there = pipe
    keepers: list[Callable[[Any], Any]] = [
        lambda array: array,
        lambda array: array[5:10],
        memoryview,
        lambda array: np.lib.stride_tricks.as_strided(array, (10,), (1,)),
        cycle_around,
    ]
    gc.disable()
    try:
        for number, keeper in enumerate(keepers):
            with shmreduce.shared_allocations():
                held = [filled(number)]
                kept = keeper(held[0])
                here.send_last(held)
                received = there.recv()
            assert not received_in_place(received)
            as_array = np.asarray(kept[0] if isinstance(kept, list) else kept)
            as_array[:] = 99
            assert (received == number).all()
            received[:] = 98
            assert (as_array == 99).all()
            del kept, as_array
    finally:
        gc.enable()


def cycle_around(array: Any) -> list[Any]:
    cycle = [array]
    cycle.append(cycle)
    return cycle


def test_an_array_kept_once_can_be_moved_later(pipe: tuple[Any, Any]) -> None:
    """A copy leaves the array as it was: it is moved when the last who has it sends it."""
    here, there = pipe
    with shmreduce.shared_allocations():
        array = filled(6)
        here.send(array)
        assert not received_in_place(there.recv())
        held = [array]
        del array
        here.send_last(held)
        received = there.recv()
    assert received_in_place(received)
    assert (received == 6).all()


def test_two_views_of_one_array_are_two_arrays_at_the_receiver(pipe: tuple[Any, Any]) -> None:
    """By value: pickling two views gives two arrays, and so does moving."""
    here, there = pipe
    with shmreduce.shared_allocations():
        array = filled(1)
        held = [(array, array[:], array[1:])]
        del array
        here.send_last(held)
        first, second, third = there.recv()
    assert not np.shares_memory(first, second)
    assert not np.shares_memory(first, third)
    first[:] = 2
    assert (second == 1).all()
    assert (third == 1).all()


def test_parts_and_gaps_are_copied(pipe: tuple[Any, Any]) -> None:
    """A small part of an array, and one with gaps, would hold on to more than they are."""
    here, there = pipe
    with shmreduce.shared_allocations():
        for view in (slice(LARGE), slice(None, None, 2)):
            held = [filled(1, 4 * LARGE)[view]]
            here.send_last(held)
            received = there.recv()
            assert not received_in_place(received)
            assert (received == 1).all()


def test_a_read_only_array_stays_read_only(pipe: tuple[Any, Any]) -> None:
    """Moving keeps what pickling keeps."""
    here, there = pipe
    with shmreduce.shared_allocations():
        held = [filled(1)]
        held[0].flags.writeable = False
        here.send_last(held)
        received = there.recv()
    assert received_in_place(received)
    assert not received.flags.writeable


def test_a_moved_block_is_not_used_before_its_receiver_is_done(pipe: tuple[Any, Any]) -> None:
    """While the message is under way, and while the receiver has the array, new arrays get
    other memory; afterwards the block is used again.
    """
    here, there = pipe
    with shmreduce.shared_allocations():
        array = filled(1)
        address = address_of(array)
        held = [array]
        del array
        here.send_last(held)

        def fresh() -> list[int]:
            tend()
            arrays = [filled(200) for _ in range(4)]
            return [address_of(each) for each in arrays]

        assert address not in fresh()
        received = there.recv()
        assert address not in fresh()
        assert (received == 1).all()
        del received
        assert address in fresh()


def test_what_cannot_be_pickled_stays(pipe: tuple[Any, Any]) -> None:
    """A message that fails leaves its arrays with the sender, and nothing behind."""
    here, there = pipe
    with shmreduce.shared_allocations():
        held: list[Any] = [(filled(1), lambda: None)]
        with pytest.raises((AttributeError, pickle.PicklingError)):
            here.send_last(held)
        array = held[0][0]
        assert (array == 1).all()
        held[0] = array
        del array
        here.send_last(held)
        assert received_in_place(there.recv())


def test_a_message_that_cannot_be_sent_gives_the_block_back(pipe: tuple[Any, Any]) -> None:
    """Nobody is there to receive it: the block is free."""
    here, there = pipe
    there.close()
    with shmreduce.shared_allocations():
        array = filled(1)
        address = address_of(array)
        held = [array]
        del array
        with pytest.raises(BrokenPipeError):
            here.send_last(held)
        tend()
        assert address_of(filled(1)) == address


def test_with_pickle_on_exhaustion_nothing_is_moved(pipe: tuple[Any, Any]) -> None:
    """What might have to be copied later must be sure of its memory: so it is copied at once."""
    here, there = pipe
    with shmreduce.install(on_exhausted="pickle"), shmreduce.shared_allocations():
        here.send(filled(1))
        received = there.recv()
    assert not received_in_place(received)
    assert (received == 1).all()


def moves(queue: Any) -> bool:
    """Whether a queue moves an array; while the idle thread is at the heap none is born."""
    for _ in range(100):
        queue.put(filled(1))
        if received_in_place(queue.get()):
            return True
    return False


def test_queues_move_too() -> None:
    """``put`` of a simple and of a buffered queue moves what its caller does not keep."""
    for queue in (shmreduce.SimpleQueue(), shmreduce.Queue(), shmreduce.JoinableQueue()):
        with shmreduce.shared_allocations():
            assert moves(queue)
            kept = filled(2)
            queue.put(kept)
            copied = queue.get()
        assert not received_in_place(copied)
        queue.close()


def test_two_threads_that_send_one_array_both_get_it_right(pipe: tuple[Any, Any]) -> None:
    """One of them may have named it first; the other copies."""
    here, there = pipe
    rounds = 50
    with shmreduce.shared_allocations():
        array = filled(7)

        def send() -> None:
            for _ in range(rounds):
                here.send(array)

        threads = [threading.Thread(target=send) for _ in range(2)]
        for thread in threads:
            thread.start()
        for _ in range(2 * rounds):
            received = there.recv()
            assert (received == 7).all()
            received[:] = 0
        for thread in threads:
            thread.join(30)
        assert (array == 7).all()


def test_a_move_that_is_interrupted_by_a_free_is_a_move(pipe: tuple[Any, Any]) -> None:
    """An array whose last reference goes while the message is pickled is moved, whole."""

    class Dropping:
        def __init__(self, held: list[Any]) -> None:
            self.held = held

        def __reduce__(self) -> Any:
            self.held.clear()
            return int, ()

    here, there = pipe
    with shmreduce.shared_allocations():
        inner = [filled(8)]
        here.send_last([(inner, Dropping(inner))])
        received, _ = there.recv()
    assert (received[0] == 8).all()


def test_an_array_that_is_written_back_later_is_copied(pipe: tuple[Any, Any]) -> None:
    """A temporary copy of NumPy's is not where the array is that it is written back to."""
    here, there = pipe
    with shmreduce.shared_allocations():
        array = np.arange(float(LARGE))
        with written_back_to(array) as iterator:
            here.send(iterator.operands[0])
        assert np.array_equal(there.recv(), array)
        del iterator


def test_leaks_are_noticed_here_too(pipe: tuple[Any, Any]) -> None:
    """A moved array that nobody reads is a leak, as any unread message."""
    here, there = pipe
    before = take_census()
    with shmreduce.shared_allocations():
        here.send(filled(1))
    assert any("still unread" in leak or "not been read" in leak for leak in find_leaks(before, 0))
    there.recv()
    assert find_leaks(before) == []
    assert counters().freed == 0
