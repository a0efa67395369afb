"""Packets: what a channel of shmreduce sends for one message, by one system call.

May import errors, signals, settings, registry, :mod:`shmreduce.memory`, ``moving``,
``copying``, ``handle_calls``, ``pickled_calls``, ``pickler``, ``pickling``, ``plain_objects``,
``unpickling`` and, for a number, ``packet_socket`` and, for a type, ``receive_buffer``; does
nothing with sockets.

A packet has its kind, the number of segments that it refers to, the segments'
tokens, and then the body: the pickle itself or, if that is large, the handle of the
block that has it. The descriptors of the segments travel with the packet (SCM_RIGHTS),
in the order of the tokens; some at the end may be missing.

If the pickle is one call with a handle, a packet of another kind says where in the
pickle the handle is; see ``handle_calls``.
"""

from __future__ import annotations

import pickle
import struct
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NoReturn, Self, TypeAlias

from shmreduce.copying import copy_bytes
from shmreduce.errors import (
    AttachError,
    InvalidHandleError,
    LeaseTimeoutError,
    OutOfSharedMemoryError,
    ReducerError,
    SegmentError,
    ShmreduceError,
)
from shmreduce.handle_calls import (
    LENGTH_PREFIX,
    around_handle,
    call_of,
    pickle_around,
    pickles_beside,
    place_among_atoms,
)
from shmreduce.memory import quick_blocks
from shmreduce.memory.allocation import find_block
from shmreduce.memory.handle import Handle
from shmreduce.memory.lease_slots import MESSAGE
from shmreduce.memory.loading import (
    contents_of,
    discard_message,
    hold_message,
    import_block,
    with_arrived,
)
from shmreduce.memory.message import Message, keep_leases, next_nonce
from shmreduce.memory.one_buffer import give_out
from shmreduce.memory.runtime import current
from shmreduce.memory.standard_streams import all_clear_of_streams
from shmreduce.moving import Moves, born_at, give_born
from shmreduce.packet_socket import MOST_DESCRIPTORS
from shmreduce.pickled_calls import PROTOCOL, CallOnLoad
from shmreduce.pickler import reducer_claim
from shmreduce.pickling import dump_parts
from shmreduce.plain_objects import UNASKED, is_plain
from shmreduce.registry import describe, qualified_name
from shmreduce.settings import inline_limit
from shmreduce.signals import is_from_system
from shmreduce.unpickling import discard_apart, load_message, load_whole, loads_again

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from shmreduce.memory.blocks import Block
    from shmreduce.memory.lease import Lease
    from shmreduce.memory.lending import Lender
    from shmreduce.memory.one_buffer import GivenBuffer
    from shmreduce.memory.segment import Segment
    from shmreduce.receive_buffer import ReceiveBuffer
    from shmreduce.registry import ReducerClaim

__all__ = [
    "INLINE_BODY",
    "LARGEST_PACKET",
    "SMALL_PACKET",
    "Arrival",
    "CallArrival",
    "Packet",
    "PlainArrival",
    "Received",
    "load_packet",
    "open_packet",
    "pack_bytes",
    "pack_last",
    "pack_lent",
]

INLINE_BODY = 144 << 10
"""Bytes. A body of up to this size goes into its packet; for a larger one, a block is faster."""
SMALL_PACKET = 32 << 10
"""Bytes. Only a few larger packets fit into a socket's buffer."""
LARGEST_PACKET = 192 << 10
"""Bytes. Even the smallest usual socket buffer takes a packet of this size."""
_HEAD = struct.Struct("<BB")
"""Kind of the packet, number of segments."""
_KINDS = _IN_PACKET, _IN_BLOCK = 1, 2
_ONE_CALL = 3
_CALL_HEAD = struct.Struct("<BB16sHH")
"""Of a packet with one call: kind, 1, token, bytes before the handle, bytes of the handle."""
_TOKEN_SIZE = 16
_HEAD_WITHOUT_SEGMENT = _HEAD.pack(_IN_PACKET, 0)
_HEAD_OF_ONE_SEGMENT = _HEAD.pack(_IN_PACKET, 1)
"""The segment's token follows it."""


