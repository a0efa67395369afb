"""A pool of worker processes with the interface of :class:`multiprocessing.pool.Pool`.

May import everything below it. :mod:`shmreduce.pool_feeding` turns calls into tasks,
:mod:`shmreduce.pool_supervisor` runs the workers that do them.
"""

from __future__ import annotations

import operator
import os
import threading
import warnings
from multiprocessing import util
from typing import TYPE_CHECKING, Any, NoReturn, Self, TypeVar

from shmreduce.context import get_context
from shmreduce.errors import WorkerDied
from shmreduce.pool_arguments import (
    check_initializer,
    check_maxtasksperchild,
    check_progress,
    check_shared_allocations,
    checked_retries,
    default_worker_count,
)
from shmreduce.pool_feeding import Feeder, sized_chunks
from shmreduce.pool_progress_bar import length_of, make_bar
from shmreduce.pool_results import (
    ApplyResult,
    AsyncResult,
    IMapIterator,
    IMapUnorderedIterator,
    MapResult,
)
from shmreduce.pool_supervisor import Supervisor
from shmreduce.pool_tasks import EACH, EACH_STARRED, ONCE
from shmreduce.pool_worker import WorkerOptions
from shmreduce.standard_names import names_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from multiprocessing.process import BaseProcess
    from types import TracebackType

    from shmreduce.pool_tasks import Call

__all__ = [
    "ApplyResult",
    "AsyncResult",
    "IMapIterator",
    "IMapUnorderedIterator",
    "MapResult",
    "Pool",
    "ThreadPool",
]

_S = TypeVar("_S")
_T = TypeVar("_T")

# The states of multiprocessing.pool.
RUN, CLOSE, TERMINATE = "RUN", "CLOSE", "TERMINATE"
_INIT = "INIT"


