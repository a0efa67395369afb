"""The workers of one pool, and the thread that watches, replaces and ends them.

May import errors, ``interrupts``, ``pool_backpressure``, ``pool_channel``, ``pool_dispatch``,
``pool_errors``, ``pool_self_pipe``, ``pool_worker_handle``, ``pool_worker_start``, ``lending``
of the memory, and for types alone ``pool_results``, ``pool_tasks`` and ``pool_worker``.
:mod:`shmreduce.pool_dispatch` decides which worker gets which task.

The protocol
------------
Each worker has its own connection to the parent, in both directions. Workers share a
table of numbers, in which each writes only its own, and a ring of tasks that they claim.
So a worker that is killed, at any instant, leaves no lock taken and no half message in
the way of others.

1. The parent starts the worker. The worker calls the initializer. Then it sends
   ``ready``, or it sends ``failed`` with the exception and leaves.
2. The parent sends a task. The worker does it, claims another in the ring if there is
   one, sends the answer ``(succeeded, value)``, does the other, and so on until the
   ring is empty. Then it waits for the next task that is sent. So answers carry no
   number: an answer belongs to the worker's oldest unanswered task.
3. Before it unpickles a task, the worker counts it in shared memory
   (:class:`~shmreduce.pool_worker_progress.WorkerProgress`). There it also notes
   which item of the task it is working on.
4. A worker leaves after ``maxtasksperchild`` tasks, when it is told to stop,
   and when its connection ends. It is killed when the pool is terminated or
   its parent dies.

When a process dies
-------------------
The thread watches the worker process itself (pidfd_open(2)). It does not rely on the
end of the connection, of which the worker's own children may have a copy. When a worker
has died, the answers that it had sent are read first. Then a new worker takes its place,
and :mod:`shmreduce.pool_dispatch` decides about its tasks.

If a worker dies before it is ready, the pool tries again after a pause. The pool gives
up, and fails the tasks that wait, when (number of workers + 10) of them have died so in a
row; (number of workers + 2) if the initializer raised.

When the parent dies, its workers end: idle ones read the end of the connection, busy
ones get a signal (:mod:`shmreduce.parent_death`).
"""

from __future__ import annotations

import itertools
import os
import selectors
import threading
import time
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any

from shmreduce.errors import InheritedPoolError, ProducerDied, TaskAbandonedError
from shmreduce.interrupts import Interrupts
from shmreduce.memory.lending import Lender
from shmreduce.pool_backpressure import Backpressure
from shmreduce.pool_channel import (
    FAILED,
    READY,
    STOP,
    channel_class,
)
from shmreduce.pool_dispatch import Dispatcher
from shmreduce.pool_errors import expect_answer, explained
from shmreduce.pool_self_pipe import SelfPipe
from shmreduce.pool_worker_handle import death_error
from shmreduce.pool_worker_start import WorkerStarter

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.process import BaseProcess

    from shmreduce.pool_results import Receiver
    from shmreduce.pool_tasks import Task
    from shmreduce.pool_worker import WorkerOptions
    from shmreduce.pool_worker_handle import WorkerHandle

__all__ = ["Supervisor", "make_abandoned"]

_LEAVE = 0.5
"""Seconds that an idle worker has to leave before it gets SIGTERM."""
_GRACE = 5.0
"""Seconds that a worker has to end after SIGTERM."""
_RETRY_DELAY = 0.02
"""Seconds to wait after the first worker that could not be started; the pause grows."""
_LONGEST_RETRY_DELAY = 1.0
"""Seconds."""
_SMALL_ANSWERS = 32
"""After so many answers without large arrays workers take tasks by themselves again."""
_FAILED_STARTS = 10
"""This many workers more than the pool's size may fail to start in a row."""


def make_abandoned() -> BaseException:
    """Return the exception of a result that will not come, since its pool was terminated."""
    return TaskAbandonedError(
        "the pool was terminated before this result arrived: call close() and join() instead of "
        "terminate(), or get the results before the end of the `with` block"
    )


