"""Backpressure: threads that feed a pool wait while too many tasks wait for its workers.

May import ``thread_locks``.
"""

from __future__ import annotations

import threading

from shmreduce.thread_locks import interrupt_safe

__all__ = ["Backpressure"]


class Backpressure:
    """Limits how many tasks of long iterables may wait for a worker.

    The thread that feeds the pool waits here, so that a generator of large arrays is
    not read far ahead of the workers.

    Parameters
    ----------
    size : int
        The number of workers. For each of them, one task with shared memory or a mebibyte
        of other tasks may wait.
    """

    def __init__(self, size: int) -> None:
        self._limit = size << 20
        self._used = 0
        self._closed = False
        # Never ``with self._changed``, see interrupt_safe().
        lock = threading.RLock()
        self._lock = interrupt_safe(lock)
        self._changed = threading.Condition(lock)

    def acquire(self, weight: int) -> bool:
        """Wait until there is room; return False if the pool ends instead."""
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
        """Wake all threads that wait; nobody waits from now on."""
        with self._lock:
            self._closed = True
            self._changed.notify_all()
