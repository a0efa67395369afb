"""Backpressure: threads that feed a pool wait while too many tasks wait for its workers.

May import ``thread_locks``, and ``pool_tasks`` for types alone.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from shmreduce.thread_locks import interrupt_safe

if TYPE_CHECKING:
    from shmreduce.pool_tasks import Task

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
        self.closed = False
        """Whether nobody waits any more: the pool has ended, or is about to."""
        # Never ``with self._changed``, see interrupt_safe().
        lock = threading.RLock()
        self._lock = interrupt_safe(lock)
        self._changed = threading.Condition(lock)

    def acquire(self, task: Task) -> bool:
        """Wait until there is room for a task, which takes it; return False if the pool ends."""
        with self._lock:
            while not self.closed and self._used >= self._limit:
                self._changed.wait()
            # First the note by which the room is given back, even if Ctrl-C comes now.
            task.wait_in_queue(self.release)
            self._used += task.weight
            return not self.closed

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
            self.closed = True
            self._changed.notify_all()
