"""Gives idle memory back while the program does something else.

May import ``locks``, ``heap`` and ``blocks``.

A process that waits for its next message cannot notice that its receivers are
done. So while its heaps hold more than they may keep idle, a thread looks once
in a while. It ends itself when it is no longer needed, and is ended before a
fork: CPython 3.12 and later warn about forking with other threads running, and from
3.15 on raise where warnings are errors. With 3.13 the warning comes all the same: it
counts the threads after the hooks of the fork, which start this one again.
"""

from __future__ import annotations

import _thread
import os
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from shmreduce.memory import locks
from shmreduce.memory.heap import Heap, HeapBusyError

if TYPE_CHECKING:
    from collections.abc import Callable

    from shmreduce.memory.blocks import LiveBlocks

__all__ = ["IdleReturn"]

_LONGEST_PAUSE = 0.5
"""Seconds between two looks of the thread."""
_PATIENCE = 0.5
"""Seconds to wait for the end of the thread before a fork."""
_EXIT_PATIENCE = 0.05
"""Seconds to wait until the kernel has forgotten it, which takes some microseconds."""


class IdleReturn:
    """The thread that looks after idle memory.

    Parameters
    ----------
    live : LiveBlocks
        Releases that wait are tried again.
    heaps : callable
        Returns the process's heaps.
    limits : callable
        Returns for how long memory must be idle, in seconds, and how many
        bytes of it may be kept.
    """

    def __init__(
        self,
        live: LiveBlocks,
        heaps: Callable[[], list[Heap]],
        limits: Callable[[], tuple[float, int]],
    ) -> None:
        self._live = live
        self._heaps = heaps
        self._limits = limits
        self._thread: threading.Thread | None = None
        self._leaving: threading.Thread | None = None
        """The thread that found itself needless, and may not have ended yet."""
        self._asked = False
        """Whether somebody has asked for the thread since it last began to look."""
        self._stop = _thread.allocate_lock()
        self._stopped_for_fork = False

    def start(self) -> None:
        """See to it that the thread runs; cheap if it does."""
        self._asked = True
        before = self._thread
        # One without an identity is just being started.
        if before is not None and (before.is_alive() or before.ident is None):
            return
        stop = _thread.allocate_lock()
        stop.acquire()
        thread = threading.Thread(
            target=self._run, args=(stop,), name="shmreduce-idle", daemon=True
        )
        # Another thread may have been faster. No call between the lines, so no other thread.
        if self._thread is not before:
            return
        self._stop, self._thread = stop, thread
        try:
            # None can be had (a limit of processes), or the interpreter ends: somebody
            # asks again when more memory is taken.
            with suppress(RuntimeError):
                thread.start()
        finally:
            if thread.ident is None:
                self._thread = None

    def stop(self) -> bool:
        """End the thread, waiting for it boundedly; return whether there was one."""
        leaving, self._leaving = self._leaving, None
        if leaving is not None:
            _wait_for(leaving)
        # Both of one moment, and no call in between: another thread may start one anew.
        stop, thread, self._thread = self._stop, self._thread, None
        if thread is None:
            return False
        # Also if it is just being started, by another thread: then it ends at once.
        if stop.locked():
            stop.release()
        if not thread.is_alive():
            return False
        _wait_for(thread)
        return True

    def before_fork(self) -> None:
        """End the thread for the duration of a fork."""
        # First, and perhaps for the second time: what comes now may be interrupted.
        self._stopped_for_fork = self._stopped_for_fork or self._thread is not None
        self.stop()

    def after_fork_in_parent(self) -> None:
        """Go on after a fork."""
        if self._stopped_for_fork:
            self._stopped_for_fork = False
            self.start()

    def _run(self, stop: _thread.LockType) -> None:
        while True:
            seconds, _ = self._limits()
            if stop.acquire(timeout=min(_LONGEST_PAUSE, max(seconds / 4, 0.01))):
                return
            self._asked = False
            # Those of now: who changed them meanwhile has asked an instant ago.
            seconds, keep = self._limits()
            self._live.settle()
            heaps = self._heaps()
            left = keep
            for heap in heaps:
                self._look_after(heap, seconds, left)
                left = max(0, left - heap.warm_bytes)
            if sum(heap.block_bytes for heap in heaps) <= keep and not self._asked:
                self._leave(stop)
                return

    def _leave(self, stop: _thread.LockType) -> None:
        """Make way for another thread, should it be needed from now on."""
        if stop is not self._stop:
            # There is another already.
            return
        self._leaving, self._thread = self._thread, None
        # Who asked before that line has seen this thread alive.
        if self._asked:
            self.start()

    def _look_after(self, heap: Heap, seconds: float, keep: int) -> None:
        """Take back what is free, and give back what has been free for long."""
        if heap.collect():
            heap.last_used = time.monotonic()
        try:
            with heap.exclusive(wait=False):
                heap.reap_after(0)
                if time.monotonic() - heap.last_used >= seconds:
                    heap.cool(keep)
        except HeapBusyError:
            # Another thread is inside, or a finalizer in this one has come from there.
            return


def _wait_for(thread: threading.Thread) -> None:
    # A destructor that the collector calls in the thread itself may fork.
    if thread.ident == threading.get_ident():
        return
    thread.join(_PATIENCE)
    # What CPython counts is the kernel's threads, and one that has been joined may be on
    # its way out yet. A number, if it is there for longer, is another thread's by now.
    itself = f"/proc/self/task/{thread.native_id}"
    locks.keep_trying(lambda: not os.path.exists(itself), _EXIT_PATIENCE)
