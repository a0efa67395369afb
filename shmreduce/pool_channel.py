"""One end of the connection between a pool and one of its workers.

May import errors, ``connection``, ``packets``, ``pickling`` and what is below them.

Pickling and sending are two steps here: a task is pickled when the user gives
it to the pool and sent when a worker is free, and an error while an answer is
unpickled must not be taken for a broken connection.

With a context of :mod:`multiprocessing` messages are pickled by
``ForkingPickler``, and share memory after :func:`shmreduce.install`. With one
of :mod:`shmreduce.context` they always do, and answers bring the descriptors of
their segments: a worker may be gone before its answer is read. Tasks need not:
the pool lives as long as they do.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import struct
import weakref
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any

from shmreduce import connection, packets, pickling
from shmreduce.errors import ShmreduceError
from shmreduce.fork_hooks import renew_in_children
from shmreduce.memory.handle import MARK
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
    "RETURNED",
    "STOP",
    "Channel",
    "channel_class",
    "close_in_forked_children",
    "make_channels",
]

STOP = b"\0"
"""To a worker: leave. No pickle looks like that."""
_SEVERAL = b"\1"
"""To a worker: several tasks, behind their number and their sizes. No pickle looks like that."""
_LENT = b"\2"
"""To a worker: memory for what the task behind it returns. No pickle looks like that."""
_LARGEST_WITH_LENT = 32 << 10
"""Bytes of a task that memory is lent with: arrays do not count, and one copy more."""
READY = "ready"
"""From a worker: the initializer is done."""
FAILED = "failed"
"""From a worker: the initializer raised this exception."""
RETURNED = "returned"
"""From a worker: the next so many of its tasks are not going to be done here."""


class Channel:
    """One end of a connection, and how messages on it are pickled.

    As part of the arguments of a process that is being started it reaches the
    child under every start method.

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
        """Close it; doing so again changes nothing."""
        self._connection.close()

    def give_up(self) -> None:
        """Give back the memory of what was sent and never read; the other side is dead."""

    def have_lender(self, lender: Lender) -> None:
        """Have a lender keep large memory of answers, once dropped, for :meth:`send_task`."""

    @staticmethod
    def dumps(obj: object) -> Any:
        """Pickle a task, for :meth:`send_bytes`; nothing is held if that fails."""
        return ForkingPickler.dumps(obj)

    def pack_last(self, held: list[Any]) -> Any:
        """Pickle the one object in a list, an answer, for :meth:`send_packed`; it is emptied.

        Nothing is held if that fails. Arrays that nobody has afterwards are moved.
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
        """Unpickle a message; what it holds is given back if that fails."""
        return ForkingPickler.loads(data)

    def send_bytes(self, data: Any) -> None:
        """Send bytes, such as :meth:`dumps` returns; OSError if the other side is gone."""
        self._connection.send_bytes(data)

    def send_task(self, task: Any, borrower: int | None) -> None:
        """Send a pickled task to an idle worker, and lend that process memory for its answer."""
        del borrower
        self.send_bytes(task)

    def send_tasks(self, tasks: list[Any]) -> None:
        """Send pickled tasks, small ones if there are several, for :meth:`receive_tasks`."""
        self.send_bytes(tasks[0] if len(tasks) == 1 else _join(tasks))

    def receive_tasks(self) -> list[bytes]:
        """Wait for what :meth:`send_tasks` sends; for errors see :meth:`receive_bytes`."""
        data = self.receive_bytes()
        return _split(data) if data.startswith(_SEVERAL) else [data]

    def send_packed(self, message: Any) -> None:
        """Send what :meth:`pack_last` returned; OSError if the other side is gone."""
        self._connection.send_bytes(message)

    def receive_bytes(self) -> bytes:
        """Wait for a message and return it as it came.

        Raises
        ------
        EOFError, OSError
            If the other side is gone.
        """
        return self._connection.recv_bytes()

    def receive(self) -> Callable[[], Any] | None:
        """Return what unpickles the next answer, to be called once; None if it is not there yet.

        Raises
        ------
        EOFError, OSError
            If the other side is gone.
        """
        return functools.partial(self.loads, self.receive_bytes())

    def poll(self) -> bool:
        """Whether a message, or the end, is there."""
        return self._connection.poll(0)


class _OwnChannel(Channel):
    """One end of a connection of our own."""

    _connection: connection.Connection

    def __init__(self, ours: Connection) -> None:
        super().__init__(ours)
        self._in_block: packets.Packet | None = None
        self._lender: Lender | None = None
        self._lent: packets.Packet | None = None
        self._borrowed: list[Block] = []

    def close(self) -> None:
        super().close()
        # A forked child of a worker has nothing of what was lent to that.
        self._borrowed.clear()

    def give_up(self) -> None:
        # The last one alone: large tasks are sent to those who read.
        if self._in_block is not None:
            self._in_block.discard()
            self._in_block = None
        self._take_back_lent()

    def have_lender(self, lender: Lender) -> None:
        self._lender = lender

    def send_task(self, task: Any, borrower: int | None) -> None:
        # What could not be opened there.
        self._take_back_lent()
        if self._lender is None or not self._lender.has_some or len(task) > _LARGEST_WITH_LENT:
            self.send_bytes(task)
            return
        # Without a lease for them, say, they are their owner's again.
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
        # No descriptor is free, say: one's own memory will do, and the lender takes it back.
        with contextlib.suppress(ShmreduceError):
            self._borrowed = pickling.loads(lent)
        return task

    def pack_last(self, held: list[Any]) -> Any:
        try:
            return packets.pack_last(held, self._borrowed)
        finally:
            # What is not needed goes back to its owner.
            self._borrowed.clear()

    @staticmethod
    def loads(data: Any) -> Any:
        if len(data) <= packets.SMALL_PACKET and MARK not in data:
            # Without shared memory there is nothing that could have to be given back.
            return packets.load_whole(data)
        return pickling.loads(data)

    def send_bytes(self, data: Any) -> None:
        packet = packets.pack_bytes(memoryview(data))
        if packet.segments:
            self._in_block = packet
        # Without memory in the kernel (ENOBUFS) for the moment the other side still lives.
        self._connection.transmit(packet, patient=True)

    def send_packed(self, message: Any) -> None:
        self._connection.transmit(message, patient=True)

    def receive(self) -> Callable[[], Any] | None:
        buffer = connection.take_buffer()
        arrival = self._connection.receive(buffer, wait=False)
        if arrival is None:
            return None
        return functools.partial(_unpickle, arrival, buffer, self._lender)


def _join(tasks: list[bytes | memoryview]) -> bytes:
    count = len(tasks)
    return b"".join((_SEVERAL, struct.pack(f"<B{count}I", count, *map(len, tasks)), *tasks))


def _split(data: bytes) -> list[bytes]:
    sizes = struct.unpack_from(f"<{data[1]}I", data, 2)
    ends = itertools.accumulate(sizes, initial=2 + 4 * data[1])
    return [data[start:end] for start, end in itertools.pairwise(ends)]


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
    """Return what the channels of a context are."""
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
    """See to it that forked children do not keep this end of the connection.

    A worker would not see the end of its parent while a sibling has the
    parent's end, nor a parent the end of its worker while the worker's own
    children have its end.
    """
    _channels.add(channel)


def _close_all() -> None:
    for channel in list(_channels):
        channel.close()
    _channels.clear()


renew_in_children(_close_all)