class Packet:
    """A message that is ready to be sent, once.

    Parameters
    ----------
    data : bytes
        The packet's bytes, which are written by one system call.
    segments : sequence of Segment
        The segments whose descriptors are sent with it.
    leases : sequence of Lease
        The leases that pass to its reader.
    body : bytes, optional
        The handle of the block that has the message.
    """

    __slots__ = ("_body", "_leases", "afterwards", "data", "is_under_way", "segments")

    def __init__(
        self,
        data: bytes,
        segments: Sequence[Segment],
        leases: Sequence[Lease] = (),
        body: bytes | None = None,
    ) -> None:
        self.data = data
        self.segments = segments
        self._leases = leases
        self._body = body
        self.is_under_way = False
        """Whether it may have been written, even if a signal handler interrupted the writer."""
        self.afterwards: Callable[[], object] | None = None
        """For :meth:`finish`."""

    def descriptors(self) -> list[int]:
        """Return the descriptors to send along. They stay the segments'.

        If the process has no free descriptor for a segment, those of the segments before
        it are returned. The receiver opens the other segments by name.
        """
        found = []
        for segment in self.segments:
            try:
                found.append(segment.transfer_fd)
            except OSError as error:
                if not is_from_system(error):
                    raise
                break
        return found

    def note_missing_descriptors(self) -> None:
        """Note in the segments that some descriptors were not sent with the packet."""
        for lease in self._leases:
            lease.segment.sent_alone(lease.nonce)

    def in_block(self) -> Packet:
        """Return a small packet with the same message in a block, to be sent instead.

        Returns this packet if there is no room for a block.
        """
        # A packet of one call is small anyway, and has another head.
        if self._body is not None or self.data[0] == _ONE_CALL:
            return self
        body = memoryview(self.data)[_HEAD.size + _TOKEN_SIZE * self.data[1] :]
        message = Message()
        try:
            handle = _move_to_block(body, message)
            if handle is None:
                return self
            segments = list(dict.fromkeys([*self.segments, *message.segments()]))
            return _commit_to_packet(_IN_BLOCK, handle, segments, message, self._leases)
        except ShmreduceError:
            message.rollback()
            return self
        except BaseException:
            message.rollback()
            raise

    def is_read(self) -> bool:
        """Return whether a reader has claimed the message's block; True if it has no block."""
        if self._body is None:
            return True
        what = Handle.unpack(self._body)
        return all(
            segment.words[what.slot] != MESSAGE | what.nonce
            for segment in self.segments
            if segment.token == what.token
        )

    def finish(self) -> None:
        """Do what the reader need not wait for, so it is best done after sending.

        It is not a part of sending: an error of it must not be taken for one of that. It
        may be left out, and is then done for a later message.
        """
        if self.afterwards is not None:
            self.afterwards()

    def discard(self) -> None:
        """Give back the leases of a message that will not be sent.

        Pickles that the message contains as bytes are not touched: they may be loaded
        from elsewhere.
        """
        _take_back(self._leases)


def _take_back(leases: Sequence[Lease]) -> None:
    for lease in leases:
        # -1 in a forked child: there the lease belongs to the parent.
        if lease.segment.lock_fd != -1:
            # If other code has closed the segment's descriptors, its message ends with this
            # process. Those of other segments end now.
            with suppress(SegmentError):
                lease.undo()


def pack_last(held: list[Any], lent: list[Block] | None = None) -> Packet:
    """Return the packet of the one object in a list, and empty the list.

    The packet has the object as it is now. Arrays to which no other reference is left are
    moved, if they were born in shared memory or received by value. Others are copied, into
    ``lent`` blocks as far as they fit.

    Raises
    ------
    OutOfSharedMemoryError, BudgetExceededError
        If it is large and there is no room. After any error, all memory is given back; the
        list may be empty already.
    """
    obj = held[0]
    kind = type(obj)
    if kind in UNASKED and is_plain(obj):
        plain = pickle.dumps(obj, PROTOCOL)
        held.clear()
        return _make(memoryview(plain), None)
    # Arrays are moved if no other reference is left: keep none in this frame.
    del obj
    if (kind is tuple or kind not in UNASKED) and quick_blocks.COMPILED and not lent:
        packet = _pack_one_buffer(held)
        if packet is not None:
            return packet
    moves = Moves(None, lent)
    message: Message | None = None
    try:
        pickled, message = dump_parts(held[0], INLINE_BODY, moves)
        held.clear()
        data = pickled
        if message is not None:
            data = moves.settle(pickled)
            if data is not pickled:
                # settle() returned another pickle, in ordinary memory.
                message.take_back(pickled)
    except BaseException:
        if message is not None:
            message.rollback()
        raise
    finally:
        moves.give_up()
    return _make(data, message)


