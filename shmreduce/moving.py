"""Arrays that travel without a copy, because the sender has no other reference to them.

May import errors, settings, :mod:`shmreduce.memory`, ``born.moving`` and ``born.heap``.

Python cannot tell whether an array is referenced from anywhere else. So the message
is pickled as if the array were moved, and then the sender drops the array. If that
frees its memory, there was no other reference, and the array has moved. If not, later
writes of its owner must not reach the receiver. A received array is then cut off from
its block: its owner gets private pages. An array that was born in shared memory is
copied into another block, and the block's handle replaces the one in the pickle.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from shmreduce.born import moving as born
from shmreduce.born.heap import has_address
from shmreduce.errors import ReducerError, SegmentError
from shmreduce.memory.handle import padded
from shmreduce.memory.message import Message
from shmreduce.memory.mover import sending
from shmreduce.memory.one_buffer import (
    GivenBuffer,
    ReceivedBlock,
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

__all__ = ["Moves", "born_at", "give_born", "moves_of"]


class _Move(Trial, Protocol):
    """One array in a message, of which it is not known yet whether it moves."""

    @property
    def lease(self) -> Lease:
        """The lease that passes to the message's reader."""

    @property
    def handle(self) -> bytes:
        """Its handle in the pickle, padded so that a longer one can replace it."""


class _PassedOn(ReceivedBlock):
    """A by-value block that this process received, and now passes on in a pickle.

    It must arrive as it is now. Until it is dropped or cut off, only two things could
    write to it: other threads, which could do so while any array is pickled; and methods
    of objects in the same message, before which it is cut off, see :meth:`Moves.cut_off`.
    """

    __slots__ = ("handle", "lease")

    def __init__(self, block: Block, lease: Lease, handle: bytes) -> None:
        super().__init__(block._record, weakref.ref(block._root))
        self.lease = lease
        self.handle = handle


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

    __slots__ = ("_held", "_moves", "_process", "lent", "uncut")

    def __init__(self, held: list[Any] | None = None, lent: list[Block] | None = None) -> None:
        self.lent: list[Block] = [] if lent is None else lent
        self._held = held
        self._moves: list[tuple[Message, _Move]] = []
        self.uncut: list[_PassedOn] = []
        """See :attr:`shmreduce.memory.mover.Mover.uncut`."""
        self._process = 0

    def serves(self, obj: object) -> bool:
        """Return whether this is the object that will be pickled."""
        return self._held is not None and any(each is obj for each in self._held)

    def give_up(self) -> None:
        """Undo the moves that are not settled: pickling has failed.

        Their leases belong to the message, which gives them back.
        """
        while self._moves:
            self._moves.pop()[1].stay()

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
        if not message.shared_memory:
            return None
        found = born.name_array(address, used, message.add_lease, partial(self._add, message))
        return None if found is None else found.handle

    def pass_on(self, message: Message, block: Block, lease: Lease, handle: bytes) -> None:
        """See :meth:`shmreduce.memory.message.Mover.pass_on`."""
        move = _PassedOn(block, lease, handle)
        self._add(message, move)
        self.uncut.append(move)

    def cut_off(self) -> None:
        """Keep later writes to the received arrays that are in the message from its reader.

        The pickler calls it before it calls methods of objects, such as ``__reduce__``,
        which may write to the arrays.
        """
        while self.uncut:
            self.uncut.pop().is_apart()

    def _add(self, message: Message, move: _Move) -> None:
        # getpid() is a system call, so only messages with moves make it.
        self._process = self._process or os.getpid()
        self._moves.append((message, move))

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
            message, move = self._moves[-1]
            # If the lease has ended, it was taken back, and the message has the array by
            # another lease, or a copy of it.
            if not move.lease.ended and not move.is_apart():
                data = _copy(message, move, data)
            self._moves.pop()
            afterwards = move.end()
            if afterwards is not None:
                afterwards()
        return data


def born_at(view: memoryview) -> int | None:
    """Return the address of a buffer that was born in shared memory, 0 for any other.

    None if that is not known, since a read-only buffer cannot be asked for its address.
    """
    if not born.started:
        return 0
    if view.readonly:
        return None
    address = ctypes.addressof(ctypes.c_char.from_buffer(view))
    return address if has_address(address) else 0


def give_born(view: memoryview, address: int, leases: list[Lease]) -> GivenBuffer | None:
    """Give out an array that was born in shared memory and is a message by itself.

    As :func:`~shmreduce.memory.one_buffer.give_out` does for other buffers. The address is from
    :func:`born_at`.
    """
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


def _copy(message: Message, move: _Move, data: Any) -> Any:
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
    if not message.is_empty:
        handle = _copy_to(message, move)
    else:
        # ForkingPickler has committed the message already, so the copy gets another one.
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
    # From its address, not through a view: the array may be freed at any moment. The lease
    # keeps its block unchanged until the move is settled.
    handle = copy_memory(message, *move.memory())
    if len(handle) > len(move.handle):
        raise SegmentError(
            "an array could not be replaced by a copy: its segment is of strategy "
            f"{move.lease.segment.strategy.name!r}, and the copy's has a longer locator. Was the "
            "sharing strategy changed while the message was being sent? Send it again",
            operation="copy",
            errno=0,
            segment=None,
        )
    return padded(handle, len(move.handle))
