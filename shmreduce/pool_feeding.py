"""Feeding a pool: makes tasks of a call's items, and submits them to the supervisor.

What cannot be sent is answered by the pool's thread as well, so callbacks run nowhere else.

May import errors, ``pool_supervisor``, ``pool_tasks``, ``signals``, and ``pool_results``
for types alone.
"""

from __future__ import annotations

import functools
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
    """Makes tasks of a pool's calls, and submits them to its supervisor.

    Parameters
    ----------
    supervisor : Supervisor
        Runs the pool's workers.
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
        """Pickle a task and submit it; return False if the pool has ended.

        Parameters
        ----------
        result, index, first, call, retries
            As for :func:`~shmreduce.pool_tasks.make_task`.
        wait : bool
            Wait first, while too many tasks wait for the workers.
        """
        try:
            dumps = self._supervisor.dumps
            task = make_task(result, index, first, call, retries=retries, dumps=dumps)
        except Exception as error:
            if is_from_handler(error):
                raise
            # As in the standard library, get() raises it, and not the method that was called.
            self._supervisor.do_soon(functools.partial(result.answer, index, False, error))
            if wait and self._supervisor.backpressure.closed:
                # Otherwise a long iterable would be read to its end, with no task to wait for.
                result.abandon(make_abandoned())
                return False
            return True
        if wait:
            try:
                wanted = self._supervisor.backpressure.acquire(task)
            except BaseException:
                task.discard()
                raise
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
        """Send items whose number is known; pass errors of the iterable to the result."""
        count = -(-len(items) // chunksize)
        sent = taken = 0
        try:
            for chunk in itertools.islice(chunks_of(items, chunksize), count):
                call: Call = (how, func, chunk, {})
                if not self.send(result, sent, sent * chunksize, call, retries, wait=wait):
                    return
                sent += 1
                taken += len(chunk)
            if sent < count:
                # An iterable may have fewer items than its length says.
                self._supervisor.do_soon(functools.partial(result.end_at, taken, count - sent))
        except Exception as error:
            if is_from_handler(error):
                # To the caller at once, without waiting for the tasks that were sent.
                raise
            # The iterable has raised it.
            self._supervisor.do_soon(functools.partial(result.fail_rest, error, count - sent))

    def send_announced(
        self,
        result: IMapIterator[Any],
        func: Callable[[Any], Any],
        iterable: Iterable[Any],
        chunksize: int,
        retries: int,
    ) -> None:
        """Send items as they come, for an announced result; pass the iterable's errors to it."""
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
            # The iterable has raised it. Even SystemExit: a thread waits for the result.
            result.end_with(index, error)
        finally:
            self._supervisor.revoke(result)


def sized_chunks(iterable: Any, chunksize: int | None, workers: int) -> tuple[Any, int]:
    """Return the items as something that has a length, and how many make one task.

    Parameters
    ----------
    iterable : iterable
        Read to its end if its length is not known.
    chunksize : int or None
        What the user asked for; None for about four tasks for each worker.
    workers : int
        The number of workers.

    Raises
    ------
    ValueError
        If ``chunksize`` is less than 1 and there are items.
    """
    items = iterable if hasattr(iterable, "__len__") else list(iterable)
    if chunksize is None:
        chunksize = -(-len(items) // (4 * workers))
    elif chunksize < 1 and len(items):
        raise ValueError(f"chunksize must be 1 or more, not {chunksize!r}")
    return items, max(1, chunksize)


def chunks_of(iterable: Iterable[Any], size: int) -> Iterator[tuple[Any, ...]]:
    """Yield the items of an iterable in chunks of ``size``; the last may have fewer.

    Examples
    --------
    >>> list(chunks_of("abcde", 2))
    [('a', 'b'), ('c', 'd'), ('e',)]
    """
    iterator = iter(iterable)
    while chunk := tuple(itertools.islice(iterator, size)):
        yield chunk
