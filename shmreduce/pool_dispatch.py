"""The tasks of one pool: which worker gets one, and what becomes of it if the worker dies.

May import errors, ``pool_task_ring``, ``pool_worker_handle``, and for types alone
``pool_results`` and ``pool_tasks``. The protocol between the pool and its workers is
described in :mod:`shmreduce.pool_supervisor`.

Which worker gets a task
------------------------
An idle worker is sent the oldest task, whatever its size, because it reads at once. If
none is idle, small tasks go into the ring (:mod:`shmreduce.pool_task_ring`), from which
a worker that has done its task takes the oldest. So tasks begin in the order in which
they were submitted, and a task may wait for any other that the same workers would do if
they read one pipe, as those of :mod:`multiprocessing` do.

Whether a worker is idle is never in doubt. It claims a task of the ring before it sends
the answer to the one that it has done, and at no other time. So when the pool has read
the answer, it sees the claim. If there is none, the worker reads its connection, and does
nothing else until the pool sends it a task. If the ring has one, which was put there too
late for the worker to see it, then the pool claims it and sends it.

What becomes of the tasks of a dead worker
-----------------------------------------
- If the worker had no task, nothing is lost.
- If the worker had begun a task and not answered, the task is tried again if
  ``retries`` allows it; otherwise :class:`~shmreduce.WorkerDied` is its answer. The
  same happens if the worker had answered, but the memory of the answer is gone with it,
  which is possible only on connections of :mod:`multiprocessing`.
- If the worker had not begun a task, the task goes to another worker, before those that
  were submitted after it. But if two workers in a row have died before they began it, it
  counts as begun: reading it may be what kills them.
"""

from __future__ import annotations

import collections
import itertools
import queue
import time
from typing import TYPE_CHECKING, Any

from shmreduce.errors import ShmreduceError
from shmreduce.pool_task_ring import PublishedTasks
from shmreduce.pool_worker_handle import death_error

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from shmreduce.pool_results import Receiver
    from shmreduce.pool_task_ring import TaskRing
    from shmreduce.pool_tasks import Task
    from shmreduce.pool_worker_handle import WorkerHandle

__all__ = ["Dispatcher"]

_SHORT_TASK = 1e-3
"""Seconds. Only tasks that take less go into the ring: for others it makes no difference, and an
idle worker can be lent memory for its answer."""


