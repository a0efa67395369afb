"""The allocator over the segments that this process made.

May import errors, contracts, ``thread_locks``, ``mapping``, ``layout``, ``size_classes``,
``segment``, ``owned_segment``, ``reservation`` and ``segment_creation``.

A freed block stays *warm*, its pages allocated and mapped, on the stack of its
size and is the first to be used again: a copy into warm memory is ten times
faster than into fresh pages. What is not warm is *cold*: address space of the
sparse file without pages. Idle blocks are cooled by punching holes
(fallocate(2)); cold runs merge and are carved again at any size.

The fast path takes a block off a stack, one atomic list operation, without a
lock. Carving, cooling and growing hold the heap's lock; a call that re-enters in
the thread that holds it (from a signal handler or a finalizer) gets
:class:`HeapBusyError` instead of a deadlock.
"""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol

from shmreduce.errors import OutOfSharedMemoryError, SegmentError
from shmreduce.memory.layout import BY_VALUE
from shmreduce.memory.mapping import PAGE_SIZE, page_ceil
from shmreduce.memory.reservation import (
    Contents,
    check_headroom,
    free_whole_pages,
    go_on_making_huge,
    reserve_run,
)
from shmreduce.memory.segment_creation import SegmentHost, create_segment
from shmreduce.memory.size_classes import FIRST_SEGMENT, SLAB, next_segment_size, size_class
from shmreduce.thread_locks import interrupt_safe, taken_at_once

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from shmreduce.contracts import SharingStrategy
    from shmreduce.memory.mapping import Mapping
    from shmreduce.memory.owned_segment import OwnedSegment
    from shmreduce.memory.segment import Segment

__all__ = ["Heap", "HeapBusyError", "HeapHost"]

_POPULATE_FROM = 256 << 10
"""Bytes from which new pages are mapped by one call, not by a fault for each."""
_REAP_SECONDS = 1.0
"""How often at most a heap that needs room looks for killed processes, if there is some left."""
_REST = 20
"""For how many times as long as it took to look for killed processes that is not done again."""
_LONGEST_REST = 10.0
"""Seconds: the process may have been stopped while it looked."""


class HeapBusyError(Exception):
    """The heap is in use where it cannot be waited for, by the calling thread itself mostly.

    No user sees it: whoever enters a heap catches it. ``Message.allocate`` has the
    bytes pickled in the ordinary way, ``allocation.allocate`` takes a spare heap,
    ``Runtime.cool_others`` passes the heap over, and those who look after heaps,
    ``idle`` and ``BornHeap``, leave it until they look again.
    """


class HeapHost(SegmentHost, Protocol):
    """What a heap needs of the process that it belongs to."""

    @property
    def directory(self) -> dict[bytes, Segment]:
        """Where segments are listed by token while they exist."""

    def list_again(self, segment: Segment) -> None:
        """List a segment that was taken out for a moment, whoever is there by now."""

    def cool_others(self, asking: Heap) -> int:
        """Give back what the other heaps have free; return how many bytes."""

    def give_up(self) -> None:
        """End messages that nobody is going to read."""

    def on_growth(self) -> None:
        """Take note that more memory was reserved."""


