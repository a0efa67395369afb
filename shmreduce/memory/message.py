"""The leases of one pickled message, on the sender's and the receiver's side.

May import errors, contracts, settings, ``mapping``, ``segment``, ``heap``,
``blocks``, ``attachments``, ``handle`` and ``runtime``.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import sys
import threading
import time
import weakref
from contextlib import contextmanager
from multiprocessing.context import get_spawning_popen
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

from shmreduce.errors import (
    AttachError,
    ConfigurationError,
    InvalidHandleError,
    OutOfSharedMemoryError,
    SegmentError,
    StaleHandleError,
)
from shmreduce.memory.blocks import Block, Record, owner_record
from shmreduce.memory.handle import MARK, Handle, key_of, lease_of, pack_handle
from shmreduce.memory.heap import HeapBusyError, OwnedSegment
from shmreduce.memory.layout import BY_VALUE, SHARED
from shmreduce.memory.mapping import Mapping, make_root
from shmreduce.memory.runtime import Runtime, current
from shmreduce.memory.segment import NONCE_MASK, Segment, Sent
from shmreduce.settings import get_settings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from collections.abc import Mapping as Arriving

    from shmreduce.contracts import Mode
    from shmreduce.memory.blocks import LiveBlocks
    from shmreduce.memory.heap import Heap

    Arrived = Arriving[bytes, int]

__all__ = [
    "Loading",
    "Message",
    "allocate",
    "discard_message",
    "find_block",
    "hold_message",
    "import_block",
    "sending",
]

_PRIVATE_FROM = 256 << 10
"""Bytes from which a received array travels on by private pages, not by a copy."""
_MODES = ("rw", "ro", "cow")
_NOTHING: Arrived = MappingProxyType({})

_nonces = itertools.count(secrets.randbits(60))


def _new_nonces() -> None:
    # A forked child must not go on with its parent's numbers.
    global _nonces
    _nonces = itertools.count(secrets.randbits(60))


os.register_at_fork(after_in_child=_new_nonces)


class _LoadingHere(threading.local):
    """The load that the current thread is in."""

    loading: Loading | None = None


_here = _LoadingHere()


class Mover(Protocol):
    """Lets arrays travel without a copy whose memory nobody else has; see ``born.moving``."""

    def move(self, message: Message, address: int, used: int) -> bytes | None:
        """See :meth:`Message.move`."""


class _SendingHere(threading.local):
    """Who moves arrays in the message that the current thread is pickling, if anybody."""

    mover: Mover | None = None


sending = _SendingHere()


class Loading:
    """What one unpickling has claimed so far.

    An error that may pass (no descriptor is free at the moment) can hit the
    second block of a message. The first is turned back into a message then,
    so that the whole can be loaded again.

    Parameters
    ----------
    arrived : mapping of bytes to int, optional
        Descriptors of segments that came with the message, by token. They are
        the caller's, who keeps them open until the unpickling has ended.
    """

    __slots__ = ("_claims", "_known", "_outer", "arrived")

    def __init__(self, arrived: Arrived | None = None) -> None:
        self.arrived: Arrived = _NOTHING if arrived is None else arrived
        # The blocks themselves: unpickling drops the arrays before it raises.
        self._claims: list[tuple[Block, Handle]] = []
        self._known: list[tuple[Block, int, int]] = []
        self._outer = _here.loading
        _here.loading = self

    def claimed(self, block: Block, what: Handle) -> None:
        """Note a claim."""
        self._claims.append((block, what))

    def known(self, block: Block, slot: int, nonce: int) -> None:
        """Note a message about a block that was here before: it ends with the unpickling."""
        self._known.append((block, slot, nonce))

    def undo(self) -> None:
        """Turn what was claimed back into what it was."""
        for block, what in self._claims:
            record = block._record
            if record.slot is not None:
                # From here on the death of the views means nothing any more.
                record.ended = True
                record.segment.holds.pop(record.slot, None)
                record.segment.unclaim(record.block, record.slot, what.nonce, what.slot)
        self._claims.clear()
        self._known.clear()

    def close(self) -> None:
        """End the unpickling."""
        _here.loading = self._outer
        for block, slot, nonce in self._known:
            _end_known(block, slot, nonce)


class Message:
    """The shared memory that one message takes with it.

    One is made for each pickling and handed to :meth:`Reducer.reduce`. What it
    gave out is kept once the message is complete, and taken back if pickling
    fails.

    Parameters
    ----------
    shared_memory : bool
        False for a message that goes to another host: nothing is given out.
    """

    __slots__ = ("_runtime", "_taken", "inline_limit", "shared_memory")

    def __init__(self, shared_memory: bool = True) -> None:
        settings = get_settings()
        self.shared_memory = shared_memory
        """Whether anything can be given out: not to another host, which may lack plugins, too."""
        self.inline_limit = settings.inline_limit
        """Bytes below which a by-value buffer should be pickled in the ordinary way."""
        self._runtime: Runtime | None = None
        self._taken: list[_Taken] = []

    def allocate(self, nbytes: int) -> tuple[memoryview, bytes] | None:
        """Give out a block that carries ``nbytes`` by value.

        Returns
        -------
        (memoryview, bytes) or None
            The bytes to fill before ``reduce`` returns, uninitialised, and the
            handle. None if this message must not, or at this moment cannot,
            use shared memory: pickle in the ordinary way.

        Raises
        ------
        OutOfSharedMemoryError, BudgetExceededError
            If there is no room and the settings do not say to pickle instead.
        """
        if not self.shared_memory:
            return None
        runtime = self._current()
        runtime.live.settle()
        heap = runtime.heap(BY_VALUE)
        try:
            segment, block = heap.allocate(nbytes)
        except HeapBusyError:
            return None
        except OutOfSharedMemoryError:
            if get_settings().on_exhausted == "pickle":
                return None
            raise
        taken = _Taken(segment, block, segment.generations[block], next(_nonces) & NONCE_MASK)
        taken.filling = _Filling(runtime.live, heap, segment, block, nbytes)
        try:
            taken.slot = segment.start_message(block, taken.nonce)
        except BaseException:
            taken.filling.end()
            raise
        self._taken.append(taken)
        return taken.filling.view(), pack_handle(
            taken.slot,
            taken.nonce,
            _constant(segment, block, taken.generation, nbytes, shared=False, mode="rw"),
        )

    def refer(self, block: Block, used: int) -> bytes | None:
        """Return a handle by which ``block`` travels without a copy, if it can.

        Parameters
        ----------
        block : Block
            From :func:`shmreduce.find_block`.
        used : int
            How many bytes of it the object being pickled covers.

        Returns
        -------
        bytes or None
            A handle to the whole block; None asks for a copy by
            :meth:`allocate`.

        Notes
        -----
        A shared block always can (but a ``cow`` one at a receiver, whose pages
        are its own). A block received by value can if this process is its
        only user: its pages here become copy-on-write, so that the receiver
        gets the bytes of this instant.
        """
        if not self.shared_memory:
            return None
        runtime = self._current()
        record = block._record
        inherited = record.live is not runtime.live
        if record.shared:
            if record.mode == "cow" and record.slot is not None:
                return None
        elif (
            record.slot is None
            or record.private
            or inherited
            or record.segment.capacities[record.block] < _PRIVATE_FROM
            or 2 * used < record.nbytes
            or not runtime.live.make_private(record)
        ):
            return None
        segment = record.segment
        if inherited:
            segment = runtime.attachments.own_view_of(segment)
        taken = self._add(segment, record.block, record.generation)
        written = record.written
        # A forked child that sends what it inherited is another sender.
        if written is None or segment is not record.segment:
            written = _constant(
                segment,
                record.block,
                record.generation,
                record.nbytes,
                shared=record.shared,
                mode=record.mode,
            )
            if segment is record.segment:
                record.written = written
        return pack_handle(taken.slot, taken.nonce, written)

    @property
    def moves(self) -> bool:
        """Whether :meth:`move` can be worth a try."""
        return sending.mover is not None

    def move(self, address: int, used: int) -> bytes | None:
        """Return a handle by which memory from ``shared_allocations`` travels without a copy.

        The bytes are those that the array has when the message is complete, and
        by value all the same: if anybody still has the array then, they are
        copied.

        Parameters
        ----------
        address : int
            What the allocator returned: where the memory begins.
        used : int
            How many bytes of it the object being pickled covers.

        Returns
        -------
        bytes or None
            A handle to all of the memory; None asks for a copy by
            :meth:`allocate`. It must stand in the pickle as it is.
        """
        mover = sending.mover
        return None if mover is None else mover.move(self, address, used)

    def add_lease(
        self, segment: Segment, block: int, generation: int, nbytes: int
    ) -> tuple[bytes, object]:
        """Name a by-value block that the caller keeps from being reused.

        Returns the handle, and what :meth:`end_lease` takes.
        """
        # Whose message it is, see _is_ours().
        self._current()
        taken = self._add(segment, block, generation)
        written = _constant(segment, block, generation, nbytes, shared=False, mode="rw")
        return pack_handle(taken.slot, taken.nonce, written), taken

    def end_lease(self, lease: Any) -> None:
        """Take back what :meth:`add_lease` gave out, also if the message was committed."""
        lease.segment.consume(lease.block, lease.generation, lease.slot, lease.nonce)
        if lease in self._taken:
            self._taken.remove(lease)

    @property
    def is_empty(self) -> bool:
        """Whether nothing was given out, or all of it has been kept or taken back."""
        return not self._taken

    def segments(self) -> list[Segment]:
        """Return the segments that the message refers to, until it is committed."""
        return list(dict.fromkeys([taken.segment for taken in self._taken]))

    def commit(self) -> None:
        """Keep what was given out: the message is complete."""
        if not self._is_ours():
            return
        child = get_spawning_popen()
        reference = None if child is None else weakref.ref(child)
        now = time.monotonic()
        for taken in self._taken:
            taken.segment.sent(
                Sent(taken.slot, taken.nonce, taken.block, taken.generation, now, reference)
            )
            if taken.filling is not None:
                taken.filling.end()
        self._taken.clear()

    def rollback(self) -> None:
        """Take back what was given out: the message will not be sent."""
        while self._is_ours():
            taken = self._taken.pop()
            taken.segment.consume(taken.block, taken.generation, taken.slot, taken.nonce)
            if taken.filling is not None:
                taken.filling.end()

    def _add(self, segment: Segment, block: int, generation: int) -> _Taken:
        taken = _Taken(segment, block, generation, next(_nonces) & NONCE_MASK)
        taken.slot = segment.add_message(block, generation, taken.nonce)
        self._taken.append(taken)
        return taken

    def _is_ours(self) -> bool:
        """Whether there is anything here that this process gave out."""
        if self._taken and self._runtime is not current():
            # A child that was forked in the middle of a pickling: it is the parent's.
            self._taken.clear()
        return bool(self._taken)

    def _current(self) -> Runtime:
        if self._runtime is None:
            self._runtime = current()
        return self._runtime


class _Taken:
    """One lease that a message gives out."""

    __slots__ = ("block", "filling", "generation", "nonce", "segment", "slot")

    def __init__(self, segment: Segment, block: int, generation: int, nonce: int) -> None:
        self.segment = segment
        self.block = block
        self.generation = generation
        self.nonce = nonce
        self.slot = -1
        self.filling: _Filling | None = None


class _Filling:
    """A block that is this process's to fill until its message is complete.

    Hardly ever does anybody keep a view for longer. Then there is no need to
    watch the views by a weak reference: it is enough to see, at the end, that
    nobody refers to their root.
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

    def view(self) -> memoryview:
        """Return the bytes to fill."""
        return memoryview(self.root).cast("B")[: self._nbytes]

    def end(self) -> None:
        """Leave the block to its leases, or free it if it has none."""
        segment, block = self._segment, self._block
        # A child that was forked meanwhile may have a view that is gone here.
        if sys.getrefcount(self.root) == _UNSHARED and self._birth == self._live.ledger.forks:
            segment.records.pop(block, None)
            if not segment.heads[block]:
                self._heap.give_back(segment, block)
        else:
            record = owner_record(self._live, self._heap, segment, block, self._nbytes, "rw")
            record.birth = self._birth
            self._live.watch(record, self.root)
        self.root = None
        self._live.fillings.pop(self, None)


