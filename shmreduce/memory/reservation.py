"""Reserves the pages of runs of blocks before they are used, as huge pages where that pays.

May import errors, signals, contracts, ``mapping``, ``layout``, ``segment_file``,
``owned_segment`` and ``headroom``.

The heap books memory against the family's budget; this module deals with the system's memory.
"""

from __future__ import annotations

import errno
import math
import os
import time
from typing import TYPE_CHECKING, Any

from shmreduce.errors import ConfigurationError, OutOfSharedMemoryError
from shmreduce.memory.headroom import headroom
from shmreduce.memory.layout import SHARED
from shmreduce.memory.mapping import PAGE_SIZE, page_ceil, punch_hole
from shmreduce.memory.segment_file import reserve_pages, room_left
from shmreduce.signals import is_from_system

if TYPE_CHECKING:
    from collections.abc import Callable

    from shmreduce.contracts import SharingStrategy
    from shmreduce.memory.owned_segment import OwnedSegment

__all__ = [
    "Contents",
    "check_headroom",
    "free_whole_pages",
    "go_on_making_huge",
    "no_room",
    "reserve_run",
]

_FEWEST_USES = 8
"""Uses of a block after which the kernel is asked again for missing huge pages, or more: so many
that copying into the block takes ``_COPIES_FOR_A_WAIT`` times as long as the last try did."""
_COPIES_FOR_A_WAIT = 8
_BYTES_PER_SECOND = 16e9
"""How fast a block is filled: two threads of a quick machine copy so many bytes."""
_BYTES_FOR_A_WAIT = 64 << 20
"""Bytes of a block for each huge page that is waited for in one try."""
_WRITTEN_FROM = 1 << 20
"""Bytes. A smaller run is carved for many blocks, and only one of them has the contents."""
_WRITTEN_AT_ONCE = 64 << 20
"""Bytes to write between two checks for signals."""


class Contents:
    """The bytes with which a block is going to be filled.

    If the block has no pages yet, writing the bytes to the file makes them. Then the kernel
    need neither clear the pages first nor map them here: one pass over the memory instead
    of three.

    Parameters
    ----------
    source : callable
        Returns the bytes, as any object that exports them as one contiguous run, or None if
        they are not contiguous. It is called when they are needed.
    nbytes : int
        The number of bytes.
    """

    __slots__ = ("_nbytes", "_source", "written")

    def __init__(self, source: Callable[[], Any], nbytes: int) -> None:
        self._source = source
        self._nbytes = nbytes
        self.written = False
        """Whether they have been written to the block."""

    def bytes(self) -> memoryview | None:
        """Return the bytes if they are contiguous, else None.

        Raises
        ------
        ConfigurationError
            If their number is wrong. They would overwrite what comes next in the file.
        """
        source = self._source()
        if source is None:
            return None
        try:
            found = memoryview(source).cast("B")
        except TypeError as error:
            raise _not_contents(f"an object of {type(source).__qualname__} ({error})") from error
        if found.nbytes != self._nbytes:
            raise _not_contents(f"{found.nbytes} bytes, not {self._nbytes}")
        return found


def _not_contents(found: str) -> ConfigurationError:
    return ConfigurationError(
        f"contents() returned {found}: it must return a contiguous buffer of exactly nbytes "
        "bytes, or None",
        setting="contents",
        value=found,
    )


def check_headroom(size: int, strategy: SharingStrategy) -> None:
    """Raise if the system does not have ``size`` bytes of memory left."""
    available = headroom()
    if available is not None and size > available:
        # The kernel would not refuse the memory; it would kill a process.
        raise no_room(size, available, errno.ENOMEM, strategy)


def no_room(
    size: int, available: int | None, number: int, strategy: SharingStrategy
) -> OutOfSharedMemoryError:
    """Return the error for missing memory; ``number`` is the system's errno."""
    left = "" if available is None else f", {available} bytes are available"
    return OutOfSharedMemoryError(
        f"no room for {size} bytes of shared memory ({os.strerror(number)}{left}). Read or "
        f"drop arrays, or give strategy {strategy.name!r} more room: 'shmreduce doctor' "
        "lists the limits",
        operation="fallocate",
        errno=number,
        requested=size,
        available=available,
        strategy=strategy.name,
    )


