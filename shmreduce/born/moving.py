"""Arrays that were born in shared memory, while it is tried whether they can be moved.

May import errors, settings, strategies, :mod:`shmreduce.memory`, ``library`` and ``heap``.

What the trial is, :mod:`shmreduce.moving` says. Here it is about the allocator:
an array has been given up when the allocator's ``free`` was called for its memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from shmreduce.born.heap import BornHeap, has_address, heap_of
from shmreduce.born.library import EXPOSED, FREED, PRIVATE, load
from shmreduce.settings import get_settings
from shmreduce.strategies import current_strategy

if TYPE_CHECKING:
    from collections.abc import Callable

    from shmreduce.memory.lease import Lease
    from shmreduce.memory.owned_segment import OwnedSegment

__all__ = ["BornMove", "has_address", "name_array", "started"]

started = False
"""Whether arrays were ever born here: only then can any be moved."""


class BornMove(NamedTuple):
    """One array in a message, of which it is not known yet whether it moves."""

    heap: BornHeap
    number: int
    handle: bytes
    lease: Lease

    def is_apart(self) -> bool:
        """Return whether it has been freed, and nobody sees the block's pages."""
        entry = load().table[self.number]
        return entry.state == FREED and not entry.flags & (PRIVATE | EXPOSED)

    def memory(self) -> tuple[int, int]:
        """Return where it is, and its size; the entry is nobody else's until this has ended."""
        entry = load().table[self.number]
        return entry.address, entry.size

    def stay(self) -> None:
        """Let an array be as if it had never been in a message."""
        self.heap.moving.pop(self.number, None)
        if not self.lease.segment.heads[self.lease.block]:
            # Otherwise somebody has it by some message: it is freed as such a block is.
            load().unsend(self.number)

    def end(self) -> Callable[[], object]:
        """Give the entry back to the heap, which is to be tended."""
        self.stay()
        return self.heap.tend


def name_array(
    address: int,
    used: int,
    lend: Callable[[OwnedSegment, int, int], tuple[bytes, Lease] | None],
    note: Callable[[BornMove], object],
) -> BornMove | None:
    """Name an array in a message without copying it; None if it cannot be moved.

    Parameters
    ----------
    address, used : int
        As of :meth:`shmreduce.Message.move`.
    lend : callable
        Called with a segment, a block of it, and the bytes that the array has. Returns the
        handle and the lease, or None if it cannot.
    note : callable
        Takes what is returned, before an interrupt can lose it.
    """
    if get_settings().on_exhausted == "pickle":
        # What may have to be copied later must be sure to get its memory.
        return None
    library = load()
    number = library.send(address)
    if not number:
        return None
    heap = heap_of(number)
    kept = False
    try:
        entry = library.table[number]
        size = entry.size
        # A copy must be named by a handle of the same length.
        if 2 * used < size or heap.strategy is not current_strategy():
            return None
        heap.moving[number] = None
        place = heap.place_of(number)
        lent = None if place is None else lend(*place, size)
        if lent is None:
            return None
        made = BornMove(heap, number, *lent)
        note(made)
        kept = True
        return made
    finally:
        if not kept:
            heap.moving.pop(number, None)
            library.unsend(number)
