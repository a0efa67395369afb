"""Every public name of :mod:`multiprocessing`, with the channels of shmreduce.

May import everything below it, and :mod:`multiprocessing`. The other classes of
this layer are imported by the methods that make them.

The contexts derive from those of :mod:`multiprocessing.context`. They make other
channels, and processes whose arguments are pickled by shmreduce. Nothing in
:mod:`multiprocessing` is changed. Both modules have the same start method, wherever it
was chosen, so that locks and the like of multiprocessing can be passed to our children.
"""

from __future__ import annotations

import multiprocessing
from multiprocessing import context
from typing import TYPE_CHECKING, Any, Literal, cast, overload

from shmreduce import connection
from shmreduce.errors import PlatformError
from shmreduce.memory import runtime
from shmreduce.standard_names import names_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from multiprocessing import managers
    from multiprocessing.process import BaseProcess

    from shmreduce import pool, queues

    _Base = context.BaseContext
else:
    # A mixin: super() finds the standard context, which comes next in the MRO.
    _Base = object


class _Channels(_Base):
    """What the contexts of shmreduce make differently."""

    def Pipe(  # noqa: N802
        self, duplex: bool = True
    ) -> tuple[connection.Connection, connection.Connection]:
        """Return the two ends of a new pipe.

        Parameters
        ----------
        duplex : bool
            Whether both ends can send and receive; if not, the first can only
            receive and the second only send.

        Returns
        -------
        (Connection, Connection)
            The caller's. Their methods are those of
            :class:`multiprocessing.connection.Connection`.

        Raises
        ------
        OSError
            If no descriptor is free.

        Examples
        --------
        >>> import shmreduce
        >>> here, there = shmreduce.Pipe()
        >>> here.send([1, 2])
        >>> there.recv()
        [1, 2]
        >>> here.close(), there.close()
        (None, None)
        """
        return connection.Pipe(duplex)

    def SimpleQueue(self) -> queues.SimpleQueue[Any]:  # noqa: N802
        """Return a queue that is only a pipe: ``put`` waits if the pipe is full.

        Returns
        -------
        shmreduce.queues.SimpleQueue
            The caller's. Any number of processes may put and get.

        Raises
        ------
        OSError
            If no descriptor is free.

        Examples
        --------
        >>> import shmreduce
        >>> queue = shmreduce.get_context("fork").SimpleQueue()
        >>> queue.put("hello")
        >>> queue.get()
        'hello'
        >>> queue.close()
        """
        if not connection.supported():
            return cast("queues.SimpleQueue[Any]", super().SimpleQueue())
        from shmreduce.queues import SimpleQueue

        return SimpleQueue(ctx=self.get_context())

    def Queue(self, maxsize: int = 0) -> queues.Queue[Any]:  # noqa: N802
        """Return a queue whose ``put`` does not wait for a reader.

        Parameters
        ----------
        maxsize : int
            The largest number of objects that may be in the queue; 0 for any number.

        Returns
        -------
        shmreduce.queues.Queue
            The caller's. If the pipe is full, a thread writes to it.

        Raises
        ------
        OSError
            If no descriptor is free.

        Examples
        --------
        >>> import shmreduce
        >>> queue = shmreduce.get_context("fork").Queue()
        >>> queue.put("hello")
        >>> queue.get()
        'hello'
        >>> queue.close()
        """
        if not connection.supported():
            return cast("queues.Queue[Any]", super().Queue(maxsize))
        from shmreduce.queues import Queue

        return Queue(maxsize, ctx=self.get_context())

    def JoinableQueue(self, maxsize: int = 0) -> queues.JoinableQueue[Any]:  # noqa: N802
        """Return a queue that also counts the objects for which ``task_done`` was not called.

        Parameters
        ----------
        maxsize : int
            The largest number of objects that may be in the queue; 0 for any number.

        Returns
        -------
        shmreduce.queues.JoinableQueue
            The caller's. Its ``join`` waits until the count is zero.

        Raises
        ------
        OSError
            If no descriptor is free.

        Examples
        --------
        >>> import shmreduce
        >>> queue = shmreduce.get_context("fork").JoinableQueue()
        >>> queue.put("hello")
        >>> queue.get()
        'hello'
        >>> queue.task_done()
        >>> queue.join()
        >>> queue.close()
        """
        if not connection.supported():
            return cast("queues.JoinableQueue[Any]", super().JoinableQueue(maxsize))
        from shmreduce.queues import JoinableQueue

        return JoinableQueue(maxsize, ctx=self.get_context())

    def Pool(  # type: ignore[override]  # noqa: N802
        self,
        processes: int | None = None,
        initializer: Callable[..., object] | None = None,
        initargs: Iterable[Any] = (),
        maxtasksperchild: int | None = None,
        *,
        retries: int = 0,
        shared_allocations: bool = False,
    ) -> pool.Pool:
        """Return a pool of worker processes, which this context starts.

        Parameters
        ----------
        processes : int, optional
            The number of workers; by default the number of processors, from Python
            3.13 on of those that this process may use.
        initializer : callable, optional
            Each worker calls ``initializer(*initargs)`` when it starts.
        initargs : iterable
            Its arguments.
        maxtasksperchild : int, optional
            After this many tasks a worker leaves, and a new one takes its place.
        retries : int
            How often a task is tried again if its worker was killed.
        shared_allocations : bool
            Run tasks in :func:`shmreduce.shared_allocations`, so that large
            arrays that they return are moved instead of copied.

        Returns
        -------
        shmreduce.pool.Pool
            The caller's; a context manager, which terminates the pool.

        Raises
        ------
        ValueError, TypeError
            If an argument is impossible.
        AllocatorUnavailableError
            With ``shared_allocations``, if the compiled allocator is missing.
        PlatformError
            If ``retries`` or ``shared_allocations`` is given on a system on which only the
            pool of multiprocessing works.

        Examples
        --------
        >>> import shmreduce
        >>> with shmreduce.get_context("fork").Pool(2, retries=1) as pool:
        ...     pool.map(abs, [-1, 2, -3])
        [1, 2, 3]
        """
        if not connection.supported():
            if retries or shared_allocations:
                raise PlatformError(
                    "the pool of multiprocessing, which is used on this platform, has neither "
                    "retries nor shared_allocations: leave them out, or make the pool on Linux",
                    missing="SOCK_SEQPACKET and locks of open file descriptions",
                )
            return cast(
                "pool.Pool", super().Pool(processes, initializer, initargs, maxtasksperchild)
            )
        from shmreduce.pool import Pool

        return Pool(
            processes,
            initializer,
            initargs,
            maxtasksperchild,
            context=self.get_context(),
            retries=retries,
            shared_allocations=shared_allocations,
        )

    def Manager(self) -> managers.SyncManager:  # noqa: N802
        """Return a manager whose process has been started.

        Returns
        -------
        shmreduce.managers.SyncManager
            The caller's; a context manager, which ends the process.

        Raises
        ------
        OSError, EOFError
            If the process cannot be started, or ends at once.

        Examples
        --------
        >>> import shmreduce
        >>> with shmreduce.get_context("fork").Manager() as manager:
        ...     shelf = manager.list([1, 2])
        ...     shelf.append(3)
        ...     len(shelf)
        3
        """
        if not connection.supported():
            return super().Manager()
        from shmreduce.managers import SyncManager

        manager = SyncManager(ctx=self.get_context())
        manager.start()
        return manager

    @overload
    def get_context(self, method: None = None) -> Any: ...
    @overload
    def get_context(self, method: Literal["spawn"]) -> SpawnContext: ...
    @overload
    def get_context(self, method: Literal["fork"]) -> ForkContext: ...
    @overload
    def get_context(self, method: Literal["forkserver"]) -> ForkServerContext: ...
    @overload
    def get_context(self, method: str) -> Any: ...

    def get_context(self, method: str | None = None) -> Any:
        """Return the context of a start method, or of the current one.

        A context of a start method returns itself for None. To ask for the current one
        fixes the start method, if none has been chosen.

        Parameters
        ----------
        method : {"fork", "spawn", "forkserver"}, optional
            None for the current start method.

        Returns
        -------
        multiprocessing context
            With the channels and processes of shmreduce.

        Raises
        ------
        ValueError
            If there is no such start method here.

        Examples
        --------
        >>> import shmreduce
        >>> shmreduce.get_context("spawn").get_start_method()
        'spawn'
        """
        return self._in_force() if method is None else _concrete(method)

    def _in_force(self) -> Any:
        return self


