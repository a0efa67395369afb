"""What a process knows of one block that is alive in it.

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
    """One block that is alive in this process.

    ``slot`` is the lease by which it is held; None in the owner, for a block
    that was born here. ``in_place`` says that this process's pages of the block
    were made private where they are, ``private`` that writes here no longer
    reach the block, by whatever way.
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
        self.private = private
        self.read_only = mode == "ro" and slot is not None
        """Whether views here must not be written: a ``ro`` block, at a receiver."""
        self.in_place = False
        self.ended = False
        """Whether the hold was given up already, before the views died."""
        self.cutting: dict[None, tuple[int]] = {}
        """Has the mark of the one call that makes the pages private, for good: its thread."""
        self.birth = self.death = live.ledger.birth
        self.written: bytes | None = None
        """What is the same in all handles that this process makes for the block."""
        self.keep: Keeper | None = None
        """Who takes over the hold when the views have died, if nobody else has the block."""
        self.key: bytes | None = None
        """By what the block is found when a message brings it again."""


class RootReference(weakref.ref[Any]):
    """A weak reference to a root that knows its record."""

    __slots__ = ("identity", "record")
    identity: int
    record: Record
