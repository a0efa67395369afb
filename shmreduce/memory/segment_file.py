"""The open file of a segment: whose it is, and its pages.

May import errors, contracts, ``mapping`` and ``layout``.
"""

from __future__ import annotations

import errno
import os
import stat

from shmreduce.errors import ForeignSegmentError, SegmentError
from shmreduce.memory.layout import SegmentHeader
from shmreduce.memory.mapping import PAGE_SIZE, page_ceil

__all__ = ["check_file", "reserve_pages", "room_left"]

_RESERVED_AT_ONCE = 16 << 20
"""Bytes."""


def reserve_pages(fd: int, offset: int, nbytes: int) -> None:
    """Allocate the pages of a byte range, so that touching them cannot fail.

    Touching a page that the file system has no room for is a ``SIGBUS``;
    ``posix_fallocate(3)`` reports it as ``ENOSPC`` beforehand.
    """
    place, end = offset & -PAGE_SIZE, page_ceil(offset + nbytes)
    while place < end:
        # Older kernels begin anew at each signal (EINTR): a timer's must not come in each call.
        length = min(end - place, _RESERVED_AT_ONCE)
        os.posix_fallocate(fd, place, length)
        place += length


def room_left(fd: int) -> int | None:
    """Return how many bytes the file system of a file has free; None if it has no limit.

    The kernel's own tmpfs, in which memfds are, says that it has no blocks at all.
    """
    status = os.fstatvfs(fd)
    return status.f_bavail * status.f_frsize if status.f_blocks else None


def check_file(fd: int, token: bytes | None) -> SegmentHeader:
    """Return the header of an open file, after checking whose and which it is."""
    status = os.fstat(fd)
    wanted = token.hex() if token else "any"
    if not stat.S_ISREG(status.st_mode):
        # The descriptor number has been reused for something else.
        raise FileNotFoundError(errno.ENOENT, f"not segment {wanted} any more")
    if status.st_uid != os.geteuid():
        raise ForeignSegmentError(
            f"segment {wanted} belongs to user {status.st_uid}, this process runs as "
            f"{os.geteuid()}; only segments of one's own user are opened: run both as one user",
            segment=wanted,
            locator=None,
            reason="another user's",
            errno=errno.EPERM,
            uid=status.st_uid,
            expected=os.geteuid(),
        )
    header = SegmentHeader.unpack(os.pread(fd, PAGE_SIZE, 0))
    if token is not None and header.token != token:
        raise FileNotFoundError(errno.ENOENT, f"not segment {wanted} any more")
    if status.st_size < header.size:
        raise SegmentError(
            f"segment {header.token.hex()} has been truncated to {status.st_size} bytes; its "
            "contents are lost. Send the array again, and find out what cut the file off",
            operation="fstat",
            errno=errno.EIO,
            segment=header.token.hex(),
        )
    return header
