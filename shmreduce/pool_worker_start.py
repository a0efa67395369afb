"""Starts the process of a pool's worker, and makes what connects the two.

May import ``fork_hooks``, ``parent_death``, ``pool_channel``, ``pool_worker``,
``pool_worker_handle``, ``pool_worker_progress``, and ``lending`` of the memory for types alone.
"""

from __future__ import annotations

import itertools
import threading
from typing import TYPE_CHECKING, Any

from shmreduce.fork_hooks import renew_in_children
from shmreduce.parent_death import Lifeline
from shmreduce.pool_channel import close_in_forked_children, make_channels
from shmreduce.pool_worker import WorkerOptions, work
from shmreduce.pool_worker_handle import WorkerHandle
from shmreduce.pool_worker_progress import ProgressTable, WorkerProgress

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.process import BaseProcess

    from shmreduce.memory.lending import Lender

__all__ = ["WorkerStarter"]

_LOCK_POLL = 0.1
"""Seconds to wait for ``_starting`` before checking whether the pool is terminated."""

_starting = threading.Lock()
"""Held while any pool starts a worker: another worker that was forked meanwhile would
inherit both ends of the connection."""


def _renew_lock() -> None:
    # The lock was held when a worker was forked, and nobody releases the worker's copy.
    global _starting
    _starting = threading.Lock()


renew_in_children(_renew_lock)


class WorkerStarter:
    """Starts the workers of one pool.

    Parameters
    ----------
    context : multiprocessing context
        Starts the processes and makes the connections.
    make_process : callable
        Called with the context and the arguments of ``Process``.
    size : int
        The largest number of workers at a time.
    options : WorkerOptions
        Passed to each worker when it starts.
    lender : Lender
        Lends the memory of results for the next ones.
    """

    def __init__(
        self,
        context: Any,
        make_process: Callable[..., BaseProcess],
        size: int,
        options: WorkerOptions,
        lender: Lender,
    ) -> None:
        self._context = context
        self._make_process = make_process
        self._options = options
        self._lender = lender
        self._table = ProgressTable.for_workers(size)
        self.ring = self._table.ring
        self._started = itertools.count()

    def start(self, slot: int, is_terminated: Callable[[], bool]) -> WorkerHandle:
        """Start a worker; it is the caller's.

        Parameters
        ----------
        slot : int
            The worker's place in the table of progress, which no living worker has.
        is_terminated : callable
            Returns whether the pool is terminated, so that nobody needs the worker any more.

        Raises
        ------
        InterruptedError
            If the pool was terminated while another pool was starting a worker.
        OSError
            If the worker cannot be started.
        """
        owner = self.ring.owner_of(next(self._started))
        progress = WorkerProgress(self._table, slot, owner)
        progress.begin(0)
        turn = _starting
        while not turn.acquire(timeout=_LOCK_POLL):
            # The cycle collector may run this pool's finalizer in the thread that holds the
            # lock. That thread then waits for this one, so this one must stop waiting.
            if is_terminated():
                raise InterruptedError("the pool is terminated")
        try:
            return self._start(slot, progress)
        finally:
            turn.release()

    def _start(self, slot: int, progress: WorkerProgress) -> WorkerHandle:
        # Under the lock from here on: a worker that another pool forks must not inherit
        # these ends.
        ours, theirs = make_channels(self._context)
        lifeline = Lifeline()
        try:
            close_in_forked_children(ours)
            process = self._make_process(
                self._context,
                target=work,
                args=(theirs, lifeline.reader, progress, self._options),
            )
            process.name = process.name.replace("Process", "PoolWorker")
            process.start()
            theirs.close()
            if not self._options.shared_allocations:
                # With shared_allocations, memory that the program drops must go back to the
                # worker at once, which allocates its next results there.
                ours.have_lender(self._lender)
            return WorkerHandle(process, ours, lifeline, progress, slot)
        except BaseException:
            ours.close()
            lifeline.cut()
            raise
        finally:
            theirs.close()
            lifeline.reader.close()
