"""The errors that shmreduce raises.

May import ``signals``; everything else may import this module.

Every error derives from :class:`ShmreduceError`, carries its facts as fields
(``error.fields``, also readable as attributes) and survives pickling, notes
(PEP 678) included, so that a worker can hand it to its parent.
"""

from __future__ import annotations

import pickle
from typing import Any

from shmreduce.signals import is_from_handler

__all__ = [
    "AllocatorUnavailableError",
    "AlreadyLoadedError",
    "AttachError",
    "BudgetExceededError",
    "CompilationError",
    "ConfigurationError",
    "ForeignSegmentError",
    "InheritedPoolError",
    "InvalidHandleError",
    "LeaseTimeoutError",
    "MissingExtraError",
    "NotShareableError",
    "OutOfLeasesError",
    "OutOfSharedMemoryError",
    "PlatformError",
    "PluginError",
    "ProcessException",
    "ProcessExitedException",
    "ProcessRaisedException",
    "ProcessTimeoutError",
    "ProducerDied",
    "ReducerConflictError",
    "ReducerError",
    "SegmentError",
    "SegmentGoneError",
    "ShmreduceError",
    "ShmreduceWarning",
    "StaleHandleError",
    "StrategyConflictError",
    "StrategyUnusableError",
    "TaskAbandonedError",
    "UnknownStrategyError",
    "WorkerDied",
    "WrongHostError",
]


def _rebuild_error(
    kind: type[ShmreduceError], message: str, fields: dict[str, Any]
) -> ShmreduceError:
    return kind(message, **fields)


def _portable(value: object) -> object:
    """Return a field, or its ``repr`` if it cannot be pickled, such as a wrong argument."""
    try:
        pickle.dumps(value)
    except Exception as error:
        # The object may raise anything. A signal handler's exception is for the caller.
        if is_from_handler(error):
            raise
        return repr(value)
    return value


class ShmreduceError(Exception):
    """The base class of shmreduce's own errors.

    Parameters
    ----------
    message : str
        What happened, where, and what to do about it.
    **fields
        The facts behind the message. Each is also an attribute. Errors can be pickled,
        so that workers can send them to their parent: a field that cannot be pickled
        arrives as its ``repr``.

    Examples
    --------
    >>> import pickle
    >>> error = ShmreduceError("no room", requested=4096)
    >>> pickle.loads(pickle.dumps(error)).requested
    4096
    """

    message_bytes: bytes | None = None
    """The whole pickled message, if it could not be loaded for a reason that may be
    temporary, such as too many open files: pass it to ``pickle.loads`` again. None for
    every other error. Not pickled with the error."""

    def __init__(self, message: str, **fields: Any) -> None:
        super().__init__(message)
        self.message = message
        self.fields = fields

    def __getattr__(self, name: str) -> Any:
        # Called only if normal lookup fails. Not self.fields: while the error is unpickled,
        # __dict__ is still empty.
        fields = self.__dict__.get("fields", {})
        if name in fields:
            return fields[name]
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __reduce__(self) -> tuple[Any, ...]:
        state = {name: value for name, value in self._state().items() if value is not None}
        fields = {name: _portable(value) for name, value in self.fields.items()}
        return _rebuild_error, (type(self), self.message, fields), state or None

    def _state(self) -> dict[str, Any]:
        """Return what is pickled in addition to message and fields; None is left out."""
        return {"__notes__": getattr(self, "__notes__", None)}


class ShmreduceWarning(UserWarning):
    """A problem that does not stop the work.

    The causes are broken plugins, unread messages that are lost because their sender
    ends, names of shared memory that a process could not remove at its end, received
    arrays that stay shared with a forked child, CUDA arrays that are in use elsewhere
    when their sender ends, and a strategy that cannot list its segments.
    """


class ConfigurationError(ShmreduceError, ValueError):
    """A setting, argument or environment variable has an impossible value.

    Fields: ``setting``, ``value``, ``variable`` (only where it was an
    environment variable).

    Examples
    --------
    >>> import shmreduce
    >>> try:
    ...     shmreduce.zeros(3, mode="mine")
    ... except shmreduce.ConfigurationError as error:
    ...     error.setting, error.value
    ('mode', 'mine')
    """


class PlatformError(ShmreduceError):
    """The operating system lacks something that the call needs.

    Fields: ``missing``.
    """


