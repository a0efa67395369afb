"""Teaches the standard :mod:`multiprocessing` to send arrays by shared memory.

The only module that changes ``multiprocessing.reduction.ForkingPickler``. May
import errors, settings, registry, process_registry, strategies, :mod:`shmreduce.memory`,
``children``, ``fork_hooks``, ``pickled_calls``, ``pickler``, ``plain_objects``,
``remote``, ``short_waits``, ``standard_pools``, ``thread_locks`` and ``unpickling``.

What is installed
-----------------
Three attributes of the class ``ForkingPickler``, and three of
``multiprocessing.connection.Connection``:

``reducer_override``
    asks the registry for a reducer by the object's type. The pickle module calls it:
    https://docs.python.org/3/library/pickle.html#reducer-override
``dump``
    commits the message if pickling succeeds, and rolls it back if it fails. When a child
    is spawned, it puts what the child must know in front of the pickled process object,
    so that shmreduce is installed in the child before its arguments are unpickled. When a
    worker of a standard pool reports that a result could not be sent, it sends our error
    instead of a text about it.
``loads``
    gives back the memory of a message that cannot be unpickled. If a standard pool cannot
    unpickle a task or a result, it makes that task fail.
``send``
    uses no shared memory if the connection leads to another host.
``_recv_bytes``, ``_poll``
    poll for a message for a short time before they sleep.

If somebody registers a class by ``ForkingPickler.register`` after the installation,
that wins over the registry. A subclass of ``ForkingPickler`` with its own
``reducer_override`` does not get ours, unless it calls ``super().reducer_override``.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.context import get_spawning_popen
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any, NoReturn, Self

from shmreduce import remote
from shmreduce.children import PreparedProcess, preload_in_fork_server
from shmreduce.errors import ReducerConflictError, ShmreduceError
from shmreduce.fork_hooks import renew_in_children
from shmreduce.memory import runtime
from shmreduce.memory.loading import discard_message
from shmreduce.memory.parts import IN_PIPE
from shmreduce.pickled_calls import CallOnLoad
from shmreduce.pickler import ask_reducer, dump_message
from shmreduce.plain_objects import REPLACED_OVERRIDE
from shmreduce.process_registry import get_registry, import_plugins
from shmreduce.registry import describe, qualified_name
from shmreduce.settings import Settings, get_settings, set_settings
from shmreduce.short_waits import make_methods
from shmreduce.standard_pools import instead_of_encoding_error, instead_of_message
from shmreduce.strategies import current_strategy
from shmreduce.thread_locks import interrupt_safe
from shmreduce.unpickling import load_message

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import TracebackType

    from shmreduce.registry import ReducerClaim, Registry

__all__ = ["Installation", "as_child", "install", "uninstall"]


class Installation:
    """What :func:`install` returns: an installation that can be undone.

    As a context manager it undoes itself at the end of the block. The settings that were
    in force before it are then in force again. Later installations that have not been
    undone stay in force.

    Parameters
    ----------
    settings : Settings
        The settings that this installation put in force.

    Examples
    --------
    >>> from shmreduce import get_sharing_strategy, install
    >>> with install(strategy="file_system") as installation:
    ...     get_sharing_strategy()
    'file_system'
    >>> installation.installed
    False
    """

    def __init__(
        self,
        settings: Settings,
        before: Settings,
        *,
        override: bool,
        outranked: Mapping[type, object],
    ) -> None:
        self.settings = settings
        self._before = before
        self._override = override
        self._outranked = outranked

    def __repr__(self) -> str:
        state = "installed" if self.installed else "taken back"
        return f"<{type(self).__name__} {state}, strategy={self.settings.strategy!r}>"

    @property
    def installed(self) -> bool:
        """Whether this installation has not been undone yet."""
        return any(each is self for each in _state.installations)

    def uninstall(self) -> None:
        """Undo this installation; do nothing if that has been done."""
        with _state.lock:
            if not self.installed:
                return
            position = next(i for i, each in enumerate(_state.installations) if each is self)
            later = _state.installations[position + 1 :]
            if later:
                later[0]._before = self._before
            else:
                set_settings(self._before)
            del _state.installations[position]
            _apply()
        _settle_down()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.uninstall()


def install(
    strategy: str | None = None, *, override: bool = False, **settings: Any
) -> Installation:
    """Let the standard multiprocessing send arrays by shared memory.

    The installation takes effect in this process, even in the parts of
    :mod:`multiprocessing` and :mod:`concurrent.futures` that were imported before, and
    in the children that it starts from now on by ``fork``, ``forkserver`` and ``spawn``,
    with the same strategy and settings. Installing again is allowed.

    Parameters
    ----------
    strategy : str, optional
        Name of the sharing strategy. If not given, the current one stays.
    override : bool
        Take precedence over a reducer that another library has put into
        ``ForkingPickler``, until :func:`uninstall`.
    **settings
        Fields of :class:`shmreduce.Settings`. The others stay as they are.

    Returns
    -------
    Installation
        A context manager that undoes the installation. It may be ignored.

    Raises
    ------
    ConfigurationError
        If a setting does not exist or has an impossible value.
    UnknownStrategyError, StrategyUnusableError
        If the strategy does not exist or does not work here.
    ReducerConflictError
        If another library has put a ``reducer_override`` into ``ForkingPickler``, or a
        reducer for a class that one of our reducers claims; or if two plugins claim
        one class.
    StrategyConflictError
        If two plugins provide strategies with the same name.
    PluginError
        If ``plugins`` names a plugin that is not installed.

    Notes
    -----
    After any of these errors everything is as it was before the call.

    Examples
    --------
    >>> import shmreduce
    >>> from multiprocessing import SimpleQueue
    >>> import numpy as np
    >>> with shmreduce.install():
    ...     queue = SimpleQueue()
    ...     queue.put(np.arange(3))
    ...     queue.get()
    array([0, 1, 2])
    """
    if strategy is not None:
        settings["strategy"] = strategy
    import_plugins(get_settings().changed(**settings))
    with _state.lock:
        return _install(get_settings().changed(**settings), override=override)


def uninstall() -> None:
    """Undo every :func:`install` of this process.

    ``ForkingPickler`` and the settings are then as they were before the first one.
    Arrays that were received or shared in the meantime stay valid, and running
    children stay installed. Without an installation this does nothing.

    If another library has wrapped what shmreduce installed, its wrapper stays, and
    the function of shmreduce below it passes everything on.

    Examples
    --------
    >>> import shmreduce
    >>> installation = shmreduce.install()
    >>> shmreduce.uninstall()
    >>> installation.installed
    False
    """
    with _state.lock:
        if _state.installations:
            set_settings(_state.installations[0]._before)
            _state.installations.clear()
            _apply()
    _settle_down()


# State


class _State:
    """What is installed in this process."""

    def __init__(self) -> None:
        self.lock = interrupt_safe(threading.RLock())
        self.installations: list[Installation] = []
        self.patch: _Patch | None = None

    def renew_lock(self) -> None:
        """Replace the lock in a forked child, where another thread may have held it."""
        self.lock = interrupt_safe(threading.RLock())


_state = _State()
renew_in_children(_state.renew_lock)


def _install(settings: Settings, *, override: bool) -> Installation:
    before = get_settings()
    set_settings(settings)
    try:
        registry = get_registry()
        current_strategy()
        outranked = _check_rivals(registry, override=override)
        runtime.prepare_for_children()
    except BaseException:
        set_settings(before)
        # Picklers ask the registry as it is, so it must be that of these settings again.
        with suppress(ShmreduceError):
            get_registry()
        raise
    installation = Installation(settings, before, override=override, outranked=outranked)
    _state.installations.append(installation)
    _apply()
    return installation


def _settle_down() -> None:
    """Load the plugins, and choose the strategy, of the settings that are in force again.

    Without the lock: a plugin may be imported, whose module may install. Where the settings do
    not work without those of the installation, whoever needs them gets the error. This is not
    the place for it: the installation has ended, and its block may have raised another one.
    """
    with suppress(ShmreduceError):
        runtime.prepare_for_children()


def _apply() -> None:
    """Patch multiprocessing if there are installations, and undo the patch if there are none."""
    if not _state.installations:
        if _state.patch is not None:
            _state.patch.undo()
            _state.patch = None
    else:
        if _state.patch is None:
            _state.patch = _Patch(get_registry())
        _state.patch.outranked = {
            cls: reduce
            for installation in _state.installations
            for cls, reduce in installation._outranked.items()
        }


def _check_rivals(registry: Registry, *, override: bool) -> dict[type, object]:
    """Return other libraries' reducers that ours override; raise without ``override``."""
    patch = _state.patch
    if patch is None:
        rival_hook = getattr(ForkingPickler, "reducer_override", None)
        if rival_hook is not None and not override:
            _raise_conflict("every type", rival_hook, "reducer_override of ForkingPickler")
    registered: dict[type, Any] = dict(ForkingPickler._extra_reducers)  # type: ignore[attr-defined]
    outranked = {}
    for cls, reduce in registered.items():
        # A reducer that was registered after the first installation wins over ours.
        if patch is not None and not override and patch.registered.get(cls) is not reduce:
            continue
        claim = registry.find_exact(cls)
        if claim is None:
            continue
        if patch is not None and patch.outranked.get(cls) is reduce:
            continue
        if not override:
            _raise_conflict(
                qualified_name(cls),
                reduce,
                f"reducer registered with ForkingPickler; ours is "
                f"{describe(claim.reducer)} ({claim.origin})",
            )
        outranked[cls] = reduce
    return outranked


