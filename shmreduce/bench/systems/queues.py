"""Peers with queues: plain multiprocessing, torch, faster-fifo, pyzmq.

May import ``base`` and ``channels``. The packages themselves are imported in the
processes that are measured.
"""

from __future__ import annotations

import os
import pickle
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from shmreduce.bench.systems.base import Ability, Kind, missing
from shmreduce.bench.systems.channels import ChannelSystem

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

__all__ = ["FasterFifo", "Stock", "TenBytes", "TenBytesByPipe", "Torch", "ZeroMQ"]


@dataclass(frozen=True)
class Stock(ChannelSystem):
    """Plain multiprocessing, which pickles."""

    name: str = "multiprocessing"

    abilities: ClassVar[frozenset[Ability]] = ChannelSystem.abilities | {"collect"}

    def queue(self, room: int) -> Any:  # noqa: ARG002 - messages of any size go through
        """Return a ``SimpleQueue``."""
        return self.context().SimpleQueue()

    def pool(self, workers: int) -> Any:
        """Return a ``Pool``."""
        return self.context().Pool(workers)


@dataclass(frozen=True)
class TenBytes(Stock):
    """Plain multiprocessing that sends ten bytes over a ``SimpleQueue``."""

    name: str = "ten bytes"

    abilities: ClassVar[frozenset[Ability]] = frozenset({"echo"})
    kinds: ClassVar[frozenset[Kind]] = frozenset({"shared", "born"})

    @property
    def is_peer(self) -> bool:
        """False: it sends no arrays."""
        return False

    def message(self, payload: Any, kind: Kind) -> Any:  # noqa: ARG002 - any payload
        """Return ten bytes for any payload."""
        return b"0123456789"

    def payload(self, message: Any) -> Any:
        """Return None: there are no arrays."""


@dataclass(frozen=True)
class TenBytesByPipe(TenBytes):
    """Plain multiprocessing that sends ten bytes over a pipe: the least a round trip costs."""

    name: str = "ten bytes by Pipe"

    def queue(self, room: int) -> Any:  # noqa: ARG002 - ten bytes always go through
        """Return a pipe, which needs no locks: it has one writer and one reader."""
        return _PipeEnds(*self.context().Pipe(duplex=False))


class _PipeEnds:
    """Gives ``send`` and ``recv`` of a pipe the names that queues have for them."""

    def __init__(self, reader: Connection, writer: Connection) -> None:
        self._ends = reader, writer
        self.get = reader.recv
        self.put = writer.send

    def __reduce__(self) -> Any:
        return _PipeEnds, self._ends


@dataclass(frozen=True)
class Torch(ChannelSystem):
    """``torch.multiprocessing`` with tensors."""

    name: str = "torch"
    strategy: str = "file_descriptor"

    abilities: ClassVar[frozenset[Ability]] = ChannelSystem.abilities | {"collect"}
    kinds: ClassVar[frozenset[Kind]] = frozenset({"fresh", "shared", "born"})

    def unusable_reason(self) -> str | None:
        """Return that torch is missing, or that it lacks the strategy, or None."""
        reason = missing("torch", "torch")
        if reason is not None:
            return reason
        if self.strategy not in _torch().multiprocessing.get_all_sharing_strategies():
            return f"torch has no strategy {self.strategy} on this system"
        return None

    def prepare(self) -> None:
        """Choose the strategy, which torch's children do not inherit."""
        _torch().multiprocessing.set_sharing_strategy(self.strategy)

    def queue(self, room: int) -> Any:  # noqa: ARG002 - messages of any size go through
        """Return a ``SimpleQueue``: torch's reducers are in force for all of them."""
        return self.context().SimpleQueue()

    def pool(self, workers: int) -> Any:
        """Return a pool of the standard library: torch's own cannot be made."""
        return self.context().Pool(workers, initializer=self.prepare)

    def message(self, payload: Any, kind: Kind) -> Any:
        """Return tensors; those of kind ``born`` are made by ``share_memory_``."""
        return super().message(payload, "fresh" if kind == "fresh" else "shared")

    def fresh(self, array: Any) -> Any:
        """Return a tensor over ``array``.

        Sending a tensor moves its storage to shared memory permanently, so each message needs
        a new tensor. ``array`` itself is not moved.
        """
        return _torch().from_numpy(array)

    def shared(self, array: Any) -> Any:
        """Return a tensor in shared memory."""
        return _torch().from_numpy(array).share_memory_()

    def payload(self, message: Any) -> Any:
        """Return the tensors' memory as arrays."""
        torch = _torch()
        if isinstance(message, torch.Tensor):
            return message.numpy()
        if isinstance(message, dict):
            return {key: self.payload(value) for key, value in message.items()}
        if isinstance(message, list | tuple):
            return type(message)(self.payload(value) for value in message)
        return message


