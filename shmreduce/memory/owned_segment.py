"""A segment that this process made: which of its blocks are free, and which runs are cold.

May import errors, contracts, ``block_locks``, ``mapping``, ``layout``, ``size_classes``,
``lease`` and ``segment``.
"""

from __future__ import annotations

import time
from bisect import insort
from typing import TYPE_CHECKING

from shmreduce.memory.block_locks import if_unlocked
from shmreduce.memory.layout import BY_VALUE, SHARED, SegmentHeader
from shmreduce.memory.lease import Lease
from shmreduce.memory.mapping import HUGE_PAGE, PAGE_SIZE, Mapping
from shmreduce.memory.segment import Segment
from shmreduce.memory.size_classes import SMALLEST_BLOCK

if TYPE_CHECKING:
    from shmreduce.contracts import SegmentFile, SharingStrategy

__all__ = ["OwnedSegment"]

_ALIGNMENTS = (HUGE_PAGE, PAGE_SIZE, SMALLEST_BLOCK)
"""A block begins at a multiple of the largest of these that is not larger than the block.
The gaps cost addresses, but no memory."""


class OwnedSegment(Segment):
    """A segment that this process made and allocates from."""

    def __init__(
        self, file: SegmentFile, header: SegmentHeader, strategy: SharingStrategy
    ) -> None:
        super().__init__(file, header, strategy, owner=True)
        start = self.layout.data_offset
        try:
            self.data = Mapping(self.fd, start, header.size - start)
        except BaseException:
            # The caller, which made the file, closes it.
            self.give_up_locks()
            raise
        if header.kind == SHARED:
            # The owner's views and those of the receivers are of the same memory.
            self.import_mapping = self.data
        self.inherited = False
        """Whether this process is a forked child, and the segment its parent's."""
        self.cold: list[tuple[int, int]] = [(start, header.size - start)]
        """Free runs without pages, as (offset, size), sorted by offset."""
        self.unused = 0
        """All block indices from this one on have never been used."""
        self.spare: list[int] = []
        """Indices of blocks whose run was made cold."""
        self.out: dict[int, float] = {}
        """Blocks that are not free, with the time since when (monotonic seconds)."""
        self.small: dict[int, tuple[int, int]] = {}
        """Blocks with small pages where huge ones could be: from which offset on, and how often
        it is used before the kernel is asked again."""
        if self.block_tables is not None:
            self.block_tables.out, self.block_tables.small = self.out, self.small
        self.reserved = 0
        """Bytes of the segment, tables included, that are booked with the family."""
        self._seen: dict[tuple[int, int], float] = {}
        """When each unread message, as (slot, word), was first seen."""

    def try_free(self, block: int) -> bool:
        """Raise the generation of a block without leases and views; return whether it was free.

        Afterwards every handle with the old generation is stale, and the caller may reuse
        the block.
        """
        if self.heads[block]:
            return False
        if self.header.kind == BY_VALUE:
            # Needs no lock against other processes: a message of such a block is loaded only
            # once, so a process without a lease on the block cannot get one.
            return self._take_back(block)
        mark = object()
        # A segment is not closed while one of its blocks is out, or while it is pinned. The
        # pin is needed because another thread may free this very block at any moment.
        self.pins[mark] = None
        try:
            if block not in self.out:
                return False
            taken = self._try_take_back(block)
            if taken is None:
                # Another process or thread has the lock; look again at the next collection.
                self.hints[block] = 1
            return bool(taken)
        finally:
            self.unpin(mark)

    def recall(self, block: int) -> int | None:
        """Make all handles of a block stale if it has no lease; return its new generation."""
        return None if self.heads[block] else self._recall(block)

    @if_unlocked
    def _recall(self, block: int) -> int | None:
        if self.heads[block]:
            return None
        self.generations[block] += 1
        return int(self.generations[block])

    @if_unlocked
    def _try_take_back(self, block: int) -> bool:
        return self._take_back(block)

    def _take_back(self, block: int) -> bool:
        # Several threads may find that a block is unused; only one of them gets its entry. A
        # slow thread may get the entry of the block's next life: then `records`, which was
        # set before that entry, has the block.
        since = self.out.pop(block, None)
        if since is None:
            return False
        if block in self.records or self.heads[block]:
            self.out[block] = since
            # A thread that found no entry meanwhile left the block alone, so look at it again.
            self.hints[block] = 1
            return False
        self.generations[block] += 1
        return True

    def give_up(self, timeout: float | None) -> None:
        """End messages that nobody is going to read, those of other processes included.

        A process that has sent a block on may be dead, and cannot end its messages itself.
        """
        super().give_up(timeout)
        if timeout is None:
            return
        now = time.monotonic()
        seen, self._seen = self._seen, {}
        for block in list(self.out):
            if self.heads[block]:
                self._end_old_messages(block, seen, now, timeout)

    def _end_old_messages(
        self, block: int, seen: dict[tuple[int, int], float], now: float, timeout: float
    ) -> None:
        mark = object()
        self.pins[mark] = None
        try:
            if block in self.out:
                self._unlink_old_messages(block, seen, now, timeout)
        finally:
            self.unpin(mark)

    @if_unlocked
    def _unlink_old_messages(
        self, block: int, seen: dict[tuple[int, int], float], now: float, timeout: float
    ) -> None:
        # A message that is still being pickled here is not old, however long that takes.
        incomplete = {mark.slot for mark in list(self.pins) if isinstance(mark, Lease)}
        for slot in self.messages(block):
            if slot in incomplete:
                continue
            key = (slot, self.words[slot])
            since = seen.get(key, now)
            if now - since > timeout:
                self._unlink(block, slot)
            else:
                self._seen[key] = since

    @property
    def empty(self) -> bool:
        """Whether the segment has no block at all, neither in use nor warm."""
        return len(self.spare) == self.unused

    def carve(self, size: int, count: int) -> list[int]:
        """Take up to ``count`` adjacent cold runs; return block indices, still without pages."""
        alignment = next(each for each in _ALIGNMENTS if each <= size)
        for place, (offset, length) in enumerate(self.cold):
            start = -(-offset // alignment) * alignment
            fitting = (offset + length - start) // size
            if fitting <= 0:
                continue
            blocks = self._take_indices(min(count, fitting))
            end = start + size * len(blocks)
            rest = [(offset, start - offset), (end, offset + length - end)]
            self.cold[place : place + 1] = [run for run in rest if run[1]]
            for number, block in enumerate(blocks):
                self.offsets[block] = start + size * number
                self.capacities[block] = size
            return blocks
        return []

    def _take_indices(self, count: int) -> list[int]:
        blocks = [self.spare.pop() for _ in range(min(count, len(self.spare)))]
        fresh = min(count - len(blocks), self.layout.blocks - self.unused)
        blocks.extend(range(self.unused, self.unused + fresh))
        self.unused += fresh
        return blocks

    def uncarve(self, block: int) -> tuple[int, int]:
        """Make a free block's run cold again; return the run, merged with its neighbours."""
        run = (self.offsets[block], self.capacities[block])
        self.capacities[block] = 0
        self.small.pop(block, None)
        insort(self.cold, run)
        place = self.cold.index(run)
        if place + 1 < len(self.cold) and run[0] + run[1] == self.cold[place + 1][0]:
            self.cold[place : place + 2] = [(run[0], run[1] + self.cold[place + 1][1])]
        if place and sum(self.cold[place - 1]) == self.cold[place][0]:
            place -= 1
            before, after = self.cold[place : place + 2]
            self.cold[place : place + 2] = [(before[0], before[1] + after[1])]
        self.spare.append(block)
        return self.cold[place]
