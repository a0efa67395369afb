"""Starts processes that run one function, and joins them as one.

May import :mod:`shmreduce.context` and what is below it,
:mod:`shmreduce.process_context` and what is below that.

The functions have the names, signatures and behaviour of those of
torch.multiprocessing, and further parameters, see ``docs/how-to/spawn.md``. The
module cannot be called ``spawn``, since ``shmreduce.spawn`` is the function.
"""

from __future__ import annotations

import os
import signal
import warnings
from typing import TYPE_CHECKING, Any

from shmreduce import channel_support, context
from shmreduce.descriptor import Descriptor
from shmreduce.errors import ConfigurationError, ProcessException
from shmreduce.importing import import_late
from shmreduce.interrupts import Interrupts
from shmreduce.memory.standard_streams import pipe
from shmreduce.parent_death import Lifeline
from shmreduce.process_context import ProcessContext, SpawnContext, StartedProcess, stop
from shmreduce.spawn_child import PicklerChoice, ReportFile, SpawnCall, run_call

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = ["ENV_VAR_PARALLEL_START", "ProcessContext", "SpawnContext", "spawn", "start_processes"]

ENV_VAR_PARALLEL_START = "SHMREDUCE_PARALLEL_START"
"""If this variable is 1, processes of a fork server are started at the same time, by threads."""

_INTERRUPTED_SECONDS = 1.0
"""How long processes have to end by themselves if the call is interrupted."""


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

    They do not outlive this process: when it ends, in whatever way, each of them
    gets a signal, and so do their own children that were started in this way. Exceptions:
    a process whose main thread is stuck in C code, unless ``death_signal`` is SIGKILL, and
    one that calls ``os.exec*``.
    In ``ps`` and ``top`` each is named after the function and its index.

    Parameters
    ----------
    fn : callable
        The function. Except with ``fork``, the child must be able to import it by name.
    args : iterable
        Further arguments. Except with ``fork`` they are pickled for each
        process when it is started.
    nprocs : int
        How many processes.
    join : bool
        Wait for all of them, and raise an error if one fails.
    daemon : bool
        Make them daemons, which the interpreter terminates at its end.
    start_method : str
        ``"spawn"``, ``"fork"`` or ``"forkserver"``; ignored with ``ctx``.
    ctx : multiprocessing context, optional
        The context that makes the processes. The default is shmreduce's context of
        ``start_method``, with which arrays in arguments and results travel by shared
        memory. With a context of :mod:`multiprocessing` they do so only after
        :func:`shmreduce.install`.
    results : bool
        Keep what ``fn`` returns.
    death_signal : int, optional
        The signal that the processes get when this process ends. The default is SIGINT,
        which raises KeyboardInterrupt in them. Use SIGKILL for functions that ignore
        SIGINT, and 0 to let the processes live on. A process that handles the signal
        and goes on is killed 30 seconds later.

    Returns
    -------
    None, list or ProcessContext
        None if ``join`` is true; the list of results by index if ``results`` is true too;
        a :class:`ProcessContext` if ``join`` is false.

    Raises
    ------
    ProcessRaisedException, ProcessExitedException
        With ``join``, as for :meth:`ProcessContext.join`. No process is left then.
    ConfigurationError
        If ``nprocs`` is negative, or there is no such start method or signal here. It is
        a ValueError, too.
    SegmentError
        If the limit of file sizes (``ulimit -f``) is too low for shared memory.

    Notes
    -----
    If a process cannot be started, those that were started before are terminated. If
    the call is interrupted, for example by Ctrl-C, the processes have one second
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
    signal_number = _signal_of(death_signal)
    if ctx is None:
        ctx = _context_of(start_method)
    starter = _Starter(ctx, fn, tuple(args), daemon, results, signal_number)
    try:
        with Interrupts(to_children=True) as interrupts:
            starter.start(nprocs, interrupts)
            # From now on only signal handlers fork here, and their processes never take over.
            interrupts.leave_children_alone()
            processes = ProcessContext(starter.children, results=results)
            while join and not processes.join_unless(interrupts):
                pass
    except ProcessException:
        # join_unless() has stopped all processes.
        raise
    except BaseException as error:
        failed = isinstance(error, Exception) and not starter.done
        stop(starter.children, 0.0 if failed else _INTERRUPTED_SECONDS)
        raise
    if not join:
        return processes
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

    Parameters, result and errors are those of :func:`start_processes`, but the start
    method is always ``spawn``, unless ``ctx`` has another one. Another
    ``start_method`` is ignored and gives a FutureWarning, as in torch.

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


