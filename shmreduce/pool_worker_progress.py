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
        self._words = memoryview(mmap.mmap(descriptor.fileno(), 0)).cast("Q")

    @classmethod
    def for_workers(cls, count: int) -> ProgressTable:
        """Make a table for so many workers."""
        number = anonymous_file("shmreduce-pool")
        descriptor = Descriptor(number)
        os.truncate(number, _WORD * _PER_WORKER * count)
        return cls(descriptor)

    def __reduce__(self) -> tuple[Any, ...]:
        return ProgressTable, (self._descriptor,)

    def __getitem__(self, place: int) -> int:
        return self._words[place]

    def __setitem__(self, place: int, number: int) -> None:
        self._words[place] = number


class WorkerProgress:
    """How far one worker is.

    Parameters
    ----------
    table : ProgressTable
        Where it is written.
    slot : int
        Which worker it is.
    """

    __slots__ = ("_start", "_table")

    def __init__(self, table: ProgressTable, slot: int) -> None:
        self._table = table
        self._start = _PER_WORKER * slot

    @property
    def begun(self) -> int:
        """How many tasks the worker has begun."""
        return self._table[self._start]

    @begun.setter
    def begun(self, number: int) -> None:
        self._table[self._start] = number

    @property
    def position(self) -> int:
        """Which item of its task it is at."""
        return self._table[self._start + 1]

    @position.setter
    def position(self, number: int) -> None:
        self._table[self._start + 1] = number
