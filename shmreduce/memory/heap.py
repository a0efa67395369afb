"""The allocator: it takes blocks from the segments that this process made.

May import errors, signals, contracts, ``thread_locks``, ``mapping``, ``layout``, ``size_classes``,
``segment``, ``owned_segment``, ``reservation`` and ``segment_creation``.

A freed block stays *warm*: its pages stay allocated and mapped, and it goes on the stack
of its size, from which the next block of that size is taken. A copy into warm memory is
ten times faster than into fresh pages. All other space is *cold*: addresses of the sparse
file, without pages. Idle blocks are cooled by punching holes (fallocate(2)). Cold runs
merge, and blocks of any size can be carved from them again.

The fast path pops a block off a stack. That is one atomic list operation and needs no
lock. Carving, cooling and growing hold the heap's lock. A signal handler or a finalizer
may call the heap again in the thread that holds the lock: that call gets
:class:`HeapBusyError` instead of a deadlock.
"""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol

from shmreduce.errors import InvalidHandleError, OutOfSharedMemoryError, SegmentError
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
from shmreduce.signals import is_from_system
from shmreduce.thread_locks import interrupt_safe, taken_at_once

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from shmreduce.contracts import SharingStrategy
    from shmreduce.memory.mapping import Mapping
    from shmreduce.memory.owned_segment import OwnedSegment
    from shmreduce.memory.segment import Segment

__all__ = ["Heap", "HeapBusyError", "HeapHost"]

_POPULATE_FROM = 256 << 10
"""New pages of this many bytes or more are mapped by one call, not by a fault for each."""
_REAP_SECONDS = 1.0
"""A heap that needs room looks for killed processes at most this often, unless all is full."""
_REST = 20
"""After such a look the heap waits this many times as long as the look took."""
_LONGEST_REST = 10.0
"""Seconds: the longest such wait. A look seems long if the process was stopped meanwhile."""


class HeapBusyError(Exception):
    """The heap is in use and the caller cannot wait, mostly since its own thread is using it.

    Users never see it, because every caller of a heap catches it: ``Message.allocate`` has
    the bytes pickled in the ordinary way, ``allocation.allocate`` takes a spare heap,
    ``Runtime.cool_others`` skips the heap, and ``idle`` and ``BornHeap`` leave it until
    they look again.
    """


class HeapHost(SegmentHost, Protocol):
    """What a heap needs from its process."""

    @property
    def directory(self) -> dict[bytes, Segment]:
        """The open segments, by token; a heap lists its own there."""

    def list_again(self, segment: Segment) -> None:
        """List a segment that was taken out for a moment, even if it was replaced since."""

    def cool_others(self, asking: Heap) -> int:
        """Give back the free memory of the other heaps; return how many bytes that were."""

    def give_up(self) -> None:
        """End messages that nobody is going to read."""

    def on_growth(self) -> None:
        """Note that more memory was reserved."""