def _raise_conflict(type_name: str, rival: Any, role: str) -> NoReturn:
    module = getattr(rival, "__module__", None) or "unknown module"
    function = getattr(rival, "__qualname__", None) or repr(rival)
    raise ReducerConflictError(
        f"{module}.{function} already handles {type_name} ({role}): remove it, or take "
        "precedence over it with install(override=True)",
        type_name=type_name,
        first=f"{module}.{function}",
        second="shmreduce.install()",
    )


# Changes to the classes of multiprocessing


class _Attribute:
    """Sets an attribute of a class, and can restore what was there before.

    The value is a function, or a static method. It is named for the place where it is set.
    So it can be pickled by its name, as what it replaces can: a program may give it to a
    pool or to a process.
    """

    def __init__(self, owner: type, name: str, value: object) -> None:
        function: Any = getattr(value, "__func__", value)
        function.__module__ = owner.__module__
        function.__qualname__ = f"{owner.__qualname__}.{name}"
        self._owner, self._name, self._value = owner, name, value
        self._was_there = name in owner.__dict__
        self._before = owner.__dict__.get(name)
        setattr(owner, name, value)

    def undo(self) -> None:
        """Restore what was there, unless somebody has replaced ours in the meantime."""
        if self._owner.__dict__.get(self._name) is not self._value:
            return
        if self._was_there:
            setattr(self._owner, self._name, self._before)
        else:
            delattr(self._owner, self._name)


