"""Arrays that travel without a copy, because nobody else has them.

May import errors, settings, strategies, :mod:`shmreduce.memory`, ``library`` and ``heap``.

Whether an array is referenced from anywhere else cannot be asked. It can be
tried: the message is pickled as if the array were moved, then its sender drops
it. If the allocator's ``free`` was called for its memory by then, nobody has it,
and it is moved. If not, its bytes are copied into another block, and the handle
in the pickle is replaced by that block's.
"""

from __future__ import annotations

import ctypes
import os
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from shmreduce.born.heap import BornHeap, heap_of
from shmreduce.born.library import EXPOSED, FREED, PRIVATE, load
from shmreduce.errors import OutOfSharedMemoryError, ReducerError, SegmentError
from shmreduce.memory.handle import padded
from shmreduce.memory.message import Lease, Message, sending
from shmreduce.settings import get_settings
from shmreduce.strategies import current_strategy

if TYPE_CHECKING:
    from types import TracebackType

__all__ = ["Moves"]

started = False
"""Whether arrays were ever born here: only then can any be moved."""

_PADDING = 16
"""Bytes by which the handle that replaces another may be longer."""


class _Move(NamedTuple):
    """One array in a message, of which it is not known yet whether it moves."""

    heap: BornHeap
    number: int
    message: Message
    lease: Lease
    handle: bytes
    """As it stands in the pickle, padded."""


class Moves:
    """The arrays of one message that are moved if its sender is the last to have them.

    A context for the pickling. The message of the object names born arrays
    without copying them; :meth:`settle` must follow when the sender has dropped
    them, and before anybody else can see the pickle.

    Parameters
    ----------
    held : list
        Its one item is the object that is going to be pickled.
    """

    def __init__(self, held: list[Any]) -> None:
        self._held = held
        self._moves: list[_Move] = []
        self._outer: Any = None
        self._process = os.getpid()

    def serves(self, obj: object) -> bool:
        """Return whether this is the object."""
        return bool(self._held) and self._held[0] is obj

    def __enter__(self) -> Self:
        self._outer = sending.mover
        sending.mover = self
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        sending.mover = self._outer
        while self._moves:
            # Pickling has failed: the message has taken its leases back.
            move = self._moves.pop()
            self._stay(move)

    def move(self, message: Message, address: int, used: int) -> bytes | None:
        """See :meth:`shmreduce.Message.move`."""
        if not message.shared_memory or get_settings().on_exhausted == "pickle":
            # What may have to be copied later must be sure to get its memory.
            return None
        library = load()
        number = library.send(address)
        if not number:
            return None
        heap = heap_of(number)
        kept = False
        try:
            entry = library.table[number]
            size = entry.size
            # A copy must be named by a handle of the same length.
            if 2 * used < size or heap.strategy is not current_strategy():
                return None
            heap.moving[number] = None
            place = heap.place_of(number)
            if place is None:
                return None
            segment, block = place
            handle, lease = message.add_lease(segment, block, segment.generations[block], size)
            handle = padded(handle, len(handle) + _PADDING)
            self._moves.append(_Move(heap, number, message, lease, handle))
            kept = True
            return handle
        finally:
            if not kept:
                heap.moving.pop(number, None)
                library.unsend(number)

    def settle(self, data: Any) -> Any:
        """Return the pickle with copies of those arrays that somebody still has.

        Parameters
        ----------
        data : bytes-like
            What was pickled.

        Raises
        ------
        OutOfSharedMemoryError, BudgetExceededError
            If there is no room for a copy. The message must not be sent then.
        """
        if not self._moves or self._process != os.getpid():
            # A child that was forked in the middle of a pickling: it is the parent's.
            return data
        table = load().table
        while self._moves:
            move = self._moves[-1]
            entry = table[move.number]
            gone = entry.state == FREED and not entry.flags & (PRIVATE | EXPOSED)
            if not gone and not move.lease.ended:
                data = self._copy(move, entry.address, entry.size, data)
            self._moves.pop()
            if gone:
                move.heap.moving.pop(move.number, None)
            else:
                self._stay(move)
            move.heap.tend()
        return data

    def _copy(self, move: _Move, address: int, size: int, data: Any) -> Any:
        text = bytes(data)
        place = text.find(move.handle)
        if place == -1:
            raise ReducerError(
                "the handle of an array that was to be moved is not in the pickle as it is. "
                "Reducers must pass on what Message.move() returns as bytes of its own",
                reducer=None,
                type_name=None,
                reason="handle not found",
            )
        if not move.message.is_empty:
            handle = _copy_to(move.message, move, address, size)
        else:
            # It was committed, by a channel that is not ours: the copy has one of its own.
            message = Message()
            try:
                handle = _copy_to(message, move, address, size)
                message.commit()
            except BaseException:
                message.rollback()
                raise
        move.message.end_lease(move.lease)
        rest = text[place + len(move.handle) :]
        return memoryview(b"".join((text[:place], handle, rest)))

    def _stay(self, move: _Move) -> None:
        """Let an array be as if it had never been in a message."""
        move.heap.moving.pop(move.number, None)
        if not move.lease.segment.heads[move.lease.block]:
            # Otherwise somebody has it by some message: it is freed as such a block is.
            load().unsend(move.number)


def _copy_to(message: Message, move: _Move, address: int, size: int) -> bytes:
    """Copy an array into a block of a message; return a handle as long as the move's."""
    given = message.allocate(size)
    if given is None:
        raise OutOfSharedMemoryError(
            f"no room for a copy of {size} bytes; the message was sent from within another "
            "that is being made. Send it again",
            operation="copy",
            errno=0,
            requested=size,
            available=None,
            strategy=None,
        )
    memory, handle = given
    if len(handle) > len(move.handle):
        raise SegmentError(
            f"strategy {move.heap.strategy.name!r} names its segments by texts of very "
            "different lengths; please report this",
            operation="copy",
            errno=0,
            segment=None,
        )
    # Not by a view of the array: it may be freed at any moment. Its block
    # stays as it is until this move has been settled.
    ctypes.memmove(ctypes.addressof(ctypes.c_char.from_buffer(memory)), address, size)
    return padded(handle, len(move.handle))
