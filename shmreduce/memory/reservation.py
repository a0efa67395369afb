"""The pages of runs of blocks: there before anybody touches them, huge ones where they pay.

May import errors, signals, contracts, ``mapping``, ``layout``, ``segment_file``,
``owned_segment`` and ``headroom``.

What a family may have is booked by the heap. Here it is about what the system has.
"""

from __future__ import annotations

import errno
import os
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

_USES_BETWEEN_TRIES = 8
"""How often a block is used before the kernel is asked again for huge pages it had not at hand."""
_BYTES_FOR_A_WAIT = 64 << 20
"""Of a block, for each huge page that is waited for: so waiting takes less than copying."""
_WRITTEN_FROM = 1 << 20
"""Bytes. Less is carved together with blocks that somebody else is going to fill."""
_WRITTEN_AT_ONCE = 64 << 20
"""Bytes between two looks at what signals have come."""


class Contents:
    """What a block is going to be filled with.

    If the block has no pages so far, they are made by writing to the file. So they
    need neither be cleared before nor be mapped here: of three passes over the
    memory one is left.

    Parameters
    ----------
    source : callable
        Returns the bytes, as any object that exports them in one run, or None if
        they do not lie in one. Called when they are needed.
    nbytes : int
        How many they are.
    """

    __slots__ = ("_nbytes", "_source", "written")

    def __init__(self, source: Callable[[], Any], nbytes: int) -> None:
        self._source = source
        self._nbytes = nbytes
        self.written = False
        """Whether the block has them."""

    def bytes(self) -> memoryview | None:
        """Return the bytes, if they lie in one run.

        Raises
        ------
        ConfigurationError
            If they are not as many as was said: what comes next in the file is another's.
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
        f"contents() returned {found}: it must return a contiguous buffer of as many bytes as "
        "were asked for, or None",
        setting="contents",
        value=found,
    )


def check_headroom(size: int, strategy: SharingStrategy) -> None:
    """Refuse what the system has no memory for."""
    available = headroom()
    if available is not None and size > available:
        # The kernel would not refuse, it would kill somebody.
        raise no_room(size, available, errno.ENOMEM, strategy)


def no_room(
    size: int, available: int | None, number: int, strategy: SharingStrategy
) -> OutOfSharedMemoryError:
    """Return the error that says so; ``number`` is the system's."""
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
    """Allocate pages; return from where on they may be huge ones some day.

    With ``contents``, which fit into ``size``, they are written there where that is quicker.
    Whether the system has the memory is to be asked before, by :func:`check_headroom`.
    """
    data = None if contents is None or size < _WRITTEN_FROM else contents.bytes()
    try:
        # One that is not at hand takes longer than small ones for all of a short block.
        # A shared block is not used again, so it is now or never.
        shared = segment.header.kind == SHARED
        patience = 1 if shared else min(1, size // _BYTES_FOR_A_WAIT)
        fd = segment.checked_fd
        made, huge = segment.data.make_huge(fd, offset, size, patience=patience)
        # Huge pages are quicker to fill than to write to, and mapped by then.
        written = data is not None and 2 * made < size and _write(segment, offset, data)
        # Also after that: the block has room for more.
        reserve_pages(segment.checked_fd, offset, size)
    except BaseException as error:
        # Not of another file whose number it is by now; nor in the child of a signal
        # handler that has forked: what its parent has there is not to be lost.
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
    """Write bytes to pages that nobody has seen; return whether all of them are there.

    What goes wrong with it is told by the reservation that comes next.
    """
    fd, place = segment.checked_fd, 0
    while place < data.nbytes:
        part, where = data[place : place + _WRITTEN_AT_ONCE], offset + place
        # A signal handler may fork, and the child go on here: what it writes to the
        # file would come over what its parent has there by then. Handlers run where a
        # call ends, and there is none between the look and the writing, which no
        # handler interrupts (signal(7): files on disk, and in memory).
        if segment.inherited:
            return False
        try:
            written = os.pwrite(fd, part, where)
        except OSError as error:
            if not is_from_system(error):
                raise
            # A file that can be mapped alone, say, or there is no room.
            return False
        if written <= 0:
            return False
        place += written
    return True


def go_on_making_huge(segment: OwnedSegment, block: int) -> None:
    """Go on with the huge pages of a block that is used again: it is worth while now."""
    place, uses = segment.small[block]
    if uses % _USES_BETWEEN_TRIES:
        segment.small[block] = place, uses + 1
        return
    size = segment.capacities[block]
    end = segment.offsets[block] + size
    patience = -(-size // _BYTES_FOR_A_WAIT)
    fd = segment.checked_fd
    _, place = segment.data.make_huge(fd, place, end - place, patience=patience)
    if place < end:
        segment.small[block] = place, uses + 1
    else:
        del segment.small[block]


def free_whole_pages(segment: OwnedSegment, start: int, end: int) -> int:
    """Free the pages that lie in a range of offsets with all their bytes; return how many bytes.

    No page if the segment's descriptor was closed by somebody else: the number may be
    another file's.
    """
    first, last = page_ceil(start), end & -PAGE_SIZE
    if last > first and segment.is_open:
        punch_hole(segment.fd, first, last - first)
        return last - first
    return 0
