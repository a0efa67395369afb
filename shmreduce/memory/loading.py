"""The receiver's side of one pickled message: the blocks that it brings.

May import errors, signals, ``quick_blocks``, ``mapping``, ``handle``, ``segment``,
``attachments``, ``record``, ``blocks`` and ``runtime``.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from contextlib import contextmanager, suppress
from types import MappingProxyType
from typing import TYPE_CHECKING, TypeVar

from shmreduce.errors import (
    AttachError,
    InvalidHandleError,
    LeaseTimeoutError,
    OutOfLeasesError,
    SegmentError,
    ShmreduceError,
)
from shmreduce.memory import quick_blocks
from shmreduce.memory.blocks import Block
from shmreduce.memory.handle import (
    MARK,
    Handle,
    block_key,
    check_handle,
    find_mark,
    key_of,
    lease_of,
)
from shmreduce.memory.mapping import Mapping, make_root, page_ceil
from shmreduce.memory.record import Record
from shmreduce.memory.runtime import Runtime, current
from shmreduce.memory.segment import Sent
from shmreduce.signals import is_from_system

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from collections.abc import Mapping as Arriving

    from shmreduce.memory.segment import Segment

    Arrived = Arriving[bytes, int]
    _Argument = TypeVar("_Argument")
    _Result = TypeVar("_Result")

__all__ = [
    "Loading",
    "common_handles",
    "contents_of",
    "discard_message",
    "here",
    "hold_message",
    "import_block",
    "with_arrived",
]

_NOTHING: Arrived = MappingProxyType({})
_READ_FROM = 4 << 20
"""Bytes. Larger blocks are copied out by read(2): it is quicker, because pages that this
process has not touched need not be mapped, and other threads can run meanwhile."""
_READ_AT_ONCE = 1 << 30
"""Bytes; Linux reads at most 2 GiB in one call."""


class _Here(threading.local):
    loading: Loading | None = None
    """The load in which the current thread is."""


here = _Here()
"""A load assigns to it inside its ``try`` and as the first thing in its ``finally``. It must
not call a Python function for that: Ctrl-C could come at the beginning of the call, and what
the thread imports afterwards would be claimed by a load that has ended.
"""


class Loading:
    """The blocks that one unpickling has claimed so far.

    An error that may pass, such as no free descriptor at the moment, can hit the second
    block of a message. Then the first block's hold is turned back into a message, so that
    the whole message can be loaded again.

    The thread's current one is ``here.loading``.

    Parameters
    ----------
    arrived : mapping of bytes to int, optional
        Descriptors of segments that came with the message, by token. The caller owns them,
        and keeps them open until the unpickling has ended.
    """

    __slots__ = ("_claims", "_known", "_private", "arrived")

    def __init__(self, arrived: Arrived | None = None) -> None:
        self.arrived: Arrived = _NOTHING if arrived is None else arrived
        # Blocks, not records, since unpickling drops the arrays before it raises.
        self._claims: list[tuple[Block, bytes]] = []
        self._known: list[tuple[Block, int, int]] = []
        self._private: dict[bytes, Block] | None = None

    def claimed(self, block: Block, handle: bytes, what: Handle) -> None:
        """Note a claim."""
        # Another one, since undo() asks whether anything else has the root: a rebuild function
        # may keep the Block that it gets.
        block = Block(block._record, block._root)
        self._claims.append((block, handle))
        if what.mode == "cow":
            # Made only when needed, since few messages bring such blocks.
            self._private = self._private or {}
            self._private[block_key(what.token, what.block, what.generation)] = block

    def find_private(self, key: bytes) -> Block | None:
        """Return a ``cow`` block that this message has brought before, by the key in its handles.

        So all views of it in the message show the same memory, as they do at the sender.
        """
        return None if self._private is None else self._private.get(key)

    def known(self, block: Block, slot: int, nonce: int) -> None:
        """Note a message about a block that was known here; it ends with the unpickling."""
        self._known.append((block, slot, nonce))

    def blocks(self) -> list[Block]:
        """Return the blocks that were claimed so far."""
        return [block for block, _ in self._claims]

    def undo(self) -> None:
        """Turn claimed blocks back into messages.

        A block stays where something has it by now: an object of the message may have kept
        its array, another thread may have found a shared block, or a child may have been
        forked. Then a shared block gets its message back, beside that hold; a by-value block
        cannot be loaded again.
        """
        live = current().live
        for block, handle in self._claims:
            record = block._record
            segment = record.segment
            # A program still has the message's bytes, and will load them again.
            segment.note_bytes()
            slot = record.slot
            if record.live is not live or slot is None:
                # A child that was forked during the load: the claim is the parent's.
                continue
            what = Handle.unpack_checked(handle)
            # Pinned, since without the hold nothing here uses the segment, and another thread
            # that needs a free descriptor would close it.
            segment.pins[block] = None
            try:
                if live.take_back(block):
                    segment.unclaim(record.block, slot, what.nonce, what.slot)
                    _keep_for_reader(segment, what)
                elif record.shared and record.slot == what.slot:
                    _hold_elsewhere(record, what)
                    _keep_for_reader(segment, what)
            finally:
                segment.unpin(block)
        self._claims.clear()
        self._known.clear()
        self._private = None

    def close(self) -> None:
        """End the unpickling. If Ctrl-C interrupts it, another call does the rest."""
        for block, slot, nonce in self._known:
            _end_known(block, slot, nonce)
        # Not before the load has ended: undo() may make a claim its segment's last message.
        try:
            for block, _ in self._claims:
                if block._record.segment.handed_over:
                    current().attachments.tidy_mailbox()
                    break
        except RecursionError:
            # If this raised, the message would be lost. Whoever ends another one of the segment
            # tidies the mailbox.
            return


def import_block(handle: bytes) -> Block:
    """Take over the block of a handle that came in a message.

    Parameters
    ----------
    handle : bytes
        From the sender's :meth:`Message.allocate` or :meth:`Message.refer`.

    Returns
    -------
    Block
        The caller owns it. A by-value block belongs to this process alone. The lease ends
        with the last view.

    Raises
    ------
    InvalidHandleError
        If the bytes are damaged or made up.
    AttachError
        If this process cannot open the segment: ``ProducerDied`` if its maker was killed,
        ``WrongHostError`` or ``ForeignSegmentError`` in those cases. The block was not taken
        over, so the handle can be tried again.
    StaleHandleError, AlreadyLoadedError
        If the block was released, or the by-value message was loaded before.
    SegmentError, OutOfLeasesError, LeaseTimeoutError
        If no address range or no lease is free, or if a stopped process has locked the block.
        The handle can be tried again.

    Examples
    --------
    >>> from shmreduce import Message
    >>> message = Message()
    >>> view, handle = message.allocate(5)
    >>> view[:] = b"hello"
    >>> message.commit()
    >>> bytes(import_block(handle).buffer)
    b'hello'
    """
    runtime = current()
    runtime.live.settle()
    loading = here.loading
    quickly: Block | None = quick_blocks.import_block(
        handle, runtime.live, runtime.attachments, loading
    )
    if quickly is not None:
        if loading is None:
            _message_ended(runtime, quickly._record.segment)
        return quickly
    check_handle(handle)
    known = runtime.live.find_shared(key_of(handle))
    if known is not None:
        _had_before(known, handle)
        return known
    what = Handle.unpack_checked(handle)
    if what.mode == "cow" and here.loading is not None:
        known = here.loading.find_private(key_of(handle))
        if known is not None:
            _had_before(known, handle)
            # Another one, as in claimed().
            return Block(known._record, known._root)
    mark = object()
    segment = runtime.attachments.pin(what, mark, _arrived_here())
    try:
        if what.shared != segment.is_shared:
            raise InvalidHandleError(
                f"the handle calls block {what.block} of segment {segment.token.hex()} "
                f"{'shared' if what.shared else 'by value'}, which it is not; the handle was "
                "damaged or made up",
                reason="kind does not match",
            )
        found = _claim(runtime, segment, handle, what)
    finally:
        segment.unpin(mark)
    if not what.shared and runtime.attachments.is_one_too_many(segment):
        # The block's hold ends with the load; until then the load may be undone.
        found = _copied(runtime, found)
    if here.loading is None:
        _message_ended(runtime, segment)
    return found


def with_arrived(
    arrived: Arrived, function: Callable[[_Argument], _Result], argument: _Argument
) -> _Result:
    """Call a function that opens segments whose descriptors came with a message."""
    loading, outer = Loading(arrived), here.loading
    try:
        here.loading = loading
        return function(argument)
    finally:
        here.loading = outer
        try:
            loading.close()
        except BaseException:
            # Ctrl-C, perhaps before anything was ended.
            loading.close()
            raise


def _had_before(known: Block, handle: bytes) -> None:
    """End a message about a block that this process has already, now or when the load ends."""
    slot, nonce = lease_of(handle)
    if here.loading is None:
        _end_known(known, slot, nonce)
    else:
        # The rest of the load may fail; then the message is loaded again.
        here.loading.known(known, slot, nonce)


def _message_ended(runtime: Runtime, segment: Segment) -> None:
    """Have the mailbox drop a segment if all its messages have ended."""
    if segment.handed_over:
        runtime.attachments.tidy_mailbox()


def _claim(runtime: Runtime, segment: Segment, handle: bytes, what: Handle) -> Block:
    """Turn a message into a hold of this process, and make the block visible here."""
    if segment.import_mapping is None:
        start = segment.layout.data_offset
        segment.import_mapping = Mapping(segment.checked_fd, start, segment.header.size - start)
    mapping = segment.import_mapping
    slot, alone = segment.claim(
        what.block, what.generation, what.slot, what.nonce, shared=what.shared
    )
    record = None
    try:
        private = what.mode == "cow" or not (what.shared or alone)
        record = _record_of(runtime, segment, what, mapping, slot, private)
        found = runtime.live.expose(record)
    except SegmentError:
        # No addresses are left (ENOMEM). Nobody has seen the block, so the message stays.
        segment.unclaim(what.block, slot, what.nonce, what.slot)
        raise
    except BaseException:
        # After Ctrl-C a traceback may keep the root, whose death then ends the hold. It must
        # not be ended here, too, because the slot may be another hold's by then.
        if record is None or not runtime.live.is_watched(record):
            segment.try_release(what.block, slot)
        raise
    if here.loading is not None:
        here.loading.claimed(found, handle, what)
    return found


def _record_of(
    runtime: Runtime, segment: Segment, what: Handle, mapping: Mapping, slot: int, private: bool
) -> Record:
    """Return the record of a block that was just claimed, after checking its place.

    Its memory is the segment's ``mapping``, or a private one.
    """
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
    if private:
        mapping = Mapping(segment.checked_fd, offset, capacity, private=True)
    return Record(
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


def _copied(runtime: Runtime, block: Block) -> Block:
    """Return a copy of a by-value block in memory that belongs to this process alone."""
    record = block._record
    segment, number = record.segment, record.block
    try:
        mapping = Mapping.of_memory(segment.offsets[number], page_ceil(max(record.nbytes, 1)))
    except SegmentError:
        # No addresses are left, so the block stays in the segment.
        return block
    root = make_root(mapping.pages, 0, mapping.size)
    ctypes.memmove(mapping.address, record.address, record.nbytes)
    # The copy has no lease and find() does not find it, so it is sent on by another copy.
    if record.slot is not None:
        segment.passing[record.slot] = None
    alone = Record(
        runtime.live, segment, number, record.nbytes, mapping, shared=False, private=True
    )
    return Block(alone, root)


def _keep_for_reader(segment: Segment, what: Handle) -> None:
    """Note a message that was given back as one of this process's own.

    Its sender may have seen that it was read, and ended: then nobody else would leave the
    segment in the mailbox, or keep it open.
    """
    now = time.monotonic()
    segment.sent(Sent(what.slot, what.nonce, what.block, what.generation, now, None))
    segment.sent_alone(what.nonce)


def _hold_elsewhere(record: Record, what: Handle) -> None:
    """Move a hold of a shared block to another slot, so that the handle's is a message again."""
    segment, before = record.segment, what.slot
    try:
        slot, _ = segment.claim(record.block, record.generation, before, what.nonce, shared=True)
    except OutOfLeasesError:
        # No slot is free. As long as the block has views here, it is found without the message.
        return
    segment.holds[slot] = record
    record.slot = slot
    segment.holds.pop(before, None)
    segment.unclaim(record.block, before, what.nonce, before)


