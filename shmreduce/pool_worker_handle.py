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

__all__ = ["WorkerHandle", "describe_death"]

_REAP = 1.0
"""Seconds to wait for the exit code of a process that has ended."""
_PAUSE = 0.02

_others_read_exit_codes = False
"""Whether this program was seen to wait for children that it does not know, as servers do."""


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
        """Tasks that it had answered, but the memory of the answer went with it."""
        self.busy_since = 0.0
        """When it got, or could begin, its oldest task."""

    @property
    def sentinel(self) -> int:
        """A descriptor that is ready when the process has ended."""
        return self._end.fileno()

    def close(self) -> None:
        """Close what the parent has of it; it has ended."""
        self.channel.close()
        self.channel.give_up()
        self.lifeline.cut()
        self._end.close()

    def await_end(self, seconds: float) -> None:
        """Wait until the process has ended, for so many seconds at most.

        ``Process.join`` would wait for what it has forked, too, where that lives on.
        """
        wait([self.sentinel], seconds)

    def exit_code(self) -> int | None:
        """Wait for the exit code of the process, which has ended; None if nobody can know it."""
        global _others_read_exit_codes
        process = self.process
        process.join(_PAUSE)
        # The kernel keeps none for a program that ignores the signal.
        kept = signal.getsignal(signal.SIGCHLD) is not signal.SIG_IGN
        patience = _REAP if kept and not _others_read_exit_codes else 0.0
        deadline = time.monotonic() + patience
        # Another thread, in active_children() say, may be just about to note it.
        while process.exitcode is None and time.monotonic() < deadline:
            process.join(_PAUSE)
        if kept and process.exitcode is None and _was_read(process):
            # By a handler of SIGCHLD, say. It will read those of the other workers, too.
            _others_read_exit_codes = True
        return process.exitcode


def _was_read(process: BaseProcess) -> bool:
    """Whether the kernel has given somebody the exit code of a child."""
    if process.pid is None:
        return False
    try:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return True
    return False


def describe_death(
    died: Callable[..., BaseException],
    worker: WorkerHandle,
    exitcode: int | None,
    index: int | None,
    task: Task | None,
) -> BaseException:
    """Return the exception that tells of a worker's end.

    Parameters
    ----------
    died : callable
        Makes it; takes what :class:`~shmreduce.WorkerDied` takes.
    worker, exitcode
        Which one, and how it ended.
    index : int or None
        Of the item that it was at.
    task : Task or None
        What it was doing; None if it was being started.
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
        advice = "the kernel does that when memory is out (see dmesg)"
    elif name in {"SIGSEGV", "SIGBUS", "SIGABRT", "SIGILL", "SIGFPE"}:
        advice = "PYTHONFAULTHANDLER=1 shows where"
    elif name is None:
        advice = (
            "does the function call sys.exit() or os._exit(), or was it Ctrl-C?"
            if task is not None
            else "its standard error tells why; a program that is imported again by 'spawn' or "
            "'forkserver' needs: if __name__ == \"__main__\":"
        )
    else:
        advice = "somebody sent it this signal"
    return f": {advice}" + ("; retries= asks for another try" if task is not None else "")
