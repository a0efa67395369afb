"""One worker of a pool, as its parent sees it.

May import errors (types only), ``parent_death``, ``pool_channel``, ``pool_worker_progress``,
``pool_tasks`` (types only) and ``process_ends``.
"""

from __future__ import annotations

import collections
import os
import signal
import time
from multiprocessing.connection import wait
from typing import TYPE_CHECKING

from shmreduce.process_ends import Sentinel, signal_name

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.process import BaseProcess

    from shmreduce.parent_death import Lifeline
    from shmreduce.pool_channel import Channel
    from shmreduce.pool_tasks import Task
    from shmreduce.pool_worker_progress import WorkerProgress

__all__ = ["WorkerHandle", "death_error"]

_REAP = 1.0
"""Seconds to wait for the exit code of a process that has ended."""
_PAUSE = 0.02
"""Seconds between two tries to get it."""

_others_read_exit_codes = False
"""Whether other code in this process has reaped a worker, as a server's SIGCHLD handler does."""


class WorkerHandle:
    """One worker process, seen from the parent."""

    def __init__(
        self,
        process: BaseProcess,
        channel: Channel,
        lifeline: Lifeline,
        progress: WorkerProgress,
        slot: int,
    ) -> None:
        self.process = process
        self.channel = channel
        self.lifeline = lifeline
        self.progress = progress
        self.slot = slot
        self._end = Sentinel(process)
        self.ready = False
        self.initializer_failed = False
        """Whether its initializer raised an exception."""
        self.disconnected = False
        """Whether its connection has ended."""
        self.sent = 0
        self.answered = 0
        self.tasks: collections.deque[Task] = collections.deque()
        self.lost_answers: list[Task] = []
        """Tasks that it has answered, but the memory of the answers went away with it."""
        self.busy_since = 0.0
        """When it got its oldest task, or answered the task before."""

    @property
    def sentinel(self) -> int:
        """A descriptor that becomes readable when the process has ended."""
        return self._end.fileno()

    def close(self) -> None:
        """Close the parent's descriptors for a worker that has ended."""
        self.channel.close()
        self.channel.give_up()
        self.lifeline.cut()
        self._end.close()

    def await_end(self, seconds: float) -> None:
        """Wait until the process has ended, for ``seconds`` at most.

        Not by ``Process.join``: that would also wait for processes that the worker has
        forked, if they live on.
        """
        wait([self.sentinel], seconds)

    def exit_code(self) -> int | None:
        """Return the exit code of the process, which has ended; None if it cannot be known."""
        global _others_read_exit_codes
        process = self.process
        process.join(_PAUSE)
        # While SIGCHLD is ignored, the kernel keeps no exit codes (waitpid(2)).
        kept = signal.getsignal(signal.SIGCHLD) is not signal.SIG_IGN
        patience = _REAP if kept and not _others_read_exit_codes else 0.0
        deadline = time.monotonic() + patience
        # Another thread, for example in active_children(), may have got the exit code and
        # not stored it yet.
        while process.exitcode is None and time.monotonic() < deadline:
            process.join(_PAUSE)
        if kept and process.exitcode is None and _was_read(process):
            # Probably a SIGCHLD handler: it will take those of the other workers, too.
            _others_read_exit_codes = True
        return process.exitcode


def _was_read(process: BaseProcess) -> bool:
    """Return whether somebody has got the exit code of a child from the kernel already."""
    if process.pid is None:
        return False
    try:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return True
    return False


def death_error(
    died: Callable[..., BaseException],
    worker: WorkerHandle,
    exitcode: int | None,
    index: int | None,
    task: Task | None,
) -> BaseException:
    """Return the exception that reports a worker's death.

    Parameters
    ----------
    died : callable
        Makes the exception; takes the arguments of :class:`~shmreduce.WorkerDied`.
    worker, exitcode
        The worker, and its exit code.
    index : int or None
        Index of the item that it was working on.
    task : Task or None
        The task that it was doing; None if it was being started.
    """
    name = signal_name(exitcode)
    if name is not None:
        what = f"was killed by {name}"
    elif exitcode is None:
        what = "ended in an unknown way"
    else:
        what = f"exited with code {exitcode}"
    when = "while it was started"
    if task is not None:
        when = "while it did a task" if index is None else f"while it did task {index}"
    return died(
        f"worker process {worker.process.pid} {what} {when}{_remedy(name, task)}",
        pid=worker.process.pid,
        exitcode=exitcode,
        signal_name=name,
        index=index,
    )


def _remedy(name: str | None, task: Task | None) -> str:
    if name == "SIGKILL":
        advice = "the kernel does that when memory runs out (see dmesg)"
    elif name in {"SIGSEGV", "SIGBUS", "SIGABRT", "SIGILL", "SIGFPE"}:
        advice = "PYTHONFAULTHANDLER=1 shows where"
    elif name is None:
        advice = (
            "does the function call sys.exit() or os._exit(), or was it Ctrl-C?"
            if task is not None
            else "its standard error says why; 'spawn' and 'forkserver' import the program's file "
            'again, so it needs: if __name__ == "__main__":'
        )
    else:
        advice = "somebody sent it this signal"
    return f": {advice}" + ("; retries= asks for another try" if task is not None else "")
