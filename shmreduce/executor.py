"""An executor with the interface of :class:`concurrent.futures.ProcessPoolExecutor`.

May import everything below it; the workers are those of :mod:`shmreduce.pool_supervisor`.
"""

from __future__ import annotations

import collections
import itertools
import os
import threading
import time
import weakref
from concurrent.futures import Executor, Future
from concurrent.futures.process import BrokenProcessPool
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from shmreduce.context import get_context
from shmreduce.errors import TaskAbandonedError, WorkerDied
from shmreduce.interpreter_shutdown import finish_at_shutdown, is_shutting_down
from shmreduce.pool_arguments import (
    check_initializer,
    check_max_tasks_per_child,
    check_shared_allocations,
    checked_retries,
    default_worker_count,
)
from shmreduce.pool_feeding import chunks_of
from shmreduce.pool_results import call
from shmreduce.pool_supervisor import Supervisor
from shmreduce.pool_tasks import EACH_STARRED, ONCE, make_task
from shmreduce.pool_worker import WorkerOptions
from shmreduce.signals import is_from_handler
from shmreduce.thread_locks import interrupt_safe

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from shmreduce.pool_tasks import Call

__all__ = ["ExecutorTaskAbandonedError", "ExecutorWorkerDied", "ProcessPoolExecutor"]

_P = ParamSpec("_P")
_T = TypeVar("_T")


class ExecutorWorkerDied(WorkerDied, BrokenProcessPool):
    """The worker that did an executor's task was killed, or exited.

    It derives from :class:`BrokenProcessPool`, which programs catch, although the
    executor is not broken: the other tasks go on.
    """


class ExecutorTaskAbandonedError(TaskAbandonedError, BrokenProcessPool):
    """The workers of an executor were killed by its user before the task was done.

    It derives from :class:`BrokenProcessPool`, which programs catch.
    """


class _FutureCondition(threading.Condition):
    """A future's condition that Ctrl-C in a waiting thread never leaves acquired.

    ``Future`` enters its condition, whose ``__enter__`` is Python code: see ``interrupt_safe``.
    Then the pool's thread would wait for it, and no future be done any more.
    """

    def __init__(self) -> None:
        lock = threading.RLock()
        super().__init__(lock)
        self._safe = interrupt_safe(lock)

    # A ``with`` finds these in the class, and gets what the property returns.
    __enter__: Any = property(attrgetter("_safe.__enter__"))
    __exit__: Any = property(attrgetter("_safe.__exit__"))


class _Promise:
    """Receives the answer to the task of one future."""

    __slots__ = ("_pending", "future")

    def __init__(self, pending: set[Future[Any]]) -> None:
        self.future: Future[Any] = Future()
        self.future._condition = _FutureCondition()
        self._pending = pending
        pending.add(self.future)

    @property
    def cancelled(self) -> bool:
        """Whether the future was cancelled."""
        return self.future.cancelled()

    def begin(self) -> bool:
        """Let the future run, unless it was cancelled."""
        wanted = self.future.set_running_or_notify_cancel()
        if not wanted:
            self._pending.discard(self.future)
        return wanted

    def answer(self, index: int, succeeded: bool, value: Any) -> None:  # noqa: ARG002
        """Take the value, or the exception."""
        # Before set_result(): whoever waits for it may submit the next call at once, and
        # this future must not count for the number of workers that are needed.
        self._pending.discard(self.future)
        if not self.future.running() and not self.future.set_running_or_notify_cancel():
            return
        # By call(), since these run callbacks. A SystemExit from one would end the pool's
        # thread, and so the workers of all futures.
        call(self.future.set_result if succeeded else self.future.set_exception, value)

    def abandon(self, error: BaseException) -> None:
        """Fail the future: no answer will come."""
        self.answer(0, False, error)