class _Patch:
    """The changes to multiprocessing while there are installations.

    Each patch makes new functions. If another library keeps a wrapper of an old one, the
    old function calls what was there before it, and so never itself.
    """

    def __init__(self, registry: Registry) -> None:
        self.active = True
        self.registered: dict[type, object] = dict(
            ForkingPickler._extra_reducers  # type: ignore[attr-defined]
        )
        self.outranked: dict[type, object] = {}
        self._next_override: Callable[[Any, Any], Any] | None = getattr(
            ForkingPickler, "reducer_override", None
        )
        send = remote.make_send(
            Connection.send, ForkingPickler.dumps, discard_message, lambda: self.active
        )
        recv_bytes, poll = make_methods(
            Connection._recv_bytes,  # type: ignore[attr-defined]
            Connection._poll,  # type: ignore[attr-defined]
            lambda: self.active,
        )
        self._attributes = [
            _Attribute(ForkingPickler, "reducer_override", self._make_override(registry)),
            _Attribute(ForkingPickler, "dump", self._make_dump(ForkingPickler.dump)),
            _Attribute(
                ForkingPickler, "loads", staticmethod(self._make_loads(ForkingPickler.loads))
            ),
            _Attribute(Connection, "send", send),
            _Attribute(Connection, "_recv_bytes", recv_bytes),
            _Attribute(Connection, "_poll", poll),
        ]

    def undo(self) -> None:
        """Restore everything; functions of ours that others have wrapped do nothing more."""
        self.active = False
        for attribute in reversed(self._attributes):
            attribute.undo()

    def _make_override(self, registry: Registry) -> Callable[[Any, Any], Any]:
        find = registry.find

        def reducer_override(pickler: Any, obj: Any) -> Any:
            """Return how to pickle an object, or NotImplemented for the ordinary way."""
            claim = find(type(obj))
            if claim is None and self._next_override is None:
                return NotImplemented
            return self._reduce(pickler, obj, claim)

        setattr(reducer_override, REPLACED_OVERRIDE, self._next_override)
        return reducer_override

    def _reduce(self, pickler: Any, obj: Any, claim: ReducerClaim | None) -> Any:
        result = NotImplemented
        if claim is not None and self.active:
            result = ask_reducer(
                pickler,
                obj,
                claim,
                outranked=self.outranked,
                shared_memory=remote.shared_memory_allowed,
                limits=IN_PIPE,
            )
        if result is NotImplemented and self._next_override is not None:
            return self._next_override(pickler, obj)
        return result

    def _make_dump(self, previous: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
        def dump(pickler: Any, obj: Any) -> None:
            """Pickle an object; if that fails, give back all memory."""
            if not self.active:
                previous(pickler, obj)
                return
            child = get_spawning_popen() if isinstance(obj, BaseProcess) else None
            if child is not None:
                obj = as_child(obj)
            elif type(obj) is tuple:
                obj = instead_of_encoding_error(obj)
            message = dump_message(pickler, obj, previous)
            if message is not None:
                try:
                    message.commit(child=child)
                except BaseException:
                    message.rollback()
                    raise

        return dump

    def _make_loads(self, previous: Callable[..., Any]) -> Callable[..., Any]:
        def loads(data: Any, /, **options: Any) -> Any:
            """Unpickle a message; if that fails, give back its memory."""
            if not self.active:
                return previous(data, **options)
            try:
                return load_message(previous, data, **options)
            except ShmreduceError as error:
                instead = instead_of_message(data, error)
                if instead is None:
                    raise
                return instead
            finally:
                # For the reason given in load_message().
                del data

        return loads


# Children


def as_child(process: object) -> PreparedProcess:
    """Return what to pickle for a child, so that shmreduce is installed there as it is here.

    Parameters
    ----------
    process : object
        The process object that is being started, or an object that pickles as one.
    """
    preload_in_fork_server()
    if not _state.installations:
        return PreparedProcess(process)
    override = any(installation._override for installation in _state.installations)
    return PreparedProcess(process, CallOnLoad(_install_in_child, override))


def _install_in_child(override: bool) -> None:
    import_plugins(get_settings())
    with _state.lock:
        _install(get_settings(), override=override)