class _Sample:
    """Refers to an object as a _Filling does to its root."""

    __slots__ = ("root",)

    def __init__(self) -> None:
        self.root = object()


_sample = _Sample()
# Counted, since versions of CPython differ in what an expression adds.
_UNSHARED = sys.getrefcount(_sample.root)


def _constant(
    segment: Segment, block: int, generation: int, nbytes: int, *, shared: bool, mode: Mode
) -> bytes:
    """Return what is the same in all handles of this process for a block."""
    return Handle(
        segment.token,
        segment.header.boot,
        generation,
        0,
        nbytes,
        block,
        0,
        os.getpid(),
        shared,
        mode,
        segment.strategy.name,
        segment.locator,
    ).constant()


def allocate(nbytes: int, mode: Mode = "rw") -> Block:
    """Make a shared block.

    Parameters
    ----------
    nbytes : int
        Bytes, 0 included. The contents are undefined.
    mode : {"rw", "ro", "cow"}
        How receivers see the block. Here it is always writable.

    Returns
    -------
    Block
        Its memory stays while the Block, or anything derived from its buffer,
        is in use here, in a process that received it, or in a message under way.

    Raises
    ------
    OutOfSharedMemoryError, BudgetExceededError
        If there is no room.
    ConfigurationError
        If ``nbytes`` or ``mode`` is impossible.

    Examples
    --------
    >>> block = allocate(5)
    >>> block.buffer[:] = b"hello"
    >>> bytes(block.buffer), block.shared
    (b'hello', True)
    """
    if not isinstance(nbytes, int) or nbytes < 0:
        raise ConfigurationError(
            f"nbytes must be an integer of 0 or more, not {nbytes!r}",
            setting="nbytes",
            value=nbytes,
        )
    if mode not in _MODES:
        raise ConfigurationError(
            f"mode must be 'rw', 'ro' or 'cow', not {mode!r}", setting="mode", value=mode
        )
    runtime = current()
    runtime.live.settle()
    heap = runtime.heap(SHARED)
    try:
        segment, block = heap.allocate(nbytes, whole_pages=mode == "cow")
    except HeapBusyError:
        # This thread was interrupted inside that heap, by a signal handler say.
        heap = runtime.spare_heap(SHARED)
        segment, block = heap.allocate(nbytes, whole_pages=mode == "cow")
    return runtime.live.expose(owner_record(runtime.live, heap, segment, block, nbytes, mode))


