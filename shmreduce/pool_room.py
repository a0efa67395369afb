"""How the threads of a program wait for a pool's thread, and wake it.

Imports nothing of shmreduce.
"""

from __future__ import annotations

import socket
import threading

__all__ = ["Room", "Wake"]


class Room:
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
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)

    def take(self, weight: int) -> bool:
        """Wait until there is room; False if there will be none, since the pool ends."""
        with self._lock:
            self._changed.wait_for(lambda: self._closed or self._used < self._limit)
            self._used += weight
            return not self._closed

    def give(self, weight: int) -> None:
        """Give back what was taken."""
        with self._lock:
            self._used -= weight
            self._changed.notify_all()

    def close(self) -> None:
        """Let everybody go who waits."""
        with self._lock:
            self._closed = True
            self._changed.notify_all()


class Wake:
    """Makes a selector return, from any thread."""

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self._set = False
        # Reentrant: a finalizer may interrupt set() and call it.
        self._lock = threading.RLock()

    def fileno(self) -> int:
        """Return the descriptor that the selector looks at."""
        return self._reader.fileno()

    def set(self) -> None:
        """Wake whoever selects, once."""
        with self._lock:
            if not self._set and self._writer.fileno() != -1:
                self._writer.send(b"!")
                self._set = True

    def clear(self) -> None:
        """Take note that it has been woken."""
        with self._lock:
            self._reader.recv(16)
            self._set = False

    def close(self) -> None:
        """Close both ends; nobody can be woken any more."""
        with self._lock:
            self._reader.close()
            self._writer.close()