def _end_known(known: Block, slot: int, nonce: int) -> None:
    """End a message about a block that this process has already."""
    # The segment stays open without a pin, because the block is alive here.
    record = known._record
    segment = record.segment
    try:
        ended = segment.consume(record.block, record.generation, slot, nonce)
    except (LeaseTimeoutError, SegmentError):
        # A stopped process has the lock, or other code has closed the descriptors here: the
        # message stays, but the array is loaded anyway.
        return
    if ended and segment.handed_over:
        current().attachments.tidy_mailbox()


def common_handles(
    first: bytes | bytearray | memoryview, second: bytes | bytearray | memoryview
) -> frozenset[Handle]:
    """Return the handles that two pickles of one object have in common.

    Each pickle has its own leases. So the common handles belong to other pickles, which the
    object contains as bytes.
    """
    return frozenset(_handles_in(first)).intersection(_handles_in(second))


def discard_message(
    data: bytes | bytearray | memoryview, but: frozenset[Handle] = frozenset()
) -> None:
    """Release the blocks of a message that cannot be unpickled.

    Blocks that were claimed already stay with the arrays that were rebuilt from them, and
    the handles in ``but`` are left to their users.
    """
    for what in _handles_in(data):
        if what in but:
            continue
        runtime = current()
        try:
            with _pinned(what) as segment:
                segment.consume(what.block, what.generation, what.slot, what.nonce)
                _message_ended(runtime, segment)
            runtime.attachments.close_ownerless(segment)
        except ShmreduceError:
            # The block was released before, or cannot be at the moment. Go on with the others.
            continue


