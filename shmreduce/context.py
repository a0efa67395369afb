"""Every public name of :mod:`multiprocessing`, with the channels of shmreduce.

May import everything below it, and :mod:`multiprocessing`.

The contexts derive from those of :mod:`multiprocessing.context`. They make other
channels, and processes whose arguments are pickled by shmreduce. Nothing in
:mod:`multiprocessing` is changed. Both modules have the same start method, wherever it
was chosen, so that locks and the like of multiprocessing can be passed to our children.
"""

from __future__ import annotations

import multiprocessing
from multiprocessing import context
from typing import TYPE_CHECKING, Any, Literal, overload

from shmreduce import channel_support
from shmreduce.channel_factories import ChannelFactories
from shmreduce.importing import import_late
from shmreduce.memory import runtime
from shmreduce.standard_names import names_of

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess


class _Context(ChannelFactories):
    """What the contexts of shmreduce have in common."""

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
    if channel_support.supported():
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
        # The method would import it, and no other fork would wait for that.
        import_late("multiprocessing.popen_fork")
        return context.ForkProcess._Popen(process_obj)


class SpawnProcess(context.SpawnProcess):
    """A process with an interpreter of its own."""

    @staticmethod
    def _Popen(process_obj: BaseProcess) -> Any:  # noqa: N802
        _get_ready()
        import_late("shmreduce.launching")
        from shmreduce.launching import SpawnPopen

        return SpawnPopen(process_obj)


class ForkServerProcess(context.ForkServerProcess):
    """A process that is forked by a server, which has no threads."""

    @staticmethod
    def _Popen(process_obj: BaseProcess) -> Any:  # noqa: N802
        _get_ready()
        import_late("shmreduce.launching")
        from shmreduce.launching import ForkServerPopen

        return ForkServerPopen(process_obj)


# Contexts


class ForkContext(_Context, context.ForkContext):
    """Starts processes by ``fork``."""

    Process = ForkProcess


class SpawnContext(_Context, context.SpawnContext):
    """Starts processes with an interpreter of their own."""

    Process = SpawnProcess


class ForkServerContext(_Context, context.ForkServerContext):
    """Starts processes by way of a server that forks them."""

    Process = ForkServerProcess


class DefaultContext(_Context, context.DefaultContext):
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

    def get_all_start_methods(self) -> list[str]:
        """Return the start methods there are here, the platform's default first.

        Examples
        --------
        >>> import multiprocessing
        >>> import shmreduce
        >>> shmreduce.get_all_start_methods() == multiprocessing.get_all_start_methods()
        True
        """
        # Not super()'s, which takes the method of the context below it for the default: that
        # is the standard library's, whose method may be chosen, and would be fixed by this.
        return _standard.get_all_start_methods()

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
        # Other packages may have added start methods of their own to the standard library's.
        found = _contexts.get(method) or vars(context)["_concrete_contexts"][method]
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