class ProcessPoolExecutor(Executor):
    """An executor like :class:`concurrent.futures.ProcessPoolExecutor`.

    If a worker is killed, only its own future fails, with
    :class:`~shmreduce.WorkerDied` (also a ``BrokenProcessPool``), or the task
    is tried again. The others go on, and a new worker takes its place.

    Parameters
    ----------
    max_workers : int, optional
        The number of workers; by default the number of processors, from Python 3.13
        on of those that this process may use.
    mp_context : multiprocessing context, optional
        Starts the workers; by default :func:`shmreduce.get_context` gives it, that of ``spawn``
        with ``max_tasks_per_child``. Arrays travel by shared memory with a context of shmreduce,
        and with any other context after :func:`shmreduce.install`.
    initializer : callable, optional
        Each worker calls ``initializer(*initargs)`` when it starts. If no worker can
        start because of that, futures fail with ``BrokenProcessPool``.
    initargs : iterable
        Its arguments.
    max_tasks_per_child : int, optional
        After this many tasks a worker leaves. Not with ``fork``.
    retries : int
        How often a task is tried again if its worker was killed. Use it for tasks that
        may safely run twice.
    shared_allocations : bool
        As for :class:`shmreduce.Pool`.

    Raises
    ------
    ValueError, TypeError
        If an argument is impossible. For ``retries`` and ``shared_allocations`` it is a
        :class:`~shmreduce.ConfigurationError`, which is a ValueError.
    AllocatorUnavailableError
        With ``shared_allocations``, if the compiled allocator is missing.

    Notes
    -----
    Arguments are pickled before :meth:`submit` and :meth:`map` return, so they
    may be changed afterwards.

    Examples
    --------
    >>> import shmreduce
    >>> context = shmreduce.get_context("fork")
    >>> with shmreduce.ProcessPoolExecutor(2, context) as executor:
    ...     list(executor.map(pow, [2, 3], [3, 2]))
    [8, 9]
    """

    def __init__(
        self,
        max_workers: int | None = None,
        mp_context: Any = None,
        initializer: Callable[..., object] | None = None,
        initargs: Iterable[Any] = (),
        *,
        max_tasks_per_child: int | None = None,
        retries: int = 0,
        shared_allocations: bool = False,
    ) -> None:
        if max_workers is None:
            max_workers = default_worker_count()
        if max_workers <= 0:
            raise ValueError("max_workers must be greater than 0")
        if mp_context is None:
            mp_context = get_context(None if max_tasks_per_child is None else "spawn")
        self._forks = mp_context.get_start_method(allow_none=False) == "fork"
        check_initializer(initializer)
        check_max_tasks_per_child(max_tasks_per_child, forks=self._forks)
        self._retries = checked_retries(retries)
        check_shared_allocations(shared_allocations)
        self._max_workers = max_workers
        self._mp_context = mp_context
        options = WorkerOptions(
            initializer,
            () if initializer is None else tuple(initargs),
            max_tasks_per_child,
            BaseException,
            os.getpid(),
            plain_errors=True,
            shared_allocations=shared_allocations,
        )
        self._supervisor = Supervisor(
            mp_context,
            _make_process,
            max_workers,
            options,
            ExecutorWorkerDied,
            _make_broken,
            _make_abandoned,
        )
        self._supervisor.wanted = max_workers if self._forks else 1
        self._lock = interrupt_safe(threading.Lock())
        self._shut = False
        self._pending: set[Future[Any]] = set()
        finish_at_shutdown(self._supervisor)
        # If the executor is dropped without shutdown(), the workers do what was submitted
        # and then leave.
        weakref.finalize(self, self._supervisor.close).atexit = False

    # Private names of the standard library's executor that other packages use.

    @property
    def _broken(self) -> bool:
        return self._supervisor.broken_by is not None

    @property
    def _processes(self) -> dict[int | None, Any]:
        return {worker.process.pid: worker.process for worker in self._supervisor.workers}

    def submit(self, fn: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs) -> Future[_T]:
        """Let a worker call ``fn(*args, **kwargs)``, without waiting for it.

        Parameters
        ----------
        fn, *args, **kwargs
            The call. It is pickled before this returns: arrays may be changed afterwards.

        Returns
        -------
        concurrent.futures.Future
            It fails with :class:`~shmreduce.WorkerDied` if the worker was killed
            and the retries are used up, and with the error of pickling if the call
            cannot be pickled.

        Raises
        ------
        BrokenProcessPool
            If workers cannot be started.
        RuntimeError
            After :meth:`shutdown`; in a forked child of the executor's process it is an
            :class:`~shmreduce.InheritedPoolError`.

        Examples
        --------
        >>> import shmreduce
        >>> with shmreduce.ProcessPoolExecutor(1, shmreduce.get_context("fork")) as executor:
        ...     executor.submit(pow, 2, 3).result()
        8
        """
        return self._submit((ONCE, fn, args, kwargs), None)

    def map(
        self,
        fn: Callable[..., _T],
        *iterables: Iterable[Any],
        timeout: float | None = None,
        chunksize: int = 1,
        buffersize: int | None = None,
    ) -> Iterator[_T]:
        """Yield ``fn(*items)`` for the items of the iterables, in order.

        Parameters
        ----------
        fn, *iterables
            The function, and the items to call it with.
        timeout : float, optional
            Seconds from now within which all results must arrive.
        chunksize : int
            The number of calls that make one task.
        buffersize : int, optional
            The largest number of tasks that are taken from the iterables ahead of the
            results that were asked for. Without it the iterables are read to their end
            before this returns.

        Returns
        -------
        iterator
            It raises the exception of a call in the place of its result, and ends there.

        Raises
        ------
        TimeoutError
            From the iterator, after ``timeout``.
        WorkerDied
            From the iterator, if the worker of a call was killed and the retries are
            used up.
        ValueError
            If ``chunksize`` or ``buffersize`` is less than 1.
        BrokenProcessPool, RuntimeError
            As for :meth:`submit`.

        Examples
        --------
        >>> import shmreduce
        >>> with shmreduce.ProcessPoolExecutor(1, shmreduce.get_context("fork")) as executor:
        ...     list(executor.map(pow, [2, 3], [3, 2], chunksize=2))
        [8, 9]
        """
        if chunksize < 1:
            raise ValueError("chunksize must be >= 1.")
        if buffersize is not None and buffersize < 1:
            raise ValueError("buffersize must be None or > 0")
        end = None if timeout is None else time.monotonic() + timeout
        chunks = enumerate(chunks_of(zip(*iterables, strict=False), chunksize))
        futures: Iterator[Future[list[Any]]]
        if type(self).submit is ProcessPoolExecutor.submit:
            futures = (
                self._submit((EACH_STARRED, fn, chunk, {}), place * chunksize)
                for place, chunk in chunks
            )
        else:
            # A derived class counts calls there, or limits or changes them.
            futures = (self.submit(_call_each, fn, chunk) for _, chunk in chunks)
        ready = collections.deque(itertools.islice(futures, buffersize))
        return _results(ready, futures, end)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no more calls; the workers leave when all are done.

        Parameters
        ----------
        wait : bool
            Wait until they have left.
        cancel_futures : bool
            Cancel all calls that no worker has begun.
        """
        if self._supervisor.is_inherited:
            # A forked child: if another thread held the lock at the fork, it is never released.
            self._shut = True
            return
        with self._lock:
            self._shut = True
            pending = list(self._pending) if cancel_futures else []
        # Without the lock: cancel() runs callbacks, which may call shutdown().
        for future in pending:
            future.cancel()
        if pending:
            self._supervisor.drop_cancelled()
        self._supervisor.close()
        if wait:
            self._supervisor.join()

    def terminate_workers(self) -> None:
        """Send the workers SIGTERM, and 5 s later SIGKILL to those still alive; do not wait.

        Nothing can be submitted afterwards. Futures that have not begun are cancelled. The
        others fail with :class:`~shmreduce.TaskAbandonedError`, which is a
        ``BrokenProcessPool`` here; they are not tried again. The shared memory that the
        workers held is freed. :meth:`shutdown` waits until all that is done.

        The standard library has this method from Python 3.14 on. There a worker may
        ignore SIGTERM.

        Examples
        --------
        >>> import time
        >>> import shmreduce
        >>> with shmreduce.ProcessPoolExecutor(1, shmreduce.get_context("fork")) as executor:
        ...     future = executor.submit(time.sleep, 600)
        ...     executor.terminate_workers()
        >>> future.done()
        True
        """
        self._stop(at_once=False)

    def kill_workers(self) -> None:
        """Send the workers SIGKILL; otherwise the same as :meth:`terminate_workers`.

        Examples
        --------
        >>> import time
        >>> import shmreduce
        >>> with shmreduce.ProcessPoolExecutor(1, shmreduce.get_context("fork")) as executor:
        ...     future = executor.submit(time.sleep, 600)
        ...     executor.kill_workers()
        >>> future.done()
        True
        """
        self._stop(at_once=True)

    def _stop(self, *, at_once: bool) -> None:
        self.shutdown(wait=False, cancel_futures=True)
        self._supervisor.stop(at_once=at_once)

    def _submit(self, call: Call, first: int | None) -> Future[Any]:
        self._check_open()
        promise = _Promise(self._pending)
        try:
            task = make_task(
                promise, 0, first, call, retries=self._retries, dumps=self._supervisor.dumps
            )
        except BaseException as error:
            if not isinstance(error, Exception) or is_from_handler(error):
                self._pending.discard(promise.future)
                raise
            promise.answer(0, False, error)
            return promise.future
        with self._lock:
            try:
                self._check_open()
            except RuntimeError:
                self._pending.discard(promise.future)
                task.discard()
                raise
            try:
                if not self._forks:
                    needed = min(self._max_workers, len(self._pending))
                    self._supervisor.wanted = max(self._supervisor.wanted, needed)
                # The thread's ident, not a flag of our own: Ctrl-C could come after the
                # thread was started and before the flag was set.
                if self._supervisor.thread.ident is None:
                    self._supervisor.start()
                self._supervisor.submit(task)
            except BaseException:
                # cancel() fails if the pool's thread has given the task to a worker: then the
                # task runs, and its result is dropped.
                if promise.future.cancel():
                    self._pending.discard(promise.future)
                    task.discard()
                raise
            return promise.future

    def _check_open(self) -> None:
        if self._supervisor.broken_by is not None:
            raise _make_broken(self._supervisor.broken_by)
        if self._shut:
            raise RuntimeError("cannot schedule new futures after shutdown")
        if is_shutting_down() or self._supervisor.closing:
            raise RuntimeError("cannot schedule new futures after interpreter shutdown")
        self._supervisor.check_made_here()


def _call_each(function: Callable[..., _T], chunk: Iterable[Iterable[Any]]) -> list[_T]:
    return [function(*arguments) for arguments in chunk]


def _make_process(context: Any, **arguments: Any) -> Any:
    return context.Process(**arguments)


def _make_broken(error: BaseException) -> BrokenProcessPool:
    broken = BrokenProcessPool(f"no worker process can be started: {error}")
    broken.__cause__ = error
    return broken


def _make_abandoned() -> BaseException:
    return ExecutorTaskAbandonedError(
        "the workers were killed by terminate_workers() or kill_workers() before this task was "
        "done: call shutdown() instead, which lets them do it, or submit it to a new executor"
    )


def _results(
    ready: collections.deque[Future[Any]], futures: Iterator[Future[Any]], end: float | None
) -> Iterator[Any]:
    try:
        while ready:
            left = None if end is None else end - time.monotonic()
            # Reversed and popped, so that a result that was yielded is not kept here.
            values = ready[0].result(left)
            ready.popleft()
            ready.extend(itertools.islice(futures, 1))
            values.reverse()
            while values:
                yield values.pop()
    finally:
        for future in ready:
            future.cancel()
