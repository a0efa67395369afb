"""Feeding a pool: the items of a call become tasks, and these go to the workers.

May import errors, ``pool_supervisor``, ``pool_tasks``, ``signals``, and ``pool_results``
for types alone.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

from shmreduce.pool_supervisor import make_abandoned
from shmreduce.pool_tasks import EACH, ONCE, make_task
from shmreduce.signals import is_from_handler

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from shmreduce.pool_results import IMapIterator, MapResult, Receiver
    from shmreduce.pool_supervisor import Supervisor
    from shmreduce.pool_tasks import Call

__all__ = ["Feeder", "chunks_of", "sized_chunks"]


class Feeder:
    """Makes tasks of a pool's calls, and gives them to its workers.

    Parameters
    ----------
    supervisor : Supervisor
        Of the workers.
    """

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor

    def send(
        self,
        result: Receiver,
        index: int,
        first: int | None,
        call: Call,
        retries: int,
        *,
        wait: bool = False,
    ) -> bool:
        """Pickle a task and give it to the workers; False if the pool has ended.

        Parameters
        ----------
        result, index, first, call, retries
            As for :func:`~shmreduce.pool_tasks.make_task`.
        wait : bool
            Wait first while too much waits for the workers.
        """
        try:
            dumps = self._supervisor.dumps
            task = make_task(result, index, first, call, retries=retries, dumps=dumps)
        except Exception as error:
            if is_from_handler(error):
                raise
            # As in the standard library it is the call that fails, not the caller.
            result.answer(index, False, error)
            return True
        if wait:
            try:
                wanted = self._supervisor.backpressure.acquire(task.weight)
            except BaseException:
                task.discard()
                raise
            task.wait_in_queue(self._supervisor.backpressure.release)
            if not wanted:
                task.discard()
                result.abandon(make_abandoned())
                return False
        self._supervisor.submit(task)
        return True

    def send_list(
        self,
        result: MapResult[Any],
        how: int,
        func: Callable[..., Any],
        items: Any,
        chunksize: int,
        retries: int,
        *,
        wait: bool,
    ) -> None:
        """Send items whose number is known; what they raise goes to the result."""
        count = -(-len(items) // chunksize)
        sent = taken = 0
        try:
            for chunk in itertools.islice(chunks_of(items, chunksize), count):
                call: Call = (how, func, chunk, {})
                if not self.send(result, sent, sent * chunksize, call, retries, wait=wait):
                    return
                sent += 1
                taken += len(chunk)
            # An iterable may have fewer items than its length says.
            result.trim(taken)
            result.forget(count - sent)
        except Exception as error:
            if is_from_handler(error):
                # Nor is it to wait for the tasks that were given to workers.
                raise
            # The iterable's own.
            result.forget(count - sent - 1)
            result.answer(sent, False, error)

    def send_announced(
        self,
        result: IMapIterator[Any],
        func: Callable[[Any], Any],
        iterable: Iterable[Any],
        chunksize: int,
        retries: int,
    ) -> None:
        """Send items as they come, for a result that is announced; what they raise goes to it."""
        index = 0
        try:
            for chunk in chunks_of(iterable, chunksize):
                how, arguments = (ONCE, chunk) if chunksize == 1 else (EACH, chunk)
                call: Call = (how, func, arguments, {})
                if not self.send(result, index, index * chunksize, call, retries, wait=True):
                    return
                index += 1
            result.expect(index)
        except BaseException as error:
            # The iterable's own, SystemExit included: somebody waits.
            result.end_with(index, error)
        finally:
            self._supervisor.revoke(result)


def sized_chunks(iterable: Any, chunksize: int | None, workers: int) -> tuple[Any, int]:
    """Return items that have a length, and how many make one task.

    Parameters
    ----------
    iterable : iterable
        Read to its end if its length is not known.
    chunksize : int or None
        What the user asked for; None for about four tasks for each worker.
    workers : int
        How many there are.
    """
    items = iterable if hasattr(iterable, "__len__") else list(iterable)
    if chunksize is None:
        chunksize = -(-len(items) // (4 * workers))
    elif chunksize < 1 and len(items):
        raise ValueError(f"chunksize must be 1 or more, not {chunksize!r}")
    return items, max(1, chunksize)


def chunks_of(iterable: Iterable[Any], size: int) -> Iterator[tuple[Any, ...]]:
    """Yield the items of an iterable by so many; the last chunk may have fewer.

    Examples
    --------
    >>> list(chunks_of("abcde", 2))
    [('a', 'b'), ('c', 'd'), ('e',)]
    """
    iterator = iter(iterable)
    while chunk := tuple(itertools.islice(iterator, size)):
        yield chunk