# Processes


def _get_ready() -> None:
    """Prepare this process's family, which a child that is about to be started will join."""
    if connection.supported():
        runtime.prepare_for_children()


class Process(context.Process):
    """A process with the current start method, like :class:`multiprocessing.Process`.

    Its arguments travel by shared memory. The child gets the settings of this process
    and the reducers of :func:`shmreduce.register_reducer`. If
    :func:`shmreduce.install` is in force here, it is in force in the child.

    Parameters
    ----------
    group : None
        Not used.
    target : callable, optional
        What the process calls. Except with ``fork``, the child must be able to import
        it by name.
    name : str, optional
        The name of the process object.
    args, kwargs : tuple, dict
        The arguments. Except with ``fork`` :meth:`start` pickles them.
    daemon : bool, optional
        Whether this process terminates the child at its end; by default the same as in
        this process.

    Raises
    ------
    OutOfSharedMemoryError, BudgetExceededError
        From :meth:`start`, if an argument is large and there is no room for it.

    Examples
    --------
    >>> import shmreduce
    >>> process = shmreduce.get_context("fork").Process(target=sorted, args=([2, 1],))
    >>> process.start()
    >>> process.join()
    >>> process.exitcode
    0
    """

    @staticmethod
    def _Popen(process_obj: BaseProcess) -> Any:  # noqa: N802
        return _default.get_context().Process._Popen(process_obj)

    @staticmethod
    def _after_fork() -> Any:
        return _default.get_context().Process._after_fork()


