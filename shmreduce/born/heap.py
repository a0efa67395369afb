"""The heap whose blocks the compiled allocator gives to arrays.

May import errors, settings, ``fork_hooks``, ``thread_locks``, :mod:`shmreduce.memory` and
``library``.

A block belongs to the allocator while an array lives in it, and while it is idle and
waits for the next array; then only the allocator's table has an entry for it. If its
array has been freed, but another process may still see it (a receiver to which it was
moved, or a forked child), the block belongs to this heap, like any by-value block. When
nobody sees it any more, it goes back to the allocator.

If an operation here is interrupted or the process is killed half-way, the worst result is
a block that is never used again.
"""

from __future__ import annotations

import ctypes
import os
import resource
import threading
import time
from bisect import insort
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, cast

from shmreduce.born.library import KNOWN, PRIVATE, Library, load
from shmreduce.errors import LeaseTimeoutError, SegmentError
from shmreduce.fork_hooks import renew_in_children
from shmreduce.memory.blocks import warn_of_exposed
from shmreduce.memory.headroom import headroom
from shmreduce.memory.heap import Heap, HeapBusyError, HeapHost
from shmreduce.memory.layout import BY_VALUE
from shmreduce.memory.runtime import current
from shmreduce.settings import inline_limit
from shmreduce.thread_locks import taken_at_once

if TYPE_CHECKING:
    from shmreduce.contracts import SharingStrategy
    from shmreduce.memory.mapping import Mapping
    from shmreduce.memory.owned_segment import OwnedSegment

__all__ = ["BornHeap", "get_heap", "has_address", "heap_of"]

_SMALLEST = 64 << 10
"""Bytes. For a smaller array, a block of whole pages would waste too much."""
_REGION = 1 << 30
"""Bytes of addresses that the allocator may carve. Pages are reserved only as it does."""
_ADDRESS_SHARE = 16
"""If addresses are limited (ulimit -v), a region may take 1/16 of them."""
_MOST_BLOCKS = 8192
"""The largest number of blocks that the allocator may carve from one region."""
_HEADROOM_SHARE = 0.8
"""The part of the memory that the system has left which the allocator may carve."""

_keep_alive = ctypes.pythonapi.Py_IncRef
_keep_alive.argtypes = [ctypes.py_object]
_keep_alive.restype = None
_let_go = ctypes.pythonapi.Py_DecRef
_let_go.argtypes = [ctypes.py_object]
_let_go.restype = None

_heaps: dict[int, BornHeap] = {}
"""The heaps by the number of a range of the allocator."""
_lenders: list[BornHeap] = []
"""The heap in which arrays are born now, if there is one."""


