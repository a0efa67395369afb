"""How far each worker of a pool is, in memory that outlives a worker.

May import :mod:`shmreduce.descriptor` and ``anonymous`` of the memory.
"""

from __future__ import annotations

import mmap
import os
from typing import Any

from shmreduce.descriptor import Descriptor
from shmreduce.memory.anonymous import anonymous_file

__all__ = ["ProgressTable", "WorkerProgress"]

_WORD = 8
_PER_WORKER = 2


class ProgressTable:
    """The progress of all workers of a pool: a few words of shared memory.

    As part of the arguments of a process that is being started it reaches the
    child under every start method. The memory goes with the last process that
    has it.

    Parameters
    ----------
    descriptor : Descriptor
        Of the memory; this object's from now on.
    """

    def __init__(self, descriptor: Descriptor) -> None:
        self._descriptor = descriptor
        self.words = memoryview(mmap.mmap(descriptor.fileno(), 0)).cast("Q")

    @classmethod
    def for_workers(cls, count: int) -> ProgressTable:
        """Make a table for so many workers."""
        number = anonymous_file("shmreduce-pool")
        descriptor = Descriptor(number)
        os.truncate(number, _WORD * _PER_WORKER * count)
        return cls(descriptor)

    def __reduce__(self) -> tuple[Any, ...]:
        return ProgressTable, (self._descriptor,)


class WorkerProgress:
    """How far one worker is.

    Parameters
    ----------
    table : ProgressTable
        Where it is written.
    slot : int
        Which worker it is.
    """

    __slots__ = ("_slot", "_table", "_words")

    def __init__(self, table: ProgressTable, slot: int) -> None:
        self._table, self._slot = table, slot
        self._words = table.words[_PER_WORKER * slot : _PER_WORKER * (slot + 1)]

    def __reduce__(self) -> tuple[Any, ...]:
        return WorkerProgress, (self._table, self._slot)

    @property
    def begun(self) -> int:
        """How many tasks the worker has begun."""
        return self._words[0]

    @property
    def position(self) -> int:
        """Which item of its task it is at."""
        return self._words[1]

    def begin(self, tasks: int) -> None:
        """Take note that the worker begins with one task more, at its first item."""
        self._words[1] = 0
        self._words[0] = tasks

    def go_on(self, position: int) -> None:
        """Take note of which item of its task the worker is at."""
        self._words[1] = position
