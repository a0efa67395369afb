"""The heap whose blocks the compiled allocator gives to arrays.

May import errors, settings, ``fork_hooks``, ``thread_locks``, :mod:`shmreduce.memory` and
``library``.

A block is the allocator's while an array lives in it and while it lies idle for
the next one; what stands there is in the allocator's table alone. It is this
heap's, as any by-value block, when its array has been freed and somebody else
may still see it: a receiver, to whom it was moved, or a forked child. Once that
is over it goes back to the allocator.

What an interrupt or a kill leaves half done is a block that is not used again.
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
from shmreduce.settings import get_settings
from shmreduce.thread_locks import taken_at_once

if TYPE_CHECKING:
    from shmreduce.contracts import SharingStrategy
    from shmreduce.memory.mapping import Mapping
    from shmreduce.memory.owned_segment import OwnedSegment

__all__ = ["BornHeap", "get_heap", "has_address", "heap_of"]

_SMALLEST = 64 << 10
"""Bytes; below, a block of whole pages would waste too much."""
_REGION = 1 << 30
"""Bytes of addresses that the allocator may carve; pages come as it does."""
_ADDRESS_SHARE = 16
"""Of limited addresses (ulimit -v), which part a region may take."""
_MOST_BLOCKS = 8192
"""That the allocator may carve from one region."""
_HEADROOM_SHARE = 0.8
"""Of what the system can still give, which part the allocator may carve."""

_keep_alive = ctypes.pythonapi.Py_IncRef
_keep_alive.argtypes = [ctypes.py_object]
_keep_alive.restype = None
_let_go = ctypes.pythonapi.Py_DecRef
_let_go.argtypes = [ctypes.py_object]
_let_go.restype = None

_heaps: dict[int, BornHeap] = {}
"""Which heap's segment each range of the allocator is."""
_lenders: list[BornHeap] = []
"""The heap in which arrays are born now, if any."""


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
        # The allocator counts forks from when it was loaded, the ledger from
        # when shared memory was first used here.
        self._forks_before = self._library.counters.forks - self._ledger.forks
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
        self.moving: dict[int, None] = {}
        """Entries that a message under way may move; nobody else decides about them."""
        # A child sees arrays that no root of this process tells of.
        runtime.live.guards_forks = True

    # The allocator's entries. Only who has the turn looks at them for longer
    # than an instant: they may become other blocks' when they are released.

    def place_of(self, number: int) -> tuple[OwnedSegment, int] | None:
        """Return segment and block of a live entry, None if it cannot be told just now."""
        try:
            with _turn.ours:
                return self._place_of(number)
        except _TurnTakenError:
            return None

    def _place_of(self, number: int) -> tuple[OwnedSegment, int]:
        entry = self._library.table[number]
        segment = self._ranges[entry.range]
        if not entry.flags & KNOWN:
            # Written down and booked when it was carved long ago.
            data = segment.data
            segment.offsets[entry.block] = entry.address - data.address + data.offset
            segment.capacities[entry.block] = entry.capacity
            if self._library.known(number):
                # It is in use: too late to refuse it.
                self._host.family.book(entry.capacity, segment)
        return segment, entry.block

    def drain(self) -> None:
        """Take the blocks whose arrays have gone, as far as nobody sees them any more."""
        with suppress(_TurnTakenError), _turn.ours:
            self._drain()

    def _drain(self) -> None:
        library = self._library
        while number := library.take_freed():
            _heaps[library.table[number].range]._waiting.append(number)
        for _ in range(len(self._waiting)):
            number = self._waiting.popleft()
            if number in self.moving or not self._take_over(number):
                self._waiting.append(number)

    def _take_over(self, number: int) -> bool:
        entry = self._library.table[number]
        if self._seen_by_child(entry.birth, entry.death):
            return False
        # The next array here must write into the file again.
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
        if self._library.counters.forks - before != self._ledger.forks:
            # A fork under way, or one whose hooks were interrupted: nobody
            # knows whether its child has gone.
            return True
        return self._ledger.visible(birth - before, death - before)

    # What it is lent

    def tend(self) -> None:
        """Take what was freed, lend what is free, and see to it that there is enough.

        Done for every message that moves something, and around every block: so
        the usual case, in which there is nothing to do, is a few comparisons.
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
        """Let no more arrays be born here; those that live go on."""
        self.lending = False
        self._library.enable(0)
        self.tend()

    def start_lending(self) -> None:
        """Let large arrays be born here."""
        self.lending = True
        self.tend()
        self._library.enable(1)

    def _relieve_others(self) -> None:
        """See to it that nothing is born in the heap of another strategy any more."""
        for heap in _lenders:
            heap.lending = False
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
        """Give the allocator a region to carve, and say how much of it."""
        counters = self._library.counters
        threshold = max(get_settings().inline_limit, _SMALLEST)
        if (
            not counters.carved_bytes
            and not counters.missed
            and counters.largest <= self._prepared
            # Else some may have been refused since the last look.
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
            # Another thread is at it, or this one was when it was interrupted.
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
            # Not for what there is no room for anyway.
            if not enough and (wanted <= room or not left):
                needed = wanted if wanted <= room else 0
                self._new_region(max(3 * needed, _usual_region()), needed)
        except (HeapBusyError, SegmentError, LeaseTimeoutError):
            # No room, or another strategy's heap is in use: arrays come from ordinary
            # memory until the next look, and are copied when they are sent.
            return 0
        return room

    def _room(self) -> int:
        """Return how many bytes may be carved until the next look.

        An equal part of what the budget leaves to all members of the family,
        since the others may be about to do the same.
        """
        members = self._host.family.members()
        room = (self._host.budget() - sum(reserved for _, reserved in members)) // len(members)
        available = headroom()
        if available is not None:
            room = min(room, int(available * _HEADROOM_SHARE))
        return max(0, room)

    def _new_region(self, size: int, needed: int) -> None:
        """Lend the allocator addresses for ``size`` bytes; a budget may allow few of them."""
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
                # As if it had been a block: merged with its neighbours.
                block = rest.pop()
                segment.offsets[block], segment.capacities[block] = run
                segment.uncarve(block)
            else:
                insort(segment.cold, run)
        segment.spare.extend(rest)

    def _number_of(self, segment: OwnedSegment) -> int | None:
        """Return the allocator's number of a segment; None if it has no room for one more."""
        number = self._numbers.get(segment.token)
        if number is None:
            data = segment.data
            number = self._library.add_range(data.address, data.size, segment.fd, data.offset)
            if number < 0:
                return None
            # Arrays do not keep the mapping alive, and may be freed when
            # everything of Python's is gone: so it is never unmapped.
            _keep_alive(data.pages)
            self._ranges[number], _heaps[number] = segment, self
            self._numbers[segment.token] = number
        return number

    # What any heap does

    def _makers_alone(self, segment: OwnedSegment) -> list[Mapping]:
        # Of the arrays the allocator has made the pages private, and what was
        # written to those is nowhere else.
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
        """Take idle blocks back from the allocator, and give the system what is above ``keep``."""
        self._take_idle()
        if not self.lending:
            self._take_region_back()
        return super().cool(keep)

    def _take_idle(self) -> None:
        with suppress(_TurnTakenError), _turn.ours:
            while number := self._library.take_idle():
                heap = heap_of(number)
                # No message has named it in this life: no handle need become stale.
                segment, block = heap._place_of(number)
                self._library.release(number)
                heap._keep_warm(segment, block)

    def _drop_empty(self) -> None:
        for segment in self.segments:
            number = self._numbers.get(segment.token)
            # The allocator's functions use the descriptor.
            if segment.empty and number is not None and self._library.drop_range(number):
                for table in (self._ranges, _heaps):
                    table.pop(number, None)
                self._numbers.pop(segment.token)
                _let_go(segment.data.pages)
        super()._drop_empty()

    def leave(self) -> None:
        """Give back what nobody needs, at the process's end; nothing is born here any more."""
        self.lending = False
        self._library.end()
        self._take_idle()
        super().leave()

    @property
    def warm_bytes(self) -> int:
        """Bytes of free blocks whose pages are kept, the allocator's included."""
        return super().warm_bytes + self._library.counters.idle_bytes


def _usual_region() -> int:
    """Return how many bytes of addresses a region has: receivers must find as many."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    return _REGION if limit == resource.RLIM_INFINITY else min(_REGION, limit // _ADDRESS_SHARE)


def get_heap() -> BornHeap:
    """Return the heap for arrays that are born now, by the strategy in force.

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
    """Somebody else, or this thread further out, is at the entries. No user sees it."""


class _Turn:
    """Whose turn it is to look at the entries."""

    def __init__(self) -> None:
        self.renew()

    def renew(self) -> None:
        """Have it be nobody's."""
        # Not a reentrant one: a destructor that comes into the middle has no turn.
        lock = threading.Lock()
        ours = taken_at_once(lock, _TurnTakenError)
        self.lock, self.ours = lock, ours


_turn = _Turn()


def _forget() -> None:
    # A forked child's allocator has forgotten its parent's blocks, too.
    _heaps.clear()
    _lenders.clear()
    _turn.renew()


renew_in_children(_forget)
