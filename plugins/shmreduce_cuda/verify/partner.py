"""A second process, and what it can be asked to do with arrays.

May import public names of :mod:`shmreduce`, the plugin, and ``lab`` and
``outcomes`` of this package. Every wait is bounded.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import time
from contextlib import contextmanager
from ctypes import byref, c_size_t
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any

import shmreduce
import shmreduce_cuda
from shmreduce_cuda.devices import current_context
from shmreduce_cuda.verify.lab import DeviceArray, read, write
from shmreduce_cuda.verify.outcomes import UnexpectedResultError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = [
    "PATIENCE",
    "Partner",
    "drop",
    "drop_only",
    "eventually",
    "free_bytes",
    "installed",
    "keep",
    "keep_loaded",
    "own_stats",
    "partner",
    "received",
    "send_back",
    "set_values",
    "values",
]

PATIENCE = 60.0
"""Seconds to wait for an answer of the other process."""
received: dict[str, Any] = {}
"""Arrays that this process has received, by name."""


@contextmanager
def installed() -> Iterator[None]:
    """Let :class:`DeviceArray` travel by the standard multiprocessing."""
    reducer = shmreduce_cuda.CudaReducer([DeviceArray])
    with shmreduce.install():
        shmreduce.register_reducer(reducer)
        try:
            yield
        finally:
            shmreduce.unregister_reducer(reducer)


def eventually(condition: Callable[[], object], what: str, patience: float = PATIENCE) -> float:
    """Wait until a condition is true; return the seconds that it took."""
    began = time.monotonic()
    while not condition():
        if time.monotonic() - began > patience:
            raise UnexpectedResultError(f"not within {patience:.0f} s: {what}")
        time.sleep(0.002)
    return time.monotonic() - began


class Partner:
    """A spawned process that calls functions, one after another."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()
        self.pid: int = self.ask(os.getpid)

    def ask(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Return what a function returns there, or raise what it raises."""
        self._connection.send((function, arguments))
        if not self._connection.poll(PATIENCE):
            raise UnexpectedResultError(
                f"the other process did not answer within {PATIENCE:.0f} s"
            )
        try:
            succeeded, answer = self._connection.recv()
        except EOFError:
            self._process.join(PATIENCE)
            raise UnexpectedResultError(
                f"the other process died with exit code {self._process.exitcode}"
            ) from None
        if not succeeded:
            raise answer
        return answer

    def kill(self) -> None:
        """Kill the process and wait for its end."""
        self._process.kill()
        self._process.join(PATIENCE)

    def close(self) -> None:
        """Let the process end."""
        if self._process.is_alive():
            self._connection.send(None)
            self._process.join(PATIENCE)
        self._connection.close()


@contextmanager
def partner() -> Iterator[Partner]:
    """Start a process that ends with the block."""
    found = Partner()
    try:
        yield found
    finally:
        found.close()


def _serve(connection: Any) -> None:
    while True:
        question = connection.recv()
        if question is None:
            return
        function, arguments = question
        try:
            answer = (True, function(*arguments))
        except Exception as error:
            answer = (False, error)
        connection.send(answer)
        # Do not keep the objects until the next question.
        del question, function, arguments, answer


# What a partner is asked to do


def keep(name: str, array: Any) -> str:
    """Keep an array; return the name of its class."""
    received[name] = array
    return type(array).__name__


def keep_loaded(name: str, message: bytes) -> None:
    """Load a message and keep its array."""
    received[name] = ForkingPickler.loads(message)


def drop(*names: str) -> None:
    """Drop arrays, all that are kept if none is named, and close their memory now."""
    drop_only(*names)
    shmreduce_cuda.collect()


def drop_only(*names: str) -> None:
    """Drop arrays, as a program does that has other things to do."""
    for name in names or list(received):
        del received[name]
    gc.collect()


def values(name: str) -> Any:
    """Return what is in a kept array."""
    return read(received[name], received[name].device)


def set_values(name: str, new: Any) -> None:
    """Write a kept array."""
    write(received[name], new, received[name].device)


def send_back(name: str) -> Any:
    """Return a kept array."""
    return received[name]


def own_stats() -> shmreduce_cuda.Stats:
    """Return what this process has sent and received."""
    return shmreduce_cuda.stats()


def free_bytes(ordinal: int = 0) -> int:
    """Return how much memory of a device is free, counting all processes."""
    available, total = c_size_t(), c_size_t()
    with current_context(ordinal) as driver:
        driver.call("cuMemGetInfo_v2", byref(available), byref(total))
    return available.value