def _pack_one_buffer(held: list[Any]) -> Packet | None:
    """Do what :func:`pack_last` does, faster, for one buffer or a tuple of one and atoms.

    Returns None, without having done anything, for any other object and in unusual cases.
    """
    obj = held[0]
    place = None
    if type(obj) is tuple:
        place = place_among_atoms(obj)
        if place is None:
            return None
        obj = obj[place]
        # reducer_claim() may load plugins, which types without reducers must not cause.
        if type(obj) in UNASKED:
            return None
    claim = reducer_claim(type(obj))
    if claim is None:
        return None
    found = claim.reducer.buffer_of(obj, inline_limit())
    if found is None:
        return None
    if type(found) is not tuple or len(found) != 3:
        _refuse_buffer(claim, obj, found)
    try:
        view = memoryview(found[0])
    except TypeError:
        _refuse_buffer(claim, obj, found)
    if not view.nbytes or not view.c_contiguous:
        # An empty one is pickled. For one with gaps, Message.carry() raises the error.
        return None
    around = around_handle(*found[1:])
    if around is None:
        return None
    beside = None if place is None else pickles_beside(held[0], place)
    runtime = current()
    if runtime.has_left:
        # Unread messages must get into the mailbox now, which a Message does.
        return None
    leases: list[Lease] = []
    given: GivenBuffer | None = None
    try:
        sent = quick_blocks.give_shared(runtime.live, view.obj, view.nbytes, next_nonce(), leases)
        if sent is None:
            given = _give_out(view, leases)
            if given is None:
                return None
            sent = given.handle, given.lease
        # The array is moved if no other reference is left: keep none in this frame.
        del obj, found, view
        held.clear()
        if given is not None:
            given.settle(leases)
            # Perhaps it is a copy's now.
            sent = given.handle, given.lease
        handle, lease = sent
        segment = lease.segment
        packet = Packet(_of_one_call(handle, segment.token, around, beside), (segment,), leases)
        if given is not None:
            packet.afterwards = given.afterwards
        # In a child that was forked meanwhile they are the parent's.
        if current() is runtime:
            keep_leases(leases)
    except BaseException:
        _take_back(leases)
        if given is not None:
            given.give_up()
        raise
    else:
        return packet


def _give_out(view: memoryview, leases: list[Lease]) -> GivenBuffer | None:
    """Give out a buffer that is no shared block, or not by the shortest way."""
    if view.nbytes < inline_limit():
        # It is pickled if its block cannot be sent: it is neither copied nor moved.
        return give_out(view, leases, copies=False) if _is_shared(view) else None
    address = born_at(view)
    if address:
        return give_born(view, address, leases)
    return give_out(view, leases, copies=address is not None)


def _refuse_buffer(claim: ReducerClaim, obj: object, found: object) -> NoReturn:
    type_name = qualified_name(type(obj))
    raise ReducerError(
        f"buffer_of() of reducer {describe(claim.reducer)} ({claim.origin}) returned "
        f"{found!r:.99} for {type_name}: it must return a tuple (buffer, rebuild, args) or None",
        reducer=describe(claim.reducer),
        type_name=type_name,
        reason="buffer_of() returned something else",
    )


def _is_shared(view: memoryview) -> bool:
    block = find_block(view)
    return block is not None and block.shared


def _of_one_call(
    handle: bytes, token: bytes, around: tuple[bytes, bytes], beside: tuple[bytes, bytes] | None
) -> bytes:
    """Return a packet that calls a function with a handle, perhaps in a tuple of atoms."""
    pickled = pickle_around(handle, around)
    if beside is None:
        return _CALL_HEAD.pack(_ONE_CALL, 1, token, len(around[0]), len(handle)) + pickled
    # Without the PROTO opcode in front and the STOP opcode at the end.
    call = memoryview(pickled)[2:-1]
    return b"".join((_HEAD_OF_ONE_SEGMENT, token, beside[0], call, beside[1]))


