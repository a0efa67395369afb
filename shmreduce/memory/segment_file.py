"""The open file of a segment: checks whose file it is, and reserves its pages.

May import errors, contracts, ``mapping``, ``handle`` and ``layout``.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from shmreduce.contracts import SegmentFile
from shmreduce.errors import ForeignSegmentError, PluginError, SegmentError
from shmreduce.memory.handle import LONGEST_LOCATOR
from shmreduce.memory.layout import CHUNK_SLOTS, SegmentHeader
from shmreduce.memory.mapping import PAGE_SIZE, page_ceil

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shmreduce.contracts import SharingStrategy
    from shmreduce.memory.layout import Layout

__all__ = [
    "check_answer",
    "check_file",
    "check_new_file",
    "check_opened",
    "contract_broken",
    "locator_of",
    "reserve_pages",
    "room_left",
    "used_slots",
]

_NONE_IN_USE = bytes(8 * CHUNK_SLOTS)
_RESERVED_AT_ONCE = 16 << 20
"""Bytes."""


def reserve_pages(fd: int, offset: int, nbytes: int) -> None:
    """Allocate the pages of a byte range, so that touching them cannot fail.

    Touching a page for which the file system has no room raises the signal ``SIGBUS``.
    ``posix_fallocate(3)`` reports the lack of room beforehand, as ``ENOSPC``.
    """
    place, end = offset & -PAGE_SIZE, page_ceil(offset + nbytes)
    while place < end:
        # Older kernels start again after each signal (EINTR), so a timer's signals could make
        # a long call last for ever.
        length = min(end - place, _RESERVED_AT_ONCE)
        os.posix_fallocate(fd, place, length)
        place += length


def room_left(fd: int) -> int | None:
    """Return how many bytes the file system of a file has free; None if it has no limit.

    The kernel's own tmpfs, which has the memfds, reports that it has no blocks at all.
    """
    status = os.fstatvfs(fd)
    return status.f_bavail * status.f_frsize if status.f_blocks else None


def used_slots(fd: int, layout: Layout) -> Iterator[int]:
    """Yield the words of a segment's lease slots that are in use, whoever has it open."""
    for first in range(0, layout.slots, CHUNK_SLOTS):
        chunk = os.pread(fd, len(_NONE_IN_USE), layout.slot_words + 8 * first)
        # Most chunks are nobody's.
        if chunk != _NONE_IN_USE:
            words = memoryview(chunk)[: len(chunk) & -8].cast("Q")
            yield from filter(None, words.tolist())


def contract_broken(strategy: SharingStrategy, call: str, what: str) -> PluginError:
    """Return the error for a strategy that does not do what it must."""
    return PluginError(
        f"{call} of sharing strategy {strategy.name!r} {what}; correct it (derive "
        "shmreduce.testing.StrategyContract to test it), or block its plugin",
        plugin=None,
        distribution=None,
        reason=f"{call} {what}",
    )


def locator_of(strategy: SharingStrategy, file: SegmentFile) -> str:
    """Return the strategy's locator of a file that this process has open.

    Raises
    ------
    PluginError
        If the strategy returns something that is not text, is too long, or has a NUL character.
    """
    said = strategy.locator(file)
    if not isinstance(said, str):
        what = f"returned {said!r} for {file}: it must return text, even if there is no name"
        raise contract_broken(strategy, "locator()", what)
    size = len(said.encode(errors="surrogateescape"))
    if size > LONGEST_LOCATOR:
        what = f"returned text of {size} bytes: {LONGEST_LOCATOR} are the most"
        raise contract_broken(strategy, "locator()", what)
    if "\0" in said:
        what = f"returned {said!r}: it must not have a NUL character, by which handles are padded"
        raise contract_broken(strategy, "locator()", what)
    return said


def check_answer(strategy: SharingStrategy, call: str, said: Any) -> SegmentFile:
    """Return a strategy's answer, after checking that it is a SegmentFile."""
    if not isinstance(said, SegmentFile):
        raise contract_broken(strategy, call, f"returned {said!r}: it must return a SegmentFile")
    if type(said.fd) is not int or not (said.name is None or isinstance(said.name, str)):
        raise contract_broken(
            strategy, call, f"returned {said!r}: fd must be an int, and name text or None"
        )
    return said


def check_opened(strategy: SharingStrategy, said: Any) -> SegmentFile:
    """Return the file that a strategy has opened, after checking that it can be a segment's."""
    file = check_answer(strategy, "open()", said)
    try:
        _check_access(strategy, "open()", file.fd)
    except BaseException:
        # It may be no open descriptor: that may be just what the check has found.
        with suppress(OSError):
            os.close(file.fd)
        raise
    return file


def check_new_file(strategy: SharingStrategy, file: SegmentFile, size: int) -> None:
    """Refuse a file that cannot be a segment; otherwise only its receivers would notice."""
    _check_access(strategy, "create()", file.fd)
    found = os.fstat(file.fd).st_size
    if found < size:
        raise contract_broken(
            strategy, "create()", f"made a file of {found} bytes: it must have {size} at least"
        )
    if any(os.pread(file.fd, PAGE_SIZE, 0)):
        # For example, it is another segment, whose tables would be overwritten.
        raise contract_broken(
            strategy, "create()", "returned a file that has contents: it must make a new one"
        )


def _check_access(strategy: SharingStrategy, call: str, fd: int) -> None:
    try:
        access = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE
    except OSError as error:
        if error.errno != errno.EBADF:
            raise
        raise contract_broken(
            strategy, call, f"returned a descriptor, {fd}, that is not open"
        ) from error
    if access != os.O_RDWR:
        raise contract_broken(strategy, call, "did not open the file for both reading and writing")


def check_file(fd: int, token: bytes | None) -> SegmentHeader:
    """Return the header of an open file, after checking its user and which segment it is.

    Parameters
    ----------
    fd : int
        A descriptor of the file. It stays the caller's.
    token : bytes or None
        Of the segment that it should be; None for any.

    Raises
    ------
    FileNotFoundError
        If it is another file or another segment, since the name or number was reused.
    ForeignSegmentError
        If it belongs to another user.
    InvalidHandleError
        If it has no header of a segment.
    SegmentError
        If it has been truncated.
    """
    status = os.fstat(fd)
    wanted = token.hex() if token else "any"
    if not stat.S_ISREG(status.st_mode):
        # The descriptor's number was reused for something else.
        raise FileNotFoundError(errno.ENOENT, f"not segment {wanted} any more")
    if status.st_uid != os.geteuid():
        raise ForeignSegmentError(
            f"segment {wanted} belongs to user {status.st_uid}, this process runs as "
            f"{os.geteuid()}; only segments of the same user are opened: run both as one user",
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