class Heap:
    """Blocks of one kind that this process made.

    Parameters
    ----------
    kind : int
        ``BY_VALUE`` or ``SHARED``.
    strategy : SharingStrategy
        The strategy that makes the segments.
    host : HeapHost
        The state of the process.
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

        The block belongs to the caller until :meth:`give_back`. If it is new, the heap may
        have written ``contents``, of ``nbytes``, to it; then ``contents.written`` is True.

        Raises
        ------
        OutOfSharedMemoryError, BudgetExceededError
            If there is no room. Then nothing is taken.
        HeapBusyError
            If this thread is inside the heap already.
        """
        size = size_class(nbytes, whole_pages=whole_pages or self._whole_pages)
        self.collect()
        warm = found = self._take_warm(size)
        if found is None:
            with self.exclusive():
                found = self._take_warm(size) or self._make_room(size, contents)
            self._host.on_growth()
        segment, block = found
        # Set before `out`: otherwise reap() in another thread, which finds neither views nor
        # leases of the block yet, could free it.
        segment.records[block] = None
        segment.out[block] = self.last_used = time.monotonic()
        if warm is not None and block in segment.small:
            try:
                go_on_making_huge(segment, block)
            except BaseException:
                # Ctrl-C: nobody has seen the block, so it is taken back.
                self.untake(segment, block)
                raise
        return found

    def untake(self, segment: OwnedSegment, block: int) -> None:
        """Take back a block that only the caller of :meth:`allocate` knows of."""
        del segment.records[block]
        self.give_back(segment, block)

    def give_back(self, segment: OwnedSegment, block: int) -> bool:
        """Free a block that nobody needs; if it is still needed, :meth:`collect` frees it."""
        try:
            freed = segment.try_free(block)
        except SegmentError:
            # Other code has closed the segment's descriptors: the block is not used again.
            return False
        if not freed:
            return False
        self._keep_warm(segment, block)
        return True

    def collect(self) -> int:
        """Free the blocks that other processes have released since the last call."""
        freed = 0
        for segment in self.segments:
            layout = segment.layout
            pages = segment.tables.pages
            end = layout.hints + segment.unused
            place = pages.find(b"\1", layout.hints, end)
            while place != -1:
                block = place - layout.hints
                # Cleared before the chain is looked at: a release after that sets the hint
                # again.
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
        """Keep what a forked child writes to its parent's tables and messages in the child.

        A signal handler, a destructor or a reducer may fork while a block is taken or
        filled, and then both parent and child continue with that.
        """
        self._inherited = True
        for segment in self.segments:
            segment.inherited = True
        for segment in self.segments:
            # If the kernel refuses this, or the descriptor was closed, they stay shared.
            with suppress(SegmentError):
                fd = segment.checked_fd
                for mapping in self._makers_alone(segment):
                    mapping.cover(fd, mapping.offset, mapping.size, private=True)

    def _makers_alone(self, segment: OwnedSegment) -> list[Mapping]:
        """Return the mappings of a segment through which a forked child must not write."""
        return [segment.tables, segment.data] if self.kind == BY_VALUE else [segment.tables]

    # Growth. The heap's lock is held in all of it.

    def exclusive(self, *, wait: bool = True) -> AbstractContextManager[Any]:
        """Return a context manager that holds the heap's lock.

        A thread that holds one heap's lock must not ``wait`` for another heap's, so that
        two threads never wait for each other.

        Raises
        ------
        HeapBusyError
            If this thread holds the lock already. Without ``wait``, entering the context
            raises it if another thread holds the lock.
        """
        if self._lock._is_owned():
            raise HeapBusyError(
                "this thread is inside the heap already, where a signal handler or a finalizer "
                "has interrupted it"
            )
        # Not a generator's context manager: Ctrl-C may come between the generator's taking of
        # the lock and the block. Then the generator keeps the lock for as long as anything
        # keeps the traceback. With the lock's own context manager it cannot come in between.
        return self._locked if wait else self._locked_at_once

    def _make_room(self, size: int, contents: Contents | None) -> tuple[OwnedSegment, int]:
        for segment in self.segments:
            # Checked before pages are given or taken: the number may be another file's by now.
            _ = segment.checked_fd
        if self.reap_after(_REAP_SECONDS):
            found = self._take_warm(size)
            if found is not None:
                return found
        try:
            return self._carve_or_grow(size, contents)
        except OutOfSharedMemoryError:
            # Before the request is refused, blocks of killed processes are freed, and warm
            # blocks of other sizes are cooled.
            self.reap()
            found = self._take_warm(size)
            if found is not None:
                return found
            if not self.cool(0) + self._host.cool_others(self):
                raise
            return self._carve_or_grow(size, contents)

    def _carve_or_grow(self, size: int, contents: Contents | None) -> tuple[OwnedSegment, int]:
        # Small blocks are carved many at a time, because booking and reserving cost system
        # calls.
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

        Returns None if the segment has no room for one. With ``checked``, it was checked that
        the system has the memory when the segment was made. Checking reads half a dozen files
        of the kernel, which takes as long as some messages.
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
            # Ctrl-C may come before or after the booking, so undo what was really booked.
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
        """Make a segment with addresses for blocks of ``size``; ``needed`` bytes are used now."""
        wanted = max(self._next_segment, 2 * size)
        directory = self._host.directory
        try:
            segment = create_segment(self.kind, wanted, needed, self.strategy, self._host)
        except SegmentError:
            # Addresses or file sizes may be limited, so ask for just enough.
            segment = create_segment(self.kind, size, needed, self.strategy, self._host)
        directory[segment.token] = segment
        self.segments.append(segment)
        self._next_segment = next_segment_size(wanted)
        if self._inherited:
            # A signal handler forked while the segment was made, and this is the child.
            segment.give_up_locks()
            self.keep_apart_in_child()
        return segment

    # Taking back

    def reap(self) -> None:
        """End the leases of killed processes on all blocks that are out."""
        began = self._reaped = time.monotonic()
        self._host.give_up()
        mark = object()
        for segment in list(self.segments):
            # Pinned: another thread that does the same may find it empty and close it.
            segment.pins[mark] = None
            # Tens of thousands of blocks mostly have the same few holders, and none is dead.
            # Locking each block and asking for each holder would take seconds.
            known: dict[int, bool] = {}
            try:
                for block in list(segment.out):
                    if segment.heads[block] and segment.seems_held_by_dead(block, known):
                        # It cannot be locked if other code has closed the descriptors.
                        with suppress(SegmentError):
                            segment.drop_dead_holders(block)
                    if not segment.heads[block] and block not in segment.records:
                        self.give_back(segment, block)
            finally:
                segment.unpin(mark)
        self._reaping_took = time.monotonic() - began

    def reap_after(self, seconds: float) -> bool:
        """Call :meth:`reap` unless it ran a short time ago; return whether it was called.

        With a hundred thousand blocks out it takes a tenth of a second.
        """
        pause = max(seconds, min(_REST * self._reaping_took, _LONGEST_REST))
        due = time.monotonic() - self._reaped > pause
        if due:
            self.reap()
        return due

    def cool(self, keep: int) -> int:
        """Free the pages of warm blocks, largest first, until ``keep`` bytes are warm.

        Returns the number of bytes given back to the system. The caller holds the lock.
        """
        # A list, since other threads, and views that die meanwhile, add new sizes.
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
        # Booked before the pages are freed, which takes longer. If Ctrl-C comes in between, the
        # bytes are booked again when they are carved again.
        self._host.family.book(-size, segment)
        # Only pages that are wholly in the merged run: a page may hold several blocks.
        first, last = offset & -PAGE_SIZE, page_ceil(offset + size)
        free_whole_pages(segment, max(start, first), min(start + length, last))

    def _drop_empty(self) -> None:
        for segment in list(self.segments):
            if not segment.empty:
                continue
            # Taken out of the directory before pins are looked at: a call that has pinned it
            # just before is seen, and a later one does not find it.
            self._host.directory.pop(segment.token, None)
            if segment.holds or segment.pins:
                self._host.list_again(segment)
            else:
                self._host.family.book(-segment.reserved, segment)
                self.segments.remove(segment)
                segment.close()
                # The caller wants memory, and it is free now. The sweep at the end of this
                # process, or by another, removes the name.
                try:
                    with suppress(InvalidHandleError):
                        self._unlink(segment)
                except OSError as error:
                    if not is_from_system(error):
                        raise
        if not self.segments:
            self._next_segment = FIRST_SEGMENT

    def leave(self) -> None:
        """Give back memory that nobody needs any more, at the process's end.

        It removes names, and frees the pages of free blocks, because the segment may live on
        in the mailbox or in importers. Nothing here waits. The rest of this member's
        reservation ends with its last forked child.
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

        If a name cannot be removed, the error is raised after the others were removed.
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
        """Bytes of free blocks that keep their pages."""
        return sum(size * len(self.warm[size]) for size in list(self.warm))

    @property
    def block_bytes(self) -> int:
        """Bytes of pages that the blocks have, including free blocks, but not the tables."""
        return sum(segment.reserved - segment.layout.slot_words for segment in list(self.segments))

    @property
    def reserved_bytes(self) -> int:
        """Bytes of pages that the heap's segments have, tables included."""
        return sum(segment.reserved for segment in list(self.segments))


def _used_by_another() -> HeapBusyError:
    return HeapBusyError("another thread is inside the heap")