def pack_lent(
    lender: Lender, borrower: int | None, joined: Callable[[bytes], bytes]
) -> Packet | None:
    """Return a packet that lends blocks to a process, together with other bytes.

    Parameters
    ----------
    lender : Lender
        The owner of the blocks.
    borrower : int or None
        The process id of the borrower.
    joined : callable
        Takes a pickle of the list of blocks, for :func:`~shmreduce.unpickling.loads`, and
        returns it together with the other bytes to send.

    Returns
    -------
    Packet or None
        None if there are no blocks to lend.
    """
    lent = lender.lend(borrower)
    if lent is None:
        return None
    message, handles = lent
    try:
        pickled = pickle.dumps([CallOnLoad(import_block, each) for each in handles], PROTOCOL)
        return _make(memoryview(joined(pickled)), message)
    except BaseException:
        message.rollback()
        raise


def pack_bytes(data: memoryview) -> Packet:
    """Return the packet of bytes; for errors see :func:`pack_last`."""
    if data.format != "B":
        # A block's memoryview has format B, and slice assignment needs equal formats.
        data = data.cast("B")
    return _make(data, None)


def _make(body: memoryview, message: Message | None) -> Packet:
    if body.nbytes <= INLINE_BODY and (message is None or message.is_empty):
        return Packet(_HEAD_WITHOUT_SEGMENT + body, ())
    if message is None:
        message = Message()
    try:
        kind, written = _IN_PACKET, body
        if body.nbytes > INLINE_BODY:
            handle = message.handle_of(body) or _move_to_block(body, message)
            if handle is not None:
                kind, written = _IN_BLOCK, memoryview(handle)
        return _commit_to_packet(kind, written, message.segments(), message)
    except BaseException:
        message.rollback()
        raise


def _commit_to_packet(
    kind: int,
    written: bytes | memoryview,
    segments: list[Segment],
    message: Message,
    leases: Sequence[Lease] = (),
) -> Packet:
    """Commit a message and return its packet, of either kind.

    The packet gets the given leases in addition to the message's.
    """
    body = bytes(written) if kind == _IN_BLOCK else None
    if body is not None:
        # The body's segment first: the last descriptors may be missing at the receiver, and
        # without the body it cannot read anything.
        first = Handle.unpack(body).token
        segments = sorted(segments, key=lambda segment: segment.token != first)
    carried = len(segments) <= MOST_DESCRIPTORS
    segments = segments[:MOST_DESCRIPTORS]
    tokens = [segment.token for segment in segments]
    data = b"".join((_HEAD.pack(kind, len(tokens)), *tokens, written))
    packet = Packet(data, segments, [*leases, *message.leases()], body)
    message.commit(carried=True)
    if not carried:
        packet.note_missing_descriptors()
    return packet


def _move_to_block(body: memoryview, message: Message) -> bytes | None:
    """Copy bytes into a block and return its handle; None if they must go in the packet."""
    fits = body.nbytes <= LARGEST_PACKET - _HEAD.size - MOST_DESCRIPTORS * _TOKEN_SIZE
    try:
        given = message.allocate(body.nbytes, lambda: body)
    except SegmentError:
        if fits:
            return None
        raise
    if given is None:
        if fits:
            return None
        # Not in several packets: those of other writers could come between them.
        raise OutOfSharedMemoryError(
            f"no shared memory for a message of {body.nbytes} bytes, which is too large for one "
            f"packet (of {LARGEST_PACKET} bytes). Read or drop arrays, raise the budget, or send "
            "it in smaller parts",
            operation="send",
            errno=0,
            requested=body.nbytes,
            available=None,
            strategy=None,
        )
    view, handle = given
    if view is not None:
        copy_bytes(view, body)
    return handle


