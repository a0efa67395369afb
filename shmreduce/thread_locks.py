"""Acquires locks of threads so that Ctrl-C never leaves one acquired.

May import nothing of :mod:`shmreduce`.

Usually no signal handler runs between the call of ``lock.__enter__``, which is in C, and
the block of ``with lock:``. In CPython 3.14 one can, and if Ctrl-C comes there, the lock
stays acquired for ever (https://github.com/python/cpython/issues/148874). If a thread does
nothing but acquire locks, half of all Ctrl-C hit that place.
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
"""It is fixed in 3.15, and the versions before 3.14 enter a ``with`` by one instruction."""


class _InterruptSafe:
    """Acquires a lock at a point after which no signal handler runs before the block.

    The interpreter checks for signals after a call of a C function, and when a Python
    function begins. It does not when a Python function returns, nor when a sequence is
    unpacked. So a Python ``__enter__`` acquires the lock by unpacking a :func:`map`.
    """

    __slots__ = ("_acquire", "_exit")

    def __init__(self, lock: Lock) -> None:
        self._acquire = lock.acquire
        self._exit = lock.__exit__

    def __enter__(self) -> bool:
        (taken,) = map(self._acquire, _WAIT)
        return taken

    # The lock's own __exit__, in C. If a Python one were interrupted when it begins, it
    # would not release the lock.
    __exit__: Any = property(attrgetter("_exit"))


class _AtOnce(_InterruptSafe):
    """Acquires a lock if that is possible without waiting; raises otherwise."""

    __slots__ = ("_refusal",)

    def __init__(self, lock: Lock, refusal: Callable[[], Exception]) -> None:
        super().__init__(lock)
        self._refusal = refusal

    def __enter__(self) -> bool:
        (taken,) = map(self._acquire, _DO_NOT_WAIT)
        if not taken:
            # Returning False would need an __exit__ that knows whether to release the lock:
            # one in Python, which could be interrupted when it begins.
            raise self._refusal()
        return taken


def interrupt_safe(lock: Lock) -> AbstractContextManager[Any]:
    """Return a context manager that acquires a lock, safely with any version of CPython.

    Parameters
    ----------
    lock : threading.Lock or threading.RLock
        The lock. For a Condition, make it with the lock, and enter this instead of the
        condition: ``Condition.__enter__`` is Python code, and a Ctrl-C in it after the lock
        is acquired would leave the lock acquired for ever.

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
    """Return a context manager that acquires a lock without ever waiting for it.

    Parameters
    ----------
    lock : threading.Lock or threading.RLock
        The lock.
    refusal : callable
        Makes the exception that is raised instead of entering the block if the lock is
        held by another thread.

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
