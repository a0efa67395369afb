"""The locks of a queue, which are made only if somebody asks for them.

Imports nothing of shmreduce.
"""

from __future__ import annotations

import os
from typing import Any, NamedTuple

__all__ = ["QueueLocks"]


class _LockOnDemand:
    """A lock that standard queues have and ours do not need; made when it is first accessed.

    Other code may need it: the standard library's pool takes ``_rlock`` of its task queue.
    But most queues would have semaphores for nothing, whose names stay in /dev/shm if all
    processes that know them are killed.

    A queue has the same lock in all processes, or none. The process that made the queue can
    make the lock at any time, and passes it on with the queue. Another process has the lock
    only if it was made before the queue was passed on. Otherwise that process could only make
    a second lock, which would exclude nobody, so there the attribute does not exist. Queues
    of derived classes have their locks from the beginning, since the methods of such a class
    may take them in any process.
    """

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, queue: Any, owner: type | None = None) -> Any:
        """Make the lock, as an attribute of the queue, which from then on hides this one."""
        if queue is None:
            return self
        if queue._maker is None or queue._maker.pid != os.getpid():
            raise AttributeError(
                f"{type(queue).__name__}.{self._name} does not exist in this process: only the "
                "process that made the queue can make it, and it had not when it passed the queue "
                "on; access it there before the queue is passed on"
            )
        # setdefault: two threads that get here at the same time get the same lock. Nobody gets
        # it before the queue has noted it.
        lock = vars(queue).setdefault("_made" + self._name, queue._maker.context.Lock())
        queue._note_lock(self._name, lock)
        vars(queue)[self._name] = lock
        return lock


class _Maker(NamedTuple):
    """The process that made a queue, the only one that may make its locks."""

    pid: int
    context: Any


class QueueLocks:
    """Replaces the locks of the standard library's queues; see :class:`_LockOnDemand`."""

    _maker: _Maker | None = None
    """None in a process that unpickled the queue."""
    _rlock: Any = _LockOnDemand()
    _wlock: Any = _LockOnDemand()

    def __dir__(self) -> list[str]:
        # Managers access all names of an object that they serve, in any process.
        missing = {"_rlock", "_wlock"} - vars(self).keys()
        return [name for name in super().__dir__() if name not in missing]

    def _promise_locks(self, ctx: Any, module: str) -> None:
        """Note that this process, and no other, may make the locks.

        ``module`` is that of the queues whose methods do not take them.
        """
        self._maker = _Maker(os.getpid(), ctx)
        if type(self).__module__ != module:
            # A derived class: access both locks, so that they are made now.
            _ = self._rlock, self._wlock

    def _note_lock(self, name: str, lock: Any) -> None:
        """Do what a queue must do when it gets one of its locks; may be called again."""

    def _made_locks(self) -> tuple[Any, Any]:
        """Return the locks for a queue's state, each None if it has not been made."""
        return vars(self).get("_rlock"), vars(self).get("_wlock")

    def _take_over_locks(self, rlock: Any, wlock: Any) -> None:
        """Set the locks that came with a queue's state."""
        for name, lock in (("_rlock", rlock), ("_wlock", wlock)):
            if lock is not None:
                self._note_lock(name, lock)
                setattr(self, name, lock)
