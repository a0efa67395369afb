"""Starts processes that run one function, and joins them as one.

May import :mod:`shmreduce.context` and what is below it,
:mod:`shmreduce.descriptor`, :mod:`shmreduce.parent_death` and
:mod:`shmreduce.spawn_child`.

The functions have the names, signatures and
behaviour of torch.multiprocessing's, and more; the page
``docs/how-to/spawn.md`` shows both. The module cannot be called ``spawn``:
that name of the package is the function.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any

from shmreduce import connection, context
from shmreduce.descriptor import Descriptor
from shmreduce.errors import (
    ConfigurationError,
    ProcessException,
    ProcessExitedException,
    ProcessRaisedException,
    ProcessTimeoutError,
)
from shmreduce.parent_death import Lifeline
from shmreduce.spawn_child import Call, Raised, ReportFile, Returned, Way, run_call

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from multiprocessing.process import BaseProcess

__all__ = ["ENV_VAR_PARALLEL_START", "ProcessContext", "SpawnContext", "spawn", "start_processes"]

ENV_VAR_PARALLEL_START = "SHMREDUCE_PARALLEL_START"
"""Where this is 1, the processes of a fork server are started at once, by threads."""

_TERMINATION_SECONDS = 30.0
"""How long a process has after SIGTERM where no grace period was given, as in torch."""
_KILL_SECONDS = 5.0
"""How long the kernel has to end a process that was sent SIGKILL."""
_INTERRUPTED_SECONDS = 1.0
"""How long processes have to end by themselves after their joiner was interrupted."""


class _Child:
    """A process with what its parent keeps for it."""

    def __init__(
        self, process: BaseProcess, way: Way, report: ReportFile, lifeline: Lifeline
    ) -> None:
        self.process = process
        self.way = way
        self.report = report
        self.lifeline = lifeline
        self._pidfd = _open_pidfd(process)
        self.sentinel = process.sentinel if self._pidfd is None else self._pidfd.fileno()

    def reap(self) -> None:
        """Collect the exit code of the process, whose sentinel is ready."""
        # Does not wait for the sentinel of multiprocessing, for want of a timeout.
        self.process.join()
        self.lifeline.cut()
        if self._pidfd is not None:
            self._pidfd.close()

    @property
    def exit_code(self) -> int:
        """Of the process, which has ended; 255 where that cannot be known.

        In a program that ignores SIGCHLD the kernel keeps no exit codes; what
        tells success then is the outcome.
        """
        code = self.process.exitcode
        if code is None:
            code = 0 if isinstance(self.report.read(), Returned) else 255
        return code


def _open_pidfd(process: BaseProcess) -> Descriptor | None:
    """Return what is ready when the process itself ends; None where there is none.

    The sentinel of multiprocessing is a pipe that is inherited by what the
    child forks, and so is ready only when all of that has ended too; except
    with a fork server, which gives it to no child.
    """
    popen = getattr(process, "_popen", None)
    if getattr(popen, "method", None) not in {"fork", "spawn"} or process.pid is None:
        return None
    try:
        pidfd = os.pidfd_open(process.pid)
    except (AttributeError, OSError):
        return None
    return Descriptor(pidfd)


class ProcessContext:
    """The processes that one call of ``start_processes`` started.

    Made by :func:`start_processes` and :func:`spawn` with ``join=False``.
    Processes that are not daemons run on when it is dropped; the interpreter
    waits for them at its end.

    Attributes
    ----------
    processes : list of multiprocessing.Process
        By index.
    sentinels : dict
        From a descriptor to the index of its process, for those that have not
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

    def __init__(self, children: Iterable[_Child], *, results: bool = False) -> None:
        self._children = list(children)
        self.processes = [child.process for child in self._children]
        self.sentinels = {child.sentinel: index for index, child in enumerate(self._children)}
        self._wants_results = results
        self._results: dict[int, Any] = {}
        self._failure: ProcessException | None = None
        self._stop: _Stop | None = None

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

        A failure is an exception, an exit code that is not 0, or a signal. Of
        several failures seen at once the one raised is that of a process which
        was killed or exited, else the earliest exception.

        Parameters
        ----------
        timeout : float, optional
            Seconds after which this returns, whatever it is waiting for; None
            to wait as long as it takes. When the time is over while the others
            are being stopped, the next call goes on with that.
        grace_period : float, optional
            Seconds that the others have to end by themselves after a failure
            before they get SIGTERM, and again before they get SIGKILL. Without
            it they get SIGTERM at once and SIGKILL after 30 seconds.

        Returns
        -------
        bool
            True if all processes have ended and succeeded, False if there is
            more to wait for.

        Raises
        ------
        ProcessRaisedException
            If the function raised; its ``__cause__`` is the exception.
        ProcessExitedException
            If the process exited with a code that is not 0 or was killed.

        After such an error no process is left. Every later call raises its like.
        """
        deadline = _deadline(timeout)
        if self._failure is None:
            failed = [index for index in self._reap(deadline) if self._children[index].exit_code]
            if not failed:
                return not self.sentinels
            self._failure = self._first_failure(failed)
        if self._stop is None:
            self._stop = _Stop(self, grace_period)
        if not self._stop.advance(deadline):
            return False
        # It refers to this context: without it what is held goes with the last reference.
        self._stop = None
        for child in self._children:
            child.report.close()
        # A copy: what is raised refers to this context by its traceback.
        raise copy(self._failure)

    def results(self, timeout: float | None = None) -> list[Any]:
        """Wait until all processes have ended and return what the function returned.

        Parameters
        ----------
        timeout : float, optional
            Seconds; None to wait as long as it takes.

        Returns
        -------
        list
            By index; None for a process that called ``sys.exit(0)``. A further
            call returns the same objects.

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
                "results are not kept unless they are asked for: start the processes with "
                "results=True",
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
        return [self._load_result(index) for index in range(len(self.processes))]

    def _reap(self, deadline: float) -> list[int]:
        """Wait until one process has ended; return the indexes of all that have."""
        ended: list[int] = []
        while self.sentinels and not ended:
            ready = self._known_to_have_ended()
            if not ready:
                ready.update(wait(list(self.sentinels), _remaining(deadline)))
                if ready:
                    # What ended at the same time belongs to the same look.
                    ready |= self._known_to_have_ended()
            ended = [self.sentinels.pop(each) for each in ready]
            for index in ended:
                self._children[index].reap()
            if time.monotonic() >= deadline:
                break
        return ended

    def _known_to_have_ended(self) -> set[Any]:
        """Return the sentinels of processes whose exit code can be had, by whomever collected."""
        return {
            sentinel
            for sentinel, index in self.sentinels.items()
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
            return _raised(outcome, self._children[first].way, first, pid)
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
                self._results[index] = child.way.loads(outcome.result)
            except Exception as error:
                error.add_note(f"while the result of process {index} was loaded")
                raise
            # A result is loaded once: its arrays belong to the first who loads it.
            child.report.close()
        return self._results[index]

    def _abandon(self) -> None:
        """Stop processes that nobody can join any more."""
        _Stop(self, _INTERRUPTED_SECONDS).advance(math.inf)


SpawnContext = ProcessContext
"""The name that torch had for :class:`ProcessContext` first."""


class _Stop:
    """Stops the processes of a context that are left, in steps that can be resumed.

    Parameters
    ----------
    processes : ProcessContext
    grace_period : float or None
        As of :meth:`ProcessContext.join`.
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

    def advance(self, deadline: float) -> bool:
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
                for index in sentinels.values():
                    action(self._context.processes[index])
                self._step_ends = time.monotonic() + seconds
            self._context._reap(min(deadline, self._step_ends))
            now = time.monotonic()
            if now >= self._step_ends:
                del self._steps[0]
                self._step_ends = None
            elif now >= deadline:
                break
        return not sentinels or not self._steps


def _leave(process: BaseProcess) -> None:
    """Do nothing to a process that has time to end by itself."""


def _terminate(process: BaseProcess) -> None:
    # It may have ended since.
    with contextlib.suppress(ProcessLookupError):
        process.terminate()


def _kill(process: BaseProcess) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.kill()


def _deadline(timeout: float | None) -> float:
    return math.inf if timeout is None else time.monotonic() + max(timeout, 0.0)


def _remaining(deadline: float) -> float | None:
    return None if deadline == math.inf else max(deadline - time.monotonic(), 0.0)


def _raised(outcome: Raised, way: Way, index: int, pid: int) -> ProcessRaisedException:
    """Return the error for an exception, with that as its cause if it can be loaded."""
    error = ProcessRaisedException(
        f"\n\n-- Process {index} terminated with the following error:\n{outcome.text}", index, pid
    )
    reason = outcome.reason
    if outcome.error is not None:
        try:
            cause = way.loads(outcome.error)
        # Whatever the constructor of somebody's exception raises.
        except Exception as failure:
            reason = f"{type(failure).__name__}: {failure}"
        else:
            if isinstance(cause, BaseException):
                error.__cause__ = cause
            else:
                reason = f"it was unpickled as an object of type {type(cause).__name__}"
    if reason:
        error.add_note(f"The exception itself could not be sent ({reason}).")
    return error


def _exited(exit_code: int, index: int, pid: int) -> ProcessExitedException:
    if exit_code >= 0:
        message = f"process {index} terminated with exit code {exit_code}"
        return ProcessExitedException(message, index, pid, exit_code)
    try:
        name = signal.Signals(-exit_code).name
    except ValueError:
        name = f"<Unknown signal {-exit_code}>"
    message = f"process {index} terminated with signal {name}"
    return ProcessExitedException(message, index, pid, exit_code, name)


def start_processes(
    fn: Callable[..., Any],
    args: Iterable[Any] = (),
    nprocs: int = 1,
    join: bool = True,
    daemon: bool = False,
    start_method: str = "spawn",
    *,
    ctx: Any = None,
    results: bool = False,
    death_signal: int | None = None,
) -> Any:
    """Start processes that each call ``fn(index, *args)``.

    They die with this process: when it ends, however it does, each of them
    gets a signal, and so do their own children that were started this way.
    Each is named after the function and its index in ``ps`` and ``top``.

    Parameters
    ----------
    fn : callable
        Except with ``fork`` it must be importable by name in the child.
    args : iterable
        Further arguments. Except with ``fork`` they are pickled for each
        process when it is started.
    nprocs : int
        How many processes.
    join : bool
        Wait for all of them, and raise if one fails.
    daemon : bool
        Make them daemons, which the interpreter terminates at its end.
    start_method : str
        ``"spawn"``, ``"fork"`` or ``"forkserver"``; not looked at with ``ctx``.
    ctx : multiprocessing context, optional
        What makes the processes; by default shmreduce's of ``start_method``,
        with which arrays in arguments and results travel by shared memory.
        With one of :mod:`multiprocessing` they do so where shmreduce is
        installed.
    results : bool
        Keep what ``fn`` returns.
    death_signal : int, optional
        The signal that the processes get at the death of this one; by default
        SIGINT, which raises KeyboardInterrupt in them. SIGKILL for functions
        that handle SIGINT otherwise, 0 to let the processes live on. A process
        that handles the signal is killed 30 seconds later.

    Returns
    -------
    None, list or ProcessContext
        None if ``join`` is true, the results by index if ``results`` is true
        too, and a :class:`ProcessContext` if ``join`` is false.

    Raises
    ------
    ProcessRaisedException, ProcessExitedException
        With ``join``, as :meth:`ProcessContext.join`; no process is left then.
    ConfigurationError
        If ``nprocs`` is negative.
    ValueError
        If there is no such start method.

    If a process cannot be started, those that were started are terminated. If
    the wait is interrupted, by Ctrl-C for example, the processes have a second
    to end by themselves before they are terminated.

    Examples
    --------
    >>> import operator
    >>> import shmreduce
    >>> shmreduce.start_processes(
    ...     operator.add, (10,), nprocs=2, start_method="fork", results=True
    ... )
    [10, 11]
    """
    if nprocs < 0:
        raise ConfigurationError(
            f"nprocs is {nprocs}: give the number of processes, 0 or more",
            setting="nprocs",
            value=nprocs,
        )
    if ctx is None:
        ctx = context.get_context(start_method)
    signal_number = signal.SIGINT if death_signal is None else death_signal
    starter = _Starter(ctx, fn, tuple(args), daemon, results, signal_number)
    if _starts_in_parallel(ctx):
        children = starter.start_in_parallel(nprocs)
    else:
        children = starter.start_in_turn(nprocs)
    processes = ProcessContext(children, results=results)
    if not join:
        return processes
    try:
        while not processes.join():
            pass
    except ProcessException:
        raise
    except BaseException:
        processes._abandon()
        raise
    return processes.results() if results else None


def spawn(
    fn: Callable[..., Any],
    args: Iterable[Any] = (),
    nprocs: int = 1,
    join: bool = True,
    daemon: bool = False,
    start_method: str = "spawn",
    *,
    ctx: Any = None,
    results: bool = False,
    death_signal: int | None = None,
) -> Any:
    """Start processes by ``spawn`` that each call ``fn(index, *args)``.

    As :func:`start_processes`, whose parameters these are, but always with the
    start method ``spawn``, unless ``ctx`` says otherwise. Another
    ``start_method`` is not heeded and gives a FutureWarning, as in torch.

    Examples
    --------
    >>> import operator
    >>> import shmreduce
    >>> shmreduce.spawn(operator.mul, args=(10,), nprocs=3, results=True)
    [0, 10, 20]
    """
    if start_method != "spawn":
        warnings.warn(
            f"spawn() starts processes by spawn, not by {start_method}: use "
            f"start_processes(..., start_method={start_method!r})",
            FutureWarning,
            stacklevel=2,
        )
    return start_processes(
        fn,
        args,
        nprocs,
        join,
        daemon,
        "spawn",
        ctx=ctx,
        results=results,
        death_signal=death_signal,
    )


def _starts_in_parallel(ctx: Any) -> bool:
    return (
        os.environ.get(ENV_VAR_PARALLEL_START) == "1"
        # The other methods fork this process, which threads must not do at once.
        and ctx.get_start_method() == "forkserver"
    )


def _way_of(ctx: Any) -> Way:
    """Return how a context pickles: its children know how to read it."""
    kind = ctx.Process
    ours = isinstance(kind, type) and issubclass(
        kind,
        context.Process | context.ForkProcess | context.SpawnProcess | context.ForkServerProcess,
    )
    return Way.OWN if ours and connection.supported() else Way.STANDARD


class _Starter:
    """Starts the processes of one call, all of them or none."""

    def __init__(
        self,
        ctx: Any,
        function: Callable[..., Any],
        arguments: tuple[Any, ...],
        daemon: bool,
        wants_result: bool,
        death_signal: int,
    ) -> None:
        self._ctx = ctx
        self._way = _way_of(ctx)
        self._function = function
        self._arguments = arguments
        self._daemon = daemon
        self._wants_result = wants_result
        self._death_signal = death_signal

    def start_in_turn(self, count: int) -> list[_Child]:
        """Start that many processes, one after the other."""
        children: list[_Child] = []
        try:
            for index in range(count):
                children.append(self._start(index))  # noqa: PERF401  those before must be known
        except BaseException:
            _end(children)
            raise
        return children

    def start_in_parallel(self, count: int) -> list[_Child]:
        """Start that many processes by as many threads.

        None of them calls the function before all have been started: to start
        a process is, for multiprocessing, also to collect the exit codes of
        others, which two threads must not do for one process.
        """
        reader, writer = (Descriptor(each) for each in os.pipe())
        with ThreadPoolExecutor(max(count, 1)) as executor:
            futures = [executor.submit(self._start, index, reader) for index in range(count)]
            errors = [error for future in futures if (error := future.exception()) is not None]
        children = [future.result() for future in futures if future.exception() is None]
        if errors:
            _end(children)
            raise errors[0]
        os.write(writer.fileno(), bytes(count))
        return children

    def _start(self, index: int, starting: Descriptor | None = None) -> _Child:
        report, lifeline = ReportFile(), Lifeline()
        call = Call(
            self._function,
            index,
            self._arguments,
            self._wants_result,
            self._way,
            report,
            os.getpid(),
            lifeline.reader,
            self._death_signal,
            starting,
        )
        process = self._ctx.Process(target=run_call, args=(call,), daemon=self._daemon)
        try:
            process.start()
        finally:
            lifeline.reader.close()
        # Held as long as multiprocessing holds the process, whoever drops the context.
        process._shmreduce_lifeline = lifeline
        return _Child(process, self._way, report, lifeline)


def _end(children: list[_Child]) -> None:
    """Kill processes whose companions could not be started."""
    _Stop(ProcessContext(children), 0.0).advance(math.inf)
