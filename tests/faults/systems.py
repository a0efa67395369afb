"""What is put under test: shmreduce, torch.multiprocessing, multiprocessing.shared_memory.

Each says how an array goes into a message, how it comes out, and which errors
tell a receiver in so many words that a message is lost.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import pickle
import warnings
from abc import ABC, abstractmethod
from typing import Any

import numpy as np

import shmreduce
from tests.stress.links import (
    ConnectionLink,
    Link,
    PipeLink,
    QueueLink,
    SimpleQueueLink,
)

__all__ = ["INLINE_LIMIT", "PLUGIN_MODULES", "System", "find_system"]

INLINE_LIMIT = 4096
PLUGIN_MODULES = (
    "numpy.ma",
    "shmreduce_memoryview.rebuild",
    "shmreduce_numpy.factory",
    "shmreduce_numpy.rebuild",
    "shmreduce_numpy.reduction",
    "shmreduce_numpy.sharing",
)
"""What is imported when it is first needed, which a process without descriptors could not."""
_STOCK: dict[str, type[Link]] = {
    "pipe": PipeLink,
    "simple queue": SimpleQueueLink,
    "queue": QueueLink,
}
_OWN: dict[str, type[Link]] = {
    "own pipe": ConnectionLink,
    "own simple queue": SimpleQueueLink,
    "own queue": QueueLink,
}


class System(ABC):
    """One way to send arrays.

    Parameters
    ----------
    strategy : str
        One of its sharing strategies.
    """

    name: str
    by_value = False
    """Whether sender and receiver may write without the other noticing."""
    named: tuple[type[BaseException], ...] = (OSError, EOFError, pickle.UnpicklingError)
    """Errors of a receiver that stand for a message that is lost."""

    def __init__(self, strategy: str) -> None:
        self.strategy = strategy

    def install(self, *, idle: bool) -> None:
        """Get this process ready. ``idle`` asks to give free memory back at once."""
        self.idle = idle

    @abstractmethod
    def outgoing(self, array: Any) -> Any:
        """Return what is put into a message for an array."""

    @abstractmethod
    def incoming(self, what: Any) -> Any:
        """Return the array behind what a message brought."""

    def context(self, method: str) -> Any:
        """Return whose processes, pools and managers are used."""
        return multiprocessing.get_context(method)

    def make_link(self, kind: str, method: str) -> Link:
        """Return a new one-way channel."""
        link: Any = _STOCK[kind]
        return link(self.context(method))  # type: ignore[no-any-return]


class Shmreduce(System):
    name = "shmreduce"
    by_value = True
    named = (*System.named, shmreduce.ShmreduceError)

    def install(self, *, idle: bool) -> None:
        options: Any = {"idle_keep": 0, "idle_seconds": 0.02} if idle else {}
        for name in PLUGIN_MODULES:
            importlib.import_module(name)
        shmreduce.install(strategy=self.strategy, inline_limit=INLINE_LIMIT, **options)

    def outgoing(self, array: Any) -> Any:
        return array

    def incoming(self, what: Any) -> Any:
        return what

    def context(self, method: str) -> Any:
        return shmreduce.get_context(method)

    def make_link(self, kind: str, method: str) -> Link:
        if kind in _OWN:
            link: Any = _OWN[kind]
            return link(shmreduce.get_context(method))  # type: ignore[no-any-return]
        link = _STOCK[kind]
        return link(multiprocessing.get_context(method))  # type: ignore[no-any-return]


class Torch(System):
    name = "torch"

    def __init__(self, strategy: str) -> None:
        super().__init__(strategy)
        import torch
        import torch.multiprocessing

        torch.set_num_threads(1)
        self._torch: Any = torch
        # What it sends through channels that have lost their other end.
        self.named = (*System.named, RuntimeError)

    def install(self, *, idle: bool) -> None:
        self._torch.multiprocessing.set_sharing_strategy(self.strategy)

    def context(self, method: str) -> Any:
        return self._torch.multiprocessing.get_context(method)

    def outgoing(self, array: Any) -> Any:
        return self._torch.from_numpy(array.view(np.int64))

    def incoming(self, what: Any) -> Any:
        return what.numpy().view(np.uint64)


class _Named:
    """The name of a SharedMemory, as a program would send it."""

    def __init__(self, name: str, length: int) -> None:
        self.name = name
        self.length = length


class SharedMemory(System):
    name = "shared_memory"
    by_value = True

    def outgoing(self, array: Any) -> Any:
        from multiprocessing.shared_memory import SharedMemory as Memory

        memory = Memory(create=True, size=array.nbytes)
        np.ndarray(len(array), np.uint64, memory.buf)[:] = array
        memory.close()
        return _Named(memory.name, len(array))

    def incoming(self, what: Any) -> Any:
        from multiprocessing.shared_memory import SharedMemory as Memory

        memory = Memory(what.name)
        array = np.ndarray(what.length, np.uint64, memory.buf).copy()
        memory.close()
        memory.unlink()
        return array


_SYSTEMS: dict[str, type[System]] = {each.name: each for each in (Shmreduce, Torch, SharedMemory)}
_known: dict[tuple[str, str, int], System] = {}


def find_system(name: str, strategy: str) -> System:
    """Return a system by name; the same object within a process."""
    key = (name, strategy, os.getpid())
    if key not in _known:
        with warnings.catch_warnings():
            # Of third parties' imports.
            warnings.simplefilter("ignore")
            _known[key] = _SYSTEMS[name](strategy)
    return _known[key]
