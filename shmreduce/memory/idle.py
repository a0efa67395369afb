"""Gives idle memory back to the system while the program does something else.

May import ``locks``, ``heap`` and ``blocks``.

A process that waits for its next message cannot notice that its receivers have released
blocks, nor that a sender was killed of which it has segments open. So while its heaps, or
these segments, are larger than what may be kept idle, a thread looks from time to time. The
thread ends when it is not needed any more. It is also stopped before a fork: CPython 3.12 and
later warn about forking while other threads run, and from 3.15 on the fork raises where
warnings are errors. With 3.13 the warning comes anyway, because it counts the threads after
the hooks of the fork, which start this one again.
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
"""Seconds: the longest time from one look of the thread to the next."""
_PATIENCE = 0.5
"""Seconds to wait before a fork for the thread to end."""
_EXIT_PATIENCE = 0.05
"""Seconds to wait until the kernel's thread is gone, which takes some microseconds."""


class IdleReturn:
    """The thread that gives back idle memory.

    Parameters
    ----------
    live : LiveBlocks
        The live blocks; the thread tries again to release those that wait.
    heaps : callable
        Returns the process's heaps.
    close_unused : callable
        Closes segments of other processes. It gets the two limits, and returns how many bytes
        stay open.
    limits : callable
        Returns how long memory must be idle, in seconds, and how many idle bytes may be
        kept.
    """

    def __init__(
        self,
        live: LiveBlocks,
        heaps: Callable[[], list[Heap]],
        close_unused: Callable[[float, int], int],
        limits: Callable[[], tuple[float, int]],
    ) -> None:
        self._live = live
        self._heaps = heaps
        self._close_unused = close_unused
        self._limits = limits
        self._thread: threading.Thread | None = None
        self._leaving: threading.Thread | None = None
        """A thread that was not needed any more, and may not have ended yet."""
        self._asked = False
        """Whether :meth:`start` was called since the thread last began to look."""
        self._stop = _thread.allocate_lock()
        self._stopped_for_fork = False

    def start(self) -> None:
        """Make sure that the thread runs; cheap if it does."""
        self._asked = True
        before = self._thread
        # A thread without an identity is just being started.
        if before is not None and (before.is_alive() or before.ident is None):
            return
        stop = _thread.allocate_lock()
        stop.acquire()
        thread = threading.Thread(
            target=self._run, args=(stop,), name="shmreduce-idle", daemon=True
        )
        # Another thread may have started one first. There is no call between these lines, so
        # no other thread runs between them.
        if self._thread is not before:
            return
        self._stop, self._thread = stop, thread
        try:
            # If no thread can be started (a limit on processes), or the interpreter ends,
            # the next growth of a heap calls this again.
            with suppress(RuntimeError):
                thread.start()
        finally:
            if thread.ident is None:
                self._thread = None

    def stop(self) -> bool:
        """Stop the thread and wait a limited time for its end; return whether there was one."""
        leaving, self._leaving = self._leaving, None
        if leaving is not None:
            _wait_for(leaving)
        # Read together, without a call in between: another thread may start a new one.
        stop, thread, self._thread = self._stop, self._thread, None
        if thread is None:
            return False
        # Also for a thread that another thread is just starting: it ends at once.
        if stop.locked():
            stop.release()
        if not thread.is_alive():
            return False
        _wait_for(thread)
        return True

    def before_fork(self) -> None:
        """Stop the thread for the time of a fork."""
        # Set first, and kept if it was set before: an interrupted step of a fork is repeated.
        self._stopped_for_fork = self._stopped_for_fork or self._thread is not None
        self.stop()

    def after_fork_in_parent(self) -> None:
        """Start the thread again after a fork."""
        if self._stopped_for_fork:
            self._stopped_for_fork = False
            self.start()

    def _run(self, stop: _thread.LockType) -> None:
        while True:
            seconds, _ = self._limits()
            if stop.acquire(timeout=min(_LONGEST_PAUSE, max(seconds / 4, 0.01))):
                return
            self._asked = False
            # Read again: if they changed during the wait, start() was called before now.
            seconds, keep = self._limits()
            self._live.settle()
            heaps = self._heaps()
            left = keep
            for heap in heaps:
                self._look_after(heap, seconds, left)
                left = max(0, left - heap.warm_bytes)
            open_elsewhere = self._close_unused(seconds, keep)
            most = max(sum(heap.block_bytes for heap in heaps), open_elsewhere)
            if most <= keep and not self._asked:
                self._leave(stop)
                return

    def _leave(self, stop: _thread.LockType) -> None:
        """End this thread in such a way that start() can start another one."""
        if stop is not self._stop:
            # There is another thread already.
            return
        self._leaving, self._thread = self._thread, None
        # A call of start() before that line found this thread alive, and did nothing.
        if self._asked:
            self.start()

    def _look_after(self, heap: Heap, seconds: float, keep: int) -> None:
        """Free blocks that others have released; give back those that were free for long."""
        if heap.collect():
            heap.last_used = time.monotonic()
        try:
            with heap.exclusive(wait=False):
                heap.reap_after(0)
                if time.monotonic() - heap.last_used >= seconds:
                    heap.cool(keep)
        except HeapBusyError:
            # Another thread is inside the heap, or this is a finalizer that interrupted it.
            return


def _wait_for(thread: threading.Thread) -> None:
    # A destructor that the garbage collector calls in that very thread may fork.
    if thread.ident == threading.get_ident():
        return
    thread.join(_PATIENCE)
    # CPython counts the kernel's threads, and a joined thread may still exist there for a
    # moment. If the number stays for longer, it belongs to another thread by now.
    itself = f"/proc/self/task/{thread.native_id}"
    locks.keep_trying(lambda: not os.path.exists(itself), _EXIT_PATIENCE)
