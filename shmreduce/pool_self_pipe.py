"""A self-pipe: any thread wakes the thread that waits in a selector.

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
        # Reentrant: a finalizer may interrupt wake() and call it.
        self._lock = interrupt_safe(threading.RLock())

    def fileno(self) -> int:
        """Return the descriptor that the selector looks at."""
        return self._reader.fileno()

    def wake(self) -> None:
        """Wake whoever selects, once."""
        if self._woken:
            # It is not drained yet: whoever selects will look around after this.
            return
        with self._lock:
            if not self._woken and self._writer.fileno() != -1:
                self._writer.send(b"!")
                self._woken = True

    def drain(self) -> None:
        """Take note that it has been woken."""
        with self._lock:
            self._reader.recv(16)
            self._woken = False

    def close(self) -> None:
        """Close both ends; nobody can be woken any more."""
        with self._lock:
            self._reader.close()
            self._writer.close()