def find_block(exporter: object) -> Block | None:
    """Return the block that a buffer lies in, or None if it is not ours.

    Parameters
    ----------
    exporter : memoryview or object
        A memoryview, or the object at the bottom of a chain of views.

    Examples
    --------
    >>> block = allocate(8)
    >>> find_block(block.buffer[2:4]).nbytes
    8
    >>> find_block(bytearray(8)) is None
    True
    """
    return current().live.find(exporter)


def import_block(handle: bytes) -> Block:
    """Take the block that a message brought.

    Parameters
    ----------
    handle : bytes
        From :meth:`Message.allocate` or :meth:`Message.refer` of the sender.

    Returns
    -------
    Block
        A by-value block is this process's alone. The lease ends with the last
        view.

    Raises
    ------
    InvalidHandleError
        If the bytes are damaged or made up.
    AttachError
        If the segment cannot be opened here; ``ProducerDied`` if its maker
        was killed, ``WrongHostError``, ``ForeignSegmentError``. Nothing was
        claimed then: the handle can be tried again.
    StaleHandleError, AlreadyLoadedError
        If the block was released, or the by-value message loaded, before.

    Examples
    --------
    >>> message = Message()
    >>> view, handle = message.allocate(5)
    >>> view[:] = b"hello"
    >>> message.commit()
    >>> bytes(import_block(handle).buffer)
    b'hello'
    """
    runtime = current()
    runtime.live.settle()
    slot, nonce = lease_of(handle)
    known = runtime.live.find_shared(key_of(handle))
    if known is not None:
        if _here.loading is None:
            _end_known(known, slot, nonce)
        else:
            # What comes after it may fail, and the message be loaded again.
            _here.loading.known(known, slot, nonce)
        return known
    what = Handle.unpack(handle)
    mark = object()
    segment = runtime.attachments.pin(what, mark, _arrived_here())
    try:
        if what.shared != (segment.header.kind == SHARED):
            raise InvalidHandleError(
                f"the handle calls block {what.block} of segment {segment.token.hex()} "
                f"{'shared' if what.shared else 'by value'}, which it is not; the handle was "
                "damaged or made up",
                reason="kind does not match",
            )
        found = _claim(runtime, segment, what)
    finally:
        segment.unpin(mark)
    if segment.orphan:
        runtime.attachments.tidy_mailbox()
    return found


