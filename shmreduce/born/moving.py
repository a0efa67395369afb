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
    from shmreduce.memory.message import Message

__all__ = ["BornMove", "name_array", "started"]

started = False
"""Whether arrays were ever born here: only then can any be moved."""


class BornMove(NamedTuple):
    """One array in a message, of which it is not known yet whether it moves."""

    heap: BornHeap
    number: int
    message: Message
    lease: Lease
    handle: bytes
    """Its handle in the pickle, padded so that a longer one can replace it."""

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
        self.heap.moving.pop(self.number, None)
        if not self.lease.segment.heads[self.lease.block]:
            # No lease is left. With a lease, a receiver has the block, and it is freed like
            # any block that was sent.
            load().unsend(self.number)

    def end(self) -> None:
        """Finish it: the message is complete, and the heap may use the entry again."""
        self.stay()
        self.heap.tend()


def name_array(
    message: Message, address: int, used: int, note: Callable[[BornMove], None]
) -> BornMove | None:
    """Put a handle of an array into a message without copying it; None if it cannot be moved.

    ``message``, ``address`` and ``used`` are those of :meth:`shmreduce.Message.move`.
    ``note`` is called with the result before this returns, so that an interrupt cannot
    lose it.
    """
    if not message.shared_memory or get_settings().on_exhausted == "pickle":
        # If the array must be copied later and there is no room, it is too late to pickle it.
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
        # With another strategy, the handle of a copy could be too long to replace this one.
        if 2 * used < size or heap.strategy is not current_strategy():
            return None
        heap.moving[number] = None
        place = heap.place_of(number)
        if place is None:
            return None
        segment, block = place
        handle, lease = message.add_lease(segment, block, segment.generations[block], size)
        made = BornMove(heap, number, message, lease, handle)
        note(made)
        kept = True
        return made
    finally:
        if not kept:
            heap.moving.pop(number, None)
            library.unsend(number)
