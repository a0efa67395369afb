"""A block while the bytes of a message are being written to it.

May import ``mapping``, ``heap`` and ``blocks``.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from shmreduce.memory.blocks import UNSHARED, owner_record
from shmreduce.memory.mapping import make_root

if TYPE_CHECKING:
    from shmreduce.memory.blocks import LiveBlocks
    from shmreduce.memory.heap import Heap
    from shmreduce.memory.owned_segment import OwnedSegment

__all__ = ["Filling"]


class Filling:
    """A block of this process that it fills until its message is complete.

    A view is rarely kept for longer. So no weak reference watches the views; it is enough
    to check at the end that nothing else refers to their root.
    """

    __slots__ = ("_birth", "_block", "_heap", "_live", "_nbytes", "_segment", "root")

    def __init__(
        self, live: LiveBlocks, heap: Heap, segment: OwnedSegment, block: int, nbytes: int
    ) -> None:
        self._live = live
        self._heap = heap
        self._segment = segment
        self._block = block
        self._nbytes = nbytes
        self._birth = live.ledger.birth
        data = segment.data
        self.root = make_root(
            data.pages, segment.offsets[block] - data.offset, segment.capacities[block]
        )
        live.fillings[self] = None
        # Done last, since a constructor that raises before this line leaves the heap's own
        # entry, with which the caller can take the block back.
        segment.records[block] = self

    def view(self) -> memoryview:
        """Return the bytes to fill."""
        return memoryview(self.root).cast("B")[: self._nbytes]

    def end(self) -> None:
        """Leave the block to its leases, or free it if it has none. A second call does nothing."""
        segment, block = self._segment, self._block
        if segment.records.get(block) is not self:
            # A commit was interrupted and is undone. The block may be used for another message.
            self._forget()
            return
        # A child that was forked meanwhile may have a view that this process has dropped.
        ledger = self._live.ledger
        seen = ledger.visible(self._birth, ledger.death)
        if sys.getrefcount(self.root) == UNSHARED and not seen:
            del segment.records[block]
            if not segment.heads[block]:
                self._heap.give_back(segment, block)
        else:
            record = owner_record(self._live, self._heap, segment, block, self._nbytes, "rw")
            record.birth = self._birth
            self._live.watch(record, self.root)
        self._forget()

    def _forget(self) -> None:
        self.root = None
        self._live.fillings.pop(self, None)
