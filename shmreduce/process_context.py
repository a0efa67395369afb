"""Processes that were started together, and that their parent joins together.

May import errors, ``interrupts``, ``parent_death`` (types only), ``process_ends``, ``signals``,
``spawn_child``, ``thread_locks`` and ``tracebacks``.
"""

from __future__ import annotations

import contextlib
import math
import signal
import threading
import time
from copy import copy
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any

from shmreduce.errors import (
    ConfigurationError,
    ProcessException,
    ProcessExitedException,
    ProcessRaisedException,
    ProcessTimeoutError,
)
from shmreduce.interrupts import Interrupts
from shmreduce.process_ends import Sentinel, once_stored, signal_name
from shmreduce.signals import is_from_handler
from shmreduce.spawn_child import Raised, Returned
from shmreduce.thread_locks import interrupt_safe
from shmreduce.tracebacks import in_one_line, note

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from multiprocessing.process import BaseProcess

    from shmreduce.parent_death import Lifeline
    from shmreduce.spawn_child import PicklerChoice, ReportFile

__all__ = ["ProcessContext", "SpawnContext", "StartedProcess", "stop"]

_TERMINATION_SECONDS = 30.0
"""How long a process has after SIGTERM if no grace period was given, as in torch."""
_KILL_SECONDS = 5.0
"""How long the kernel has to end a process that was sent SIGKILL."""
_TURN_SECONDS = 0.1
"""How long a thread waits for its turn before it checks whether it was interrupted."""


class StartedProcess:
    """A process, and what its parent keeps for it."""

    def __init__(
        self, process: BaseProcess, pickler: PicklerChoice, report: ReportFile, lifeline: Lifeline
    ) -> None:
        self.process = process
        self.pickler = pickler
        self.report = report
        self.lifeline = lifeline
        self._end = Sentinel(process)
        self.sentinel = self._end.fileno()

    def reap(self) -> None:
        """Collect the exit code of the process, whose sentinel is ready."""
        # Without a timeout: with one, multiprocessing would wait for its own sentinel first.
        self.process.join()
        self.lifeline.cut()

    def close_sentinel(self) -> None:
        """Close the sentinel, for which nobody waits any more."""
        self._end.close()

    @property
    def exit_code(self) -> int:
        """The exit code of the process, which has ended; 255 if it cannot be known.

        In a program that ignores SIGCHLD the kernel keeps no exit codes. Then it is 0 if
        the report says that the function has returned.
        """
        code = self.process.exitcode
        if code is None and signal.getsignal(signal.SIGCHLD) is not signal.SIG_IGN:
            code = once_stored(lambda: self.process.exitcode)
        if code is None:
            code = 0 if isinstance(self.report.read(), Returned) else 255
        return code


