"""Idle memory goes back to the system without anybody asking."""

from __future__ import annotations

import gc
import os
import signal
import threading
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import shmreduce
from shmreduce.memory import runtime
from shmreduce.memory.heap import Heap
from shmreduce.memory.idle import IdleReturn
from shmreduce.memory.inspection import (
    SegmentState,
    list_segments,
    process_state,
    remove_leftovers,
)
from shmreduce.memory.layout import BY_VALUE
from shmreduce.memory.process_memory import Runtime
from shmreduce.strategies import current_strategy
from shmreduce.testing.processes import OtherProcess
from tests.memory.resending import resent
from tests.memory.waiting import PATIENCE, eventually, in_forked_child, wait_for_exit

if TYPE_CHECKING:
    from collections.abc import Callable

    from shmreduce.memory.segment import Segment

MEBIBYTE = 1 << 20


def reserved() -> int:
    return sum(heap.reserved_bytes for heap in runtime.current().heaps)


def nothing_is_open(_seconds: float, _keep: int) -> int:
    """Stand in for Attachments.close_unused()."""
    return 0


def own_segments() -> list[SegmentState]:
    """Return what the kernel knows of this process's segments."""
    pid = os.getpid()
    return [each for each in list_segments() if each.owner == pid]


def really_reserved() -> int:
    """Return what the kernel says of this process's segments."""
    return sum(each.reserved for each in own_segments())


@pytest.mark.parametrize("name", ["file_descriptor", "file_system"])
def test_idle_memory_goes_back(name: str) -> None:
    """Beyond ``idle_keep`` bytes, memory unused for ``idle_seconds`` is given back by
    itself, and the kernel has it.
    """
    before = really_reserved()
    with shmreduce.install(strategy=name, idle_keep=8 * MEBIBYTE, idle_seconds=0.1):
        arrays = [np.ones(10 * MEBIBYTE, np.uint8) for _ in range(4)]
        messages = [ForkingPickler.dumps(each) for each in arrays]
        shared = [shmreduce.zeros(10 * MEBIBYTE, np.uint8) for _ in range(4)]
        assert reserved() >= 80 * MEBIBYTE
        for data in messages:
            ForkingPickler.loads(data)
        del shared
        gc.collect()
        # Tables of the segments are not idle memory; each heap keeps its share.
        eventually(lambda: reserved() < 2 * 8 * MEBIBYTE + 8 * MEBIBYTE, "memory is back")
        eventually(
            lambda: really_reserved() < before + 3 * 8 * MEBIBYTE, "the kernel has it as well"
        )


def load_after_the_segment_has_gone(shared: bool) -> bool:
    """Return whether the error is the right one, in a process whose heap is its own."""
    with shmreduce.install(idle_keep=0, idle_seconds=0.05):
        array = np.ones(10 * MEBIBYTE, np.uint8)
        if shared:
            array = shmreduce.share(array)
        data = bytes(ForkingPickler.dumps(array))
        loaded = ForkingPickler.loads(data)
        del array, loaded
        # Not by process_state(): they are out of sight a moment before they are closed.
        eventually(lambda: not own_segments(), "the segments are closed")
        with pytest.raises(shmreduce.StaleHandleError) as caught:
            ForkingPickler.loads(data)
    assert isinstance(caught.value, shmreduce.SegmentGoneError)
    # It will never load.
    assert caught.value.message_bytes is None
    assert caught.value.pid == os.getpid()
    return "released" in str(caught.value)


@pytest.mark.parametrize("shared", [False, True])
def test_a_message_about_memory_that_went_back_says_so(shared: bool) -> None:
    """Where the whole segment has been closed, the error says that the array was released."""
    assert wait_for_exit(in_forked_child(lambda: load_after_the_segment_has_gone(shared))) == 0


def test_a_waiting_sender_notices_that_its_reader_is_done() -> None:
    """A process that does nothing takes back what its reader has dropped."""
    with (
        shmreduce.install(idle_keep=4 * MEBIBYTE, idle_seconds=0.05, inline_limit=4096),
        OtherProcess("fork") as other,
    ):
        other.ask(np.sum, np.ones(40 * MEBIBYTE, np.uint8))
        eventually(lambda: reserved() < 12 * MEBIBYTE, "memory is back")