class Supervisor:
    """The workers of one pool.

    Parameters
    ----------
    context : multiprocessing context
        Starts the processes and makes the connections.
    make_process : callable
        Called with the context and the arguments of ``Process``.
    size : int
        The number of workers.
    options : WorkerOptions
        Passed to each worker when it starts.
    died : callable
        Makes the exception of a task whose worker was killed; takes the arguments of
        :class:`~shmreduce.WorkerDied`.
    broken : callable
        Makes the exception of tasks that cannot be done, from the error that
        kept workers from starting.
    abandoned : callable, optional
        Makes the exception of tasks that were not done when the workers were killed.
    """

    def __init__(
        self,
        context: Any,
        make_process: Callable[..., BaseProcess],
        size: int,
        options: WorkerOptions,
        died: Callable[..., BaseException],
        broken: Callable[[BaseException], BaseException],
        abandoned: Callable[[], BaseException] = make_abandoned,
    ) -> None:
        self.size = size
        self.wanted = size
        """How many workers there should be now; up to ``size``."""
        self.workers: list[WorkerHandle] = []
        self.backpressure = Backpressure(size)
        self.dumps = channel_class(context).dumps
        """The pickling function for :func:`~shmreduce.pool_tasks.make_task`."""
        self._options = options
        self._died = died
        self._abandoned = abandoned
        self._failures = 0
        self._next_start = 0.0
        self._closing = self._terminating = self._stopping = self.ended = False
        self._at_once = False
        """Whether workers get SIGKILL without time to end by themselves."""
        self._gently = False
        """Whether idle workers are asked to leave before they get a signal."""
        self._killing = False
        """Whether :meth:`_kill` has begun to end the workers."""
        self._self_pipe: SelfPipe
        self._selector: selectors.BaseSelector
        self._lender = Lender(self.wake)
        self._starter = WorkerStarter(context, make_process, size, options, self._lender)
        self._dispatcher = Dispatcher(
            self.workers,
            options.max_tasks,
            died,
            broken,
            self._starter.ring,
        )
        self._small_answers = _SMALL_ANSWERS
        """How many answers in a row had no large arrays, as if some had come before the first."""
        self.thread = threading.Thread(target=self._run, name="shmreduce-pool", daemon=True)

    # From other threads

    def start(self) -> None:
        """Start the workers and then the thread: forking is safer with fewer threads.

        Raises
        ------
        OSError
            If a worker cannot be started. Those that were started have been ended then.
        """
        with ExitStack() as undone:
            self._self_pipe = SelfPipe()
            undone.callback(self._self_pipe.close)
            self._selector = selectors.DefaultSelector()
            undone.callback(self._selector.close)
            self._selector.register(self._self_pipe.fileno(), selectors.EVENT_READ)
            undone.pop_all()
        try:
            with Interrupts() as interrupts:
                while len(self.workers) < self.wanted:
                    self._add_worker()
                    interrupts.pass_on()
                self.thread.start()
        except BaseException:
            if self.thread.ident is None:
                self._kill()
                self._close()
            else:
                # The workers and the selector belong to the thread now.
                self.terminate()
            raise

    def submit(self, task: Task) -> None:
        """Give a task to the workers; its receiver will get the answer."""
        self._dispatcher.submit(task)
        self.wake()

    def do_soon(self, action: Callable[[], object]) -> None:
        """Have the thread call a function."""
        self._dispatcher.do_soon(action)
        self.wake()

    def announce(self, receiver: Receiver, *, here: bool) -> None:
        """Note that more tasks for this receiver will come, even after :meth:`close`.

        If the pool ends before that, the receiver is abandoned.

        Parameters
        ----------
        receiver : Receiver
            Gets the answers.
        here : bool
            Whether the calling thread will submit them.
        """
        self._dispatcher.announce(receiver, threading.get_ident() if here else None)

    def revoke(self, receiver: Receiver) -> None:
        """Note that no more tasks for this receiver will come; may be called again."""
        self._dispatcher.revoke(receiver)
        # Only a pool that is closed waits for that. close() wakes it, too.
        if self._closing:
            self.wake()

    def wake(self) -> None:
        """Make the thread check what there is to do; from any thread, and from a finalizer.

        Does nothing before :meth:`start`, and in a forked child.
        """
        if self.thread.ident is None or self.is_inherited:
            return
        self._self_pipe.wake()
        if self.ended:
            self._dispatcher.abandon(self._abandoned())

    @property
    def is_inherited(self) -> bool:
        """Whether this process was forked by the one that started the workers."""
        return os.getpid() != self._options.parent

    def check_made_here(self) -> None:
        """Raise InheritedPoolError in a forked child: no worker would ever answer it."""
        if self.is_inherited:
            raise InheritedPoolError(
                f"process {os.getpid()} was forked by process {self._options.parent}, which made "
                "this pool and alone gets the answers of its workers: make a pool in this "
                "process",
                parent=self._options.parent,
                pid=os.getpid(),
            )

    @property
    def broken_by(self) -> BaseException | None:
        """The error that keeps workers from starting; None if they can be started."""
        return self._dispatcher.broken_by

    def drop_cancelled(self) -> None:
        """Have the thread drop the tasks of cancelled futures now, with their memory."""
        self.do_soon(self._dispatcher.drop_cancelled)

    @property
    def closing(self) -> bool:
        """Whether the workers will leave when all tasks are done."""
        return self._closing

    def close(self) -> None:
        """Let the workers leave when all tasks are done."""
        self._closing = True
        self.wake()

    def terminate(self) -> None:
        """End the workers now, and wait until they have ended; do nothing in a forked child."""
        if self.is_inherited:
            return
        self._gently = True
        self.stop(at_once=False)
        self.join(_GRACE)
        if not self._killing and threading.current_thread() is not self.thread:
            # The thread may block in a write to a worker that is stopped (SIGSTOP). On a
            # connection of multiprocessing only the worker's death ends that.
            self._kill_all()
        self.join()

    def stop(self, *, at_once: bool) -> None:
        """Have the workers killed, without waiting for it; do nothing in a forked child.

        Parameters
        ----------
        at_once : bool
            Whether to send SIGKILL at once. Otherwise the workers get SIGTERM, and those
            that are alive some seconds later get SIGKILL.
        """
        if self.is_inherited:
            return
        if at_once:
            self._at_once = True
        # First the flag that makes the thread end. The thread does the rest too, even if
        # Ctrl-C interrupts this.
        self._terminating = True
        self.wake()
        self.backpressure.close()
        if at_once:
            self._kill_all()

    def _kill_all(self) -> None:
        for worker in list(self.workers):
            worker.process.kill()

    def join(self, timeout: float | None = None) -> None:
        """Wait until all workers have ended, for ``timeout`` seconds at most."""
        if threading.current_thread() is not self.thread and self.thread.ident is not None:
            # A signal handler may have interrupted a call, which cannot go on before this returns.
            self._dispatcher.abandon_those_of(threading.get_ident(), self._abandoned())
            self.wake()
            self.thread.join(timeout)

    # The thread

    def _run(self) -> None:
        error = self._abandoned()
        try:
            while self._run_once():
                pass
        except BaseException as unforeseen:
            error = unforeseen
            raise
        finally:
            self.backpressure.close()
            try:
                self._kill()
            finally:
                # Whatever went wrong, such as a process that may not be killed: nobody waits for
                # a result that never comes.
                for worker in self.workers:
                    self._dispatcher.take_back(worker)
                self.ended = True
                self._dispatcher.abandon(error)
                self._close()

    def _run_once(self) -> bool:
        self._dispatcher.take_submitted()
        if self._terminating:
            return False
        if not self._stopping:
            self._repopulate()
            self._dispatcher.assign(may_publish=self._may_publish())
        if self._closing and not self._dispatcher.has_work():
            self._stop_workers()
        if self._stopping and not self.workers:
            return False
        self._wait_for_events()
        return True

    def _may_publish(self) -> bool:
        """Return whether workers may take tasks by themselves."""
        # Memory is lent only with tasks that are sent. If there is none now, some may come back
        # before a worker is idle.
        lends = self._lender.has_some or self._small_answers < _SMALL_ANSWERS
        # A future in the ring could not be cancelled.
        return not (lends or self._options.plain_errors)

    def _wait_for_events(self) -> None:
        """Wait for messages and deaths of workers, and for :meth:`wake`; handle them."""
        timeout = self._lender.look_after()
        if not self._has_all_workers():
            until_start = max(0.0, self._next_start - time.monotonic())
            timeout = until_start if timeout is None else min(timeout, until_start)
        ended = []
        for key, _ in self._selector.select(timeout):
            worker: WorkerHandle | None = key.data
            if worker is None:
                self._self_pipe.drain()
            elif key.fd == worker.sentinel:
                ended.append(worker)
            else:
                self._receive(worker)
        for worker in ended:
            # If the pool is terminated, _kill() removes them, and no task is tried again.
            if not self._terminating:
                self._handle_death(worker)

    # Workers

    def _has_all_workers(self) -> bool:
        return self._stopping or self.broken_by is not None or len(self.workers) >= self.wanted

    def _repopulate(self) -> None:
        if self._closing and not self._dispatcher.has_work():
            return
        while not self._has_all_workers() and time.monotonic() >= self._next_start:
            try:
                self._add_worker()
            except Exception as error:
                # There may be no descriptor, process or memory for it now: try again later.
                self._failed_to_start(error)
                return

    def _add_worker(self) -> None:
        slot = next(i for i in itertools.count() if all(i != w.slot for w in self.workers))
        worker = self._starter.start(slot, lambda: self._terminating)
        self.workers.append(worker)
        try:
            self._selector.register(worker.channel.fileno(), selectors.EVENT_READ, worker)
            self._selector.register(worker.sentinel, selectors.EVENT_READ, worker)
        except BaseException:
            # No memory, or the user has reached the limit of watched files (epoll_ctl(2)).
            # Nobody would notice what this worker does.
            worker.process.kill()
            worker.exit_code()
            self._remove(worker)
            raise

    def _handle_death(self, worker: WorkerHandle) -> None:
        """Read the last answers of a worker that has died, and reassign its tasks."""
        while not worker.disconnected and worker.channel.poll():
            self._receive(worker)
        exitcode = worker.exit_code()
        self._dispatcher.note_claims()
        self._remove(worker)
        if not worker.ready and not worker.initializer_failed:
            self._failed_to_start(death_error(self._died, worker, exitcode, None, None))
        self._dispatcher.recover(worker, exitcode)

    def _failed_to_start(self, error: BaseException, patience: int = _FAILED_STARTS) -> None:
        self._failures += 1
        pause = min(_LONGEST_RETRY_DELAY, _RETRY_DELAY * self._failures)
        self._next_start = time.monotonic() + pause
        nobody = not any(worker.ready for worker in self.workers)
        if self.broken_by is None and nobody and self._failures >= self.wanted + patience:
            self._dispatcher.reject_all(error)

    def _stop_workers(self) -> None:
        if self._stopping:
            return
        self._stopping = True
        for worker in self.workers:
            try:
                worker.channel.send_bytes(STOP)
            except OSError:
                # It has left already, which the thread will notice.
                continue

    def _remove(self, worker: WorkerHandle) -> None:
        for descriptor in (worker.channel.fileno(), worker.sentinel):
            if descriptor in self._selector.get_map():
                self._selector.unregister(descriptor)
        self.workers.remove(worker)
        worker.close()
        self._lender.give_back_ownerless()

    def _kill(self) -> None:
        """End all workers, and wait for that."""
        self._killing = True
        self._dispatcher.withdraw_all()
        gently = self._gently and not self._at_once
        # Workers that are not ready yet are among them.
        idle = [worker for worker in self.workers if gently and not worker.tasks]
        refused: list[PermissionError] = []

        def strike(signal: Callable[[], None]) -> None:
            # It may have changed its user. The others are ended all the same.
            try:
                signal()
            except PermissionError as error:
                refused.append(error)

        for worker in self.workers:
            if worker not in idle:
                strike(worker.process.terminate)
        for worker in self._ask_to_leave(idle):
            strike(worker.process.terminate)
        deadline = time.monotonic() + (0.0 if self._at_once else _GRACE)
        for worker in self.workers:
            worker.await_end(max(0.0, deadline - time.monotonic()))
            if worker.process.exitcode is None:
                strike(worker.process.kill)
        for worker in list(self.workers):
            if not refused or worker.process.exitcode is not None:
                worker.exit_code()
            self._dispatcher.take_back(worker)
            self._remove(worker)
        if refused:
            raise refused[0]

    def _ask_to_leave(self, idle: list[WorkerHandle]) -> list[WorkerHandle]:
        """Ask idle workers to leave; return those that have not.

        SIGTERM might not end them: a forked worker ignores it if its parent does.
        """
        for worker in idle:
            # OSError if it has ended already.
            with suppress(OSError):
                worker.channel.send_bytes(STOP)
        deadline = time.monotonic() + _LEAVE
        for worker in idle:
            worker.await_end(max(0.0, deadline - time.monotonic()))
        return [worker for worker in idle if worker.process.exitcode is None]

    def _close(self) -> None:
        self._lender.close()
        self._selector.close()
        self._self_pipe.close()

    # Messages of workers

    def _receive(self, worker: WorkerHandle) -> None:
        """Read a worker's message, and further answers that have arrived for certain."""
        before = worker.answered
        while self._receive_one(worker) and not self._terminating:
            # A worker begins a task after it has sent the answer to the one before. If it
            # has begun two tasks that are not answered here, the next answer has arrived,
            # and is read without another select().
            if worker.progress.begun - worker.answered < 2:
                break
        self._dispatcher.note_pace(worker, worker.answered - before)

    def _receive_one(self, worker: WorkerHandle) -> bool:
        """Read one message of a worker; return False if there is none."""
        try:
            unpickle = worker.channel.receive()
        except (EOFError, OSError):
            self._stop_listening(worker)
            return False
        if unpickle is None:
            return False
        large = self._lender.large_answers
        expect_answer(for_executor=self._options.plain_errors)
        try:
            kind, value = unpickle()
        except ProducerDied as error:
            if error.pid == worker.process.pid:
                # The answer's memory went away with the worker, which happens on
                # connections of multiprocessing.
                self._lose_answer(worker)
                return not worker.disconnected
            kind, value = False, error
        except BaseException as error:
            # Unpickling runs the user's code, which may raise anything.
            kind, value = False, explained(error)
        if not worker.ready and kind != READY:
            # Its first message is READY or FAILED: here the error of the initializer, which
            # could not be unpickled.
            kind = FAILED
        if kind == READY:
            worker.ready = True
            self._failures = 0
        elif kind == FAILED:
            worker.initializer_failed = True
            # Little patience: the initializer will probably raise in the next worker too.
            self._failed_to_start(value, patience=2)
        elif self._dispatcher.has_task(worker):
            is_large = self._lender.large_answers > large
            self._small_answers = 0 if is_large else self._small_answers + 1
            self._dispatcher.answer(worker, bool(kind), value)
        else:
            # An answer without a task: the worker's next answers cannot be assigned either.
            worker.process.kill()
            self._stop_listening(worker)
            return False
        return True

    def _lose_answer(self, worker: WorkerHandle) -> None:
        """Handle an answer that cannot be read, since its worker has died."""
        if worker.ready and self._dispatcher.has_task(worker):
            # Answers that came after it may still be readable.
            self._dispatcher.lose_answer(worker)
        else:
            self._stop_listening(worker)
        worker.process.kill()

    def _stop_listening(self, worker: WorkerHandle) -> None:
        self._selector.unregister(worker.channel.fileno())
        worker.disconnected = True
