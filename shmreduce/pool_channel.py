"""One end of the connection between a pool and one of its workers.

May import errors, ``connection``, ``packets``, ``pickling``, ``unpickling`` and what is below
them.

Pickling and sending are separate steps. A task is pickled when the user gives it to
the pool, and sent when a worker is free. An answer is received and then unpickled, so
that an error of unpickling is not taken for a broken connection.

With a context of :mod:`multiprocessing`, messages are pickled by ``ForkingPickler``,
and share memory only after :func:`shmreduce.install`. With a context of
:mod:`shmreduce.context` they always do, and the descriptors of an answer's segments
travel with it, because the worker may have exited before its answer is read. Tasks do
not need descriptors: the pool, which owns the segments, lives as long as its tasks.
"""

from __future__ import annotations

import contextlib
import functools
import struct
import weakref
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any

from shmreduce import connection, packets, pickling, unpickling
from shmreduce.errors import ShmreduceError
from shmreduce.fork_hooks import renew_in_children
from shmreduce.memory.loading import discard_message
from shmreduce.moving import moves_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection

    from shmreduce.memory.blocks import Block
    from shmreduce.memory.lending import Lender
    from shmreduce.receive_buffer import ReceiveBuffer

__all__ = [
    "FAILED",
    "READY",
    "STOP",
    "Channel",
    "channel_class",
    "close_in_forked_children",
    "make_channels",
]

STOP = b"\0"
"""To a worker: leave. No pickle begins with this byte, nor with the next one."""
_LENT = b"\1"
"""To a worker: blocks that it may use for its answer, and the task."""
_LARGEST_WITH_LENT = 32 << 10
"""Bytes. Memory is lent only with tasks up to this size, since it costs a copy of the task.

The task's arrays do not count.
"""
READY = "ready"
"""From a worker: the initializer has returned."""
FAILED = "failed"
"""From a worker: the initializer raised this exception."""