class AllocatorUnavailableError(ShmreduceError):
    """The compiled allocator for ``shared_allocations`` is missing or unusable.

    Fields: ``path``, ``reason``.
    """


class CompilationError(ShmreduceError):
    """A part of shmreduce that is written in C could not be compiled.

    Fields: ``path`` (of the file that was to be made), ``reason``.
    """


class MissingExtraError(ShmreduceError, ImportError):
    """A package of an optional extra is not installed.

    Fields: ``package`` (that could not be imported), ``extra`` (that installs it).
    """


class UnknownStrategyError(ConfigurationError):
    """No plugin provides a sharing strategy of this name.

    Fields: ``name``, ``available`` (names), ``unusable`` (from name to reason), and those
    of :class:`ConfigurationError`.

    Examples
    --------
    >>> import shmreduce
    >>> try:
    ...     shmreduce.set_sharing_strategy("teleport")
    ... except shmreduce.UnknownStrategyError as error:
    ...     error.name, "file_system" in error.available
    ('teleport', True)
    """


class StrategyUnusableError(ShmreduceError):
    """The sharing strategy exists but does not work on this machine.

    Fields: ``name``, ``reason``, ``available``.
    """


class PluginError(ShmreduceError):
    """A plugin could not be found, imported or registered, or a strategy broke its contract.

    Fields: ``plugin``, ``distribution``, ``reason``.
    """


class ReducerError(ShmreduceError):
    """A reducer broke its contract.

    Fields: ``reducer``, ``type_name``, ``reason``.
    """


class ReducerConflictError(ShmreduceError):
    """Two reducers claim the same type.

    Fields: ``type_name``, ``first``, ``second`` (which reducers, and where they come from).
    """


class StrategyConflictError(ShmreduceError):
    """Two plugins provide a sharing strategy of the same name.

    Fields: ``name``, ``first``, ``second`` (which plugins, and where they come from).
    """


class NotShareableError(ShmreduceError, TypeError):
    """The object cannot be put into shared memory.

    Fields: ``type_name``, ``reason``.
    """


class SegmentError(ShmreduceError):
    """The operating system refused to make, map or resize a segment.

    Fields: ``operation``, ``errno``, ``segment``.
    """


class OutOfSharedMemoryError(SegmentError):
    """There is no room for the block: the file system, cgroup or machine is full.

    Fields: ``operation``, ``errno``, ``requested`` (bytes), ``available``
    (bytes or None), ``strategy``.
    """


class BudgetExceededError(OutOfSharedMemoryError):
    """The block would take the family of processes over its memory budget.

    Fields: ``requested``, ``in_use``, ``budget`` (bytes).
    """


class OutOfLeasesError(ShmreduceError):
    """A segment has no free lease slot, or no room for another process.

    Also raised if the family of processes has no room for another one.

    Fields: ``segment``, ``slots``.
    """


class LeaseTimeoutError(ShmreduceError, TimeoutError):
    """Another process kept a block's lock for too long; perhaps it is stopped.

    Or a signal handler or destructor uses a block on which its own thread, which it has
    interrupted, was at work: then ``waited`` is 0.

    Fields: ``segment``, ``block``, ``waited`` (seconds).
    """


class InvalidHandleError(ShmreduceError, ValueError):
    """The bytes are not a handle, or the handle points outside its segment.

    Fields: ``reason``.
    """


class StaleHandleError(ShmreduceError):
    """The block that the handle names has been released or reused.

    Fields: ``segment``, ``block``.
    """


class AlreadyLoadedError(StaleHandleError):
    """A message with a by-value array was loaded again; the first loader owns the array.

    Fields: ``segment``, ``block``.

    Examples
    --------
    >>> from shmreduce import AlreadyLoadedError, Message, import_block
    >>> message = Message()
    >>> view, handle = message.allocate(5)
    >>> message.commit()
    >>> block = import_block(handle)
    >>> try:
    ...     import_block(handle)
    ... except AlreadyLoadedError:
    ...     print("loaded before")
    loaded before
    """


class AttachError(ShmreduceError):
    """The segment that the handle names cannot be opened in this process.

    Fields: ``segment``, ``locator``, ``reason``, ``errno``.
    """


class ProducerDied(AttachError):
    """The process that sent the array died before the array was read.

    Fields: ``pid``, ``segment``, ``locator``.
    """


