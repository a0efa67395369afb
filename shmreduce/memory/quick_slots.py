"""Transitions of lease slots in one call each, where they were compiled.

May import :mod:`shmreduce.compiled` and ``layout``.

A transition takes microseconds the long way, which is ``segment``'s, most of them
for the block's lock. ``_quick_slots.c`` has the short way, and says what makes it
safe; it does the usual case whole, and of every other nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from shmreduce.compiled import SLOTS, find_module
from shmreduce.memory.layout import LOCK_BLOCK

if TYPE_CHECKING:
    from shmreduce.memory.layout import Layout

__all__ = ["LongWay", "QuickSlots", "quick_slots"]


class QuickSlots(Protocol):
    """The short way: each method makes a transition, or changes nothing and returns False.

    ``fd`` is the descriptor that blocks are locked through, ``word`` what stands
    in the slot before (after :meth:`add`), ``holder`` what stands there if this
    process holds the block.
    """

    def add(self, fd: int, block: int, slot: int, word: int, generation: int) -> bool:
        """Link a message into a slot that is the caller's."""

    def start(self, block: int, slot: int, word: int) -> bool:
        """Link the first message of a block that nobody else can name, if it has none."""

    def claim_alone(
        self, fd: int, block: int, slot: int, word: int, generation: int, holder: int
    ) -> bool:
        """Turn a message into a hold, if the block's chain has nothing else."""

    def consume(
        self, fd: int, block: int, slot: int, word: int, generation: int, holder: int
    ) -> bool:
        """End a message."""

    def release(self, fd: int, block: int, slot: int, word: int) -> bool:
        """End a hold."""


class LongWay:
    """What stands for it where it was not compiled: all goes the long way."""

    def add(self, *_numbers: int) -> bool:
        """See :meth:`QuickSlots.add`."""
        return False

    start = claim_alone = consume = release = add


_module, _ = find_module(SLOTS)


def quick_slots(tables: Any, layout: Layout, busy: dict[int, Any]) -> QuickSlots:
    """Return the short way for a segment.

    Parameters
    ----------
    tables : mmap.mmap
        The segment's tables, which stay mapped as long as the result lives.
    layout : Layout
        Where they are.
    busy : dict
        Has the blocks that a thread of this process has locked the long way. As
        long as it has any, all go the long way: locks of threads are nothing to
        each other, as they lock through one description.
    """
    if _module is None:
        return LongWay()
    made: QuickSlots = _module.QuickSlots(
        tables,
        busy,
        first_lock=LOCK_BLOCK,
        blocks=layout.blocks,
        slots=layout.slots,
        generations=layout.generations,
        heads=layout.heads,
        hints=layout.hints,
        words=layout.slot_words,
        next=layout.slot_next,
        previous=layout.slot_previous,
    )
    return made