class Pool:
    """A pool of worker processes like :class:`multiprocessing.pool.Pool`.

    If a worker is killed, its task fails at once with :class:`~shmreduce.WorkerDied`,
    or is tried again. Workers may have pools and children of their own.

    Parameters
    ----------
    processes : int, optional
        The number of workers; by default the number of processors, from Python 3.13
        on of those that this process may use.
    initializer : callable, optional
        Each worker calls ``initializer(*initargs)`` when it starts.
    initargs : iterable
        Its arguments.
    maxtasksperchild : int, optional
        After this many tasks a worker leaves, and a new one takes its place.
    context : multiprocessing context, optional
        Starts the workers; by default :func:`shmreduce.get_context` gives it. Arrays travel
        by shared memory with a context of shmreduce, and with any other context after
        :func:`shmreduce.install`.
    retries : int
        How often a task is tried again if its worker was killed. Use it for tasks that
        may safely run twice.
    shared_allocations : bool
        Whether tasks run in :func:`shmreduce.shared_allocations`: large arrays
        that they return and do not keep are moved to the caller, not copied.

    Raises
    ------
    ValueError, TypeError
        If an argument is impossible. For ``retries`` and ``shared_allocations`` it is a
        :class:`~shmreduce.ConfigurationError`, which is a ValueError.
    AllocatorUnavailableError
        With ``shared_allocations``, if the compiled allocator is missing.
    SegmentError
        If the limit of file sizes (``ulimit -f``) is too low for shared memory.
    OSError
        If a worker cannot be started. Those that were started have been ended then.

    Notes
    -----
    The arguments of a call are pickled before the call returns, so they may be
    changed afterwards; ``imap`` and ``imap_unordered`` pickle each item when
    they take it from the iterable.

    Examples
    --------
    >>> import shmreduce
    >>> with shmreduce.get_context("fork").Pool(2) as pool:
    ...     pool.map(abs, [-1, 2, -3])
    [1, 2, 3]
    """

    # On the class: if __init__ raises TypeError for its arguments, __del__ is called still.
    _state = _INIT

    def __init__(
        self,
        processes: int | None = None,
        initializer: Callable[..., object] | None = None,
        initargs: Iterable[Any] = (),
        maxtasksperchild: int | None = None,
        context: Any = None,
        *,
        retries: int = 0,
        shared_allocations: bool = False,
    ) -> None:
        self._pid = os.getpid()
        if processes is None:
            processes = default_worker_count()
        processes = operator.index(processes)
        if processes < 1:
            raise ValueError("Number of processes must be at least 1")
        check_maxtasksperchild(maxtasksperchild)
        check_initializer(initializer)
        self._retries = checked_retries(retries)
        check_shared_allocations(shared_allocations)
        self._processes = processes
        self._supervisor = Supervisor(
            context or get_context(),
            self.Process,
            processes,
            WorkerOptions(
                initializer,
                () if initializer is None else tuple(initargs),
                maxtasksperchild,
                Exception,
                self._pid,
                shared_allocations=shared_allocations,
            ),
            died=WorkerDied,
            broken=lambda error: error,
        )
        self._feeder = Feeder(self._supervisor)
        # Before start(): if Ctrl-C interrupts that, the caller has no pool to terminate.
        self._terminate = util.Finalize(self, self._supervisor.terminate, exitpriority=15)
        self._supervisor.start()
        self._state = RUN

    @staticmethod
    def Process(ctx: Any, *args: Any, **kwds: Any) -> BaseProcess:  # noqa: N802
        """Make a worker's process; subclasses may override this."""
        process: BaseProcess = ctx.Process(*args, **kwds)
        return process

    def __repr__(self) -> str:
        cls = type(self)
        # The standard library's pool still counts its workers when they have left.
        size = len(self._pool) if self._state == RUN else self._processes
        return f"<{cls.__module__}.{cls.__qualname__} state={self._state} pool_size={size}>"

    def __reduce__(self) -> NoReturn:
        raise NotImplementedError("pool objects cannot be passed between processes or pickled")

    def __del__(
        self,
        warn: Callable[..., object] = warnings.warn,
        getpid: Callable[[], int] = os.getpid,
    ) -> None:
        # At interpreter shutdown globals may be None; default arguments still exist.
        if self._state == "RUN" and self._pid == getpid():
            warn(f"unclosed running multiprocessing pool {self!r}", ResourceWarning, source=self)

    def __enter__(self) -> Self:
        self._check_running()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.terminate()

    @property
    def _pool(self) -> list[BaseProcess]:
        # A private name of the standard library's pool that other packages use.
        return [worker.process for worker in self._supervisor.workers]

    def _repopulate_pool(self) -> None:
        # Another such name. Here the pool's thread does it anyway.
        self._supervisor.wake()

    def _check_running(self) -> None:
        if self._state != RUN:
            raise ValueError("Pool not running")
        self._check_made_here()

    def _check_made_here(self) -> None:
        self._supervisor.check_made_here()

    # One call

    def apply(
        self,
        func: Callable[..., _T],
        args: Iterable[Any] = (),
        kwds: Mapping[str, Any] | None = None,
        *,
        retries: int | None = None,
    ) -> _T:
        """Return ``func(*args, **kwds)``, done by a worker.

        Parameters
        ----------
        func, args, kwds
            The call.
        retries : int, optional
            As for the pool, for this call.

        Raises
        ------
        WorkerDied
            If the worker was killed, and the retries are used up.
        TaskAbandonedError
            If the pool is terminated before the result arrives.
        Exception
            What the call raised, or the error of pickling it.
        ConfigurationError
            If ``retries`` is impossible.
        ValueError
            If the pool was closed or terminated before.

        Examples
        --------
        >>> import shmreduce
        >>> with shmreduce.get_context("fork").Pool(1) as pool:
        ...     pool.apply(int, ("ff",), {"base": 16})
        255
        """
        # Only what was asked for: in a derived class it may be that of the standard library.
        more: dict[str, Any] = {} if retries is None else {"retries": retries}
        result: ApplyResult[_T]
        result = self.apply_async(func, args, {} if kwds is None else kwds, **more)
        return result.get()

    def apply_async(
        self,
        func: Callable[..., _T],
        args: Iterable[Any] = (),
        kwds: Mapping[str, Any] | None = None,
        callback: Callable[[_T], object] | None = None,
        error_callback: Callable[[BaseException], object] | None = None,
        *,
        retries: int | None = None,
    ) -> ApplyResult[_T]:
        """Let a worker call ``func(*args, **kwds)``, without waiting for it.

        Parameters
        ----------
        func, args, kwds
            The call. It is pickled before this returns: arrays may be changed afterwards.
        callback, error_callback : callable, optional
            Called in the pool's thread with the value, or the exception.
        retries : int, optional
            As for the pool, for this call.

        Returns
        -------
        ApplyResult
            Its ``get()`` returns the value, or raises what :meth:`apply` would.

        Raises
        ------
        ConfigurationError
            If ``retries`` is impossible.
        ValueError
            If the pool was closed or terminated before.

        Examples
        --------
        >>> import shmreduce
        >>> with shmreduce.get_context("fork").Pool(2) as pool:
        ...     results = [pool.apply_async(pow, (2, number)) for number in range(4)]
        ...     [result.get() for result in results]
        [1, 2, 4, 8]
        """
        self._check_running()
        result: ApplyResult[_T] = ApplyResult(self, callback, error_callback)
        call: Call = (ONCE, func, args, kwds or {})
        tries = self._tries(retries)
        try:
            self._supervisor.announce(result, here=True)
            self._feeder.send(result, 0, None, call, tries)
        finally:
            self._supervisor.revoke(result)
        return result

    # Lists

    def map(
        self,
        func: Callable[[_S], _T],
        iterable: Iterable[_S],
        chunksize: int | None = None,
        *,
        retries: int | None = None,
        progress: bool | str = False,
    ) -> list[_T]:
        """Return ``[func(item) for item in iterable]``, done by the workers.

        Parameters
        ----------
        func, iterable
            The function, and the items to call it with. Items of an iterable without a
            length, such as a generator, are all taken first; :meth:`imap` does not do so.
        chunksize : int, optional
            The number of items that make one task; by default there are about four
            tasks for each worker.
        retries : int, optional
            As for the pool, for this call; a chunk is tried again as a whole.
        progress : bool or str
            Show a progress bar (extra ``cli``); a string is shown beside it.

        Raises
        ------
        WorkerDied
            If the worker of an item was killed, and the retries are used up.
        TaskAbandonedError
            If the pool is terminated before all results are there.
        Exception
            The exception of the first item that raised one, after all items are done.
        MissingExtraError
            If a progress bar is asked for and tqdm is not installed.
        ConfigurationError
            If ``retries`` or ``progress`` is impossible.
        ValueError
            If ``chunksize`` is less than 1, or the pool was closed or terminated before.

        Examples
        --------
        >>> import shmreduce
        >>> with shmreduce.get_context("fork").Pool(2) as pool:
        ...     pool.map(len, ["a", "bc", ""], chunksize=1)
        [1, 2, 0]
        """
        return self._map(EACH, func, iterable, chunksize, retries, progress)

    def starmap(
        self,
        func: Callable[..., _T],
        iterable: Iterable[Iterable[Any]],
        chunksize: int | None = None,
        *,
        retries: int | None = None,
        progress: bool | str = False,
    ) -> list[_T]:
        """Return ``[func(*item) for item in iterable]``; otherwise like :meth:`map`.

        Examples
        --------
        >>> import shmreduce
        >>> with shmreduce.get_context("fork").Pool(2) as pool:
        ...     pool.starmap(pow, [(2, 3), (3, 2)])
        [8, 9]
        """
        return self._map(EACH_STARRED, func, iterable, chunksize, retries, progress)

    def map_async(
        self,
        func: Callable[[_S], _T],
        iterable: Iterable[_S],
        chunksize: int | None = None,
        callback: Callable[[list[_T]], object] | None = None,
        error_callback: Callable[[BaseException], object] | None = None,
        *,
        retries: int | None = None,
    ) -> MapResult[_T]:
        """Start the calls of :meth:`map` and return at once: the result's ``get()`` waits.

        All items are pickled before this returns, so they may be changed afterwards. If
        they do not fit into memory together, use :meth:`map` or :meth:`imap`.

        Parameters
        ----------
        func, iterable, chunksize, retries
            As for :meth:`map`.
        callback, error_callback : callable, optional
            Called in the pool's thread with the list, or the exception.

        Returns
        -------
        MapResult
            Its ``get()`` returns the list, or raises what :meth:`map` would.

        Raises
        ------
        ConfigurationError
            If ``retries`` is impossible.
        ValueError
            If ``chunksize`` is less than 1, or the pool was closed or terminated before.

        Examples
        --------
        >>> import shmreduce
        >>> with shmreduce.get_context("fork").Pool(2) as pool:
        ...     pool.map_async(abs, [-1, 2]).get()
        [1, 2]
        """
        return self._map_async(EACH, func, iterable, chunksize, callback, error_callback, retries)

    def starmap_async(
        self,
        func: Callable[..., _T],
        iterable: Iterable[Iterable[Any]],
        chunksize: int | None = None,
        callback: Callable[[list[_T]], object] | None = None,
        error_callback: Callable[[BaseException], object] | None = None,
        *,
        retries: int | None = None,
    ) -> MapResult[_T]:
        """Start the calls of :meth:`starmap` and return at once; else like :meth:`map_async`."""
        return self._map_async(
            EACH_STARRED, func, iterable, chunksize, callback, error_callback, retries
        )

    def _map(
        self,
        how: int,
        func: Callable[..., _T],
        iterable: Iterable[Any],
        chunksize: int | None,
        retries: int | None,
        progress: bool | str,
    ) -> list[_T]:
        self._check_running()
        check_progress(progress)
        items, chunksize = sized_chunks(iterable, chunksize, self._processes)
        tries = self._tries(retries)
        bar = make_bar(progress, len(items)) if progress else None
        try:
            update = None if bar is None else bar.update
            result: MapResult[_T] = MapResult(self, chunksize, len(items), progress=update)
            try:
                self._supervisor.announce(result, here=True)
                # map() waits anyway, so wait for room too: then inputs are not copied far
                # ahead of the workers.
                self._feeder.send_list(result, how, func, items, chunksize, tries, wait=True)
            finally:
                self._supervisor.revoke(result)
            return result.get()
        finally:
            if bar is not None:
                bar.close()

    def _map_async(
        self,
        how: int,
        func: Callable[..., _T],
        iterable: Iterable[Any],
        chunksize: int | None,
        callback: Callable[[list[_T]], object] | None,
        error_callback: Callable[[BaseException], object] | None,
        retries: int | None,
    ) -> MapResult[_T]:
        self._check_running()
        items, chunksize = sized_chunks(iterable, chunksize, self._processes)
        tries = self._tries(retries)
        result: MapResult[_T] = MapResult(self, chunksize, len(items), callback, error_callback)
        try:
            self._supervisor.announce(result, here=True)
            self._feeder.send_list(result, how, func, items, chunksize, tries, wait=False)
        finally:
            self._supervisor.revoke(result)
        return result

    # Iterators

    def imap(
        self,
        func: Callable[[_S], _T],
        iterable: Iterable[_S],
        chunksize: int = 1,
        *,
        retries: int | None = None,
        progress: bool | str = False,
    ) -> IMapIterator[_T]:
        """Yield ``func(item)`` for each item, in order, as the results arrive.

        A thread takes items from the iterable, a little ahead of the workers,
        and pickles each before it takes the next.

        Parameters
        ----------
        func, iterable, retries, progress
            As for :meth:`map`.
        chunksize : int
            The number of items that make one task.

        Returns
        -------
        IMapIterator
            Raises the exception of an item in the place of its result. With ``chunksize=1``
            it then goes on, otherwise it ends there. Its ``next(timeout)`` waits for so
            many seconds at most.

        Raises
        ------
        Exception
            As :meth:`map`. The iterator raises what concerns single items, such as
            WorkerDied and TaskAbandonedError.

        Examples
        --------
        >>> import itertools
        >>> import shmreduce
        >>> with shmreduce.get_context("fork").Pool(2) as pool:
        ...     results = pool.imap(abs, itertools.count(-3))
        ...     [next(results) for _ in range(4)]
        [3, 2, 1, 0]
        """
        return self._imap(IMapIterator, func, iterable, chunksize, retries, progress)

    def imap_unordered(
        self,
        func: Callable[[_S], _T],
        iterable: Iterable[_S],
        chunksize: int = 1,
        *,
        retries: int | None = None,
        progress: bool | str = False,
    ) -> IMapIterator[_T]:
        """Yield ``func(item)`` for each item, in any order; otherwise like :meth:`imap`.

        Examples
        --------
        >>> import shmreduce
        >>> with shmreduce.get_context("fork").Pool(2) as pool:
        ...     sorted(pool.imap_unordered(abs, [-2, -1]))
        [1, 2]
        """
        return self._imap(IMapUnorderedIterator, func, iterable, chunksize, retries, progress)

    def _imap(
        self,
        kind: type[IMapIterator[_T]],
        func: Callable[[_S], _T],
        iterable: Iterable[_S],
        chunksize: int,
        retries: int | None,
        progress: bool | str,
    ) -> IMapIterator[_T]:
        self._check_running()
        check_progress(progress)
        if chunksize < 1:
            raise ValueError(f"Chunksize must be 1+, not {chunksize!r}")
        bar = make_bar(progress, length_of(iterable)) if progress else None
        tries = self._tries(retries)
        result = kind(self, in_chunks=chunksize > 1, bar=bar)
        try:
            self._supervisor.announce(result, here=False)
            threading.Thread(
                target=self._feed,
                args=(result, func, iterable, chunksize, tries),
                name="shmreduce-pool-imap",
                daemon=True,
            ).start()
        except BaseException:
            self._supervisor.revoke(result)
            raise
        return result

    def _feed(self, *arguments: Any) -> None:
        # A bound method, so that the pool lives until this thread ends. If it were freed
        # when its last result arrives, its finalizer would wait for the pool's thread while
        # it holds the result's lock, which that thread needs.
        self._feeder.send_announced(*arguments)

    # What all of them do

    def _tries(self, retries: int | None) -> int:
        return self._retries if retries is None else checked_retries(retries)

    # The end

    def close(self) -> None:
        """Take no more calls, and let the workers leave when all calls are done.

        Examples
        --------
        >>> import shmreduce
        >>> pool = shmreduce.get_context("fork").Pool(1)
        >>> result = pool.apply_async(abs, (-1,))
        >>> pool.close()
        >>> pool.join()
        >>> result.get()
        1
        """
        util.debug("closing pool")
        if self._state == RUN:
            self._state = CLOSE
            self._supervisor.close()

    def terminate(self) -> None:
        """End the workers and wait until they have ended, as the end of a ``with`` block does.

        Busy workers get SIGTERM, and SIGKILL 5 s later. Results that have not arrived raise
        :class:`~shmreduce.TaskAbandonedError`.

        Examples
        --------
        >>> import time
        >>> import shmreduce
        >>> pool = shmreduce.get_context("fork").Pool(1)
        >>> result = pool.apply_async(time.sleep, (3600,))
        >>> pool.terminate()
        >>> try:
        ...     result.get()
        ... except shmreduce.TaskAbandonedError:
        ...     print("it will not come")
        it will not come
        """
        util.debug("terminating pool")
        self._state = TERMINATE
        # Not by calling the finalizer: it runs once only, even if Ctrl-C interrupts it.
        self._supervisor.terminate()
        self._terminate.cancel()

    def join(self) -> None:
        """Wait until the workers have left, after :meth:`close` or :meth:`terminate`.

        Raises
        ------
        ValueError
            If neither was called.

        Examples
        --------
        >>> import shmreduce
        >>> with shmreduce.get_context("fork").Pool(1) as pool:
        ...     print(pool.map(abs, [-1, 2]))
        ...     pool.close()
        ...     pool.join()
        [1, 2]
        """
        util.debug("joining pool")
        if self._state == RUN:
            raise ValueError("Pool is still running")
        if self._state not in {CLOSE, TERMINATE}:
            raise ValueError("In unknown state")
        self._supervisor.join()


if TYPE_CHECKING:
    from multiprocessing.pool import ThreadPool
else:
    __getattr__ = names_of("pool")