class ProcessContext:
    """The processes that one call of ``start_processes`` started.

    :func:`start_processes` and :func:`spawn` return one with ``join=False``. If it is
    dropped, processes that are not daemons run on; the interpreter waits for them at
    its end.

    Attributes
    ----------
    processes : list of multiprocessing.Process
        The processes, by index.
    sentinels : dict of int to int
        From a descriptor to the index of its process, for the processes that have not
        been joined. ``multiprocessing.connection.wait(context.sentinels)``
        returns when one of them has ended.

    Examples
    --------
    >>> import operator
    >>> import shmreduce
    >>> context = shmreduce.spawn(operator.mul, (10,), nprocs=2, join=False, results=True)
    >>> context.results(timeout=60)
    [0, 10]
    """

    def __init__(self, children: Iterable[StartedProcess], *, results: bool = False) -> None:
        self._children = list(children)
        self.processes = [child.process for child in self._children]
        self.sentinels = {child.sentinel: index for index, child in enumerate(self._children)}
        self._wants_results = results
        self._results: dict[int, Any] = {}
        self._failure: ProcessException | None = None
        self._ended: dict[int, None] = {}
        """Processes that have ended, of which it is not known yet whether they have failed."""
        self._stop: _Stop | None = None
        self._reaping = 0
        """How many calls of ``_reap`` there are: more than one if a signal handler joins, too."""
        self._reaped: list[StartedProcess] = []
        """Processes whose sentinels are to be closed."""
        # One thread waits at a time: it closes the sentinels of processes that have ended,
        # and their numbers may be reused while another thread still waits for them.
        self._turn = threading.RLock()

    def __repr__(self) -> str:
        running = f"{len(self.sentinels)} of {len(self.processes)} processes not joined"
        return f"<{type(self).__name__} {running}>"

    def pids(self) -> list[int]:
        """Return the process ids, by index.

        Returns
        -------
        list of int
            Of processes that have ended, too.
        """
        return [process.pid for process in self.processes if process.pid is not None]

    def join(self, timeout: float | None = None, grace_period: float | None = None) -> bool:
        """Wait until a process ends; if it failed, stop the others and raise.

        A failure is an exception, an exit code that is not 0, or a signal. If several
        failures are seen at once, that of a process that was killed or exited is raised,
        otherwise the earliest exception.

        Parameters
        ----------
        timeout : float, optional
            Seconds after which this returns, whatever it is waiting for. None waits as
            long as it takes. If the time is over while the others are being stopped, the
            next call goes on with that.
        grace_period : float, optional
            Seconds that the others have to end by themselves after a failure
            before they get SIGTERM, and again before they get SIGKILL. Without
            it they get SIGTERM at once and SIGKILL after 30 seconds.

        Returns
        -------
        bool
            True if all processes have ended without an error, False if some are still
            running.

        Raises
        ------
        ProcessRaisedException
            If the function raised an exception, which is its ``__cause__``.
        ProcessExitedException
            If the process exited with a code that is not 0, or was killed.

        Notes
        -----
        After such an error no process is left. Every later call raises the same error.
        Several threads may join at the same time; they take turns.
        """
        with Interrupts() as interrupts:
            return self.join_unless(interrupts, _deadline(timeout), grace_period)

    def join_unless(
        self,
        interrupts: Interrupts,
        deadline: float = math.inf,
        grace_period: float | None = None,
    ) -> bool:
        """Wait as :meth:`join` until the deadline, or raise what an interrupt raises.

        For the core alone: :meth:`join` and ``start_processes`` call it.

        Raises
        ------
        ProcessRaisedException, ProcessExitedException
            As :meth:`join`.
        """
        if not self._my_turn(deadline, interrupts):
            return False
        try:
            return self._join(interrupts, deadline, grace_period)
        finally:
            self._turn.release()

    def _my_turn(self, deadline: float, interrupts: Interrupts) -> bool:
        """Wait until no other thread joins; return False if the time is over."""
        left = _remaining(deadline)
        while not self._turn.acquire(
            timeout=_TURN_SECONDS if left is None else min(left, _TURN_SECONDS)
        ):
            if left == 0:
                return False
            interrupts.pass_on()
            left = _remaining(deadline)
        return True

    def _join(self, interrupts: Interrupts, deadline: float, grace_period: float | None) -> bool:
        if self._failure is None and not self._ended:
            self._reap(deadline, interrupts)
        # Again, since a signal handler that joins may have found one meanwhile.
        if self._failure is None:
            # They stay listed if Ctrl-C comes now, or the error cannot be made: a later call
            # must not take them for processes that did their work.
            failed = [index for index in list(self._ended) if self._children[index].exit_code]
            if not failed:
                self._ended.clear()
                return not self.sentinels
            self._failure = self._first_failure(failed)
        if self._stop is None:
            self._stop = _Stop(self, grace_period)
        if not self._stop.advance(deadline, interrupts):
            return False
        # It refers to this context: without the cycle the context is freed when dropped.
        self._stop = None
        # Nobody can load the results and exceptions of the other processes any more.
        for child in self._children:
            child.report.give_up(child.pickler)
        # A copy, since the traceback of what is raised refers to this context.
        raise copy(self._failure)

    def results(self, timeout: float | None = None) -> list[Any]:
        """Wait until all processes have ended and return what the function returned.

        Parameters
        ----------
        timeout : float, optional
            Seconds. None waits as long as it takes.

        Returns
        -------
        list
            The results, by index; None for a process that called ``sys.exit(0)``. A
            later call returns the same objects.

        Raises
        ------
        ProcessTimeoutError
            If the time is over. The processes run on.
        ConfigurationError
            If the processes were not started with ``results=True``.
        ProcessRaisedException, ProcessExitedException
            As :meth:`join`.
        """
        if not self._wants_results:
            raise ConfigurationError(
                "the results were not kept: start the processes with results=True",
                setting="results",
                value=False,
            )
        deadline = _deadline(timeout)
        while not self.join(_remaining(deadline)):
            if time.monotonic() >= deadline:
                running = sorted(self.sentinels.values())
                raise ProcessTimeoutError(
                    f"processes {running} have not ended within {timeout} s: wait longer, or "
                    "terminate them (context.processes[index].terminate())",
                    waited=timeout,
                    running=running,
                )
        # Results that were loaded and not kept could not be loaded again.
        with Interrupts(), interrupt_safe(self._turn):
            return [self._load_result(index) for index in range(len(self.processes))]

    def _reap(self, deadline: float, interrupts: Interrupts | None) -> None:
        """Wait until one process has ended; note all that have."""
        self._reaping += 1
        try:
            self._wait_and_reap(deadline, interrupts)
        finally:
            self._reaping -= 1
            # Not while a call that a signal handler has interrupted waits for them: their
            # numbers may be reused.
            while self._reaped and not self._reaping:
                self._reaped.pop().close_sentinel()

    def _wait_and_reap(self, deadline: float, interrupts: Interrupts | None) -> None:
        others: list[Any] = [] if interrupts is None else [interrupts]
        ready: set[Any] = set()
        while self.sentinels and not ready:
            ready = self._known_to_have_ended()
            if not ready:
                ready.update(wait([*self.sentinels, *others], _remaining(deadline)))
                if interrupts is not None:
                    interrupts.pass_on()
                    ready.discard(interrupts)
                if ready:
                    # Include processes that have ended meanwhile, to compare their failures.
                    ready |= self._known_to_have_ended()
            for each in ready:
                index = self.sentinels.get(each)
                if index is None:
                    # A signal handler has joined it meanwhile, in this thread, whose turn it is.
                    continue
                self._ended[index] = None
                self.sentinels.pop(each, None)
                self._children[index].reap()
                self._reaped.append(self._children[index])
            if time.monotonic() >= deadline:
                break

    def _known_to_have_ended(self) -> set[Any]:
        """Return the sentinels of processes whose exit code is known, whoever collected it."""
        return {
            sentinel
            # A copy, here and elsewhere: a signal handler may join processes meanwhile.
            for sentinel, index in list(self.sentinels.items())
            if self.processes[index].exitcode is not None
        }

    def _first_failure(self, failed: Iterable[int]) -> ProcessException:
        outcomes = {index: self._children[index].report.read() for index in failed}

        def order(index: int) -> tuple[float, int]:
            outcome = outcomes[index]
            return (outcome.at if isinstance(outcome, Raised) else -math.inf), index

        first = min(outcomes, key=order)
        pid = self.processes[first].pid or 0
        outcome = outcomes[first]
        if isinstance(outcome, Raised):
            return _raised(outcome, self._children[first].pickler, first, pid)
        return _exited(self._children[first].exit_code, first, pid)

    def _load_result(self, index: int) -> Any:
        if index not in self._results:
            child = self._children[index]
            outcome = child.report.read()
            if not isinstance(outcome, Returned) or outcome.result is None:
                raise ProcessExitedException(
                    f"process {index} ended with exit code 0 and without a result: the function "
                    "must return, not end the process by os._exit()",
                    index,
                    child.process.pid or 0,
                    0,
                )
            try:
                self._results[index] = child.pickler.loads(outcome.result)
            except Exception as error:
                note(error, f"while the result of process {index} was loaded")
                raise
            # By-value arrays of a result can be loaded only once, so the file is not needed.
            child.report.close()
        return self._results[index]