def open_packet(buffer: ReceiveBuffer, size: int) -> Received:
    """Return the packet that was read into a buffer.

    Parameters
    ----------
    buffer : ReceiveBuffer
        Has the packet and the descriptors that came with it.
    size : int
        Bytes of the packet.

    Raises
    ------
    InvalidHandleError
        If it is not a packet.
    """
    one_call = buffer[0] == _ONE_CALL
    if not one_call and _names_no_segment(buffer, size):
        return PlainArrival(buffer, size)
    # If stdout is closed, a segment may have got number 1. While the message is unpickled,
    # somebody may print.
    all_clear_of_streams(buffer.descriptors)
    return (CallArrival if one_call else Arrival)(buffer, size)


def load_packet(buffer: ReceiveBuffer, size: int) -> Any:
    """Return the object of the packet that was read into a buffer.

    It is ``open_packet(buffer, size).load()``, and quicker for packets that refer to no segments.
    """
    if buffer[0] != _ONE_CALL and _names_no_segment(buffer, size):
        return load_whole(pickle.loads, memoryview(buffer)[_HEAD.size : size])
    return open_packet(buffer, size).load()


def _names_no_segment(buffer: ReceiveBuffer, size: int) -> bool:
    head = size >= _HEAD.size and buffer.startswith(_HEAD_WITHOUT_SEGMENT)
    return head and not buffer.descriptors


class PlainArrival:
    """A packet that refers to no segments, as most do; has the methods of :class:`Arrival`."""

    __slots__ = ("_body",)

    def __init__(self, buffer: ReceiveBuffer, size: int) -> None:
        self._body = memoryview(buffer)[_HEAD.size : size]

    def load(self, lender: Lender | None = None) -> Any:  # noqa: ARG002
        """Return the object."""
        return load_whole(pickle.loads, self._body)

    def contents(self) -> bytes:
        """Return the bytes of the message."""
        return bytes(self._body)


class Arrival:
    """A packet that was received.

    One of :meth:`load` and :meth:`contents` must be called, once.

    Parameters
    ----------
    buffer : ReceiveBuffer
        Has the packet, and owns the descriptors that came with it. Nobody may change it
        until that call has ended.
    size : int
        Bytes of the packet.
    """

    __slots__ = ("_arrived", "_body", "_kind")

    def __init__(self, buffer: ReceiveBuffer, size: int) -> None:
        descriptors = buffer.descriptors
        kind, count = buffer[0], buffer[1] if size >= _HEAD.size else 0
        start = _HEAD.size + _TOKEN_SIZE * count
        if size < start or kind not in _KINDS or len(descriptors) > count:
            _refuse(memoryview(buffer)[:size], len(descriptors))
        self._kind = kind
        self._body = memoryview(buffer)[start:size]
        # Kept even for segments that are open here. One whose owner is dead may be closed
        # at any moment when none of it is in use, and can then be opened by nothing else.
        self._arrived: dict[bytes, int] = {}
        place = _HEAD.size
        for fd in descriptors:
            end = place + _TOKEN_SIZE
            self._arrived[bytes(buffer[place:end])] = fd
            place = end

    def load(self, lender: Lender | None = None) -> Any:
        """Return the object.

        Parameters
        ----------
        lender : Lender, optional
            Keeps the message's blocks once the program has dropped them.

        Raises
        ------
        AttachError
            If a segment cannot be opened here; ``message_bytes`` then has the
            message, which ``pickle.loads`` can try again.
        """
        if self._kind != _IN_BLOCK:
            return load_message(pickle.loads, self._body, self._arrived, lender)
        # In a list, from which it is taken: a traceback would keep it in use.
        body: list[memoryview] = []
        try:
            body.append(self._import_body(_load_body).buffer)
        except ShmreduceError:
            raise
        except BaseException:
            # The stack is used up, for example. It is enough for one call: the constructor was
            # called at this depth.
            discard_apart(_discard_body, self._arrived, self._body)
            raise
        return load_message(pickle.loads, body.pop(), self._arrived, lender)

    def contents(self) -> bytes:
        """Return the bytes of the message; while they live, what they refer to is kept."""
        if self._kind == _IN_BLOCK:
            try:
                data = contents_of(self._import_body(_read_body))
            except ShmreduceError:
                raise
            except BaseException:
                discard_apart(_discard_body, self._arrived, self._body)
                raise
        else:
            data = bytes(self._body)
        return _hold_or_discard(data, self._arrived)

    def _import_body(self, again: Callable[[bytes], Any]) -> Block:
        handle = bytes(self._body)
        try:
            return with_arrived(self._arrived, import_block, handle)
        except (AttachError, SegmentError, LeaseTimeoutError) as error:
            error.message_bytes = loads_again(pickle.dumps(CallOnLoad(again, handle), PROTOCOL))
            raise


