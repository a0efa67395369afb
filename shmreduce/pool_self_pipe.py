"""A self-pipe, by which any thread can wake the thread that waits in a selector.

May import ``thread_locks``.
"""

from __future__ import annotations

import socket
import threading

from shmreduce.thread_locks import interrupt_safe

__all__ = ["SelfPipe"]


class SelfPipe:
    """Makes a selector return, from any thread."""

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self._woken = False
        # Reentrant: the cycle collector may run a finalizer in wake(), which calls wake().
        self._lock = interrupt_safe(threading.RLock())

    def fileno(self) -> int:
        """Return the descriptor to register with the selector."""
        return self._reader.fileno()

    def wake(self) -> None:
        """Wake the thread that selects; do nothing if that has been done already."""
        if self._woken:
            # Not drained yet: after drain() the thread will see what this caller has done.
            return
        with self._lock:
            if not self._woken and self._writer.fileno() != -1:
                self._writer.send(b"!")
                self._woken = True

    def drain(self) -> None:
        """Read what :meth:`wake` wrote, in the thread that was woken."""
        with self._lock:
            self._reader.recv(16)
            self._woken = False

    def close(self) -> None:
        """Close both ends; nobody can be woken any more."""
        with self._lock:
            self._reader.close()
            self._writer.close()