class Heap:
    """Blocks of one kind that this process made.

    Parameters
    ----------
    kind : int
        ``BY_VALUE`` or ``SHARED``.
    strategy : SharingStrategy
        Makes the segments.
    host : HeapHost
        The process's state.
    """

    def __init__(
        self,
        kind: int,
        strategy: SharingStrategy,
        host: HeapHost,
    ) -> None:
        self.kind = kind
        self.strategy = strategy
        self.segments: list[OwnedSegment] = []
        self.warm: dict[int, list[tuple[OwnedSegment, int]]] = {}
        self._lock: Any = threading.RLock()
        self._locked = interrupt_safe(self._lock)
        self._locked_at_once = taken_at_once(self._lock, _used_by_another)
        self._inherited = False
        self._host = host
        self._whole_pages = kind == BY_VALUE
        self._next_segment = FIRST_SEGMENT
        self._reaped = self.last_used = time.monotonic()
        self._reaping_took = 0.0

    # Allocation

    def allocate(
        self, nbytes: int, *, whole_pages: bool = False, contents: Contents | None = None
    ) -> tuple[OwnedSegment, int]:
        """Return a block of at least ``nbytes`` that nobody else can see.

        The block is the caller's until it gives it to :meth:`give_back`. A new one may
        have its ``contents``, of ``nbytes``, already: these say so.

        Raises
        ------
        OutOfSharedMemoryError, BudgetExceededError
            If there is no room. Nothing is taken.
        HeapBusyError
            On re-entry in a thread that is inside the heap.
        """
        size = size_class(nbytes, whole_pages=whole_pages or self._whole_pages)
        self.collect()
        warm = found = self._take_warm(size)
        if found is None:
            with self.exclusive():
                found = self._take_warm(size) or self._make_room(size, contents)
            self._host.on_growth()
        segment, block = found
        # Before it counts as out, so that reap() in another thread, which sees
        # neither views nor leases yet, leaves it alone.
        segment.records[block] = None
        segment.out[block] = self.last_used = time.monotonic()
        if warm is not None and block in segment.small:
            try:
                go_on_making_huge(segment, block)
            except BaseException:
                # Ctrl-C: nobody has seen the block.
                self.untake(segment, block)
                raise
        return found

    def untake(self, segment: OwnedSegment, block: int) -> None:
        """Take a block back of which :meth:`allocate` had told nobody but the caller."""
        del segment.records[block]
        self.give_back(segment, block)

    def give_back(self, segment: OwnedSegment, block: int) -> bool:
        """Free a block that nobody needs; else it waits for :meth:`collect`."""
        if not segment.try_free(block):
            return False
        self._keep_warm(segment, block)
        return True

    def collect(self) -> int:
        """Free the blocks that others have released since the last call."""
        freed = 0
        for segment in self.segments:
            layout = segment.layout
            pages = segment.tables.pages
            end = layout.hints + segment.unused
            place = pages.find(b"\1", layout.hints, end)
            while place != -1:
                block = place - layout.hints
                # Cleared before the chain is looked at: a release that comes
                # later sets it again.
                segment.hints[block] = 0
                if block in segment.out and block not in segment.records:
                    freed += self.give_back(segment, block)
                place = pages.find(b"\1", place + 1, end)
        return freed

    def _take_warm(self, size: int) -> tuple[OwnedSegment, int] | None:
        stack = self.warm.get(size)
        if stack:
            try:
                return stack.pop()
            except IndexError:
                return None
        return None

    def _keep_warm(self, segment: OwnedSegment, block: int) -> None:
        self.warm.setdefault(segment.capacities[block], []).append((segment, block))

    def keep_apart_in_child(self) -> None:
        """Have what a forked child writes to its parent's tables and messages stay in the child.

        The fork may have come while a block was taken or filled, from a signal
        handler, a destructor or a reducer, and the child goes on with that as its
        parent does.
        """
        self._inherited = True
        for segment in self.segments:
            segment.inherited = True
        for segment in self.segments:
            # Where the kernel refuses, or the descriptor was closed, they stay as they are.
            with suppress(SegmentError):
                fd = segment.checked_fd
                for mapping in self._makers_alone(segment):
                    mapping.cover(fd, mapping.offset, mapping.size, private=True)

    def _makers_alone(self, segment: OwnedSegment) -> list[Mapping]:
        """Return the mappings by which nobody but the maker writes to a segment."""
        return [segment.tables, segment.data] if self.kind == BY_VALUE else [segment.tables]

    # Growth, all under the lock

    def exclusive(self, *, wait: bool = True) -> AbstractContextManager[Any]:
        """Return what ``with`` holds the heap's lock by.

        A thread that has one heap is not to ``wait`` for another, so two cannot wait
        for each other.

        Raises
        ------
        HeapBusyError
            On re-entry. From ``with``, if another thread has it and is not to be
            waited for.
        """
        if self._lock._is_owned():
            raise HeapBusyError(
                "this thread is inside the heap already, where a signal handler or a finalizer "
                "has interrupted it"
            )
        # The lock's own ``with``: Ctrl-C does not come between the lock and the block. It
        # would between a generator's lock and the block, and then, as long as somebody
        # keeps the traceback, the generator and its lock are kept, too.
        return self._locked if wait else self._locked_at_once

    def _make_room(self, size: int, contents: Contents | None) -> tuple[OwnedSegment, int]:
        for segment in self.segments:
            # Before anything is given or taken: the number may be another file's.
            _ = segment.checked_fd
        if self.reap_after(_REAP_SECONDS):
            found = self._take_warm(size)
            if found is not None:
                return found
        try:
            return self._carve_or_grow(size, contents)
        except OutOfSharedMemoryError:
            # Blocks of killed processes, and warm ones of other sizes, make way
            # before anybody is refused.
            self.reap()
            found = self._take_warm(size)
            if found is not None:
                return found
            if not self.cool(0) + self._host.cool_others(self):
                raise
            return self._carve_or_grow(size, contents)

    def _carve_or_grow(self, size: int, contents: Contents | None) -> tuple[OwnedSegment, int]:
        # Small blocks are carved many at a time: booking and reserving cost
        # system calls.
        count = max(1, SLAB // size)
        for segment in reversed(self.segments):
            found = self._carve(segment, size, count, contents)
            if found is not None:
                return found
        segment = self._grow(size, size * count)
        found = self._carve(segment, size, count, contents, checked=True)
        if found is None:
            raise SegmentError(
                f"segment {segment.token.hex()} of {segment.header.size} bytes has no room for "
                f"a block of {size} bytes though it was made for it; please report this",
                operation="carve",
                errno=0,
                segment=segment.token.hex(),
            )
        return found

    def _carve(
        self,
        segment: OwnedSegment,
        size: int,
        count: int,
        contents: Contents | None,
        *,
        checked: bool = False,
    ) -> tuple[OwnedSegment, int] | None:
        """Carve a run of blocks and give it pages; return one, keep the others warm.

        Returns None if the segment has no room for one. With ``checked``, the system was
        asked for this memory when the segment was made: that takes half a dozen files of
        the kernel's, and the time of some messages.
        """
        blocks: list[int] = []
        before = segment.reserved
        try:
            blocks = segment.carve(size, count)
            if not blocks:
                return None
            offset, length = segment.offsets[blocks[0]], size * len(blocks)
            self._host.family.reserve(length, self._host.budget(), segment)
            if not checked:
                check_headroom(length, segment.strategy)
            huge = reserve_run(segment, offset, length, contents)
        except BaseException:
            # What was booked, not what was asked for: Ctrl-C may have come before or after.
            booked = segment.reserved - before
            if booked:
                self._host.family.book(-booked, segment)
            for block in blocks:
                segment.uncarve(block)
            raise
        if length >= _POPULATE_FROM and not (contents is not None and contents.written):
            segment.data.populate(offset & -PAGE_SIZE, page_ceil(length))
        if huge < offset + length:
            segment.small[blocks[0]] = huge, 0
        for block in blocks[1:]:
            self._keep_warm(segment, block)
        return segment, blocks[0]

    def _grow(self, size: int, needed: int) -> OwnedSegment:
        """Make a segment with addresses for blocks of ``size``, and ``needed`` bytes come now."""
        wanted = max(self._next_segment, 2 * size)
        directory = self._host.directory
        try:
            segment = create_segment(self.kind, wanted, needed, self.strategy, self._host)
        except SegmentError:
            # Address space or file size may be limited: ask for just enough.
            segment = create_segment(self.kind, size, needed, self.strategy, self._host)
        directory[segment.token] = segment
        self.segments.append(segment)
        self._next_segment = next_segment_size(wanted)
        if self._inherited:
            # A signal handler has forked while it was made, and this is the child.
            segment.give_up_locks()
            self.keep_apart_in_child()
        return segment

    # Taking back

    def reap(self) -> None:
        """End the leases of killed processes, wherever blocks are out."""
        began = self._reaped = time.monotonic()
        self._host.give_up()
        mark = object()
        for segment in list(self.segments):
            # Another thread that does the same may find it empty, and close it.
            segment.pins[mark] = None
            # Of tens of thousands of blocks most have the same few holders, and none is
            # dead: to lock each block and ask for each holder would take seconds.
            known: dict[int, bool] = {}
            try:
                for block in list(segment.out):
                    if segment.heads[block] and segment.seems_held_by_dead(block, known):
                        segment.drop_dead_holders(block)
                    if not segment.heads[block] and block not in segment.records:
                        self.give_back(segment, block)
            finally:
                segment.unpin(mark)
        self._reaping_took = time.monotonic() - began

    def reap_after(self, seconds: float) -> bool:
        """Do what :meth:`reap` does unless that was just done; return whether it was due.

        With a hundred thousand blocks out it takes a tenth of a second.
        """
        pause = max(seconds, min(_REST * self._reaping_took, _LONGEST_REST))
        due = time.monotonic() - self._reaped > pause
        if due:
            self.reap()
        return due

    def cool(self, keep: int) -> int:
        """Punch out warm blocks, largest first, until ``keep`` bytes are warm.

        Returns the bytes given back to the system. Call under the lock.
        """
        # A list: other threads, and views that die here, bring sizes that are new.
        sizes = sorted(self.warm, reverse=True)
        warm = sum(size * len(self.warm[size]) for size in sizes)
        released = 0
        for size in sizes:
            stack = self.warm[size]
            while stack and warm - released > keep:
                try:
                    segment, block = stack.pop()
                except IndexError:
                    break
                self._cool_block(segment, block)
                released += size
        self._drop_empty()
        return released

    def _cool_block(self, segment: OwnedSegment, block: int) -> None:
        offset, size = segment.offsets[block], segment.capacities[block]
        start, length = segment.uncarve(block)
        # Now, not when the pages are gone, which takes longer: what Ctrl-C leaves is booked
        # again when it is carved again.
        self._host.family.book(-size, segment)
        # Whole pages of the merged run: a page may have held several blocks.
        first, last = offset & -PAGE_SIZE, page_ceil(offset + size)
        free_whole_pages(segment, max(start, first), min(start + length, last))

    def _drop_empty(self) -> None:
        for segment in list(self.segments):
            if not segment.empty:
                continue
            # Out of sight first: a call that has pinned it just before is seen
            # by the second look.
            self._host.directory.pop(segment.token, None)
            if segment.holds or segment.pins:
                self._host.list_again(segment)
            else:
                self._host.family.book(-segment.reserved, segment)
                self.segments.remove(segment)
                segment.close()
                self._unlink(segment)
        if not self.segments:
            self._next_segment = FIRST_SEGMENT

    def leave(self) -> None:
        """Give back what nobody needs any more, at the process's end.

        Names are removed, and the pages of free blocks freed, since the segment
        may live on in the mailbox or in importers. Nothing here waits. What is
        left of this member's reservation ends with its last forked child.
        """
        try:
            self.unlink_names()
        finally:
            self._free_all()

    def _free_all(self) -> None:
        self.collect()
        freed = 0
        for stack in list(self.warm.values()):
            while stack:
                segment, block = stack.pop()
                offset = segment.offsets[block]
                freed += free_whole_pages(segment, offset, offset + segment.capacities[block])
        if freed:
            self._host.family.lower(freed)

    def unlink_names(self) -> None:
        """Remove the names of all segments, which stay open.

        If one cannot be removed its error is raised when all others have gone.
        """
        failed: Exception | None = None
        for segment in list(self.segments):
            try:
                self._unlink(segment)
            except Exception as error:
                failed = failed or error
        if failed is not None:
            raise failed

    def _unlink(self, segment: OwnedSegment) -> None:
        if segment.file.name is not None:
            self.strategy.unlink(segment.file.name)

    @property
    def warm_bytes(self) -> int:
        """Bytes of free blocks whose pages are kept."""
        return sum(size * len(self.warm[size]) for size in list(self.warm))

    @property
    def block_bytes(self) -> int:
        """Bytes that all blocks have pages for, free ones included, tables not."""
        return sum(segment.reserved - segment.layout.slot_words for segment in list(self.segments))

    @property
    def reserved_bytes(self) -> int:
        """Bytes of shared memory that the heap's segments have pages for."""
        return sum(segment.reserved for segment in list(self.segments))


def _used_by_another() -> HeapBusyError:
    return HeapBusyError("another thread is inside the heap")
