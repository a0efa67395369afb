"""Byte locks that belong to an open file description.

May import ``standard_streams``.

``F_OFD_SETLK`` locks (fcntl(2), Linux 3.15) are owned by the open file description. They
survive ``dup`` and the ``close`` of one of its descriptors, and ``fork`` inherits them. The
kernel releases them when the last descriptor is closed, so also when the process is killed.
POSIX record locks, in contrast, end with the first ``close`` of any descriptor of the file.
Two threads that use the same descriptor do not exclude each other.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import sys
import time
from typing import TYPE_CHECKING

from shmreduce.memory.standard_streams import clear_of_streams

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "SETLK",
    "first_locked",
    "identity_of",
    "keep_trying",
    "lock_request",
    "reopen",
    "supported",
    "try_lock",
    "try_request",
    "try_share",
    "unlock",
    "unlock_request",
]

# struct flock of 64-bit Linux: l_type, l_whence, l_start, l_len, l_pid.
_FLOCK = struct.Struct("@hhqqi4x")
# Given as numbers, too, since a Python built for a C library before glibc 2.20 lacks the names.
_HAS_THEM = sys.platform == "linux"
SETLK: int = getattr(fcntl, "F_OFD_SETLK", 37 if _HAS_THEM else -1)
"""The command of fcntl(2), for code that must lock or unlock without calling a Python function."""
_GETLK: int = getattr(fcntl, "F_OFD_GETLK", 36 if _HAS_THEM else -1)
_CONFLICT = frozenset((errno.EAGAIN, errno.EACCES))
# Seconds. A lock is held for microseconds, unless its holder is stopped.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.00002, 0.005


def supported() -> bool:
    """Return whether this platform has open file description locks."""
    return SETLK != -1 and struct.calcsize("P") == 8


def reopen(fd: int) -> int:
    """Open the same file with a new open file description (proc(5), /proc/self/fd)."""
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK
    return clear_of_streams(os.open(f"/proc/self/fd/{fd}", flags))


def identity_of(fd: int) -> tuple[int, int] | None:
    """Return what distinguishes a descriptor's file from others; None if it is closed.

    Daemons close all descriptors, and files that they open later get the same numbers.
    """
    try:
        status = os.fstat(fd)
    except OSError as error:
        if error.errno != errno.EBADF:
            # For example, a signal handler's TimeoutError, which has no errno.
            raise
        return None
    return status.st_dev, status.st_ino


def try_lock(fd: int, offset: int, *, later: bool = False) -> bool:
    """Lock one byte for writing; return False if another description holds it.

    With ``later``, the caller tries again later, so it also returns False if the kernel has
    no memory for another lock at the moment (``ENOLCK``).
    """
    return try_request(fd, lock_request(offset), later=later)


def try_share(fd: int, offset: int) -> bool:
    """Lock one byte for reading; return False if the kernel has no memory for another lock."""
    return try_request(fd, _FLOCK.pack(fcntl.F_RDLCK, 0, offset, 1, 0), later=True)


def lock_request(offset: int) -> bytes:
    """Return the request by which :func:`try_request` locks one byte."""
    return _FLOCK.pack(fcntl.F_WRLCK, 0, offset, 1, 0)


def try_request(fd: int, request: bytes, *, later: bool) -> bool:
    """Do what :func:`try_lock` does, needing as many frames of recursion as :func:`unlock`."""
    try:
        fcntl.fcntl(fd, SETLK, request)
    except OSError as error:
        if error.errno in _CONFLICT or (later and error.errno == errno.ENOLCK):
            return False
        raise
    return True


def keep_trying(attempt: Callable[[], bool], patience: float) -> float | None:
    """Repeat an attempt, such as to get a lock, until it succeeds; then return None.

    If it does not succeed in ``patience`` seconds, return how many seconds it was tried. The
    kernel's own waiting, ``F_OFD_SETLKW``, has no limit.
    """
    start = time.monotonic()
    pause = _FIRST_PAUSE
    while not attempt():
        waited = time.monotonic() - start
        if waited > patience:
            return waited
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)
    return None


def unlock(fd: int, offset: int) -> None:
    """Release the lock of one byte; do nothing if none is held or the descriptor is closed."""
    try:
        # unlock_request() is not called, since it would need another frame.
        fcntl.fcntl(fd, SETLK, _FLOCK.pack(fcntl.F_UNLCK, 0, offset, 1, 0))
    except OSError as error:
        if error.errno != errno.EBADF:
            raise


def unlock_request(offset: int) -> bytes:
    """Return the request by which :func:`unlock` unlocks one byte."""
    return _FLOCK.pack(fcntl.F_UNLCK, 0, offset, 1, 0)


def first_locked(fd: int, offset: int, length: int = 1) -> int | None:
    """Return the first byte that *another* description has locked, or None.

    Locks that are held through ``fd`` itself do not count.
    """
    answer = fcntl.fcntl(fd, _GETLK, _FLOCK.pack(fcntl.F_WRLCK, 0, offset, length, 0))
    kind, _, start, _, _ = _FLOCK.unpack(answer)
    if kind == fcntl.F_UNLCK:
        return None
    return max(int(start), offset)