def _claim(runtime: Runtime, segment: Segment, what: Handle) -> Block:
    if segment.import_mapping is None:
        start = segment.layout.data_offset
        segment.import_mapping = Mapping(segment.fd, start, segment.header.size - start)
    mapping = segment.import_mapping
    slot, alone = segment.claim(
        what.block, what.generation, what.slot, what.nonce, shared=what.shared
    )
    try:
        offset, capacity = segment.offsets[what.block], segment.capacities[what.block]
        if (
            offset < segment.layout.data_offset
            or offset + capacity > segment.header.size
            or what.nbytes > capacity
        ):
            raise InvalidHandleError(
                f"block {what.block} of segment {segment.token.hex()} has {capacity} bytes at "
                f"{offset}, the handle says {what.nbytes}; one of them was damaged or made up",
                reason="block out of bounds",
            )
        private = what.mode == "cow" or not (what.shared or alone)
        if private:
            mapping = Mapping(segment.fd, offset, capacity, private=True)
        record = Record(
            runtime.live,
            segment,
            what.block,
            what.nbytes,
            mapping,
            shared=what.shared,
            mode=what.mode,
            slot=slot,
            private=private,
        )
        found = runtime.live.expose(record)
    except SegmentError:
        # No addresses left (ENOMEM): nothing was looked at, the message stays.
        segment.unclaim(what.block, slot, what.nonce, what.slot)
        raise
    except BaseException:
        segment.try_release(what.block, slot)
        raise
    if _here.loading is not None:
        _here.loading.claimed(found, what)
    return found


