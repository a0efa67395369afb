"""The tasks of one pool: which worker gets one, and what becomes of it if the worker dies.

May import errors, ``pool_worker_handle``, and for types alone ``pool_results`` and
``pool_tasks``. The protocol between the pool and its workers is described in
:mod:`shmreduce.pool_supervisor`.

Which worker gets a task
------------------------
An idle worker is sent a task of any size, because it reads at once. A busy worker is
sent some more tasks ahead, but only if

- they are small enough not to fill the connection,
- tasks have been short lately, many are waiting, and the worker has not been busy for
  long: another worker could do a task that is queued behind a long one,
- none of them can be cancelled until it is sent,
- they can be taken back, or they belong to the call that the worker is busy with. A
  task may wait for tasks of other calls, for example because it collects what they put
  into a queue. A task of such a call that stays behind it would never be done. For the
  same reason all tasks of a packet are of one call.

If a worker's task takes long after all, the tasks behind it wait for another worker
again. On our own connections the pool takes back the packets that the worker has not
read: each is read by one of them only. The worker gives back the tasks that it has
read, after the long one. In both cases nobody has begun them.

What becomes of the tasks of a dead worker
-----------------------------------------
- If the worker had no task, nothing is lost.
- If the worker had begun a task and not answered, the task is tried again if
  ``retries`` allows it; otherwise :class:`~shmreduce.WorkerDied` is its answer. The
  same happens if the worker had answered, but the memory of the answer is gone with it,
  which is possible only on connections of :mod:`multiprocessing`.
- If the worker had not begun a task, the task goes to another worker. But if two workers
  in a row have died before they began it, it counts as begun: reading it may be what
  kills them.
"""

from __future__ import annotations

import collections
import queue
import time
from typing import TYPE_CHECKING, Any

from shmreduce.errors import ShmreduceError
from shmreduce.pool_worker_handle import death_error

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from shmreduce.pool_results import Receiver
    from shmreduce.pool_tasks import Task
    from shmreduce.pool_worker_handle import WorkerHandle

__all__ = ["Dispatcher"]

_SHORT_TASK = 1e-3
"""Seconds. Only tasks that take less are sent ahead."""
_FEWEST_AHEAD, _MOST_AHEAD = 4, 32
"""Limits of the number of short tasks that a worker may have, so that it need not sleep
between them: as many as together take ``_SHORT_TASK`` seconds."""
_BYTES_AHEAD = 16 << 10
"""Bytes of tasks that may be sent at a time to a worker that is not reading."""
_LOOK_AGAIN = 10e-3
"""Seconds until the next look at a worker that has tasks ahead, and has not begun one in time.

It does not get a processor, or is stopped.
"""