SpawnContext = ProcessContext
"""The older name of :class:`ProcessContext` in torch."""


class _Stop:
    """Stops the processes of a context that are left, in steps that can be resumed.

    Parameters
    ----------
    processes : ProcessContext
        The context.
    grace_period : float or None
        As for :meth:`ProcessContext.join`.
    """

    def __init__(self, processes: ProcessContext, grace_period: float | None) -> None:
        self._context = processes
        patience = _TERMINATION_SECONDS if grace_period is None else grace_period
        self._steps: list[tuple[Callable[[BaseProcess], None], float]] = [
            (_leave, grace_period or 0.0),
            (_terminate, patience),
            (_kill, _KILL_SECONDS),
        ]
        self._step_ends: float | None = None

    def advance(self, deadline: float, interrupts: Interrupts | None = None) -> bool:
        """Go on until no process is left or the time is over.

        Returns
        -------
        bool
            False if the time is over. True, too, if a process is left that
            even SIGKILL does not end, since the kernel is busy with it.
        """
        sentinels = self._context.sentinels
        while sentinels and self._steps:
            action, seconds = self._steps[0]
            if self._step_ends is None:
                for index in list(sentinels.values()):
                    action(self._context.processes[index])
                self._step_ends = time.monotonic() + seconds
            self._context._reap(min(deadline, self._step_ends), interrupts)
            now = time.monotonic()
            if now >= self._step_ends:
                del self._steps[0]
                self._step_ends = None
            elif now >= deadline:
                break
        return not sentinels or not self._steps


