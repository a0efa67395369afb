"""The compiled short way of lease transitions: each is one call, where it was compiled.

May import :mod:`shmreduce.compiled` and ``layout``.

A transition by the long way, in ``lease_transitions``, takes microseconds, most of them for the
block's lock. ``_quick_slots.c`` is the short way, and explains why it is safe. It does the
usual case completely, and does nothing in any other case.
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

    ``fd`` is the descriptor through which blocks are locked. ``word`` is the slot's word
    before the transition, or after it for :meth:`add` and :meth:`start`. ``holder`` is the
    word of a hold of this process.
    """

    def add(self, fd: int, block: int, slot: int, word: int, generation: int) -> bool:
        """Link a message into a slot that the caller has taken."""

    def start(self, block: int, slot: int, word: int) -> bool:
        """Link the first message of a block that nobody else can name, if it has none."""

    def claim_alone(
        self, fd: int, block: int, slot: int, word: int, generation: int, holder: int
    ) -> bool:
        """Turn a message into a hold, if the block's chain has no other slot."""

    def claim_shared(
        self, fd: int, block: int, slot: int, word: int, generation: int, holder: int
    ) -> bool:
        """Turn a message of a shared block into a hold."""

    def consume(
        self, fd: int, block: int, slot: int, word: int, generation: int, holder: int
    ) -> bool:
        """End a message."""

    def release(self, fd: int, block: int, slot: int, word: int) -> bool:
        """End a hold."""


class LongWay:
    """Takes its place if it was not compiled: every transition takes the long way."""

    def add(self, *_numbers: int) -> bool:
        """See :meth:`QuickSlots.add`."""
        return False

    start = claim_alone = claim_shared = consume = release = add


_module, _ = find_module(SLOTS)


def quick_slots(
    tables: Any, layout: Layout, busy: dict[int, Any], identity: tuple[int, int] | None
) -> QuickSlots:
    """Return the short way of a segment's transitions.

    Parameters
    ----------
    tables : mmap.mmap
        The segment's tables. They stay mapped as long as the result lives.
    layout : Layout
        The offsets of the tables.
    busy : dict
        The blocks that a thread of this process has locked by the long way. While there are
        any, all transitions take the long way: threads lock through one open file
        description, so the byte locks do not exclude each other.
    identity : tuple of int
        Device and inode of the segment's file. With the descriptor of another file, all
        transitions take the long way, which raises the error.
    """
    if _module is None:
        return LongWay()
    device, inode = identity or (0, 0)
    made: QuickSlots = _module.QuickSlots(
        tables,
        busy,
        device=device,
        inode=inode,
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