class SegmentGoneError(AttachError, StaleHandleError):
    """The segment that the handle names has been closed, although its maker lives.

    Nothing in it was in use any more: the block had been released, or the by-value
    message loaded. Or another process has the maker's pid: the maker was killed and its
    pid was used again, or the maker is in another PID namespace.

    Fields: ``segment``, ``block``, ``pid``, ``locator``, ``reason``, ``errno``.
    """


class WrongHostError(AttachError):
    """The handle was made on another host, or before this host's last boot.

    Fields: ``segment``, ``here``, ``there`` (boot identities).
    """


class ForeignSegmentError(AttachError):
    """The segment belongs to another user and is not trusted.

    Fields: ``segment``, ``uid`` (its owner), ``expected``.
    """


class ProcessException(ShmreduceError):
    """A process that ``spawn`` or ``start_processes`` started has failed.

    It takes the same positional arguments as torch's exception of that name.
    Its ``__cause__`` survives pickling.

    Fields: ``msg``, ``error_index`` (of the process), ``error_pid`` or ``pid``.
    """

    def __init__(self, msg: str, error_index: int, error_pid: int, **fields: Any) -> None:
        super().__init__(msg, error_index=error_index, error_pid=error_pid, **fields)

    @property
    def msg(self) -> str:
        """The message."""
        return self.message

    @property
    def pid(self) -> int:
        """The process id, under the name that torch's exception uses."""
        pid: int = self.error_pid
        return pid

    def _state(self) -> dict[str, Any]:
        return {**super()._state(), "__cause__": self.__cause__}


class ProcessRaisedException(ProcessException):
    """The function raised an exception in its process.

    The message has the traceback from that process. ``__cause__`` is the exception
    itself. If it could not be sent, a note says why.

    Fields: ``msg``, ``error_index`` (of the process), ``error_pid`` or ``pid``.

    Examples
    --------
    >>> import shmreduce
    >>> try:
    ...     shmreduce.start_processes(divmod, (0,), start_method="fork")
    ... except shmreduce.ProcessRaisedException as error:
    ...     error.error_index, type(error.__cause__).__name__
    (0, 'ZeroDivisionError')
    """


class ProcessExitedException(ProcessException):
    """A process ended without doing its work, and without an exception of its function.

    Its exit code is not 0, or a signal killed it, or it ended by ``os._exit(0)`` without the
    result that was asked for.

    Fields: ``msg``, ``error_index`` (of the process), ``error_pid`` or ``pid``,
    ``exit_code`` (if negative, the number of the signal that killed it),
    ``signal_name`` (None if no signal killed it).
    """

    def __init__(
        self,
        msg: str,
        error_index: int,
        error_pid: int,
        exit_code: int,
        signal_name: str | None = None,
    ) -> None:
        super().__init__(msg, error_index, error_pid, exit_code=exit_code, signal_name=signal_name)


class ProcessTimeoutError(ShmreduceError, TimeoutError):
    """The processes have not ended in the given time.

    Fields: ``waited`` (seconds), ``running`` (indexes of processes).
    """


class WorkerDied(ShmreduceError):
    """The worker process that ran a pool's task was killed, or exited.

    Fields: ``pid``, ``exitcode`` (if negative, the number of the signal that killed it;
    None if unknown), ``signal_name`` (None if no signal killed it), ``index`` (the
    position of the item in the iterable; None for a single call, or if the worker died
    before it had begun with an item).

    Examples
    --------
    >>> import os
    >>> import shmreduce
    >>> with shmreduce.get_context("fork").Pool(1) as pool:
    ...     try:
    ...         pool.apply(os._exit, (3,))
    ...     except shmreduce.WorkerDied as error:
    ...         error.exitcode, error.signal_name, error.index
    (3, None, None)
    """

    @property
    def signal(self) -> int | None:
        """The number of the signal that killed the worker; None if no signal did."""
        code = self.exitcode
        return -code if code is not None and code < 0 else None

    @property
    def task_index(self) -> int | None:
        """Another name of ``index``."""
        index: int | None = self.index
        return index


class InheritedPoolError(ShmreduceError, ValueError, RuntimeError):
    """A pool or executor was used in a process that was forked by the one that made it.

    The workers answer their parent only. It is a ValueError as from a pool that is not
    running, and a RuntimeError as from an executor that was shut down.

    Fields: ``parent`` (pid of the process that made it), ``pid``.
    """


class TaskAbandonedError(ShmreduceError):
    """The pool, or an executor's workers, were terminated before the result arrived.

    Fields: none.
    """
