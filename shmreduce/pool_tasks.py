"""One task of a pool: the pickled call, and the receiver of its answer.

May import :mod:`shmreduce.memory` and :mod:`shmreduce.pool_results` (types only).

A task is pickled once, when it is given to the pool, so that its arrays have the
contents of that moment. The pickle is kept until the answer arrives: if a worker is
killed, the arrays that it had not loaded are freed, or go to another worker.

By-value arrays can be loaded from a pickle only once. So a task that may be tried again
is pickled once for each try, unless the pickle has no shared memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

from shmreduce.memory.handle import has_mark
from shmreduce.memory.loading import common_handles, discard_message

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from shmreduce.memory.handle import Handle
    from shmreduce.pool_results import Receiver

__all__ = ["EACH", "EACH_STARRED", "ONCE", "Call", "Task", "make_task"]

# How a worker calls the function. Plain numbers, since every task's pickle has one.
ONCE = 0
"""``function(*arguments, **keywords)``"""
EACH = 1
"""``function(item)`` for each item of the arguments."""
EACH_STARRED = 2
"""``function(*item)`` for each item of the arguments."""

Call: TypeAlias = "tuple[int, Callable[..., Any], Any, Mapping[str, Any]]"
"""How, the function, its arguments or the items, its keywords."""

_HEAVY = 1 << 20
"""The least weight of a task with shared memory, in bytes."""


class Task:
    """A pickled call.

    Parameters
    ----------
    receiver : Receiver
        Receives the answer.
    index : int
        Which of the receiver's tasks it is.
    first : int or None
        Index of the task's first item in the iterable that the user passed; None
        for a single call.
    tries : list of bytes
        The pickles, one for each try.
    repeats : int
        How often the last pickle may be tried again.
    handles : bool
        Whether the pickles refer to shared memory.
    """

    __slots__ = (
        "_foreign",
        "_handles",
        "_release",
        "deaths",
        "first",
        "index",
        "number",
        "receiver",
        "repeats",
        "started",
        "tries",
        "weight",
    )

    def __init__(
        self,
        receiver: Receiver,
        index: int,
        first: int | None,
        tries: list[bytes | memoryview],
        repeats: int,
        *,
        handles: bool,
    ) -> None:
        self.receiver = receiver
        self.index = index
        self.first = first
        self.tries = tries
        self.repeats = repeats
        self._handles = handles
        self._foreign = _foreign_handles(tries) if handles else frozenset()
        self.weight = max(len(tries[0]), _HEAVY if handles else 0)
        """Its share of the backpressure's limit, in bytes, while it waits for a worker."""
        self.number = -1
        """How many tasks its pool got before it."""
        self.deaths = 0
        """How many workers in a row have died before they began it."""
        self.started = False
        """Whether it has been sent to a worker."""
        self._release: Callable[[int], object] | None = None

    @property
    def data(self) -> bytes | memoryview:
        """The pickle of the current try."""
        return self.tries[-1]

    def wait_in_queue(self, release: Callable[[int], object]) -> None:
        """Note the function that releases the task's weight when it no longer waits."""
        self._release = release

    def leave_queue(self) -> None:
        """Release its weight: it no longer waits for a worker."""
        if self._release is not None:
            self._release(self.weight)
            self._release = None

    def next_try(self) -> bool:
        """Go on to the next try and give back the memory of this one; False if there is none."""
        if self.repeats > 0:
            self.repeats -= 1
        elif len(self.tries) > 1:
            discard_message(self.tries.pop(), self._foreign)
        else:
            return False
        self.deaths = 0
        return True

    def done(self) -> None:
        """Drop all tries: a worker has loaded the current one, and the others are discarded."""
        if self.tries:
            self.tries.pop()
        self.discard()

    def discard(self) -> None:
        """Give back the memory of all tries."""
        self.leave_queue()
        if self._handles:
            for data in self.tries:
                discard_message(data, self._foreign)
        self.tries.clear()


def make_task(
    receiver: Receiver,
    index: int,
    first: int | None,
    call: Call,
    *,
    retries: int,
    dumps: Callable[[Any], bytes | memoryview],
) -> Task:
    """Pickle a call, with the contents that its arrays have now.

    Raises
    ------
    Exception
        Whatever pickling raises. All memory is given back then.
    """
    tries = [dumps(call)]
    if not has_mark(tries[0]):
        return Task(receiver, index, first, tries, retries, handles=False)
    try:
        tries.extend(dumps(call) for _ in range(retries))
    except BaseException:
        foreign = _foreign_handles(tries)
        for data in tries:
            discard_message(data, foreign)
        raise
    return Task(receiver, index, first, tries, 0, handles=True)


def _foreign_handles(tries: Sequence[bytes | memoryview]) -> frozenset[Handle]:
    """Return the handles in pickles that the user passed as arguments.

    Discarding the task must not discard them, since they may still be loaded elsewhere. They
    are the handles that all tries have in common, so with a single try they are not known.
    """
    return common_handles(tries[0], tries[1]) if len(tries) > 1 else frozenset()