class Channel:
    """One end of a connection, and how messages on it are pickled.

    It can be passed to a child process as an argument, under every start method.

    Parameters
    ----------
    connection : Connection
        It belongs to this object afterwards.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def fileno(self) -> int:
        """Return the descriptor, for selectors."""
        return self._connection.fileno()

    def close(self) -> None:
        """Close it; do nothing if it is closed."""
        self._connection.close()

    def give_up(self) -> None:
        """Give back the memory of messages that the other side, which is dead, has not read."""

    def have_lender(self, lender: Lender) -> None:
        """Let a lender keep the large blocks of answers that the program has dropped.

        :meth:`send_task` lends them to the worker again.
        """

    @staticmethod
    def dumps(obj: object) -> Any:
        """Pickle a task, for :meth:`send_bytes`; if that fails, give back all memory."""
        return ForkingPickler.dumps(obj)

    def pack_last(self, held: list[Any]) -> Any:
        """Pickle the one object in a list, an answer, for :meth:`send_packed`; empty the list.

        Arrays to which no other reference is left are moved. If pickling fails, all memory
        is given back.
        """
        with moves_of(held) as moves:
            data = ForkingPickler.dumps(held[0])
            try:
                held.clear()
                return moves.settle(data)
            except BaseException:
                discard_message(data)
                raise

    @staticmethod
    def loads(data: Any) -> Any:
        """Unpickle a message; if that fails, give back its memory."""
        return ForkingPickler.loads(data)

    def send_bytes(self, data: Any) -> None:
        """Send bytes, such as :meth:`dumps` returns; OSError if the other side is gone."""
        self._connection.send_bytes(data)

    def send_task(self, task: Any, borrower: int | None) -> None:
        """Send a pickled task to an idle worker, and lend that process memory for its answer."""
        del borrower
        self.send_bytes(task)

    def send_packed(self, message: Any) -> None:
        """Send what :meth:`pack_last` returned; OSError if the other side is gone."""
        self._connection.send_bytes(message)

    def receive_bytes(self) -> bytes:
        """Wait for a message, and return it without unpickling it.

        Raises
        ------
        EOFError, OSError
            If the other side is gone.
        """
        return self._connection.recv_bytes()

    def receive(self) -> Callable[[], Any] | None:
        """Return a function that unpickles the next answer, to be called once, or None.

        None means that no answer has arrived yet.

        Raises
        ------
        EOFError, OSError
            If the other side is gone.
        """
        return functools.partial(self.loads, self.receive_bytes())

    def poll(self) -> bool:
        """Return whether a message can be read, or the connection has ended."""
        return self._connection.poll(0)


class _OwnChannel(Channel):
    """One end of a :class:`shmreduce.connection.Connection`."""

    _connection: connection.Connection

    def __init__(self, ours: Connection) -> None:
        super().__init__(ours)
        self._in_block: packets.Packet | None = None
        self._lender: Lender | None = None
        self._lent: packets.Packet | None = None
        self._borrowed: list[Block] = []

    def close(self) -> None:
        super().close()
        # This also runs in a forked child of a worker, to which nothing was lent.
        self._borrowed.clear()

    def give_up(self) -> None:
        # Only the last one can be unread: a large task is sent only to an idle worker.
        if self._in_block is not None:
            self._in_block.discard()
            self._in_block = None
        self._take_back_lent()

    def have_lender(self, lender: Lender) -> None:
        self._lender = lender

    def send_task(self, task: Any, borrower: int | None) -> None:
        # Blocks that were lent with the task before and that the worker could not open.
        self._take_back_lent()
        if self._lender is None or not self._lender.has_some or len(task) > _LARGEST_WITH_LENT:
            self.send_bytes(task)
            return
        # If they cannot be lent, for example because no lease is free, pack_lent() has given
        # them back, and the task is sent without them.
        with contextlib.suppress(ShmreduceError):
            self._lent = packets.pack_lent(
                self._lender, borrower, lambda lent: _with_lent(lent, task)
            )
        if self._lent is None:
            self.send_bytes(task)
        else:
            self._connection.transmit(self._lent, patient=True)

    def _take_back_lent(self) -> None:
        if self._lent is not None:
            self._lent.discard()
            self._lent = None

    @staticmethod
    def dumps(obj: object) -> Any:
        data, message = pickling.dumps(obj)
        if message is not None:
            message.commit()
        return data

    def receive_bytes(self) -> bytes:
        data = super().receive_bytes()
        if not data.startswith(_LENT):
            return data
        lent, task = _without_lent(data)
        # If the blocks cannot be opened, for example because no descriptor is free, the worker
        # uses memory of its own, and the lender takes the blocks back.
        with contextlib.suppress(ShmreduceError):
            self._borrowed = unpickling.loads(lent)
        return task

    def pack_last(self, held: list[Any]) -> Any:
        try:
            return packets.pack_last(held, self._borrowed)
        finally:
            # Blocks that were not needed go back to their owner.
            self._borrowed.clear()

    @staticmethod
    def loads(data: Any) -> Any:
        return unpickling.loads(data)

    def send_bytes(self, data: Any) -> None:
        packet = packets.pack_bytes(memoryview(data))
        if packet.segments:
            self._in_block = packet
        # Patient: if the kernel is out of memory (ENOBUFS), the other side is still alive.
        self._connection.transmit(packet, patient=True)

    def send_packed(self, message: Any) -> None:
        self._connection.transmit(message, patient=True)

    def receive(self) -> Callable[[], Any] | None:
        buffer = connection.take_buffer()
        arrival = None
        try:
            arrival = self._connection.receive(buffer, wait=False)
        finally:
            if arrival is None:
                connection.give_buffer(buffer)
        if arrival is None:
            return None
        return functools.partial(_unpickle, arrival, buffer, self._lender)


def _with_lent(lent: bytes, task: Any) -> bytes:
    return b"".join((_LENT, struct.pack("<I", len(lent)), lent, task))


def _without_lent(data: bytes) -> tuple[bytes, bytes]:
    start = len(_LENT) + 4
    end = start + int(struct.unpack_from("<I", data, len(_LENT))[0])
    return data[start:end], data[end:]


def _unpickle(arrival: packets.Received, buffer: ReceiveBuffer, lender: Lender | None) -> Any:
    try:
        return arrival.load(lender)
    finally:
        connection.give_buffer(buffer)


def channel_class(context: Any) -> type[Channel]:
    """Return the class of a context's channels."""
    first, second = make_channels(context)
    first.close()
    second.close()
    return type(first)


def make_channels(context: Any) -> tuple[Channel, Channel]:
    """Return the two ends of a new connection."""
    first, second = context.Pipe()
    kind = _OwnChannel if isinstance(first, connection.Connection) else Channel
    return kind(first), kind(second)


_channels: weakref.WeakSet[Channel] = weakref.WeakSet()


def close_in_forked_children(channel: Channel) -> None:
    """Close this end of the connection in processes that this one forks.

    Otherwise a worker would not notice its parent's death while a sibling had a copy of
    the parent's end, nor a parent the worker's death while the worker's own children had
    a copy of the worker's end.
    """
    _channels.add(channel)


def _close_all() -> None:
    for channel in list(_channels):
        channel.close()
    _channels.clear()


renew_in_children(_close_all)