@dataclass(frozen=True)
class FasterFifo(ChannelSystem):
    """Queues of faster-fifo: messages are pickled into a circular buffer in shared memory."""

    name: str = "faster-fifo"

    queues_have_room: ClassVar[bool] = True

    def unusable_reason(self) -> str | None:
        """Return that it is missing, or None."""
        return missing("faster_fifo", "faster-fifo")

    def prepare(self) -> None:
        """Make queues picklable as arguments of spawned processes."""
        import_module("faster_fifo_reduction")

    def queue(self, room: int) -> Any:
        """Return a queue with room for two messages, and some more bytes for the pickles."""
        made: Any = import_module("faster_fifo").Queue
        return _PatientFifo(made(max_size_bytes=2 * room + 4_000_000))


class _PatientFifo:
    """Waits practically without a limit; faster-fifo waits ten seconds by default."""

    def __init__(self, fifo: Any) -> None:
        self._fifo = fifo

    def put(self, message: Any) -> None:
        self._fifo.put(message, timeout=3600.0)

    def get(self) -> Any:
        return self._fifo.get(timeout=3600.0)


@dataclass(frozen=True)
class ZeroMQ(ChannelSystem):
    """pyzmq over ipc, with the buffers of PEP 574 as parts of a message."""

    name: str = "pyzmq"

    def unusable_reason(self) -> str | None:
        """Return that it is missing, or None."""
        return missing("zmq", "pyzmq")

    def queue(self, room: int) -> Any:  # noqa: ARG002 - messages of any size go through
        """Return a queue between PUSH and PULL sockets."""
        return _ZeroMQQueue()


class _ZeroMQQueue:
    """Sends as in pyzmq's guide to serializing: by pickle protocol 5, and without copies."""

    def __init__(self) -> None:
        descriptor, path = tempfile.mkstemp(prefix="bench-zmq-")
        os.close(descriptor)
        self._path = path
        self._sockets: dict[str, Any] = {}

    def __reduce__(self) -> Any:
        return _connect, (self._path,)

    def put(self, message: Any) -> None:
        buffers: list[pickle.PickleBuffer] = []
        body = pickle.dumps(message, protocol=5, buffer_callback=buffers.append)
        self._socket("PUSH").send_multipart([body, *(each.raw() for each in buffers)], copy=False)

    def get(self) -> Any:
        body, *buffers = self._socket("PULL").recv_multipart(copy=False)
        return pickle.loads(body.buffer, buffers=[each.buffer for each in buffers])

    def __del__(self) -> None:
        for socket in self._sockets.values():
            socket.close(linger=1000)
        with suppress(FileNotFoundError):
            Path(self._path).unlink()

    def _socket(self, kind: str) -> Any:
        if kind not in self._sockets:
            zmq = import_module("zmq")
            socket = zmq.Context.instance().socket(getattr(zmq, kind))
            self._sockets[kind] = socket
            # The reader binds the address, to which writers connect.
            (socket.bind if kind == "PULL" else socket.connect)(f"ipc://{self._path}")
        return self._sockets[kind]


def _connect(path: str) -> _ZeroMQQueue:
    queue = _ZeroMQQueue.__new__(_ZeroMQQueue)
    queue._path = path
    queue._sockets = {}
    return queue


def _torch() -> Any:
    # Not a plain import: it is optional, and only partly typed.
    import_module("torch.multiprocessing")
    return import_module("torch")