class Dispatcher:
    """The tasks of one pool, from when they are submitted until they are answered.

    The pool's thread calls its methods; any thread may call :meth:`submit`,
    :meth:`announce` and :meth:`revoke`, and :meth:`abandon` when the thread has ended.

    Parameters
    ----------
    max_tasks : int or None
        How many tasks a worker is sent before it leaves.
    died : callable
        Makes the exception of a task whose worker was killed; takes the arguments of
        :class:`~shmreduce.WorkerDied`.
    broken : callable
        Makes the exception of tasks that cannot be done, from the error that
        kept workers from starting.
    """

    def __init__(
        self,
        max_tasks: int | None,
        died: Callable[..., BaseException],
        broken: Callable[[BaseException], BaseException],
    ) -> None:
        self.broken_by: BaseException | None = None
        """The error that keeps workers from starting, if there is one."""
        self._max_tasks = max_tasks
        self._died = died
        self._broken = broken
        self._inbox: queue.SimpleQueue[Task] = queue.SimpleQueue()
        self._waiting: collections.deque[Task] = collections.deque()
        self._announced: dict[Receiver, None] = {}
        """The receivers for which more tasks will be submitted, as an ordered set."""
        self._mean_seconds = 5 * _SHORT_TASK

    # Tasks that come in

    def submit(self, task: Task) -> None:
        """Take a task; its receiver will get the answer."""
        self._inbox.put(task)

    def announce(self, receiver: Receiver) -> None:
        """Note that more tasks for this receiver will come; see :meth:`abandon`."""
        self._announced[receiver] = None

    def revoke(self, receiver: Receiver) -> None:
        """Note that no more tasks for this receiver will come; may be called again."""
        self._announced.pop(receiver, None)

    def has_work(self, workers: Sequence[WorkerHandle]) -> bool:
        """Return whether any task is unanswered, or may still come."""
        # _announced before the inbox: a receiver's last task is in the inbox before the
        # receiver is revoked, so it is seen in one of the two.
        return bool(
            self._announced
            or self._waiting
            or any(worker.tasks or worker.lost_answers for worker in workers)
            or not self._inbox.empty()
        )

    def take_submitted(self) -> None:
        """Move submitted tasks to those that wait; fail them if no worker can be started."""
        while True:
            try:
                task = self._inbox.get_nowait()
            except queue.Empty:
                return
            if self.broken_by is not None:
                self._fail(task, self._broken(self.broken_by))
            else:
                self._waiting.append(task)
            del task

    # Which worker gets a task

    def assign(self, workers: Sequence[WorkerHandle]) -> None:
        """Send tasks to the workers that can take some."""
        self._take_back_ahead(workers)
        if not self._waiting:
            return
        for worker in workers:
            while not worker.tasks and self._send_next(worker):
                pass
        depth = self._tasks_ahead()
        if len(self._waiting) > depth * len(workers):
            now = time.monotonic()
            for worker in workers:
                has = len(worker.tasks)
                if 0 < has <= depth // 2 and now - worker.busy_since < _SHORT_TASK:
                    self._prefetch(worker, depth - has)

    def _tasks_ahead(self) -> int:
        """Return how many tasks a worker may have."""
        if self._mean_seconds >= _SHORT_TASK:
            return 1
        # The mean may be near 0: at most _MOST_AHEAD tasks.
        short = max(self._mean_seconds, _SHORT_TASK / _MOST_AHEAD)
        return max(_FEWEST_AHEAD, int(_SHORT_TASK / short))

    def _send_next(self, worker: WorkerHandle) -> bool:
        """Send the next task to an idle worker; return False if none could be sent."""
        while self._waiting and self._may_get(worker, 1):
            task = self._waiting.popleft()
            if self._begin(task):
                return self._send(worker, [task])
        return False

    def _prefetch(self, worker: WorkerHandle, count: int) -> None:
        """Send the next tasks to a worker that is busy with another, a packet for each call."""
        room = _BYTES_AHEAD
        while count and self._waiting and self._may_wait_at(worker, self._waiting[0]):
            tasks, room = self._next_of_a_call(worker, count, room)
            if not (tasks and self._send(worker, tasks)):
                return
            count -= len(tasks)

    def _may_wait_at(self, worker: WorkerHandle, task: Task) -> bool:
        """Return whether a task may be sent to a worker that is busy with another."""
        of_its_call = task.receiver is worker.tasks[0].receiver
        return of_its_call or (worker.channel.can_take_back and not task.receiver.cancellable)

    def _next_of_a_call(
        self, worker: WorkerHandle, count: int, room: int
    ) -> tuple[list[Task], int]:
        """Return the next tasks of a call for a worker, and how many bytes of room are left."""
        receiver = self._waiting[0].receiver
        tasks: list[Task] = []
        while (
            self._waiting
            and self._waiting[0].receiver is receiver
            and len(self._waiting[0].data) <= room
            and len(tasks) < count
            and self._may_get(worker, len(tasks) + 1)
        ):
            task = self._waiting.popleft()
            if self._begin(task):
                room -= len(task.data)
                tasks.append(task)
        return tasks, room

    def _take_back_ahead(self, workers: Sequence[WorkerHandle]) -> None:
        """Let tasks that were sent ahead wait again, if the task before them takes long."""
        for worker in workers:
            if (
                worker.may_have_unread
                and worker.is_doing_oldest
                and time.monotonic() - worker.busy_since >= _SHORT_TASK
            ):
                self._take_back_from(worker)

    def _take_back_from(self, worker: WorkerHandle) -> None:
        worker.sent_ahead = False
        # If this fails, the pool ends: it is not known any more whose answers will come.
        keys = set(worker.channel.take_back())
        returned = [task for task in worker.tasks if id(task) in keys]
        kept = [task for task in worker.tasks if id(task) not in keys]
        worker.tasks.clear()
        worker.tasks.extend(kept)
        worker.sent -= len(returned)
        self._waiting.extendleft(reversed(returned))

    def until_long(self, workers: Sequence[WorkerHandle]) -> float | None:
        """Return in how many seconds :meth:`assign` may have tasks to take back, or None."""
        since = [worker.busy_since for worker in workers if worker.may_have_unread]
        if not since:
            return None
        late = time.monotonic() - _SHORT_TASK
        return min(each - late if each > late else _LOOK_AGAIN for each in since)

    def _may_get(self, worker: WorkerHandle, count: int) -> bool:
        """Return whether a worker can take this many more tasks."""
        if not worker.ready or worker.disconnected or worker.lost_answers:
            return False
        return self._max_tasks is None or worker.sent + count <= self._max_tasks

    def _begin(self, task: Task) -> bool:
        """Prepare a task for sending; return False if its future was cancelled."""
        task.leave_queue()
        # begin() is called once only: not again if the task goes to a second worker.
        if task.started or task.receiver.begin():
            task.started = True
            return True
        task.discard()
        return False

    def _send(self, worker: WorkerHandle, tasks: list[Task]) -> bool:
        """Send tasks to a worker and note that it has them; return False if it takes no more."""
        if not worker.tasks:
            worker.busy_since = time.monotonic()
        worker.tasks.extend(tasks)
        worker.sent += len(tasks)
        try:
            if len(tasks) == len(worker.tasks) == 1:
                worker.channel.send_task(tasks[0].data, worker.process.pid)
            else:
                worker.channel.send_ahead({id(task): task.data for task in tasks})
                worker.sent_ahead = worker.channel.can_take_back
        except ConnectionError:
            # The worker has died. The supervisor will see that, and call recover().
            return False
        except Exception as error:
            if isinstance(error, OSError) and not isinstance(error, ShmreduceError):
                # Part of the message may have been written: the connection is unusable.
                worker.process.kill()
                return False
            # There is no memory for a large task.
            for task in tasks:
                worker.tasks.pop()
                worker.sent -= 1
                self._fail(task, error)
        return True

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

    def take_returned(self, worker: WorkerHandle, count: int) -> None:
        """Let tasks that a worker has given back wait for another worker."""
        count = min(count, len(worker.tasks))
        returned = [worker.tasks.popleft() for _ in range(count)]
        worker.sent -= count
        self._waiting.extendleft(reversed(returned))

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
        self._waiting.extendleft(reversed(again))
        worker.tasks.clear()
        worker.lost_answers.clear()

    def take_back(self, worker: WorkerHandle) -> None:
        """Let the tasks of a worker that the pool has ended wait, as if they had not been sent."""
        self._waiting.extend([*worker.lost_answers, *worker.tasks])
        worker.lost_answers.clear()
        worker.tasks.clear()

    def reject_all(self, error: BaseException) -> None:
        """Fail all tasks that wait or will be submitted: no worker can be started."""
        self.broken_by = error
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
