"""What a process knows about a block that is alive in it.

May import contracts, ``mapping``, ``segment``, ``heap`` and, for its types, ``blocks``.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shmreduce.contracts import Mode
    from shmreduce.memory.blocks import Keeper, LiveBlocks
    from shmreduce.memory.heap import Heap
    from shmreduce.memory.mapping import Mapping
    from shmreduce.memory.segment import Segment

__all__ = ["Record", "RootReference"]


class Record:
    """A block that is alive in this process.

    ``slot`` is the lease by which this process holds the block, or None if it made the
    block itself. ``in_place`` tells whether this process's pages of the block were made
    private at their addresses. ``private`` tells whether writes here no longer reach the
    block, for this or another reason.
    """

    __slots__ = (
        "address",
        "birth",
        "block",
        "cutting",
        "death",
        "ended",
        "generation",
        "heap",
        "in_place",
        "keep",
        "key",
        "live",
        "mapping",
        "mode",
        "nbytes",
        "private",
        "read_only",
        "segment",
        "shared",
        "slot",
        "written",
    )

    def __init__(
        self,
        live: LiveBlocks,
        segment: Segment,
        block: int,
        nbytes: int,
        mapping: Mapping,
        *,
        shared: bool,
        mode: Mode = "rw",
        slot: int | None = None,
        heap: Heap | None = None,
        private: bool = False,
    ) -> None:
        self.live = live
        self.segment = segment
        self.block = block
        self.generation = segment.generations[block]
        self.nbytes = nbytes
        self.mapping = mapping
        self.address = mapping.address + segment.offsets[block] - mapping.offset
        self.shared = shared
        self.mode = mode
        self.slot = slot
        self.heap = heap
        """The heap of the block, if this process made it."""
        self.private = private
        self.read_only = mode == "ro" and slot is not None
        """Whether views here are read-only: for a ``ro`` block at a receiver."""
        self.in_place = False
        self.ended = False
        """Whether the hold has ended or was taken over, perhaps before the views died."""
        self.cutting: dict[None, tuple[int]] = {}
        """The mark, with the thread, of the one call that makes or has made the pages private."""
        self.birth = self.death = live.ledger.birth
        """For :meth:`ForkLedger.visible`: when the root was made, and when its last view died."""
        self.written: bytes | None = None
        """The bytes that are the same in all handles that this process makes for the block."""
        self.keep: Keeper | None = None
        """Takes over the hold when the views have died, if nobody else has the block."""
        self.key: bytes | None = None
        """The key by which a later message finds the block."""


class RootReference(weakref.ref[Any]):
    """A weak reference to a root, with the root's record."""

    __slots__ = ("identity", "record")
    identity: int
    """The ``id`` of the root, by which it is found while it lives."""
    record: Record