class BornHeap(Heap):
    """By-value blocks that the compiled allocator gives out.

    Parameters
    ----------
    kind : int
        ``BY_VALUE``.
    strategy : SharingStrategy
        Makes the segments.
    host : HeapHost
        The process's state.
    """

    def __init__(self, kind: int, strategy: SharingStrategy, host: HeapHost) -> None:
        super().__init__(kind, strategy, host)
        runtime = current()
        self._library: Library = load()
        self._ledger = runtime.live.ledger
        self._forks_before: int | None = None
        """How many more forks the allocator has counted than the ledger; None if that is not
        known yet. The one counts since it was loaded, the other since shared memory was first
        used here."""
        self._ranges: dict[int, OwnedSegment] = {}
        self._numbers: dict[bytes, int] = {}
        self._region_blocks: list[int] = []
        self._waiting: deque[int] = deque()
        self._exposed = 0
        self._threshold = self._served = self._prepared = 0
        self._has_room = False
        self.lending = False
        """Whether arrays may be born here now."""
        self._process = os.getpid()
        self.moving: dict[int, object] = {}
        """Entries that a message may move, with a mark of that move; until the message is
        complete, nobody else may take them."""
        # A forked child sees the arrays of the allocator, for which this process has no roots.
        runtime.live.guards_forks = True

    # The allocator's entries. Only the thread that has the turn may use one for longer than
    # an instant, since a released entry may be reused for another block.

    def place_of(self, number: int) -> tuple[OwnedSegment, int] | None:
        """Return segment and block of a live entry; None if another thread has the turn."""
        try:
            with _turn.ours:
                return self._place_of(number)
        except _TurnTakenError:
            return None

    def _place_of(self, number: int) -> tuple[OwnedSegment, int]:
        entry = self._library.table[number]
        segment = self._ranges[entry.range]
        if not entry.flags & KNOWN:
            # The allocator has carved the block, but this heap has not recorded it yet.
            data = segment.data
            segment.offsets[entry.block] = entry.address - data.address + data.offset
            segment.capacities[entry.block] = entry.capacity
            if self._library.known(number):
                # It is in use, so it must be booked even above the budget.
                self._host.family.book(entry.capacity, segment)
        return segment, entry.block

    def drain(self) -> None:
        """Take over the blocks whose arrays were freed and that no child can see any more."""
        with suppress(_TurnTakenError), _turn.ours:
            self._drain()

    def _drain(self) -> None:
        library = self._library
        while number := library.take_freed():
            _heaps[library.table[number].range]._waiting.append(number)
        # Thousands of arrays mostly have lived through the same few forks.
        seen: dict[tuple[int, int], bool] = {}
        for _ in range(len(self._waiting)):
            number = self._waiting.popleft()
            if number in self.moving or not self._take_over(number, seen):
                self._waiting.append(number)

    def _take_over(self, number: int, seen: dict[tuple[int, int], bool]) -> bool:
        entry = self._library.table[number]
        lived = entry.birth, entry.death
        if lived not in seen:
            seen[lived] = self._seen_by_child(*lived)
        if seen[lived]:
            return False
        # Private pages must become pages of the file again, for the next array.
        if entry.flags & PRIVATE and not self._library.restore(number):
            return False
        segment, block = self._place_of(number)
        self._library.release(number)
        segment.out[block] = time.monotonic()
        self.give_back(segment, block)
        return True

    def _seen_by_child(self, birth: int, death: int) -> bool:
        if birth == death:
            return False
        before = self._forks_before
        if before is None or self._library.counters.forks - before != self._ledger.forks:
            # A fork is in progress, or its hooks were interrupted: then it is not known
            # whether the child has ended.
            return True
        return self._ledger.visible(birth - before, death - before)

    # Memory that is lent to the allocator

    def tend(self) -> None:
        """Take over freed blocks, lend free ones, and make sure that the allocator has enough.

        This is done for every message that moves an array, and when a ``with`` block is
        entered or left. In the usual case there is nothing to do, which takes only a few
        comparisons.
        """
        if not self.is_own:
            # A child that was forked before its parent had sent a message goes on with it.
            return
        counters = self._library.counters
        noted = counters.unknown
        if noted:
            self._take_note_of_all()
        self.collect()
        if counters.exposed > self._exposed:
            self._exposed = counters.exposed
            warn_of_exposed(self._exposed)
        if self.lending:
            if _lenders != [self]:
                self._relieve_others()
            self._lend()
            self._provide()
            if self._forks_before is None:
                self._enable()
        if noted:
            self._host.on_growth()

    def _take_note_of_all(self) -> None:
        with suppress(_TurnTakenError), _turn.ours:
            while number := self._library.unknown():
                heap_of(number)._place_of(number)

    @property
    def is_own(self) -> bool:
        """Whether this process made the heap, and did not inherit it by a fork."""
        return self._process == os.getpid()

    def stop_lending(self) -> None:
        """Let no more arrays be born here; those that live are not affected."""
        self.lending = False
        self._library.enable(0)
        self.tend()

    def start_lending(self) -> None:
        """Let large arrays be born here, if no fork is under way that the allocator may miss."""
        self.lending = True
        self.tend()
        self._enable()

    def _enable(self) -> None:
        """Enable the allocator if it is known of which forks it knows.

        Another thread's fork that had begun when the allocator was loaded may happen without
        the allocator's hooks. It is marked in the ledger by then, or still to be prepared for
        by :func:`~shmreduce.fork_hooks.also_prepare`.
        """
        if self._forks_before is None:
            counters, ledger = self._library.counters, self._ledger
            # From here until the number is noted, no call lets another thread run.
            if ledger.pending or counters.forking:
                return
            self._forks_before = counters.forks - ledger.forks
        self._library.enable(1)

    def _relieve_others(self) -> None:
        """Let no more arrays be born in the heap of another strategy."""
        for heap in _lenders:
            heap.lending = False
        # Otherwise a block of theirs that comes free would be the next array's again and again.
        for number, heap in list(_heaps.items()):
            self._library.retire(number, heap is not self)
        self._take_idle()
        _lenders[:] = [self]

    def _lend(self) -> None:
        library = self._library
        for stack in list(self.warm.values()):
            while stack:
                try:
                    segment, block = stack.pop()
                except IndexError:
                    break
                address = segment.data.address + segment.offsets[block] - segment.data.offset
                number = self._number_of(segment)
                capacity = segment.capacities[block]
                if number is None or not library.lend(number, block, address, capacity):
                    stack.append((segment, block))
                    return

    def _provide(self) -> None:
        """Give the allocator a region, and set how many bytes of it it may carve."""
        counters = self._library.counters
        threshold = max(inline_limit(), _SMALLEST)
        if (
            not counters.carved_bytes
            and not counters.missed
            and counters.largest <= self._prepared
            # Without room, arrays may have been refused since the last call.
            and self._has_room
            and threshold == self._threshold
            and self._region_blocks
        ):
            return
        largest = max(counters.largest, counters.missed)
        wanted = self._library.size_class(largest)
        try:
            with self.exclusive(wait=False):
                room = self._prepare(wanted)
        except HeapBusyError:
            # Another thread is doing it, or this one was when it was interrupted.
            return
        self._threshold, self._prepared = threshold, largest
        self._has_room = self._library.size_class(max(largest, threshold)) <= room
        self._library.allow(threshold, room)

    def _prepare(self, wanted: int) -> int:
        """Give the allocator a region if the one that it has is too small; return the room."""
        left = self._library.region_left() if self._region_blocks else 0
        enough = left > 2 * wanted
        try:
            room = self._room()
            # A new region does not help if there is no room for an array of that size.
            if not enough and (wanted <= room or not left):
                needed = wanted if wanted <= room else 0
                self._new_region(max(3 * needed, _usual_region()), needed)
        except (HeapBusyError, SegmentError, LeaseTimeoutError):
            # No room, or another strategy's heap is in use. Until the next call arrays get
            # ordinary memory, and are copied when they are sent.
            return 0
        return room

    def _room(self) -> int:
        """Return how many bytes may be carved until the next call.

        That is the rest of the budget, divided equally among the members of the family,
        since the others may do the same at this moment.
        """
        members = self._host.family.members()
        room = (self._host.budget() - sum(reserved for _, reserved in members)) // len(members)
        available = headroom()
        if available is not None:
            room = min(room, int(available * _HEADROOM_SHARE))
        return max(0, room)

    def _new_region(self, size: int, needed: int) -> None:
        """Lend the allocator addresses for ``size`` bytes; the budget may allow to use few."""
        for heap in {*_heaps.values()} - {self}:
            with heap.exclusive(wait=False):
                heap._take_region_back()
        self._take_region_back()
        found = next(
            (
                (segment, place)
                for segment in self.segments
                for place, (_, length) in enumerate(segment.cold)
                if length >= size // 2
                and len(segment.spare) + segment.layout.blocks > segment.unused
            ),
            None,
        )
        zeroed = found is None
        if found is None:
            self._next_segment = max(self._next_segment, size)
            found = self._grow(size // 2, needed), 0
        segment, place = found
        number = self._number_of(segment)
        if number is None:
            return
        offset, length = segment.cold.pop(place)
        blocks = segment._take_indices(_MOST_BLOCKS)
        self._region_blocks = blocks
        self._library.lend_region(
            number,
            segment.data.address + offset - segment.data.offset,
            length,
            zeroed,
            (ctypes.c_uint32 * len(blocks))(*blocks),
            len(blocks),
        )

    def _take_region_back(self) -> None:
        number, used = ctypes.c_uint32(), ctypes.c_uint32()
        start, end = ctypes.c_uint64(), ctypes.c_uint64()
        if not self._region_blocks:
            return
        blocks, self._region_blocks = self._region_blocks, []
        if not self._library.take_region(number, start, end, used):
            return
        segment = self._ranges[number.value]
        rest = blocks[used.value :]
        length = end.value - start.value
        if length:
            run = (start.value - segment.data.address + segment.data.offset, length)
            if rest:
                # Given back as if it were a block, which merges it with its neighbours.
                block = rest.pop()
                segment.offsets[block], segment.capacities[block] = run
                segment.uncarve(block)
            else:
                insort(segment.cold, run)
        segment.spare.extend(rest)

    def _number_of(self, segment: OwnedSegment) -> int | None:
        """Return the allocator's range number of a segment; None if it cannot take the segment.

        Its table may be full, or other code may have closed the segment's descriptor, whose
        number may be another file's by now.
        """
        number = self._numbers.get(segment.token)
        if number is None:
            if not segment.is_open:
                return None
            data, fd = segment.data, segment.fd
            number = self._library.add_range(data.address, data.size, fd, data.offset)
            if number < 0:
                return None
            # Kept alive here, since arrays do not keep the mapping, and may be freed after
            # all Python objects are gone.
            _keep_alive(data.pages)
            self._ranges[number], _heaps[number] = segment, self
            self._numbers[segment.token] = number
        return number

    # Methods of any heap

    def _makers_alone(self, segment: OwnedSegment) -> list[Mapping]:
        # Not the data: the allocator has made the pages of the arrays private, and only they
        # have what was written there.
        return [segment.tables]

    def collect(self) -> int:
        """Take the blocks that arrays, children and receivers have released."""
        counters = self._library.counters
        if counters.freed or self._waiting:
            self.drain()
        served = counters.served
        if served != self._served:
            self._served, self.last_used = served, time.monotonic()
        return super().collect()

    def cool(self, keep: int) -> int:
        """Take idle blocks back from the allocator; give what is above ``keep`` to the system."""
        self._take_idle()
        if not self.lending:
            self._take_region_back()
        return super().cool(keep)

    def _take_idle(self) -> None:
        with suppress(_TurnTakenError), _turn.ours:
            while number := self._library.take_idle():
                heap = heap_of(number)
                # No message has had a handle of it since it was lent, so no handle need be
                # made stale.
                segment, block = heap._place_of(number)
                self._library.release(number)
                heap._keep_warm(segment, block)

    def _drop_empty(self) -> None:
        for segment in self.segments:
            # Before the segment's descriptor is closed, which the allocator uses.
            if segment.empty:
                self._drop_range(segment)
        super()._drop_empty()

    def _drop_range(self, segment: OwnedSegment) -> None:
        # Taken out first: when the range has been dropped, its number may be another segment's.
        # If Ctrl-C comes before that, add_range() returns the same number again.
        number = self._numbers.pop(segment.token, None)
        if number is None:
            return
        if not self._library.drop_range(number):
            self._numbers[segment.token] = number
            return
        for table in (self._ranges, _heaps):
            table.pop(number, None)
        _let_go(segment.data.pages)

    def leave(self) -> None:
        """Give back what nobody needs, at the process's end; no arrays are born here any more."""
        self.lending = False
        self._library.end()
        self._take_idle()
        super().leave()

    @property
    def warm_bytes(self) -> int:
        """Bytes of free blocks whose pages are kept, including those of the allocator."""
        return super().warm_bytes + self._library.counters.idle_bytes


def _usual_region() -> int:
    """Return how many bytes of addresses a region has; receivers need as many."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    return _REGION if limit == resource.RLIM_INFINITY else min(_REGION, limit // _ADDRESS_SHARE)


def get_heap() -> BornHeap:
    """Return the heap for arrays that are born now, with the current strategy.

    Raises
    ------
    AllocatorUnavailableError
        If the allocator was not built.
    """
    return cast("BornHeap", current().heap_for(BY_VALUE, "born", BornHeap))


def heap_of(number: int) -> BornHeap:
    """Return the heap that an entry of the allocator belongs to."""
    return _heaps[load().table[number].range]


def has_address(address: int) -> bool:
    """Return whether an address is of memory that the allocator gives to arrays."""
    for number, heap in list(_heaps.items()):
        segment = heap._ranges.get(number)
        if segment is not None and 0 <= address - segment.data.address < segment.data.size:
            return True
    return False


class _TurnTakenError(Exception):
    """Another thread uses the entries, or an outer call of this one. Users never see it.

    Whoever gets it leaves the work to its next call.
    """


class _Turn:
    """The lock for using the allocator's entries."""

    def __init__(self) -> None:
        self.renew()

    def renew(self) -> None:
        """Make a new lock, which is not held."""
        # Not reentrant: a destructor that interrupts the thread must not get the turn.
        lock = threading.Lock()
        ours = taken_at_once(lock, _TurnTakenError)
        self.lock, self.ours = lock, ours


_turn = _Turn()


def _forget() -> None:
    # In a forked child the allocator forgets its parent's blocks, too.
    _heaps.clear()
    _lenders.clear()
    _turn.renew()


renew_in_children(_forget)
