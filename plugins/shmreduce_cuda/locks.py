"""A lock that may be held while the driver is called.

May import ``errors`` of this plugin.

A signal handler runs in the main thread, between any two of its instructions. If it sends
or receives an array while the code that it interrupts has the lock, it would wait for
ever.
"""

from __future__ import annotations

import os
import threading
from typing import Any

from shmreduce_cuda.errors import CudaSharingError

__all__ = ["InterruptibleLock"]

_PATIENCE = 60.0
"""Seconds to wait for another thread."""


class InterruptibleLock:
    """A lock that raises an error where a plain one would wait for its own thread.

    Parameters
    ----------
    work : str
        What is done under the lock, for the error.

    Examples
    --------
    >>> lock = InterruptibleLock("counting")
    >>> with lock:
    ...     with lock:
    ...         pass
    Traceback (most recent call last):
        ...
    shmreduce_cuda.errors.CudaSharingError: process ... was counting already, in the code ...
    """

    __slots__ = ("_lock", "_work")

    def __init__(self, work: str) -> None:
        self._work = work
        # Not for its reentrance, but because it notes its owner as it is acquired: a handler may
        # run between any two instructions.
        self._lock: Any = threading.RLock()

    def __enter__(self) -> None:
        if self._lock._is_owned():
            raise self._failure("in the code that this call, of a signal handler, interrupts")
        if not self._lock.acquire(timeout=_PATIENCE):
            raise self._failure(f"for {_PATIENCE:.0f} s, in another thread")

    def __exit__(self, *_: object) -> None:
        self.release()

    def _failure(self, where: str) -> CudaSharingError:
        return CudaSharingError(
            f"process {os.getpid()} was {self._work} already, {where}: do it again later"
        )

    def attempt(self) -> bool:
        """Acquire the lock if it is free; return whether it was, for :meth:`release`."""
        return not self._lock._is_owned() and bool(self._lock.acquire(blocking=False))

    def release(self) -> None:
        """Release the lock."""
        self._lock.release()
