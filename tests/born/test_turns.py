"""Who may look at the allocator's entries: one at a time, and nobody for ever."""

from __future__ import annotations

import sys
import threading

import pytest

import shmreduce
from shmreduce.born.heap import _turn, get_heap
from shmreduce.testing import OtherProcess
from tests.born.allocator import counters, filled
from tests.interrupter import interrupted_everywhere

pytestmark = pytest.mark.usefixtures("allocator")


def born_and_dropped() -> None:
    with shmreduce.shared_allocations():
        filled(1)


def test_who_comes_into_the_middle_does_nothing() -> None:
    """A destructor, say, in the same thread, or another thread: what was freed waits."""
    with shmreduce.shared_allocations():
        heap = get_heap()
        array = filled(1)

        def look() -> None:
            heap.drain()
            places.append(heap.place_of(0))

        places: list[object] = []
        with _turn.ours:
            look()
            other = threading.Thread(target=look)
            other.start()
            other.join()
        assert places == [None, None]
        del array


def interrupt_everywhere() -> None:
    sys.unraisablehook = lambda _: None
    heap = get_heap()
    number = 0

    def look() -> None:
        born_and_dropped()
        heap.drain()
        heap._take_note_of_all()
        heap._take_idle()

    for number in interrupted_everywhere(look, "/born/heap.py", "/thread_locks.py"):
        assert not _turn.lock.locked(), number
    assert number > 20
    look()
    assert not counters().freed
    assert not counters().unknown


def test_an_interrupt_ends_a_turn() -> None:
    """At every instant where a handler can run, also while the traceback is kept: what is born
    later is booked, and what is freed is used again.
    """
    # In a process of its own: what an interrupt leaves half done is not used again.
    with OtherProcess("spawn") as other:
        other.ask(interrupt_everywhere)
