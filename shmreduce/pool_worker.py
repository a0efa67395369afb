"""What a worker process of a pool does.

May import :mod:`shmreduce.errors`, ``born``, ``importing``, ``pool_tasks``, ``pool_channel``,
``pool_errors``, ``pool_worker_progress``, ``parent_death`` and ``tracebacks``. The
protocol is described in :mod:`shmreduce.pool_supervisor`.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
from typing import TYPE_CHECKING, Any

from shmreduce.born.allocations import check_allocator, shared_allocations
from shmreduce.errors import ShmreduceError
from shmreduce.importing import import_late
from shmreduce.parent_death import die_with_parent
from shmreduce.pool_channel import FAILED, READY, STOP, close_in_forked_children
from shmreduce.pool_errors import WithTraceback, in_words
from shmreduce.pool_tasks import EACH, ONCE
from shmreduce.tracebacks import formatted

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from shmreduce.descriptor import Descriptor
    from shmreduce.pool_channel import Channel
    from shmreduce.pool_worker_progress import WorkerProgress

__all__ = ["WorkerOptions", "work"]

_INTERRUPTED = 130
"""Exit code after Ctrl-C: 128 + SIGINT, as shells report it."""


class _ProgramFile:
    """Makes a worker import the main module even if the program's file has been executed.

    When the main thread reaches the end of its file, Python deletes ``__file__`` of the
    main module, and only then waits for other threads and for executors. From then on
    :mod:`multiprocessing` does not tell a new worker which file to load, and the worker
    could not find the functions in it.
    """

    def __init__(self) -> None:
        self._path: str | None = getattr(sys.modules.get("__main__"), "__file__", None)

    def __reduce__(self) -> tuple[Any, ...]:
        main = sys.modules.get("__main__")
        # A module that `-m` runs keeps its __spec__, whose name multiprocessing passes on.
        named = getattr(main, "__spec__", None) is not None
        if self._path is None or named or hasattr(main, "__file__"):
            return str, ()
        import_late("multiprocessing.spawn")
        from multiprocessing.spawn import import_main_path

        return import_main_path, (self._path,)


class WorkerOptions:
    """The options that all workers of a pool get when they start.

    Parameters
    ----------
    initializer : callable or None
        Called first, with ``initargs``.
    initargs : tuple
        Its arguments.
    max_tasks : int or None
        How many tasks to do before leaving.
    catch : type
        Exceptions of this class become the answer of the task that raised them. Any other
        exception ends the worker.
    parent : int
        The parent's process id.
    plain_errors : bool
        Whether to behave as :mod:`concurrent.futures` does: the answer for a result that
        cannot be pickled is the pickler's exception, and not ``MaybeEncodingError``, and
        tracebacks are of the class of that module.
    shared_allocations : bool
        Whether tasks run in :func:`shmreduce.shared_allocations`. Results to which the
        worker keeps no reference are moved.
    """

    def __init__(
        self,
        initializer: Callable[..., object] | None,
        initargs: tuple[Any, ...],
        max_tasks: int | None,
        catch: type[BaseException],
        parent: int,
        *,
        plain_errors: bool = False,
        shared_allocations: bool = False,
    ) -> None:
        # The first attribute, so that it is unpickled first: the others may be objects of
        # the main module.
        self.program_file = _ProgramFile()
        self.initializer = initializer
        self.initargs = initargs
        self.max_tasks = max_tasks
        self.catch = catch
        self.parent = parent
        self.plain_errors = plain_errors
        self.shared_allocations = shared_allocations


def work(
    channel: Channel, lifeline: Descriptor, progress: WorkerProgress, options: WorkerOptions
) -> None:
    """Do tasks until there are none, the limit is reached, or the parent is gone."""
    try:
        die_with_parent(lifeline, signal.SIGTERM, options.parent)
        close_in_forked_children(channel)
        if _initialize(channel, options):
            _do_tasks(channel, progress, options)
    except KeyboardInterrupt:
        # Ctrl-C reaches all processes of a terminal, and the parent reports it.
        raise SystemExit(_INTERRUPTED) from None


def _initialize(channel: Channel, options: WorkerOptions) -> bool:
    if options.initializer is not None or options.shared_allocations:
        try:
            if options.shared_allocations:
                check_allocator()
            if options.initializer is not None:
                options.initializer(*options.initargs)
        except Exception as error:
            # Reported here too: perhaps nobody ever asks for a result.
            _report(error, plain=options.plain_errors)
            return not _tell(channel, FAILED, WithTraceback(error))
    return _tell(channel, READY, None)


def _report(error: Exception, *, plain: bool) -> None:
    """Write an initializer's error to standard error; ``plain`` as concurrent.futures does."""
    if plain:
        # Without a handler logging writes to standard error.
        import_late("logging")
        import logging

        logger = logging.getLogger("concurrent.futures")
        logger.critical("Exception in initializer:", exc_info=error)
    else:
        # Writing fails if standard error is closed.
        with contextlib.suppress(Exception):
            sys.stderr.write(formatted(error, error.__traceback__))


