"""Arrays that travel without a copy, because the sender has no other reference to them.

May import errors, settings, :mod:`shmreduce.memory` and ``born.moving``.

Python cannot tell whether an array is referenced from anywhere else. So the message
is pickled as if the array were moved, and then the sender drops the array. If that
frees its memory, there was no other reference, and the array has moved. If not, later
writes of its owner must not reach the receiver. A received array is then cut off from
its block: its owner gets private pages. An array that was born in shared memory is
copied into another block, and the block's handle replaces the one in the pickle.
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
        """The message that it is in."""

    @property
    def lease(self) -> Lease:
        """The lease that passes to the message's reader."""

    @property
    def handle(self) -> bytes:
        """Its handle in the pickle, padded so that a longer one can replace it."""

    def is_apart(self) -> bool:
        """Return whether no later write in this process can reach the receiver.

        Either nobody here has the array, or its owner has private pages.
        """

    def memory(self) -> tuple[int, int]:
        """Return the address and size of the array's memory, which the lease keeps."""

    def stay(self) -> None:
        """Undo it: the array is as if it had never been in a message."""

    def end(self) -> None:
        """Finish it: the message is complete."""


class _PassedOn:
    """A by-value block that this process received, and now passes on.

    It must arrive as it is now. Until it is dropped or cut off, only two things could
    write to it: other threads, which could do so while any array is pickled; and methods
    of objects in the same message, before which it is cut off, see :meth:`Moves.cut_off`.
    """

    __slots__ = ("_record", "_root", "handle", "lease", "message")

    def __init__(self, message: Message, block: Block, lease: Lease, handle: bytes) -> None:
        self.message = message
        self.lease = lease
        self.handle = handle
        self._record = block._record
        self._root = weakref.ref(block._root)

    def is_apart(self) -> bool:
        # The local reference keeps the block held: if the hold ended before
        # make_private(), the pages might belong to another block by then.
        root = self._root()
        record = self._record
        return root is None or record.private or bool(record.live.make_private(record))

    def memory(self) -> tuple[int, int]:
        return self._record.address, self._record.nbytes

    def stay(self) -> None:
        """Do nothing: nothing was changed."""

    end = stay


class Moves:
    """The arrays of one message that are moved if the sender has no other reference to them.

    While the object is pickled, its arrays are neither copied nor cut off. After the sender
    has dropped them, and before anybody can read the pickle, :meth:`settle` must be called;
    or :meth:`give_up` if pickling fails.

    Parameters
    ----------
    held : list, optional
        A list with the one object that ``ForkingPickler`` will pickle, see
        :func:`moves_of`. Without it, our own pickler is given this object and calls
        :meth:`cut_off`; only then received arrays are moved too.
    lent : list of Block, optional
        Blocks to copy into first. Those that are used are removed from the list.
    """

    __slots__ = ("_held", "_moves", "_process", "_uncut", "lent")

    def __init__(self, held: list[Any] | None = None, lent: list[Block] | None = None) -> None:
        self.lent: list[Block] = [] if lent is None else lent
        self._held = held
        self._moves: list[_Move] = []
        self._uncut: list[_PassedOn] = []
        self._process = 0

    def serves(self, obj: object) -> bool:
        """Return whether this is the object that will be pickled."""
        return self._held is not None and any(each is obj for each in self._held)

    def give_up(self) -> None:
        """Undo the moves that are not settled: pickling has failed.

        Their leases belong to the message, which gives them back.
        """
        while self._moves:
            self._moves.pop().stay()

    @property
    def passes_on(self) -> bool:
        """Whether received arrays are moved."""
        return self._held is None

    @property
    def takes_born(self) -> bool:
        """Whether this process may have arrays for :meth:`move`."""
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
        """Keep later writes to the received arrays that are in the message from its reader.

        The pickler calls it before it calls methods of objects, such as ``__reduce__``,
        which may write to the arrays.
        """
        while self._uncut:
            self._uncut.pop().is_apart()

    def _add(self, move: _Move) -> None:
        # getpid() is a system call, so only messages with moves make it.
        self._process = self._process or os.getpid()
        self._moves.append(move)

    def settle(self, data: Any) -> Any:
        """Return the pickle, with copies of those arrays that are still referenced.

        Parameters
        ----------
        data : bytes-like
            The pickle.

        Raises
        ------
        OutOfSharedMemoryError, BudgetExceededError
            If there is no room for a copy. The message must not be sent then.
        """
        if not self._moves or self._process != os.getpid():
            # Another process: a child that was forked during pickling. The moves belong to
            # the parent.
            return data
        while self._moves:
            move = self._moves[-1]
            # If the lease has ended, it was taken back, and the message has the array by
            # another lease, or a copy of it.
            if not move.lease.ended and not move.is_apart():
                data = _copy(move, data)
            self._moves.pop()
            move.end()
        return data


@contextmanager
def moves_of(held: list[Any]) -> Iterator[Moves]:
    """Let any pickler in this thread that pickles the one item of a list use these moves."""
    moves, outer = Moves(held), sending.mover
    sending.mover = moves
    try:
        yield moves
    finally:
        sending.mover = outer
        moves.give_up()


def _copy(move: _Move, data: Any) -> Any:
    """Copy an array into another block; return the pickle with that block's handle."""
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
        # ForkingPickler has committed the message already, so the copy gets another one.
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
    # From its address, not through a view: the array may be freed at any moment. The lease
    # keeps its block unchanged until the move is settled.
    handle = copy_memory(message, *move.memory())
    if len(handle) > len(move.handle):
        raise SegmentError(
            f"strategy {move.lease.segment.strategy.name!r} returned locators of very different "
            "lengths for its segments; please report this",
            operation="copy",
            errno=0,
            segment=None,
        )
    return padded(handle, len(move.handle))
