"""Runs a function in a fresh interpreter and exchanges messages with it, with timeouts.

The demo and the benchmarks run each thing that they compare in its own process, so that
an ``install()`` for one does not change what is measured of another. May import errors,
``parent_death``, ``process_ends`` and ``tracebacks``.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import time
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from shmreduce.errors import ShmreduceError
from shmreduce.parent_death import Lifeline, die_with_parent
from shmreduce.process_ends import signal_name
from shmreduce.tracebacks import formatted

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection
    from types import TracebackType

    from shmreduce.descriptor import Descriptor

__all__ = ["FreshProcess", "RunFailedError", "fail"]

_FAREWELL = 2.0
"""Seconds that a process has to end by itself after it failed, or its starter did."""
_TIDYING = 5.0
"""Seconds that the rest of its group has after that to end."""


class RunFailedError(ShmreduceError):
    """A process of a demo or benchmark run died, failed or stopped answering.

    Fields: ``process`` (its name), ``reason``.
    """


@dataclass(frozen=True)
class _Failure:
    """What a process sends instead of an answer when it cannot go on."""

    error: ShmreduceError | None
    text: str


def fail(connection: Connection, reason: str | Exception) -> None:
    """Tell the starter of this process that the run cannot go on.

    May be called from any thread as long as no other one is sending. The starter may be gone.
    """
    if isinstance(reason, ShmreduceError):
        failure = _Failure(reason, str(reason))
    elif isinstance(reason, Exception):
        failure = _Failure(None, formatted(reason, reason.__traceback__))
    else:
        failure = _Failure(None, reason)
    with contextlib.suppress(ConnectionError):
        # By pickle.dumps(): the patched send() may be what failed.
        connection.send_bytes(pickle.dumps(failure))


class FreshProcess:
    """A spawned process that runs ``target(connection, *arguments)``.

    It is a context manager. When it is left, the process is gone, and so is every process
    that it started, since they are in the same process group. They also end if the starter
    is killed.

    Parameters
    ----------
    name : str
        Its name in messages.
    target : callable
        A function that can be imported by name. ``connection`` is its end of a pipe. If it
        raises an exception, :meth:`receive` raises it here.
    *arguments
        Further arguments, which must be picklable.
    patience : float
        Seconds that :meth:`receive` waits for one message.

    Examples
    --------
    >>> from multiprocessing.connection import Connection
    >>> with FreshProcess("sender", Connection.send, "hello") as process:
    ...     process.receive()
    'hello'
    """

    def __init__(
        self, name: str, target: Callable[..., object], *arguments: Any, patience: float = 120.0
    ) -> None:
        context = get_context("spawn")
        self._name = name
        self._patience = patience
        self._failed = False
        self._connection, theirs = context.Pipe()
        self._lifeline = Lifeline()
        self._process = context.Process(
            target=_run,
            args=(theirs, self._lifeline.reader, os.getpid(), target, arguments),
            name=name,
        )
        self._process.start()
        theirs.close()
        self._lifeline.reader.close()

    @property
    def pid(self) -> int:
        """The process id, which is also that of the process group."""
        pid = self._process.pid
        if pid is None:
            raise self._failure("it was not started")
        return pid

    def send(self, message: Any) -> None:
        """Send a message to the process's end of the pipe.

        Raises
        ------
        RunFailedError
            If the process has ended.
        """
        try:
            self._connection.send(message)
        except BrokenPipeError as error:
            raise self._failure(self._end()) from error

    def receive(self) -> Any:
        """Return the next message of the process.

        Raises
        ------
        RunFailedError
            If it died, failed, or was silent for ``patience`` seconds.
        ShmreduceError
            The one that the process raised.
        """
        ready = wait([self._connection, self._process.sentinel], timeout=self._patience)
        if not ready:
            raise self._failure(f"no answer within {self._patience:g} s")
        if not self._connection.poll():
            raise self._failure(self._end())
        try:
            message = self._connection.recv()
        except (EOFError, ConnectionResetError) as error:
            raise self._failure(self._end()) from error
        if isinstance(message, _Failure):
            self._failed = True
            raise message.error or self._failure(message.text)
        return message

    def finish(self) -> None:
        """Wait until the process has ended by itself.

        Raises
        ------
        RunFailedError
            If it did not end within ``patience`` seconds, or its exit code is not 0.
        """
        self._process.join(self._patience)
        if self._process.exitcode != 0:
            raise self._failure(self._end())

    def processes_left(self, patience: float = 5.0) -> int:
        """Count the processes of its group that still run.

        Helpers such as the fork server of multiprocessing end a moment after the processes
        that they serve. They have ``patience`` seconds for that.
        """
        deadline = time.monotonic() + patience
        while (left := _count_group(self.pid)) and time.monotonic() < deadline:
            time.sleep(0.01)
        return left

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # A target that waits for requests, or sends, ends when our end is closed.
        self._connection.close()
        try:
            # Let it end by itself: a process that is killed leaves its semaphores to the
            # resource tracker, which warns about them.
            well = kind is None and not self._failed
            self._process.join(self._patience if well else min(self._patience, _FAREWELL))
        finally:
            self._kill()

    def _kill(self) -> None:
        try:
            # A resource tracker ignores SIGTERM. It ends when those that it serves have, and
            # unlinks the shared memory that they left.
            if self._signal_group(signal.SIGTERM):
                self.processes_left(_TIDYING)
        finally:
            self._end_group()

    def _signal_group(self, number: int) -> bool:
        """Send a signal to the process group; return False if nobody is left in it."""
        try:
            os.killpg(self.pid, number)
        except (ProcessLookupError, PermissionError):
            # Or only processes of another user (kill(2)).
            return False
        return True

    def _end_group(self) -> None:
        self._signal_group(signal.SIGKILL)
        if self._process.is_alive():
            self._process.kill()
        self._lifeline.cut()
        self._process.join()
        self._process.close()

    def _end(self) -> str:
        self._process.join(5)
        code = self._process.exitcode
        if code is None:
            return "it closed its end of the pipe"
        name = signal_name(code)
        if name is not None:
            return f"it was killed by {name}"
        return f"it ended with exit status {code} before it answered"

    def _failure(self, reason: str) -> RunFailedError:
        self._failed = True
        return RunFailedError(
            f"the process {self._name!r} failed: {reason}", process=self._name, reason=reason
        )


def _run(
    connection: Connection,
    lifeline: Descriptor,
    parent: int,
    target: Callable[..., object],
    arguments: tuple[Any, ...],
) -> None:
    # A group for this process and all that it starts, so that one call ends them.
    os.setpgid(0, 0)
    die_with_parent(lifeline, signal.SIGKILL, parent, group=True)
    try:
        target(connection, *arguments)
    except (KeyboardInterrupt, BrokenPipeError, EOFError):
        # The starter is gone, so nobody would read a report.
        return
    except Exception as error:
        fail(connection, error)


def _count_group(group: int) -> int:
    """Count a process group's members, without zombies."""
    stats = []
    for folder in Path("/proc").glob("[0-9]*"):
        # The process may have ended, or belong to another user and be hidden (hidepid).
        with contextlib.suppress(OSError):
            stats.append((folder / "stat").read_text())
    if not stats:
        # Without /proc the kernel only says whether there are any, zombies included.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, 0)
            return 1
        return 0
    # pid (name) state parent group; the name may contain any characters (proc_pid_stat(5)).
    fields = [text.rpartition(")")[2].split()[:3] for text in stats]
    return sum(state != "Z" and int(its) == group for state, _, its in fields)
