"""Locks of threads that a signal handler never leaves taken.

May import nothing of :mod:`shmreduce`.

Usually ``with lock:`` takes a lock of :mod:`threading` as a whole or not at all: no
signal handler runs between the call of ``__enter__``, which is in C, and the block. In
CPython 3.14 one can, and if Ctrl-C comes there, the lock stays taken for ever
(https://github.com/python/cpython/issues/148874). If a thread does nothing but take
locks, half of the Ctrl-C hit that place.
"""

from __future__ import annotations

import sys
from operator import attrgetter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    Lock = threading.Lock | threading.RLock

__all__ = ["interrupt_safe", "taken_at_once"]

_WAIT = (True,)
_DO_NOT_WAIT = (False,)
_NEEDED = sys.version_info[:2] == (3, 14)
"""3.15 has it mended, and the versions before 3.14 take locks by one instruction."""


class _InterruptSafe:
    """Takes a lock without a call in the frame of the ``with``, but that of a Python function.

    The interpreter looks for signals after calls of what is in C and when a Python
    function begins; neither when one returns nor where a sequence is unpacked, though
    that calls :func:`map`, and this the lock.
    """

    __slots__ = ("_acquire", "_exit")

    def __init__(self, lock: Lock) -> None:
        self._acquire = lock.acquire
        self._exit = lock.__exit__

    def __enter__(self) -> bool:
        (taken,) = map(self._acquire, _WAIT)
        return taken

    # The lock's own, in C: a function of Python could be struck when it begins.
    __exit__: Any = property(attrgetter("_exit"))


class _AtOnce(_InterruptSafe):
    """Takes a lock if that can be done without waiting."""

    __slots__ = ("_refusal",)

    def __init__(self, lock: Lock, refusal: Callable[[], Exception]) -> None:
        super().__init__(lock)
        self._refusal = refusal

    def __enter__(self) -> bool:
        (taken,) = map(self._acquire, _DO_NOT_WAIT)
        if not taken:
            # To yield False would need a way out that looks whether there is anything to
            # give back: one in Python, which could be struck when it begins.
            raise self._refusal()
        return taken


def interrupt_safe(lock: Lock) -> AbstractContextManager[Any]:
    """Return what ``with`` takes in the place of a lock, safely with any CPython.

    Parameters
    ----------
    lock : threading.Lock or threading.RLock
        Taken and released by it. Conditions are to be made of the lock itself.

    Examples
    --------
    >>> import threading
    >>> lock = threading.Lock()
    >>> with interrupt_safe(lock):
    ...     lock.locked()
    True
    >>> lock.locked()
    False
    """
    return _InterruptSafe(lock) if _NEEDED else lock


def taken_at_once(lock: Lock, refusal: Callable[[], Exception]) -> AbstractContextManager[Any]:
    """Return what ``with`` takes in the place of a lock, without ever waiting for it.

    Parameters
    ----------
    lock : threading.Lock or threading.RLock
        Taken and released by it.
    refusal : callable
        Makes what is raised, before the block, if the lock is taken.

    Examples
    --------
    >>> import threading
    >>> lock = threading.Lock()
    >>> with taken_at_once(lock, BlockingIOError):
    ...     with taken_at_once(lock, BlockingIOError):
    ...         print("twice")
    Traceback (most recent call last):
    BlockingIOError
    >>> lock.locked()
    False
    """
    return _AtOnce(lock, refusal)
