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

import os
import weakref
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

from shmreduce.born import moving as born
from shmreduce.errors import ReducerError, SegmentError
from shmreduce.memory.handle import padded
from shmreduce.memory.message import Message
from shmreduce.memory.mover import sending
from shmreduce.memory.one_buffer import copy_memory

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shmreduce.memory.blocks import Block
    from shmreduce.memory.lease import Lease

__all__ = ["Moves", "moves_of"]


class _Move(Protocol):
    """One array in a message, of which it is not known yet whether it moves."""

    @property
    def message(self) -> Message:
        """In which it is."""

    @property
    def lease(self) -> Lease:
        """What the message gives to its reader."""

    @property
    def handle(self) -> bytes:
        """As it stands in the pickle, with room for one that is longer."""

    def is_apart(self) -> bool:
        """Return whether nobody here has it, or what they write is not the receiver's to see."""

    def memory(self) -> tuple[int, int]:
        """Return the address and the size of what is to be copied; the lease keeps it there."""

    def stay(self) -> None:
        """Let the array be as if it had never been in a message."""

    def end(self) -> None:
        """Take note that the message is complete."""


class _PassedOn:
    """A by-value block that was received, and is on its way to somebody else.

    It arrives as it is now. Nobody writes to it until it is dropped or cut off but
    those who could write at the same time anyhow, and what objects of the same message
    do when they are pickled: before that it is cut off, see :meth:`Moves.cut_off`.
    """

    __slots__ = ("_record", "_root", "handle", "lease", "message")

    def __init__(self, message: Message, block: Block, lease: Lease, handle: bytes) -> None:
        self.message = message
        self.lease = lease
        self.handle = handle
        self._record = block._record
        self._root = weakref.ref(block._root)

    def is_apart(self) -> bool:
        # As long as there is a reference here the hold does not end: pages that were cut
        # off after its end would be another block's.
        root = self._root()
        record = self._record
        return root is None or record.private or bool(record.live.make_private(record))

    def memory(self) -> tuple[int, int]:
        return self._record.address, self._record.nbytes

    def stay(self) -> None:
        """Nothing was changed."""

    end = stay


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
        self._moves: list[_Move] = []
        self._uncut: list[_PassedOn] = []
        self._process = 0

    def serves(self, obj: object) -> bool:
        """Return whether this is the object."""
        return self._held is not None and any(each is obj for each in self._held)

    def give_up(self) -> None:
        """Let what has not been settled stay: pickling has failed, the message has its leases."""
        while self._moves:
            self._moves.pop().stay()

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
        found = born.name_array(message, address, used, self._add)
        return None if found is None else found.handle

    def pass_on(self, message: Message, block: Block, lease: Lease, handle: bytes) -> None:
        """See :meth:`shmreduce.memory.message.Mover.pass_on`."""
        move = _PassedOn(message, block, lease, handle)
        self._add(move)
        self._uncut.append(move)

    def cut_off(self) -> None:
        """Let writes to received arrays that were named so far not reach the message.

        To be called before anything is run that may write to them: methods by which
        objects say how they are pickled.
        """
        while self._uncut:
            self._uncut.pop().is_apart()

    def _add(self, move: _Move) -> None:
        # Asked of the system for those alone that move anything.
        self._process = self._process or os.getpid()
        self._moves.append(move)

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
            move = self._moves[-1]
            # What was taken back meanwhile is in the message by another lease, or a copy.
            if not move.lease.ended and not move.is_apart():
                data = _copy(move, data)
            self._moves.pop()
            move.end()
        return data


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


def _copy(move: _Move, data: Any) -> Any:
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
    if not move.message.is_empty:
        handle = _copy_to(move.message, move)
    else:
        # It was committed, by a channel that is not ours: the copy has one of its own.
        message = Message()
        try:
            handle = _copy_to(message, move)
            message.commit()
        except BaseException:
            message.rollback()
            raise
    move.message.end_lease(move.lease)
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
