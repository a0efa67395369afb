"""What runs in the processes that send and receive CUDA arrays for the tests.

The test's own process never loads the driver. It asks *actors*, processes that
were spawned, to make arrays, send them to each other, and tell what they have.
"""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import os
import pickle
from contextlib import contextmanager
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import shmreduce
import shmreduce_cuda
from shmreduce.memory.inspection import process_state
from shmreduce.testing import OtherProcess
from shmreduce_cuda.devices import current_context
from shmreduce_cuda.driver import get_driver
from shmreduce_cuda.verify.lab import DeviceArray, Memory, Pool, Stream, read, write
from tests.memory.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from multiprocessing.connection import Connection

__all__ = ["Actor", "actors", "connect"]

_REDUCER = shmreduce_cuda.CudaReducer([DeviceArray])

arrays: dict[str, Any] = {}
kept: dict[str, Any] = {}
connections: dict[str, Any] = {}


class Actor:
    """A process that was spawned to send and receive."""

    def __init__(self, process: OtherProcess) -> None:
        self._process = process
        self.pid: int = process.ask(os.getpid)

    def ask(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Return what a function returns there, or raise what it raises."""
        return self._process.ask(function, *arguments)

    def start(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Begin a call, whose result :meth:`finish` returns."""
        self._process._connection.send((function, arguments))

    def finish(self) -> Any:
        """Return what the call that was begun returns."""
        assert self._process._connection.poll(30)
        succeeded, answer = self._process._connection.recv()
        if not succeeded:
            raise answer
        return answer

    def kill(self) -> None:
        """Kill the process and wait for its end."""
        self._process.kill()


@contextmanager
def actors(count: int) -> Iterator[list[Actor]]:
    """Start processes that send :class:`DeviceArray`, among others."""
    processes: list[OtherProcess] = []
    with shmreduce.install():
        try:
            # They get it with what else a child gets.
            shmreduce.register_reducer(_REDUCER)
            try:
                processes += [OtherProcess("spawn") for _ in range(count)]
                started = [Actor(process) for process in processes]
            finally:
                shmreduce.unregister_reducer(_REDUCER)
            yield started
        finally:
            for process in processes:
                process.__exit__(None, None, None)


def connect(first: Actor, second: Actor, name: str = "other") -> None:
    """Give two actors the ends of a pipe."""
    ends = multiprocessing.get_context("spawn").Pipe()
    for actor, end in zip((first, second), ends, strict=True):
        actor.ask(take_connection, name, end)
        end.close()


# What actors are asked to do


def take_connection(name: str, connection: Connection) -> None:
    connections[name] = connection


def make(name: str, values: Any, kind: str = "legacy", ordinal: int = 0, pieces: int = 1) -> None:
    arrays[name] = DeviceArray.of(values, kind, ordinal, pieces=pieces)


def make_in_pool(names: list[str], values: Any) -> None:
    """Make arrays of one exportable pool."""
    pool = Pool(0)
    for name in names:
        arrays[name] = DeviceArray.of(values, "pool", pool=pool)


def cut(name: str, source: str, *keys: Any) -> None:
    """Make an array that is a part of another one."""
    arrays[name] = arrays[source][keys]


def transpose(name: str, source: str) -> None:
    arrays[name] = arrays[source].T


def send(*names: str, to: str = "other") -> None:
    for name in names:
        connections[to].send(arrays[name])


def send_to(to: str, *names: str) -> None:
    send(*names, to=to)


def receive(*names: str, frm: str = "other") -> None:
    for name in names:
        assert connections[frm].poll(30)
        arrays[name] = connections[frm].recv()


def receive_from(frm: str, *names: str) -> None:
    receive(*names, frm=frm)


def _device_of(name: str) -> int:
    device = getattr(arrays[name], "device", 0)
    ordinal: int = getattr(device, "id", device)
    return ordinal


def values(name: str) -> Any:
    return read(arrays[name], _device_of(name))


def set_values(name: str, new: Any) -> None:
    write(arrays[name], new, _device_of(name))


def describe(name: str) -> tuple[str, Any]:
    """Return the class of an array, and its interface without the address."""
    array = arrays[name]
    interface = dict(array.__cuda_array_interface__)
    interface["data"] = interface["data"][1]
    return type(array).__name__, interface


def address(name: str) -> int:
    found: int = arrays[name].__cuda_array_interface__["data"][0]
    return found


def drop(*names: str) -> None:
    """Drop arrays, all if none is named, and close the memory that nobody uses any more."""
    drop_only(*names)
    shmreduce_cuda.collect()
    # A lease that ends at the moment when its owner looks at it is given back at the next
    # use of shared memory, and a process that waits to be asked makes none.
    eventually(lambda: not process_state().waiting, "all leases that ended were given back")


def drop_only(*names: str) -> None:
    """Drop arrays, and leave it to the plugin when their memory is closed."""
    for name in names or list(arrays):
        del arrays[name]
    gc.collect()


def share(name: str, source: str, stream: Any = None) -> None:
    """Keep what ``shmreduce_cuda.share`` returns."""
    arrays[name] = shmreduce_cuda.share(arrays[source], stream)


def share_after_fill(name: str, source: str, value: int) -> None:
    """Share an array on a stream that is still to write it."""
    stream = kept.setdefault("stream", Stream(0))
    memory: Memory = arrays[source].memory
    stream.fill(memory, value)
    arrays[name] = shmreduce_cuda.share(arrays[source], stream.handle.value)


def share_on_new_stream(name: str, source: str, value: int, times: int) -> int:
    """Share an array on a stream of its own that is still to write it; return its handle."""
    stream = Stream(0)
    memory: Memory = arrays[source].memory
    stream.fill(memory, value, times=times)
    handle = stream.handle.value or 0
    arrays[name] = shmreduce_cuda.share(arrays[source], handle)
    # The stream is destroyed here, at work as it is.
    return handle


def new_stream() -> None:
    """Use another stream from now on."""
    # The old ones stay: a handle that is given out again has the event of the old one.
    old = kept.pop("stream", None)
    kept.setdefault("streams", []).append(old)
    kept["stream"] = Stream(0)


def fill_and_send(name: str, value: int) -> None:
    """Send an array that a stream is still to write."""
    stream = kept.setdefault("stream", Stream(0))
    memory: Memory = arrays[name].memory
    stream.fill(memory, value)
    connections["other"].send(arrays[name])


def fill_and_drop(name: str, value: int) -> None:
    """Have a stream write a received array, and drop the array without waiting."""
    stream = kept.setdefault("stream", Stream(0))
    _fill(stream, name, value, arrays[name].nbytes // 4)
    drop(name)


def fill_by_peer_and_drop(name: str, value: int) -> None:
    """Have a stream of another device do so."""
    stream = kept.setdefault("stream of a peer", Stream(1))
    _fill(stream, name, value, arrays[name].nbytes // 4)
    drop(name)


def fill_by_peer_and_send(name: str, value: int) -> None:
    """Send an array of a device that a stream of another device is still to write."""
    stream = kept.setdefault("stream of a peer", Stream(1))
    memory: Memory = arrays[name].memory
    _fill(stream, name, value, memory.nbytes // 4)
    connections["other"].send(arrays[name])


def _fill(stream: Stream, name: str, value: int, count: int) -> None:
    with current_context(stream.ordinal) as driver:
        driver.call("cuMemsetD32Async", address(name), value, count, stream.handle)


def stats() -> Any:
    return shmreduce_cuda.stats()


def collect() -> int:
    return shmreduce_cuda.collect()


def set_delays(operations: int = 0, closing: int = 0) -> None:
    """Set how many milliseconds the stand-in takes in this process."""
    os.environ["STANDIN_CUDA_DELAY"] = str(operations)
    os.environ["STANDIN_CUDA_CLOSE"] = str(closing)


def fail(name: str, code: int, count: int = 1) -> None:
    """Let calls of the stand-in fail in this process."""
    get_driver()._library.standin_fail(name.encode(), code, count)


def device_state() -> dict[str, int]:
    """Return what the stand-in has, of all processes."""
    found = (ctypes.c_uint64 * 5)()
    get_driver()._library.standin_state(found)
    return dict(zip(("bytes", "imports", "opened", "closed", "violations"), found, strict=True))


def context_depth() -> int:
    depth: int = get_driver()._library.standin_depth()
    return depth


def pickled(name: str) -> bytes:
    """Return a message that is not sent by anybody yet."""
    return bytes(ForkingPickler.dumps(arrays[name]))


def load(name: str, message: bytes) -> None:
    arrays[name] = ForkingPickler.loads(message)


def pickle_in_vain(name: str) -> None:
    """Pickle an array beside something that cannot be pickled."""
    with pytest.raises((AttributeError, pickle.PicklingError)):
        ForkingPickler.dumps([arrays[name], lambda: None])


def census() -> tuple[Any, ...]:
    """Return what may not grow: descriptors, leases, shared memory, device memory."""
    gc.collect()
    found = process_state()
    device = device_state()
    return (
        len(list(Path("/proc/self/fd").iterdir())),
        (found.arrays, found.unread, found.out, found.reserved),
        (device["bytes"], device["imports"]),
        stats().mappings,
    )


# What tests wait for


def nothing_is_out(actor: Actor) -> None:
    """Wait until all that an actor has sent was let go of."""
    eventually(lambda: actor.ask(stats).exports == 0, "everything sent was let go of")
