"""Backpressure: threads that feed a pool wait while too many tasks wait for its workers.

May import ``thread_locks``.
"""

from __future__ import annotations

import threading

from shmreduce.thread_locks import interrupt_safe

__all__ = ["Backpressure"]


class Backpressure:
    """How much may wait for a worker, of what comes from long iterables.

    Those who feed the pool wait here, so that a generator of large arrays is
    not read far ahead of the workers.

    Parameters
    ----------
    size : int
        How many workers there are. As many tasks with shared memory may wait,
        or a mebibyte of others for each.
    """

    def __init__(self, size: int) -> None:
        self._limit = size << 20
        self._used = 0
        self._closed = False
        # Taken by its own ``with``: that of a Condition is Python code, in which
        # Ctrl-C may come between the lock and the block, and it stays taken.
        lock = threading.RLock()
        self._lock = interrupt_safe(lock)
        self._changed = threading.Condition(lock)

    def acquire(self, weight: int) -> bool:
        """Wait until there is room; False if there will be none, since the pool ends."""
        with self._lock:
            while not self._closed and self._used >= self._limit:
                self._changed.wait()
            self._used += weight
            return not self._closed

    def release(self, weight: int) -> None:
        """Give back what was acquired."""
        with self._lock:
            was_full = self._used >= self._limit
            self._used -= weight
            if was_full and self._used < self._limit:
                self._changed.notify_all()

    def close(self) -> None:
        """Let everybody go who waits."""
        with self._lock:
            self._closed = True
            self._changed.notify_all()