def reserve_run(
    segment: OwnedSegment, offset: int, size: int, contents: Contents | None = None
) -> int:
    """Allocate pages; return the offset from which on huge pages are still possible.

    ``contents``, which fit into ``size``, are written to the new pages if that is faster.
    The caller has checked that the system has the memory, by :func:`check_headroom`.
    """
    data = None if contents is None or size < _WRITTEN_FROM else contents.bytes()
    try:
        # Waiting for one huge page takes longer than small pages for all of a short block. A
        # shared block has only this chance to get huge pages, since it is not used again.
        shared = segment.header.kind == SHARED
        patience = 1 if shared else min(1, size // _BYTES_FOR_A_WAIT)
        fd = segment.checked_fd
        made, huge = segment.data.make_huge(fd, offset, size, patience=patience)
        # Huge pages are mapped already, so it is faster to copy into them than to write.
        written = data is not None and 2 * made < size and _write(segment, offset, data)
        # Needed after writing, too, since the block may be larger than the contents.
        reserve_pages(segment.checked_fd, offset, size)
    except BaseException as error:
        # If the descriptor was closed, the number may belong to another file. If a signal
        # handler has forked and this is the child, the pages are its parent's.
        if segment.is_open and not segment.inherited:
            punch_hole(segment.fd, offset, size)
        if not (isinstance(error, OSError) and is_from_system(error)):
            raise
        left = room_left(segment.fd)
        raise no_room(size, left, error.errno or 0, segment.strategy) from error
    if contents is not None:
        contents.written = written
    return huge


def _write(segment: OwnedSegment, offset: int, data: memoryview) -> bool:
    """Write bytes to pages that nobody has seen; return whether all of them were written.

    The reservation that follows raises the error, if there is one.
    """
    fd, place = segment.checked_fd, 0
    while place < data.nbytes:
        part, where = data[place : place + _WRITTEN_AT_ONCE], offset + place
        # A signal handler may fork, and the child continues here: it would overwrite what its
        # parent has there by then. Python runs handlers after a call has returned, and there
        # is no call between this check and os.pwrite(). No signal interrupts the writing
        # itself (signal(7): files on disk and in memory).
        if segment.inherited:
            return False
        try:
            written = os.pwrite(fd, part, where)
        except OSError as error:
            if not is_from_system(error):
                raise
            # For example, the file can be mapped but not written to, or there is no room.
            return False
        if written <= 0:
            return False
        place += written
    return True


def go_on_making_huge(segment: OwnedSegment, block: int) -> None:
    """Try again to get huge pages for a block that is used again: now waiting for them pays."""
    place, uses_left = segment.small[block]
    if uses_left:
        segment.small[block] = place, uses_left - 1
        return
    size = segment.capacities[block]
    end = segment.offsets[block] + size
    patience = -(-size // _BYTES_FOR_A_WAIT)
    fd = segment.checked_fd
    began = time.monotonic()
    _, place = segment.data.make_huge(fd, place, end - place, patience=patience)
    if place < end:
        copies = _COPIES_FOR_A_WAIT * (time.monotonic() - began) * _BYTES_PER_SECOND / size
        segment.small[block] = place, max(_FEWEST_USES, math.ceil(copies)) - 1
    else:
        del segment.small[block]


def free_whole_pages(segment: OwnedSegment, start: int, end: int) -> int:
    """Free the pages that lie wholly in a range of offsets; return how many bytes that is.

    If other code has closed the segment's descriptor, no page is freed: the number may
    belong to another file.
    """
    first, last = page_ceil(start), end & -PAGE_SIZE
    if last > first and segment.is_open:
        punch_hole(segment.fd, first, last - first)
        return last - first
    return 0
