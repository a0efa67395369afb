"""The attempt to move arrays that were born in shared memory.

May import errors, settings, strategies, :mod:`shmreduce.memory`, ``library`` and ``heap``.

:mod:`shmreduce.moving` explains the attempt. For these arrays, there is no other reference
if the allocator's ``free`` has been called for the memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from shmreduce.born.heap import BornHeap, heap_of
from shmreduce.born.library import EXPOSED, FREED, PRIVATE, load
from shmreduce.settings import get_settings
from shmreduce.strategies import current_strategy

if TYPE_CHECKING:
    from collections.abc import Callable

    from shmreduce.memory.lease import Lease
    from shmreduce.memory.owned_segment import OwnedSegment

__all__ = ["BornMove", "name_array", "started"]

started = False
"""Whether arrays were ever born here: only then can any be moved."""


class BornMove(NamedTuple):
    """One array in a message, of which it is not known yet whether it moves."""

    heap: BornHeap
    number: int
    handle: bytes
    """Its handle in the pickle, padded if a longer one may have to replace it."""
    lease: Lease
    mark: object
    """What the heap has for the entry, to tell this move from others of the same number."""

    def is_apart(self) -> bool:
        """Return whether it has been freed, and no forked child sees the block's pages."""
        entry = load().table[self.number]
        return entry.state == FREED and not entry.flags & (PRIVATE | EXPOSED)

    def memory(self) -> tuple[int, int]:
        """Return the array's address and size. The entry is not reused until :meth:`end`."""
        entry = load().table[self.number]
        return entry.address, entry.size

    def stay(self) -> None:
        """Undo it: the array is as if it had never been in a message."""
        # Without a lease nobody has the block. With one, a receiver has it, and it is freed like
        # any block that was sent.
        unsent = not self.lease.segment.heads[self.lease.block]
        _end_move(self.heap, self.number, self.mark, unsent=unsent)

    def end(self) -> Callable[[], object]:
        """Finish it: the message is complete. Return what lets the heap use the entry again."""
        self.stay()
        return self.heap.tend


def name_array(
    address: int,
    used: int,
    lend: Callable[[OwnedSegment, int, int], tuple[bytes, Lease] | None],
    note: Callable[[BornMove], object],
) -> BornMove | None:
    """Put a handle of an array into a message without copying it; None if it cannot be moved.

    Parameters
    ----------
    address, used : int
        Those of :meth:`shmreduce.Message.move`.
    lend : callable
        Called with a segment, a block of it, and the size of the array in bytes. Returns the
        handle and the lease, or None if there can be none.
    note : callable
        Called with the result before this returns, so that an interrupt cannot lose it.
    """
    if get_settings().on_exhausted == "pickle":
        # If the array must be copied later and there is no room, it is too late to pickle it.
        return None
    library = load()
    number = library.send(address)
    if not number:
        return None
    heap, mark = heap_of(number), object()
    kept = False
    try:
        heap.moving[number] = mark
        entry = library.table[number]
        size = entry.size
        # With another strategy, the handle of a copy could be too long to replace this one.
        if 2 * used < size or heap.strategy is not current_strategy():
            return None
        place = heap.place_of(number)
        lent = None if place is None else lend(*place, size)
        if lent is None:
            return None
        made = BornMove(heap, number, *lent, mark)
        note(made)
        kept = True
        return made
    finally:
        if not kept:
            _end_move(heap, number, mark, unsent=True)


def _end_move(heap: BornHeap, number: int, mark: object, *, unsent: bool) -> None:
    """Let the heap take the entry again; with ``unsent``, no message has named it after all.

    A second call does nothing, since the number may be another array's by then.
    """
    moving = heap.moving
    try:
        # Before the entry is let go: another thread may release it at once.
        if unsent and number in moving and moving[number] is mark:
            load().unsend(number)
    finally:
        # Its array may have been freed meanwhile, and another one that is moved have the number.
        # There is no call in between, so no other thread runs.
        if number in moving and moving[number] is mark:
            del moving[number]