def _do_tasks(channel: Channel, progress: WorkerProgress, options: WorkerOptions) -> None:
    done, itself = 0, os.getpid()
    task: bytes | Exception | None = None
    around = shared_allocations() if options.shared_allocations else None
    while True:
        if task is None:
            task = _receive(channel)
            if task is None:
                return
        done += 1
        progress.begin(done)
        # After MemoryError while a task was received, the rest of it may still be in the way.
        broken = isinstance(task, Exception) and not isinstance(task, ShmreduceError)
        # In a list that is emptied, so that no frame keeps the pickle while the task is done.
        received = [task]
        task = None
        message = _answer(channel, received, progress, options, around)
        # A child that the task has forked, and in which it returns as well, takes no task, which
        # the pool would take for this worker's. Its end of the connection is closed.
        leaves = broken or done == options.max_tasks or os.getpid() != itself
        # Before the answer is sent: after it, the pool sends a task to a worker that has none.
        following = None if leaves else _claim(progress)
        if not _deliver(channel, message) or leaves:
            return
        # Do not keep this task's arrays while waiting for the next one.
        task = following
        del message
        if gc.isenabled():
            # The youngest generation only: that is where a task's garbage cycles are.
            gc.collect(0)


def _claim(progress: WorkerProgress) -> bytes | None:
    try:
        return progress.next_task()
    except MemoryError:
        # It stays where it is, and the pool may send it to this worker, which may have some then.
        return None


def _receive(channel: Channel) -> bytes | Exception | None:
    """Wait for a task; return None if there will be none."""
    try:
        task = channel.receive_bytes()
    except (EOFError, OSError):
        # The parent is gone.
        return None
    except (ShmreduceError, MemoryError) as error:
        # The memory of a large task cannot be opened, for example because no descriptor is free.
        # Any other exception comes from a signal handler and ends the worker: part of a
        # message may have been read.
        return error
    return None if task == STOP else task


def _answer(
    channel: Channel,
    received: list[bytes | Exception],
    progress: WorkerProgress,
    options: WorkerOptions,
    around: AbstractContextManager[object] | None,
) -> Any:
    """Do one task; return its answer, for :func:`_deliver`."""
    # In a list, which pack_last() empties: so no frame keeps a reference to the result.
    held = [_run(channel, received, progress, options.catch, around)]
    try:
        return channel.pack_last(held)
    except KeyboardInterrupt:
        raise
    except options.catch as error:
        # If the list is empty, the result was pickled, and then could not be moved. Our own
        # errors say what to do, so they are not wrapped either.
        if not held or isinstance(error, ShmreduceError) or options.plain_errors:
            return _pack(channel, False, WithTraceback(error))
        return _pack(channel, False, in_words(error, held[0][1]))


def _run(
    channel: Channel,
    received: list[bytes | Exception],
    progress: WorkerProgress,
    catch: type[BaseException],
    around: AbstractContextManager[object] | None,
) -> tuple[bool, Any]:
    try:
        data = received.pop()
        if isinstance(data, Exception):
            raise data
        how, function, arguments, keywords = channel.loads(data)
        del data
        if around is None:
            return True, _call(how, function, arguments, keywords, progress)
        with around:
            return True, _call(how, function, arguments, keywords, progress)
    except KeyboardInterrupt:
        raise
    except catch as error:
        return False, WithTraceback(error)


def _call(
    how: int,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    keywords: dict[str, Any],
    progress: WorkerProgress,
) -> Any:
    if how == ONCE:
        return function(*arguments, **keywords)
    items = progress.each(arguments)
    if how == EACH:
        return [function(item) for item in items]
    return [function(*item) for item in items]


def _tell(channel: Channel, kind: str, value: Any) -> bool:
    """Send a message that is no answer; return False if the parent is gone."""
    return _deliver(channel, _pack(channel, kind, value))


def _pack(channel: Channel, kind: bool | str, value: Any) -> Any:
    try:
        return channel.pack_last([(kind, value)])
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        if not isinstance(value, WithTraceback):
            raise
        return channel.pack_last([(kind, in_words(error, value))])


def _deliver(channel: Channel, message: Any) -> bool:
    try:
        channel.send_packed(message)
    except OSError:
        # The parent is gone.
        return False
    return True
