"""Tasks of a pool that any worker may take, in memory that the pool shares with its workers.

May import :mod:`shmreduce.compiled`, and ``pool_tasks`` for types alone.

The memory is a ring of places. The pool puts a task into the next place; a worker that
has done a task *claims* the oldest one that nobody has claimed. So tasks begin in the
order in which they were submitted, as they do where workers read one pipe, and whoever
may wait for a task there may wait for it here.

A place has a word with the number of its task and with who has claimed it. A claim is one
compare-and-swap of this word. So a worker that is killed leaves no lock taken, and the
pool knows what it had: a task is claimed by nobody, or by one worker. The worker copies
the task, and says so in a second word; then the place is free for another.

The pool itself claims a task that it sends to an idle worker in another way.

These are functions of ``_quick_packets_tasks.c``: Python has no compare-and-swap. Where
it was not compiled, no task is put here.
"""

from __future__ import annotations

import collections
from typing import TYPE_CHECKING, Any

from shmreduce.compiled import PACKETS, find_module

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeAlias

    from shmreduce.pool_tasks import Task

    Give: TypeAlias = Callable[[int, Task], None]

__all__ = ["PublishedTasks", "TaskRing"]

_FEWEST_PLACES = 128
_PLACES_PER_WORKER = 4
_ROOM = 32 << 10
"""Bytes of a place, its numbers included. Larger tasks are sent to idle workers."""
_HEAD = 8
"""Bytes before the first place."""
_OWNER_BITS = 20
_OWNER_MASK = (1 << _OWNER_BITS) - 1
_POOL = _OWNER_MASK
"""Owner of the tasks that the pool itself has claimed; 0 is nobody."""
_module: Any = find_module(PACKETS)[0]


class TaskRing:
    """The ring of one pool.

    Parameters
    ----------
    memory : memoryview
        Of :meth:`size_for` bytes, zero at first; aligned to 8.
    """

    __slots__ = ("_memory", "_words", "places")

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory
        self._words = memory[_HEAD:].cast("Q")
        self.places = (len(memory) - _HEAD) // _ROOM
        """How many tasks it has room for; 0 if none can be put here."""
        if _module is None:
            self.places = 0

    @staticmethod
    def size_for(workers: int) -> int:
        """Return how many bytes of memory the ring of a pool of this many workers needs."""
        return _HEAD + _ROOM * max(_FEWEST_PLACES, _PLACES_PER_WORKER * workers)

    # By the pool

    def publish(self, number: int, task: bytes | memoryview) -> bool:
        """Let workers take a task; return False if it is too large or its place is in use.

        There must be places.

        Parameters
        ----------
        number : int
            1 for the first task that is published, and so on.
        task : bytes-like
            What :meth:`claim` returns.
        """
        done: bool = _module.publish_task(self._memory, _ROOM, number, task)
        return done

    def owner(self, number: int) -> int:
        """Return who has claimed a task; 0 is nobody.

        It is known until another task is published in the same place.
        """
        return self._words[self._place(number)] & _OWNER_MASK

    def withdraw(self, number: int) -> bool:
        """Claim a task for the pool; return False if it was claimed before."""
        done: bool = _module.withdraw_task(self._memory, _ROOM, number, _POOL)
        return done

    def forget(self, owner: int) -> None:
        """Free the places of tasks that a worker had claimed and not copied: it has died."""
        words = self._words
        for number in range(1, self.places + 1):
            place = self._place(number)
            if words[place] & _OWNER_MASK == owner:
                words[place + 1] = words[place] >> _OWNER_BITS

    def _place(self, number: int) -> int:
        return (number - 1) % self.places * (_ROOM // 8)

    # By a worker

    def claim(self, owner: int) -> bytes | None:
        """Claim the oldest task; return it, or None if there is none.

        Parameters
        ----------
        owner : int
            Stands for the worker; see :meth:`owner_of`.

        Raises
        ------
        MemoryError
            If there is no memory for it. It stays where it is.
        """
        if not self.places:
            return None
        task: bytes | None = _module.claim_task(self._memory, _ROOM, owner)
        return task

    @staticmethod
    def owner_of(started: int) -> int:
        """Return what stands for a worker, before which the pool has started so many.

        Not its slot, which another worker may have while it lives: if a fork server is
        killed, its workers look as if they were dead.
        """
        return started % (_POOL - 1) + 1


class PublishedTasks:
    """The tasks that the pool has put into its ring, until it has seen who claimed them.

    Several methods take a function ``give``. They call it with the owner that stands for a
    worker, and the task that it has claimed. It is not kept: the cycle would keep the memory of
    a pool that has ended.

    Parameters
    ----------
    ring : TaskRing
        Where workers find them.
    """

    def __init__(self, ring: TaskRing) -> None:
        self._ring = ring
        self._tasks: collections.deque[Task] = collections.deque()
        self._oldest = 1
        """The number of the first of them."""
        self._next = 1
        """The number of the next task."""

    def __bool__(self) -> bool:
        return bool(self._tasks)

    @property
    def youngest(self) -> Task:
        """The task that was put into the ring last; there must be one."""
        return self._tasks[-1]

    def publish(self, task: Task) -> bool:
        """Let workers take a task; return False if the ring cannot take it now."""
        # Who has claimed the task that was in the same place must have been seen.
        if len(self._tasks) >= self._ring.places:
            return False
        if not self._ring.publish(self._next, task.data):
            return False
        self._next += 1
        self._tasks.append(task)
        return True

    def note_claims(self, give: Give) -> None:
        """Give the tasks that were claimed to their workers."""
        # They are claimed in their order.
        while self._tasks and self._ring.owner(self._oldest):
            self._give_oldest(give)

    def withdraw(self, give: Give) -> Task | None:
        """Claim the oldest task that no worker has; return None if they have all."""
        while self._tasks:
            if self._ring.withdraw(self._oldest):
                self._oldest += 1
                return self._tasks.popleft()
            self._give_oldest(give)
        return None

    def withdraw_all(self, give: Give) -> list[Task]:
        """Claim all tasks that no worker has; return them from the oldest to the youngest."""
        found: list[Task] = []
        # From the youngest on. If a worker claims one meanwhile, it must be the oldest that
        # nobody has: it may wait for any that are older.
        while self._tasks and self._ring.withdraw(self._next - 1 - len(found)):
            found.append(self._tasks.pop())
        self.note_claims(give)
        self._oldest = self._next
        return found[::-1]

    def forget(self, owner: int) -> None:
        """Free what a worker, which has died, had claimed and not copied."""
        self._ring.forget(owner)

    def _give_oldest(self, give: Give) -> None:
        owner = self._ring.owner(self._oldest)
        self._oldest += 1
        give(owner, self._tasks.popleft())