def _signal_of(death_signal: int | None) -> int:
    if death_signal is None:
        return signal.SIGINT
    # A list, not the set: what cannot be hashed is no signal either.
    if death_signal not in [0, *signal.valid_signals()]:
        raise ConfigurationError(
            f"death_signal is {death_signal!r}: give a signal such as signal.SIGTERM, or 0 to let "
            "the processes live on",
            setting="death_signal",
            value=death_signal,
        )
    return death_signal


def _context_of(start_method: str) -> Any:
    try:
        return context.get_context(start_method)
    except ValueError as error:
        # get_context() raises the standard library's error. start_method is our parameter.
        raise ConfigurationError(
            f"start_method={start_method!r}: there is no such start method here; there are "
            f"{', '.join(context.get_all_start_methods())}",
            setting="start_method",
            value=start_method,
        ) from error


def _starts_in_parallel(ctx: Any) -> bool:
    return (
        os.environ.get(ENV_VAR_PARALLEL_START) == "1"
        # The other methods fork this process, which several threads must not do at once.
        and ctx.get_start_method() == "forkserver"
    )


def _pickler_of(ctx: Any) -> PicklerChoice:
    """Return the pickler that a context's processes use for their arguments."""
    kind = ctx.Process
    ours = isinstance(kind, type) and issubclass(
        kind,
        context.Process | context.ForkProcess | context.SpawnProcess | context.ForkServerProcess,
    )
    return PicklerChoice.OWN if ours and channel_support.supported() else PicklerChoice.STANDARD


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
        self._pickler = _pickler_of(ctx)
        self._function = function
        self._arguments = arguments
        self._daemon = daemon
        self._wants_result = wants_result
        self._death_signal = death_signal
        self.children: list[StartedProcess] = []
        """The processes that are known to have been started."""
        self.done = False
        """Whether all processes were started."""

    def start(self, count: int, interrupts: Interrupts) -> None:
        """Start that many processes; if that fails, ``children`` must be stopped."""
        if _starts_in_parallel(self._ctx):
            self._start_in_parallel(count)
        else:
            for index in range(count):
                self.children.append(self._start(index))
                interrupts.pass_on()
        self.done = True

    def _start_in_parallel(self, count: int) -> None:
        """Start that many processes by as many threads.

        No process calls the function, and so none ends, before all have been started. When
        multiprocessing starts a process, it also collects the exit codes of those that have
        ended, which two threads must not do for one process.
        """
        # Only here: while a thread forks, the module holds a lock, and a signal handler that
        # forks meanwhile would wait for it for ever.
        import_late("concurrent.futures.thread")
        from concurrent.futures.thread import ThreadPoolExecutor

        reader, writer = (Descriptor(each) for each in pipe())
        with ThreadPoolExecutor(max(count, 1)) as executor:
            futures = [executor.submit(self._start, index, reader) for index in range(count)]
        self.children = [each.result() for each in futures if each.exception() is None]
        for future in futures:
            # Raises the first exception there was.
            future.result()
        os.write(writer.fileno(), bytes(count))

    def _start(self, index: int, starting: Descriptor | None = None) -> StartedProcess:
        report, lifeline = ReportFile(), Lifeline()
        call = SpawnCall(
            self._function,
            index,
            self._arguments,
            self._wants_result,
            self._pickler,
            report,
            os.getpid(),
            lifeline.reader,
            self._death_signal,
            starting,
        )
        process = self._ctx.Process(target=run_call, args=(call,), daemon=self._daemon)
        try:
            process.start()
        except BaseException:
            # For example a second Ctrl-C after the fork: nobody knows the process, which
            # ends when its lifeline is cut.
            lifeline.cut()
            raise
        finally:
            lifeline.reader.close()
        # Attributes of the process, which multiprocessing keeps until it is known to have
        # ended, even if the context is dropped.
        process._shmreduce_lifeline = lifeline
        process._shmreduce_report = report
        report.give_up_when_dropped(self._pickler)
        return StartedProcess(process, self._pickler, report, lifeline)
