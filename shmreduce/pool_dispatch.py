"""The tasks of one pool: which worker gets one, and what becomes of it if the worker dies.

May import errors, ``pool_worker_handle``, and for types alone ``pool_results`` and
``pool_tasks``. The protocol between the pool and its workers is described in
:mod:`shmreduce.pool_supervisor`.

Which worker gets a task
------------------------
An idle worker is sent a task of any size, because it reads at once. A busy worker is
sent some more tasks ahead, but only if

- they are small enough not to fill the connection,
- tasks have been short lately, and many are waiting: another worker could do a task
  that is queued behind a long one,
- they belong to the call that the worker is busy with, and it has not been busy for
  long. A task may wait for tasks of other calls, for example because it collects what
  they put into a queue. A task of such a call that is queued behind it would never be
  done.

If a worker's task takes long after all, the worker gives back those that came together
with it, as soon as that task is done.

A task may wait for tasks that were submitted before it. The oldest task that is not done
never stays behind one that waits for it:

- Tasks wait in the order in which they were submitted, also those that come back.
- A busy worker is sent only tasks that are younger than all those that it has.
- A worker that has given back tasks is idle as soon as the pool knows of it. What the pool
  has sent to it before is younger, so the worker gives it back as well: packets with tasks
  that are sent ahead say how often, as far as the pool knows, the worker has given back
  tasks. The pool sends it nothing before all that has come back.

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
import itertools
import queue
import time
from typing import TYPE_CHECKING, Any

from shmreduce.errors import ShmreduceError
from shmreduce.pool_worker_handle import death_error

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

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
"""Bytes of tasks that a worker may have which is not reading."""


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
        """By their numbers."""
        self._numbers = itertools.count()
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
                task.number = next(self._numbers)
                self._waiting.append(task)
            del task

    def _wait_again(self, tasks: Iterable[Task]) -> None:
        """Put tasks back, from the oldest to the youngest, in their old places."""
        front: list[Task] = []
        for task in tasks:
            while self._waiting and self._waiting[0].number < task.number:
                front.append(self._waiting.popleft())
            front.append(task)
        self._waiting.extendleft(reversed(front))

    # Which worker gets a task

    def assign(self, workers: Sequence[WorkerHandle]) -> None:
        """Send tasks to the workers that can take some."""
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
                late = now - worker.busy_since >= _SHORT_TASK
                if 0 < has <= depth // 2 and not (late or worker.gives_back):
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
        """Send the next tasks, in one packet, to a worker that is busy with another."""
        receiver, youngest = worker.tasks[0].receiver, worker.tasks[-1].number
        tasks: list[Task] = []
        # All but the task that it is doing may be unread.
        room = _BYTES_AHEAD - sum(
            len(task.data) for task in itertools.islice(worker.tasks, 1, None)
        )
        while self._waiting and len(tasks) < count and self._may_get(worker, len(tasks) + 1):
            task = self._waiting[0]
            room -= len(task.data)
            if task.receiver is not receiver or task.number < youngest or room < 0:
                break
            self._waiting.popleft()
            if self._begin(task):
                tasks.append(task)
        if tasks:
            self._send(worker, tasks)

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
        idle = not worker.tasks
        if idle:
            worker.busy_since = time.monotonic()
            worker.gives_back = False
        worker.tasks.extend(tasks)
        worker.sent += len(tasks)
        try:
            if idle:
                worker.channel.send_task(tasks[0].data, worker.process.pid)
            else:
                worker.channel.send_ahead([task.data for task in tasks], worker.returns)
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

    def take_returned(self, worker: WorkerHandle, count: int, returns: int) -> None:
        """Let tasks that a worker has given back, for which time it says, wait again."""
        count = min(count, len(worker.tasks))
        worker.sent -= count
        worker.returns = returns
        worker.gives_back = True
        self._wait_again([worker.tasks.popleft() for _ in range(count)])

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