def hold_message(data: bytes | bytearray | memoryview) -> Callable[[], None] | None:
    """Keep the segments open that a message refers to, if they can be opened.

    Use it for a message that is unpickled later, when the descriptors that came with it
    are closed and its sender may be dead.

    Returns
    -------
    callable or None
        Call it once, in any thread, to let the segments go. None if the message refers to
        no segment that can be opened.
    """
    attachments = current().attachments
    pins = []
    try:
        for what in _handles_in(data):
            mark = object()
            try:
                segment = attachments.pin(what, mark, _arrived_here())
                pins.append((segment, mark))
                segment.note_bytes()
            except (AttachError, LeaseTimeoutError):
                # The unpickling will raise the error.
                continue
    except BaseException:
        # Ctrl-C, or the stack is used up.
        for segment, mark in pins:
            segment.unpin(mark)
        raise
    if not pins:
        return None

    def let_go() -> None:
        for segment, mark in pins:
            segment.unpin(mark)
            # In a forked child the segment may be the parent's.
            if current().directory.get(segment.token) is segment:
                attachments.close_ownerless(segment)

    return let_go


def contents_of(block: Block) -> bytes:
    """Return the bytes of a block that was just received."""
    record = block._record
    segment = record.segment
    if (
        not _READ_FROM <= block.nbytes <= _READ_AT_ONCE
        # A block that was copied when it came has no slot: its hold has ended, and the place in
        # the file may belong to another block by now.
        or record.slot is None
        or record.cutting
        or not segment.is_open
    ):
        return bytes(block.buffer)
    try:
        found = os.pread(segment.fd, block.nbytes, segment.offsets[record.block])
    except OSError as error:
        if not is_from_system(error):
            raise
        # For example, the file can be mapped but not read.
        found = b""
    return found if len(found) == block.nbytes else bytes(block.buffer)


@contextmanager
def _pinned(what: Handle) -> Iterator[Segment]:
    mark = object()
    segment = current().attachments.pin(what, mark, _arrived_here())
    try:
        yield segment
    finally:
        segment.unpin(mark)


def _arrived_here() -> Arrived:
    return _NOTHING if here.loading is None else here.loading.arrived


def _handles_in(data: bytes | bytearray | memoryview) -> Iterator[Handle]:
    text = bytes(data)
    start = find_mark(text, 0)
    while start != -1:
        size = Handle.size_at(text, start)
        # Bytes that only look like a handle are skipped.
        with suppress(InvalidHandleError):
            yield Handle.unpack(text[start : start + size])
        start = find_mark(text, start + len(MARK))
