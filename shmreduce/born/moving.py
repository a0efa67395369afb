"""Arrays that were born in shared memory, while it is tried whether they can be moved.

May import errors, settings, strategies, :mod:`shmreduce.memory`, ``library`` and ``heap``.

What the trial is, :mod:`shmreduce.moving` says. Here it is about the allocator:
an array has been given up when the allocator's ``free`` was called for its memory.
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
    """As it stands in the pickle, padded."""

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

    def end(self) -> None:
        """Give the entry back to the heap: the message is complete."""
        self.stay()
        self.heap.tend()


def name_array(
    message: Message, address: int, used: int, note: Callable[[BornMove], None]
) -> BornMove | None:
    """Name an array in a message without copying it; None if it cannot be moved.

    ``message``, ``address`` and ``used`` are those of :meth:`shmreduce.Message.move`;
    ``note`` takes what is returned, before an interrupt can lose it.
    """
    if not message.shared_memory or get_settings().on_exhausted == "pickle":
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