class CallArrival:
    """A packet with the pickle of one call; has the methods of :class:`Arrival`.

    Raises
    ------
    InvalidHandleError
        If it is damaged.
    """

    __slots__ = ("_arrived", "_before", "_body", "_handle_size")

    def __init__(self, buffer: ReceiveBuffer, size: int) -> None:
        descriptors = buffer.descriptors
        if size < _CALL_HEAD.size or len(descriptors) > 1:
            _refuse(memoryview(buffer)[:size], len(descriptors))
        _, _, token, self._before, self._handle_size = _CALL_HEAD.unpack_from(buffer)
        self._body = memoryview(buffer)[_CALL_HEAD.size : size]
        self._arrived = {token: descriptors[0]} if descriptors else {}

    def load(self, lender: Lender | None = None) -> Any:
        """Return the object; see :meth:`Arrival.load`."""
        return load_message(self._call, self._body, self._arrived, lender)

    def _call(self, body: memoryview) -> Any:
        """Do what ``pickle.loads`` would do, but faster."""
        data = bytes(body)
        start = self._before + LENGTH_PREFIX
        end = start + self._handle_size
        call = call_of(data[: self._before], data[end:])
        if call is None:
            return pickle.loads(data)
        function, arguments = call
        return function(data[start:end], *arguments)

    def contents(self) -> bytes:
        """Return the bytes of the message; while they live, what they refer to is kept."""
        return _hold_or_discard(bytes(self._body), self._arrived)


Received: TypeAlias = "Arrival | CallArrival | PlainArrival"


class _HeldBytes(bytes):
    """The bytes of a message. While they live, the segments that it refers to stay open."""

    _let_go: Callable[[], None]

    def __new__(cls, data: bytes, let_go: Callable[[], None]) -> Self:
        held = super().__new__(cls, data)
        held._let_go = let_go
        return held

    def __reduce__(self) -> tuple[Any, ...]:
        # Plain bytes: another process cannot keep this process's segments open.
        return bytes, (bytes(self),)

    def __del__(self, is_ending: Callable[[], bool] = sys.is_finalizing) -> None:
        # During interpreter shutdown the modules' globals may be gone.
        if not is_ending():
            self._let_go()


def _hold_or_discard(data: bytes, arrived: dict[bytes, int]) -> bytes:
    """Return the bytes of a message, which hold its segments; discard it if they cannot."""
    try:
        # The descriptors will be closed by the time the bytes are unpickled.
        return with_arrived(arrived, _hold, data)
    except ShmreduceError:
        raise
    except BaseException:
        # Nobody gets the bytes, and the stack may be used up.
        discard_apart(discard_message, arrived, data)
        raise


def _hold(data: bytes) -> bytes:
    let_go = hold_message(data)
    # _HeldBytes copies the bytes, which are mostly small.
    return data if let_go is None else _HeldBytes(data, let_go)


def _refuse(packet: memoryview, descriptors: int) -> NoReturn:
    raise InvalidHandleError(
        f"a packet of {len(packet)} bytes and {descriptors} descriptors, which begins with "
        f"{bytes(packet[: _HEAD.size])!r}, is not a packet of this version of shmreduce: its "
        "writer has another version, or wrote to the descriptor directly. Only shmreduce may "
        "write to its connections",
        reason="no packet",
    )


def _read_body(handle: bytes) -> bytes:
    """Return the bytes of a message in a block."""
    return contents_of(import_block(handle))


def _discard_body(handle: bytes) -> None:
    """Release the blocks of a message in a block, and that block."""
    try:
        data = _read_body(handle)
    except ShmreduceError:
        # It was read before, and what it refers to has been released.
        return
    discard_message(data)


def _load_body(handle: bytes) -> Any:
    """Unpickle a message in a block."""
    return pickle.loads(import_block(handle).buffer)
