"""The progress of each worker of a pool, in memory that outlives the worker.

The same memory has the pool's ring of tasks.

May import :mod:`shmreduce.descriptor`, ``pool_task_ring`` and ``anonymous`` of the memory.
"""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING, Any, TypeVar

from shmreduce.descriptor import Descriptor
from shmreduce.memory.anonymous import anonymous_zeros
from shmreduce.pool_task_ring import TaskRing

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = ["ProgressTable", "WorkerProgress"]

_T = TypeVar("_T")

_WORD = 8
"""Bytes of a word of the table."""
_PER_WORKER = 2
"""Words of each worker: the tasks that it has begun, and the item that it is working on."""
_OWNERS = 1 << 32
"""The first word has the number of tasks below this, and above it whose it is."""


class ProgressTable:
    """The progress of all workers of a pool, a few words of shared memory, and its task ring.

    It can be passed to a child process as an argument, under every start method. The
    kernel frees the memory when the last process that has it open is gone.

    Parameters
    ----------
    descriptor : Descriptor
        The memory's descriptor. It belongs to this object from now on.
    count : int
        The number of workers.
    """

    def __init__(self, descriptor: Descriptor, count: int) -> None:
        self._descriptor, self._count = descriptor, count
        memory = memoryview(mmap.mmap(descriptor.fileno(), 0))
        size = _WORD * _PER_WORKER * count
        self.words = memory[:size].cast("Q")
        self.ring = TaskRing(memory[size:])

    @classmethod
    def for_workers(cls, count: int) -> ProgressTable:
        """Make a table for this many workers."""
        size = _WORD * _PER_WORKER * count + TaskRing.size_for(count)
        return cls(Descriptor(anonymous_zeros("shmreduce-pool", size)), count)

    def __reduce__(self) -> tuple[Any, ...]:
        return ProgressTable, (self._descriptor, self._count)


class WorkerProgress:
    """The progress of one worker.

    Parameters
    ----------
    table : ProgressTable
        The table that has its words.
    slot : int
        The worker's place in the table.
    owner : int
        What stands for the worker in the ring.
    """

    __slots__ = ("_slot", "_table", "_words", "owner")

    def __init__(self, table: ProgressTable, slot: int, owner: int) -> None:
        self._table, self._slot, self.owner = table, slot, owner
        self._words = table.words[_PER_WORKER * slot : _PER_WORKER * (slot + 1)]

    def __reduce__(self) -> tuple[Any, ...]:
        return WorkerProgress, (self._table, self._slot, self.owner)

    @property
    def begun(self) -> int:
        """How many tasks the worker has begun."""
        owner, tasks = divmod(self._words[0], _OWNERS)
        # A worker that had the place before may not be dead; see TaskRing.owner_of().
        return tasks if owner == self.owner else 0

    @property
    def position(self) -> int:
        """Which item of its task it is working on."""
        return self._words[1]

    def begin(self, tasks: int) -> None:
        """Note that the worker begins its task number ``tasks``, with the first item."""
        self._words[1] = 0
        self._words[0] = self.owner * _OWNERS + tasks

    def next_task(self) -> bytes | None:
        """Claim a task of the pool's ring; see :meth:`TaskRing.claim`."""
        return self._table.ring.claim(self.owner)

    def each(self, items: Iterable[_T]) -> Iterator[_T]:
        """Yield the items of its task, and note which one the worker begins."""
        words = self._words
        # A method that is called for each item would take longer than a short item.
        for position, item in enumerate(items):
            words[1] = position
            yield item
