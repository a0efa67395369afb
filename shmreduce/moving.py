"""Arrays that travel without a copy, because nobody else has them.

May import errors, settings, :mod:`shmreduce.memory` and ``born.moving``.

Whether an array is referenced from anywhere else cannot be asked. It can be
tried: the message is pickled as if the array were moved, then its sender drops
it. If its memory was given up by then, nobody has it, and it has moved. If not,
what its owner writes from now on is kept from the receiver: a received array
is cut off from its block, by private pages; one that was born in shared memory
is copied into another block, and the handle in the pickle replaced by that
block's.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from shmreduce.born import moving as born
from shmreduce.errors import ReducerError, SegmentError
from shmreduce.memory.handle import padded
from shmreduce.memory.message import Message
from shmreduce.memory.mover import sending
from shmreduce.memory.one_buffer import (
    GivenBuffer,
    Received,
    Trial,
    copy_memory,
    lend_by_value,
)
from shmreduce.memory.runtime import current

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shmreduce.memory.blocks import Block
    from shmreduce.memory.lease import Lease
    from shmreduce.memory.segment import Segment

__all__ = ["Moves", "give_born", "is_born_elsewhere", "moves_of"]


class _Move(Trial, Protocol):
    """One array in a message, of which it is not known yet whether it moves."""

    @property
    def lease(self) -> Lease:
        """What the message gives to its reader."""

    @property
    def handle(self) -> bytes:
        """As it stands in the pickle, with room for one that is longer."""


class _PassedOn(Received):
    """A received block in a pickle.

    It arrives as it is now. Nobody writes to it until it is dropped or cut off but
    those who could write at the same time anyhow, and what objects of the same message
    do when they are pickled: before that it is cut off, see :meth:`Moves.cut_off`.
    """

    __slots__ = ("handle", "lease")

    def __init__(self, block: Block, lease: Lease, handle: bytes) -> None:
        super().__init__(block._record, weakref.ref(block._root))
        self.lease = lease
        self.handle = handle


class Moves:
    """The arrays of one message that are moved if its sender is the last to have them.

    The message of the object names arrays without copying them or cutting them off;
    :meth:`settle` must follow when the sender has dropped them, and before anybody
    else can see the pickle; :meth:`give_up` where it does not come to that.

    Parameters
    ----------
    held : list, optional
        Its one item is what another pickler than ours is going to pickle, see
        :func:`moves_of`. Ours is given this itself and calls :meth:`cut_off`; so only
        then are received arrays moved, too.
    lent : list of Block, optional
        What copies are put into first; they are taken out.
    """

    __slots__ = ("_held", "_moves", "_process", "_uncut", "lent")

    def __init__(self, held: list[Any] | None = None, lent: list[Block] | None = None) -> None:
        self.lent: list[Block] = [] if lent is None else lent
        self._held = held
        self._moves: list[tuple[Message, _Move]] = []
        self._uncut: list[_PassedOn] = []
        self._process = 0

    def serves(self, obj: object) -> bool:
        """Return whether this is the object."""
        return self._held is not None and any(each is obj for each in self._held)

    def give_up(self) -> None:
        """Let what has not been settled stay: pickling has failed, the message has its leases."""
        while self._moves:
            self._moves.pop()[1].stay()

    @property
    def passes_on(self) -> bool:
        """Whether received arrays are moved."""
        return self._held is None

    @property
    def takes_born(self) -> bool:
        """Whether there can be anything for :meth:`move` here."""
        return born.started

    def move(self, message: Message, address: int, used: int) -> bytes | None:
        """See :meth:`shmreduce.Message.move`."""
        if not message.shared_memory:
            return None
        found = born.name_array(address, used, message.add_lease, partial(self._add, message))
        return None if found is None else found.handle

    def pass_on(self, message: Message, block: Block, lease: Lease, handle: bytes) -> None:
        """See :meth:`shmreduce.memory.message.Mover.pass_on`."""
        move = _PassedOn(block, lease, handle)
        self._add(message, move)
        self._uncut.append(move)

    def cut_off(self) -> None:
        """Let writes to received arrays that were named so far not reach the message.

        To be called before anything is run that may write to them: methods by which
        objects say how they are pickled.
        """
        while self._uncut:
            self._uncut.pop().is_apart()

    def _add(self, message: Message, move: _Move) -> None:
        # Asked of the system for those alone that move anything.
        self._process = self._process or os.getpid()
        self._moves.append((message, move))

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
        while self._moves:
            message, move = self._moves[-1]
            # What was taken back meanwhile is in the message by another lease, or a copy.
            if not move.lease.ended and not move.is_apart():
                data = _copy(message, move, data)
            self._moves.pop()
            afterwards = move.end()
            if afterwards is not None:
                afterwards()
        return data


def give_born(view: memoryview, leases: list[Lease]) -> GivenBuffer | None:
    """Give out an array that was born in shared memory and is a message by itself.

    As :func:`~shmreduce.memory.one_buffer.give_out` does for other buffers.
    """
    address = _address_of(view)
    if address is None:
        return None
    moves: list[born.BornMove] = []

    def lend(segment: Segment, block: int, nbytes: int) -> tuple[bytes, Lease] | None:
        # Whoever rebuilds it expects a block of these bytes and no others.
        return lend_by_value(segment, block, nbytes, leases) if nbytes == view.nbytes else None

    try:
        move = born.name_array(address, view.nbytes, lend, moves.append)
        return None if move is None else GivenBuffer(current(), move.handle, move.lease, move)
    except BaseException:
        for each in moves:
            each.stay()
        raise


def is_born_elsewhere(view: memoryview) -> bool:
    """Return whether a buffer is certainly in memory of which nothing can be moved."""
    address = _address_of(view) if born.started else None
    return not born.started or (address is not None and not born.has_address(address))


def _address_of(view: memoryview) -> int | None:
    """Return where a buffer begins; None if that cannot be asked because it is read-only."""
    return None if view.readonly else ctypes.addressof(ctypes.c_char.from_buffer(view))


@contextmanager
def moves_of(held: list[Any]) -> Iterator[Moves]:
    """Tell whatever pickler comes to pickle the one item of a list, in this thread."""
    moves, outer = Moves(held), sending.mover
    sending.mover = moves
    try:
        yield moves
    finally:
        sending.mover = outer
        moves.give_up()


def _copy(message: Message, move: _Move, data: Any) -> Any:
    """Copy an array into another block; return the pickle with the handle of that."""
    text = bytes(data)
    place = text.find(move.handle)
    if place == -1:
        raise ReducerError(
            "the pickle does not contain the handle of an array that was to be moved. Reducers "
            "must return the bytes that they get from Message.move() and Message.refer() "
            "unchanged, as an object of their own",
            reducer=None,
            type_name=None,
            reason="handle not found",
        )
    if not message.is_empty:
        handle = _copy_to(message, move)
    else:
        # It was committed, by a channel that is not ours: the copy has one of its own.
        apart = Message()
        try:
            handle = _copy_to(apart, move)
            apart.commit()
        except BaseException:
            apart.rollback()
            raise
    message.end_lease(move.lease)
    rest = text[place + len(move.handle) :]
    return memoryview(b"".join((text[:place], handle, rest)))


def _copy_to(message: Message, move: _Move) -> bytes:
    """Copy an array into a block of a message; return a handle as long as the move's."""
    # Not by a view of the array: it may be freed at any moment. Its block
    # stays as it is until this move has been settled.
    handle = copy_memory(message, *move.memory())
    if len(handle) > len(move.handle):
        raise SegmentError(
            f"strategy {move.lease.segment.strategy.name!r} names its segments by texts of very "
            "different lengths; please report this",
            operation="copy",
            errno=0,
            segment=None,
        )
    return padded(handle, len(move.handle))
