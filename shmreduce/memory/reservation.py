"""The pages of runs of blocks: reserved before anybody touches them, huge ones where they pay.

May import errors, signals, contracts, ``mapping``, ``layout``, ``segment_file``,
``owned_segment`` and ``headroom``.

What a family may have is booked by the heap. Here it is about what the system has.
"""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING

from shmreduce.errors import OutOfSharedMemoryError
from shmreduce.memory.headroom import headroom
from shmreduce.memory.layout import SHARED
from shmreduce.memory.mapping import PAGE_SIZE, page_ceil, punch_hole
from shmreduce.memory.segment_file import reserve_pages, room_left
from shmreduce.signals import is_from_system

if TYPE_CHECKING:
    from shmreduce.contracts import SharingStrategy
    from shmreduce.memory.owned_segment import OwnedSegment

__all__ = [
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


def reserve_run(segment: OwnedSegment, offset: int, size: int) -> int:
    """Allocate pages; return from where on they may be huge ones some day."""
    check_headroom(size, segment.strategy)
    try:
        # One that is not at hand takes longer than small ones for all of a short block.
        # A shared block is not used again, so it is now or never.
        shared = segment.header.kind == SHARED
        patience = 1 if shared else min(1, size // _BYTES_FOR_A_WAIT)
        huge = segment.data.make_huge(segment.fd, offset, size, patience=patience)
        reserve_pages(segment.fd, offset, size)
    except OSError as error:
        punch_hole(segment.fd, offset, size)
        if not is_from_system(error):
            raise
        left = room_left(segment.fd)
        raise no_room(size, left, error.errno or 0, segment.strategy) from error
    return huge


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
    place = segment.data.make_huge(fd, place, end - place, patience=patience)
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