def test_memory_in_use_does_not_go_back() -> None:
    """Arrays in use keep their bytes while everything around them is given back."""
    with shmreduce.install(idle_keep=0, idle_seconds=0.01, inline_limit=4096):
        kept: list[Any] = []
        for number in range(60):
            kept.append(shmreduce.full(MEBIBYTE // 2, number, np.uint8))
            kept.append(resent(np.full(MEBIBYTE // 2, number, np.uint8)))
            resent(np.ones(MEBIBYTE, np.uint8))
        eventually(lambda: process_state().warm == 0, "all that is free is cold")
        assert all((array == number // 2).all() for number, array in enumerate(kept))
        del kept


def segments_of(pid: int) -> list[Segment]:
    """Return the segments of another process that this one has open."""
    every = runtime.current().attachments.segments()
    return [each for each in every if each.header.owner_pid == pid]


@pytest.mark.parametrize("name", ["file_descriptor", "file_system"])
def test_memory_of_a_killed_sender_goes_back(name: str) -> None:
    """A process that had received arrays, and does nothing, closes what the sender left."""
    with shmreduce.install(strategy=name, idle_keep=MEBIBYTE, idle_seconds=60):
        with OtherProcess("fork") as other:
            arrays = [other.ask(np.ones, 5 * MEBIBYTE) for _ in range(3)]
            pid = other.process.pid
            assert pid is not None
            assert sum(segment.header.size for segment in segments_of(pid)) >= 120 * MEBIBYTE
            # While the sender lives, its segments stay open for the next message.
            arrays.clear()
            assert segments_of(pid)
            os.kill(pid, signal.SIGKILL)
        eventually(lambda: not segments_of(pid), "the segments are closed")
        if name == "file_system":
            # Files of the killed stay until the next process uses the strategy.
            remove_leftovers()
        assert not [each for each in list_segments() if each.owner == pid]


def test_segments_that_are_not_used_are_closed_in_time() -> None:
    """Those of a process that lives, too. Its next message opens them again."""
    with (
        shmreduce.install(idle_keep=MEBIBYTE, idle_seconds=0.05),
        OtherProcess("fork") as other,
    ):
        pid = other.process.pid
        assert pid is not None
        for number in range(3):
            array = other.ask(np.full, 2 * MEBIBYTE, number)
            assert segments_of(pid)
            assert (array == number).all()
            del array
            eventually(lambda: not segments_of(pid), "the segments are closed")


def test_segments_that_are_used_or_small_stay_open() -> None:
    """Nothing is closed that has an array, that was used a moment ago, or that may be kept."""
    attachments = runtime.current().attachments
    with (
        shmreduce.install(idle_keep=1 << 40, idle_seconds=60),
        OtherProcess("fork") as other,
    ):
        pid = other.process.pid
        assert pid is not None
        array = other.ask(np.ones, 2 * MEBIBYTE)
        attachments.close_unused(0.0, 0)
        assert segments_of(pid)
        del array
        attachments.close_unused(60.0, 0)
        assert segments_of(pid)
        attachments.close_unused(0.0, 1 << 40)
        assert segments_of(pid)
        left = attachments.close_unused(0.0, 0)
        assert not segments_of(pid)
        assert left == attachments.foreign_bytes()


def test_a_thread_that_was_stopped_is_started_for_segments_of_others_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A process that joins another family stops the thread, and asks for it again."""
    state = runtime.current()
    with (
        shmreduce.install(idle_keep=MEBIBYTE, idle_seconds=60),
        OtherProcess("fork") as other,
    ):
        array = other.ask(np.ones, 2 * MEBIBYTE)
        state.idle_return.stop()
        monkeypatch.setattr(Runtime, "heaps", [])
        state.on_growth()
        assert state.idle_return.stop()
        del array


def test_the_thread_that_gives_back_ends() -> None:
    """When there is nothing to give back there is no thread."""
    import threading

    with shmreduce.install(idle_keep=4 * MEBIBYTE, idle_seconds=0.02):
        array = shmreduce.zeros(20 * MEBIBYTE, np.uint8)
        names = [thread.name for thread in threading.enumerate()]
        assert "shmreduce-idle" in names
        del array
        eventually(
            lambda: "shmreduce-idle" not in [each.name for each in threading.enumerate()],
            f"the thread ends within {PATIENCE} s",
        )


def test_who_asks_while_the_thread_is_about_to_end_is_heard() -> None:
    """Memory that grows after the thread's last look at it is looked after all the same."""
    looks: list[int] = []
    again = threading.Event()

    class Growing(Heap):
        """Grows as soon as its bytes have been counted."""

        @property
        def block_bytes(self) -> int:
            looks.append(len(looks))
            if len(looks) == 1:
                thread.start()
            else:
                again.set()
            return 0

    state = runtime.current()
    heap = Growing(BY_VALUE, current_strategy(), state)
    thread = IdleReturn(state.live, lambda: [heap], nothing_is_open, lambda: (0.01, 0))
    thread.start()
    assert again.wait(PATIENCE)
    eventually(lambda: not thread.stop(), "the thread ends when nobody asks any more")


def test_threads_that_ask_at_once_get_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second one would not be stopped for forks."""
    idle = IdleReturn(runtime.current().live, list, nothing_is_open, lambda: (60.0, -1))
    make = threading.Thread

    def slow(*arguments: Any, **named: Any) -> threading.Thread:
        monkeypatch.undo()
        other = make(target=idle.start)
        other.start()
        other.join(PATIENCE)
        return make(*arguments, **named)

    before = set(threading.enumerate())
    monkeypatch.setattr(threading, "Thread", slow)
    idle.start()
    assert len(set(threading.enumerate()) - before) == 1
    assert idle.stop()
    # One that looks after what tests before have left may have ended meanwhile.
    assert not set(threading.enumerate()) - before


def test_a_thread_that_is_asked_for_while_one_is_ended_is_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The one that is ended is that which was there before."""
    idle = IdleReturn(runtime.current().live, list, nothing_is_open, lambda: (60.0, -1))
    idle.start()
    first = idle._thread
    is_alive = threading.Thread.is_alive

    def slow(thread: threading.Thread) -> bool:
        monkeypatch.undo()
        in_another_thread(idle.start)
        return is_alive(thread)

    monkeypatch.setattr(threading.Thread, "is_alive", slow)
    idle.stop()
    second = idle._thread
    assert first is not None
    assert second is not None
    assert (first.is_alive(), second.is_alive()) == (False, True)
    assert idle.stop()
    assert not second.is_alive()


def test_a_thread_that_is_ended_while_it_is_started_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody knows of it any more who could end it later."""
    idle = IdleReturn(runtime.current().live, list, nothing_is_open, lambda: (60.0, -1))
    before = set(threading.enumerate())
    start = threading.Thread.start

    def slow(thread: threading.Thread) -> None:
        monkeypatch.undo()
        in_another_thread(idle.stop)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", slow)
    idle.start()
    eventually(lambda: set(threading.enumerate()) == before, "the thread ends")


def in_another_thread(function: Callable[[], object]) -> None:
    """Call a function in another thread, and wait for that."""
    other = threading.Thread(target=function)
    other.start()
    other.join(PATIENCE)
    assert not other.is_alive()


def test_an_interrupted_fork_leaves_the_thread_running(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was waited for, before a fork, when a signal handler raised: it goes on afterwards."""
    idle = IdleReturn(runtime.current().live, list, nothing_is_open, lambda: (60.0, -1))

    def interrupted(*_: Any) -> None:
        monkeypatch.undo()
        raise TimeoutError

    idle.start()
    monkeypatch.setattr(threading.Thread, "join", interrupted)
    with pytest.raises(TimeoutError):
        idle.before_fork()
    # The hook tries again.
    idle.before_fork()
    idle.after_fork_in_parent()
    assert idle.stop()


def test_what_may_be_kept_is_asked_when_it_is_looked_at() -> None:
    """Settings that change while the thread sleeps count from its next look on."""
    asked: list[int] = []
    again = threading.Event()

    class Constant(Heap):
        """Has blocks of ten bytes."""

        @property
        def block_bytes(self) -> int:
            # The second look: the first has not ended the thread.
            if len(asked) > 2:
                again.set()
            return 10

    def limits() -> tuple[float, int]:
        asked.append(len(asked))
        return 0.01, 100 if len(asked) == 1 else 0

    state = runtime.current()
    heap = Constant(BY_VALUE, current_strategy(), state)
    thread = IdleReturn(state.live, lambda: [heap], nothing_is_open, limits)
    thread.start()
    assert again.wait(PATIENCE)
    assert thread.stop()