def stop(children: Iterable[StartedProcess], grace_period: float) -> None:
    """Stop processes that nobody can join any more, even if Ctrl-C is pressed repeatedly."""
    with Interrupts(every=True):
        _Stop(ProcessContext(children), grace_period).advance(math.inf)


def _leave(process: BaseProcess) -> None:
    """Do nothing: the process has time to end by itself."""


def _terminate(process: BaseProcess) -> None:
    # The process may have ended in the meantime.
    with contextlib.suppress(ProcessLookupError):
        process.terminate()


def _kill(process: BaseProcess) -> None:
    # As in _terminate.
    with contextlib.suppress(ProcessLookupError):
        process.kill()


def _deadline(timeout: float | None) -> float:
    return math.inf if timeout is None else time.monotonic() + max(timeout, 0.0)


def _remaining(deadline: float) -> float | None:
    return None if deadline == math.inf else max(deadline - time.monotonic(), 0.0)


def _raised(
    outcome: Raised, pickler: PicklerChoice, index: int, pid: int
) -> ProcessRaisedException:
    """Return the error for an exception, which is its cause if it can be unpickled."""
    error = ProcessRaisedException(
        f"\n\n-- Process {index} terminated with the following error:\n{outcome.text}", index, pid
    )
    reason = outcome.reason
    if outcome.error is not None:
        try:
            cause = pickler.loads(outcome.error)
        # Unpickling calls the exception's constructor, which may raise anything.
        except BaseException as failure:
            if is_from_handler(failure):
                raise
            reason = in_one_line(failure)
        else:
            if isinstance(cause, BaseException):
                error.__cause__ = cause
            else:
                reason = f"it was unpickled as an object of type {type(cause).__name__}"
    if reason:
        error.add_note(f"The exception itself could not be sent ({reason}).")
    return error


def _exited(exit_code: int, index: int, pid: int) -> ProcessExitedException:
    name = signal_name(exit_code)
    how = f"exit code {exit_code}" if name is None else f"signal {name}"
    message = f"process {index} terminated with {how}"
    return ProcessExitedException(message, index, pid, exit_code, name)