class Dispatcher:
    """The tasks of one pool, from when they are submitted until they are answered.

    The pool's thread calls its methods; any thread may call :meth:`submit`, :meth:`do_soon`,
    :meth:`announce` and :meth:`revoke`, and :meth:`abandon` when the thread has ended.

    Parameters
    ----------
    workers : list of WorkerHandle
        The workers that there are now; the caller changes it.
    max_tasks : int or None
        How many tasks a worker does before it leaves.
    died : callable
        Makes the exception of a task whose worker was killed; takes the arguments of
        :class:`~shmreduce.WorkerDied`.
    broken : callable
        Makes the exception of tasks that cannot be done, from the error that
        kept workers from starting.
    ring : TaskRing
        Where workers that are not idle find tasks.
    """

    def __init__(
        self,
        workers: Sequence[WorkerHandle],
        max_tasks: int | None,
        died: Callable[..., BaseException],
        broken: Callable[[BaseException], BaseException],
        ring: TaskRing,
    ) -> None:
        self.broken_by: BaseException | None = None
        """The error that keeps workers from starting, if there is one."""
        self._workers = workers
        self._max_tasks = max_tasks
        self._died = died
        self._broken = broken
        self._inbox: queue.SimpleQueue[Task | Callable[[], object]] = queue.SimpleQueue()
        self._waiting: collections.deque[Task] = collections.deque()
        """By their numbers."""
        self._numbers = itertools.count()
        self._announced: dict[Receiver, int | None] = {}
        """The receivers for which more tasks will be submitted, in order, and by which thread;
        None if it does nothing else."""
        self._published = PublishedTasks(ring)
        self._mean_seconds = 5 * _SHORT_TASK

    # Tasks that come in

    def submit(self, task: Task) -> None:
        """Take a task; its receiver will get the answer."""
        self._inbox.put(task)

    def do_soon(self, action: Callable[[], object]) -> None:
        """Call a function when the tasks that were submitted before it have been taken."""
        self._inbox.put(action)

    def announce(self, receiver: Receiver, thread: int | None) -> None:
        """Note that more tasks for this receiver will come; see :meth:`abandon`."""
        self._announced[receiver] = thread

    def abandon_those_of(self, thread: int, error: BaseException) -> None:
        """Fail what a thread has announced, which is about to wait for all work."""
        for receiver, announcer in list(self._announced.items()):
            if announcer == thread:
                self.revoke(receiver)
                receiver.abandon(error)

    def revoke(self, receiver: Receiver) -> None:
        """Note that no more tasks for this receiver will come; may be called again."""
        self._announced.pop(receiver, None)

    def drop_cancelled(self) -> None:
        """Drop the tasks of futures that were cancelled, which else wait for an idle worker."""
        left = [task for task in self._waiting if not task.receiver.cancelled or self._begin(task)]
        self._waiting.clear()
        self._waiting.extend(left)

    def has_work(self) -> bool:
        """Return whether any task is unanswered, or may still come."""
        # _announced before the inbox: a receiver's last task is in the inbox before the
        # receiver is revoked, so it is seen in one of the two.
        return bool(
            self._announced
            or self._waiting
            or self._published
            or any(worker.tasks or worker.lost_answers for worker in self._workers)
            or not self._inbox.empty()
        )

    def take_submitted(self) -> None:
        """Move submitted tasks to those that wait; fail them if no worker can be started."""
        while True:
            try:
                task = self._inbox.get_nowait()
            except queue.Empty:
                return
            if callable(task):
                task()
            elif self.broken_by is not None:
                self._fail(task, self._broken(self.broken_by))
            else:
                task.number = next(self._numbers)
                self._waiting.append(task)
            del task

    def _wait_again(self, tasks: Iterable[Task]) -> None:
        """Put tasks back, in their old places."""
        front: list[Task] = []
        # A worker may have taken one from the ring that came back and was older than its last.
        for task in sorted(tasks, key=lambda each: each.number):
            while self._waiting and self._waiting[0].number < task.number:
                front.append(self._waiting.popleft())
            front.append(task)
        self._waiting.extendleft(reversed(front))

    # Which worker gets a task

    def assign(self, *, may_publish: bool) -> None:
        """Send tasks to the workers that can take some, or put them where those take them.

        Parameters
        ----------
        may_publish : bool
            Whether tasks may go into the ring, if they are short.
        """
        self.note_claims()
        may_publish = may_publish and self._mean_seconds < _SHORT_TASK
        if self._published and not (may_publish and self._is_in_order()):
            self.withdraw_all()
        for worker in self._workers:
            while not worker.tasks and self._send_next(worker):
                pass
        # A worker that is not busy may never take one: it may still be starting.
        if may_publish and any(worker.tasks for worker in self._workers):
            self._publish()

    def _is_in_order(self) -> bool:
        """Return whether no task that waits is older than one in the ring, as if it came back."""
        return not self._waiting or self._published.youngest.number < self._waiting[0].number

    def _send_next(self, worker: WorkerHandle) -> bool:
        """Send the oldest task to an idle worker; return False if none could be sent."""
        while self._may_get(worker):
            task = self._take_oldest()
            if task is None:
                return False
            if self._begin(task):
                return self._send(worker, task)
        return False

    def _take_oldest(self) -> Task | None:
        """Take the oldest task that no worker has."""
        task = self._published.withdraw(self._give_claimed)
        if task is None and self._waiting:
            return self._waiting.popleft()
        return task

    def _publish(self) -> None:
        """Put small tasks into the ring, for workers that are busy now."""
        waiting = self._waiting
        while waiting:
            if not self._begin(waiting[0]) or self._published.publish(waiting[0]):
                waiting.popleft()
            else:
                return

    def withdraw_all(self) -> None:
        """Let the tasks in the ring wait again, so that no worker takes any more of them."""
        self._wait_again(self._published.withdraw_all(self._give_claimed))

    def note_claims(self) -> None:
        """Note which workers have taken tasks from the ring.

        Before a worker that has died is removed from the list of workers, this must be called.
        """
        self._published.note_claims(self._give_claimed)

    def has_task(self, worker: WorkerHandle) -> bool:
        """Return whether a worker, from which there is a message, has a task to answer."""
        if not worker.tasks:
            # It claimed the task before it sent anything that came after the last answer.
            self.note_claims()
        return bool(worker.tasks)

    def _may_get(self, worker: WorkerHandle) -> bool:
        """Return whether a worker can take one more task."""
        if not worker.ready or worker.disconnected or worker.lost_answers:
            return False
        return self._max_tasks is None or worker.sent < self._max_tasks

    def _begin(self, task: Task) -> bool:
        """Prepare a task for a worker; return False if its future was cancelled."""
        # begin() is called once only: not again if the task goes to a second worker.
        if task.started or task.receiver.begin():
            task.started = True
            return True
        task.discard()
        return False

    def _send(self, worker: WorkerHandle, task: Task) -> bool:
        """Send a task to an idle worker and note that it has it; return False if it has died."""
        worker.busy_since = time.monotonic()
        self._give(worker, task)
        try:
            worker.channel.send_task(task.data, worker.process.pid)
        except ConnectionError:
            # The worker has died. The supervisor will see that, and call recover().
            return False
        except Exception as error:
            if isinstance(error, OSError) and not isinstance(error, ShmreduceError):
                # Part of the message may have been written: the connection is unusable.
                worker.process.kill()
                return False
            # There is no memory for a large task.
            worker.tasks.pop()
            worker.sent -= 1
            self._fail(task, error)
        return True

    def _give_claimed(self, owner: int, task: Task) -> None:
        for worker in self._workers:
            if worker.progress.owner == owner:
                self._give(worker, task)
                return
        # A worker that the pool takes for dead. It cannot send the answer to the task that it
        # did before, so it leaves and does not begin this one.
        self._published.forget(owner)
        self._wait_again([task])

    def _give(self, worker: WorkerHandle, task: Task) -> None:
        """Note that a worker has a task."""
        task.leave_queue()
        worker.tasks.append(task)
        worker.sent += 1

    # Answers, and workers that give none

    def answer(self, worker: WorkerHandle, succeeded: bool, value: Any) -> None:
        """Pass a worker's answer to the receiver of the worker's oldest task."""
        worker.answered += 1
        task = worker.tasks.popleft()
        task.done()
        task.receiver.answer(task.index, succeeded, value)

    def note_pace(self, worker: WorkerHandle, answers: int) -> None:
        """Update the mean duration of a task: a worker has given this many answers."""
        if answers:
            now = time.monotonic()
            mean = (now - worker.busy_since) / answers
            self._mean_seconds += (1 - 0.8**answers) * (mean - self._mean_seconds)
            worker.busy_since = now

    def lose_answer(self, worker: WorkerHandle) -> None:
        """Note that a worker has answered its oldest task, but the answer cannot be read."""
        worker.answered += 1
        worker.lost_answers.append(worker.tasks.popleft())

    def recover(self, worker: WorkerHandle, exitcode: int | None) -> None:
        """Let the tasks of a worker that has died wait for another worker, or fail them."""
        begun = worker.progress.begun - worker.answered
        again = []
        for task in worker.lost_answers:
            if task.next_try():
                again.append(task)
            else:
                self._fail(task, death_error(self._died, worker, exitcode, task.first, task))
        for place, task in enumerate(worker.tasks, 1):
            task.deaths += begun == 0 and place == 1
            charged = place <= begun or task.deaths > 1
            if not charged or task.next_try():
                again.append(task)
                continue
            index = task.first
            if index is not None and place == begun:
                index += worker.progress.position
            self._fail(task, death_error(self._died, worker, exitcode, index, task))
        self._published.forget(worker.progress.owner)
        self._wait_again(again)
        worker.tasks.clear()
        worker.lost_answers.clear()

    def take_back(self, worker: WorkerHandle) -> None:
        """Let the tasks of a worker that the pool has ended wait, as if they had not been sent."""
        self._wait_again([*worker.lost_answers, *worker.tasks])
        worker.lost_answers.clear()
        worker.tasks.clear()

    def reject_all(self, error: BaseException) -> None:
        """Fail all tasks that wait or will be submitted: no worker can be started."""
        self.broken_by = error
        self.withdraw_all()
        while self._waiting:
            self._fail(self._waiting.popleft(), self._broken(error))

    def abandon(self, error: BaseException) -> None:
        """Fail all tasks that are left, and those announced: the pool has ended."""
        for receiver in list(self._announced):
            receiver.abandon(error)
        self.take_submitted()
        while True:
            try:
                task = self._waiting.popleft()
            except IndexError:
                return
            task.discard()
            task.receiver.abandon(error)

    def _fail(self, task: Task, error: BaseException) -> None:
        task.discard()
        task.receiver.answer(task.index, False, error)