def _end_known(known: Block, slot: int, nonce: int) -> None:
    """End a message about a block that this process has had before."""
    # As long as it is known its segment stays open, without a pin.
    record = known._record
    record.segment.consume(record.block, record.generation, slot, nonce)


def discard_message(data: bytes | bytearray | memoryview) -> None:
    """Release what a message that cannot be unpickled would have brought.

    Handles in it that were claimed already are left to the arrays that were
    rebuilt from them.
    """
    for what in _handles_in(data):
        try:
            with _pinned(what) as segment:
                segment.consume(what.block, what.generation, what.slot, what.nonce)
        except (AttachError, StaleHandleError):
            # Nothing is left that could be released.
            continue


def hold_message(data: bytes | bytearray | memoryview) -> Callable[[], None]:
    """Keep open what a message refers to, as far as that can be opened.

    For a message that is to be unpickled later, when the descriptors that came
    with it are closed, and its sender may be dead.

    Returns
    -------
    callable
        Ends that; to be called once, in any thread.
    """
    attachments = current().attachments
    pins = []
    for what in _handles_in(data):
        mark = object()
        try:
            pins.append((attachments.pin(what, mark, _arrived_here()), mark))
        except AttachError:
            # Whoever unpickles the message is told.
            continue

    def let_go() -> None:
        for segment, mark in pins:
            segment.unpin(mark)
            # In a forked child it may be the parent's.
            if current().directory.get(segment.token) is segment:
                attachments.close_ownerless(segment)

    return let_go


@contextmanager
def _pinned(what: Handle) -> Iterator[Segment]:
    mark = object()
    segment = current().attachments.pin(what, mark, _arrived_here())
    try:
        yield segment
    finally:
        segment.unpin(mark)


def _arrived_here() -> Arrived:
    return _NOTHING if _here.loading is None else _here.loading.arrived


def _handles_in(data: bytes | bytearray | memoryview) -> Iterator[Handle]:
    text = bytes(data)
    start = text.find(MARK)
    while start != -1:
        size = Handle.size_at(text, start)
        # What only looks like a handle is passed over.
        with contextlib.suppress(InvalidHandleError):
            yield Handle.unpack(text[start : start + size])
        start = text.find(MARK, start + len(MARK))