class ForkProcess(context.ForkProcess):
    """A process that is forked."""

    @staticmethod
    def _Popen(process_obj: BaseProcess) -> Any:  # noqa: N802
        _get_ready()
        return context.ForkProcess._Popen(process_obj)


class SpawnProcess(context.SpawnProcess):
    """A process with an interpreter of its own."""

    @staticmethod
    def _Popen(process_obj: BaseProcess) -> Any:  # noqa: N802
        _get_ready()
        from shmreduce.launching import SpawnPopen

        return SpawnPopen(process_obj)


class ForkServerProcess(context.ForkServerProcess):
    """A process that is forked by a server, which has no threads."""

    @staticmethod
    def _Popen(process_obj: BaseProcess) -> Any:  # noqa: N802
        _get_ready()
        from shmreduce.launching import ForkServerPopen

        return ForkServerPopen(process_obj)


# Contexts


class ForkContext(_Channels, context.ForkContext):
    """Starts processes by ``fork``."""

    Process = ForkProcess


class SpawnContext(_Channels, context.SpawnContext):
    """Starts processes with an interpreter of their own."""

    Process = SpawnProcess


class ForkServerContext(_Channels, context.ForkServerContext):
    """Starts processes by way of a server that forks them."""

    Process = ForkServerProcess


class DefaultContext(_Channels, context.DefaultContext):
    """Starts processes by the method that :meth:`set_start_method` chooses, once."""

    Process = Process

    def _in_force(self) -> Any:
        return _concrete(self.get_start_method())

    def get_start_method(self, allow_none: bool = False) -> Any:
        """Return how processes are started, by shmreduce and by multiprocessing.

        Parameters
        ----------
        allow_none : bool
            Return None if no start method has been chosen. Otherwise the default one is
            then fixed.

        Returns
        -------
        str or None

        Examples
        --------
        >>> import multiprocessing
        >>> import shmreduce
        >>> shmreduce.get_start_method(True) == multiprocessing.get_start_method(True)
        True
        """
        return _standard.get_start_method(allow_none)

    def set_start_method(self, method: str | None, force: bool = False) -> None:
        """Choose how processes are started, by shmreduce and by multiprocessing.

        Parameters
        ----------
        method : {"fork", "spawn", "forkserver"} or None
            None, with ``force``, undoes the choice.
        force : bool
            Allow the start method to be chosen again.

        Raises
        ------
        RuntimeError
            If it has been chosen before, and ``force`` is false.
        ValueError
            If there is no such start method here.

        Examples
        --------
        >>> import shmreduce
        >>> shmreduce.set_start_method("teleport", force=True)
        Traceback (most recent call last):
            ...
        ValueError: cannot find context for 'teleport'
        """
        _standard.set_start_method(method, force)

    def freeze_support(self) -> None:
        """If a frozen program was started as a child process, run the child and exit.

        Calls the function of :mod:`multiprocessing`, which PyInstaller replaces. In a
        program that is not frozen it does nothing.

        Examples
        --------
        >>> import shmreduce
        >>> shmreduce.freeze_support()
        """
        # Not super().freeze_support(), which does nothing on Linux.
        multiprocessing.freeze_support()


_standard: context.DefaultContext = context._default_context

_contexts: dict[str, context.BaseContext] = {
    "fork": ForkContext(),
    "spawn": SpawnContext(),
    "forkserver": ForkServerContext(),
}


def _concrete(method: str) -> Any:
    try:
        found = _contexts[method]
    except KeyError:
        raise ValueError(f"cannot find context for {method!r}") from None
    found._check_available()
    return found


_default = DefaultContext(_standard)

# The names of multiprocessing

AuthenticationError = context.AuthenticationError
BaseContext = context.BaseContext
BufferTooShort = context.BufferTooShort
ProcessError = context.ProcessError
TimeoutError = context.TimeoutError  # noqa: A001

Array = _default.Array
Barrier = _default.Barrier
BoundedSemaphore = _default.BoundedSemaphore
Condition = _default.Condition
Event = _default.Event
JoinableQueue = _default.JoinableQueue
Lock = _default.Lock
Manager = _default.Manager
Pipe = _default.Pipe
Pool = _default.Pool
Queue = _default.Queue
RLock = _default.RLock
RawArray = _default.RawArray
RawValue = _default.RawValue
Semaphore = _default.Semaphore
SimpleQueue = _default.SimpleQueue
Value = _default.Value
active_children = _default.active_children
allow_connection_pickling = _default.allow_connection_pickling
cpu_count = _default.cpu_count
current_process = _default.current_process
freeze_support = _default.freeze_support
get_all_start_methods = _default.get_all_start_methods
get_context = _default.get_context
get_logger = _default.get_logger
get_start_method = _default.get_start_method
log_to_stderr = _default.log_to_stderr
parent_process = _default.parent_process
reducer = _default.reducer
set_executable = _default.set_executable
set_forkserver_preload = _default.set_forkserver_preload
set_start_method = _default.set_start_method


if not TYPE_CHECKING:
    __getattr__ = names_of("context")
