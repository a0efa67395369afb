"""The registry and the plugins of this process.

May import errors, contracts, settings, ``fork_hooks``, ``importing``, ``thread_locks``,
registry and discovery.

They are made when they are first needed, and follow the settings. The reducers that a
program registers by ``register_reducer`` are kept here, too, because its children must
get them.
"""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING, Any, NamedTuple

from shmreduce.errors import ReducerConflictError, StrategyConflictError
from shmreduce.fork_hooks import renew_in_children
from shmreduce.importing import while_importing
from shmreduce.registry import Registry, describe
from shmreduce.settings import get_settings
from shmreduce.thread_locks import interrupt_safe

if TYPE_CHECKING:
    from collections.abc import Iterable
    from contextlib import AbstractContextManager

    from shmreduce.contracts import ArrayFactory, MemoryHandlers, Reducer
    from shmreduce.discovery import Plugins
    from shmreduce.entry_points import Told
    from shmreduce.plugin import PluginReport
    from shmreduce.settings import Settings

__all__ = [
    "get_array_factory",
    "get_memory_handlers",
    "get_plugins",
    "get_registry",
    "import_plugins",
    "mark_plugins_as_warned",
    "plugin_report",
    "register_reducer",
    "registered_by_hand",
    "take_over_found",
    "take_over_reducers",
    "tell_found",
    "unregister_reducer",
    "warned_plugins",
]


class _Answer(NamedTuple):
    """What a hook of plugins returned, which settings they followed."""

    plugins: Plugins | None = None
    settings: Settings | None = None
    value: Any = None

    def is_current(self, plugins: Plugins) -> bool:
        return (
            self.value is not None
            and self.plugins is plugins
            and self.settings is plugins.settled_with
        )


class _Process:
    """The registry and plugins of this process, made when first needed."""

    def __init__(self) -> None:
        self.registry = Registry()
        self.plugins: Plugins | None = None
        self.lock: AbstractContextManager[Any] = interrupt_safe(threading.RLock())
        self.by_hand: list[Reducer] = []
        self.taken_over: list[Reducer] = []
        self.warned_by_parent: frozenset[str] = frozenset()
        self.found_by_parent: Told | None = None
        self.array_factory = self.memory_handlers = _Answer()


_process = _Process()


def _renew_locks() -> None:
    _process.lock = interrupt_safe(threading.RLock())
    _process.registry.renew_lock()


# At the fork, another thread of the parent may have held the locks.
renew_in_children(_renew_locks)


def get_plugins() -> Plugins:
    """Return this process's plugins, loaded as the current settings ask for.

    Raises
    ------
    PluginError, ReducerConflictError, StrategyConflictError
        As :meth:`Plugins.import_wanted` and :meth:`Plugins.register_wanted`.
    """
    settings = get_settings()
    plugins = _process.plugins
    # The fast path, which every message takes.
    if plugins is not None and plugins.settled_with is settings:
        return plugins
    if plugins is not None:
        settings = plugins.settings_of_import() or settings
    return while_importing(_load_plugins, settings)


def _load_plugins(settings: Settings) -> Plugins:
    plugins = _import_plugins(settings)
    with _process.lock:
        plugins.mark_as_warned(_process.warned_by_parent)
        plugins.register_wanted(settings)
    return plugins


def import_plugins(settings: Settings) -> Plugins:
    """Import the plugins that settings ask for, without registering them yet.

    Call it before taking a lock under which plugins are needed. No plugin's module may be
    imported under a lock: another thread that is importing the module may wait for the lock,
    while the thread that holds the lock waits for the import.

    Raises
    ------
    PluginError
        If ``settings.plugins`` names a plugin that is not installed.
    """
    return while_importing(_import_plugins, settings)


def _import_plugins(settings: Settings) -> Plugins:
    # Imported late: importlib.metadata and pluggy take as long to import as everything
    # else that a child without arrays needs.
    from shmreduce.discovery import Plugins

    with _process.lock:
        if _process.plugins is None:
            _process.plugins = Plugins(_process.registry, told=_process.found_by_parent)
        plugins = _process.plugins
    for imported in plugins.import_wanted(settings):
        with _process.lock:
            plugins.take(imported)
    return plugins


def get_registry() -> Registry:
    """Return this process's registry, with the plugins' reducers and strategies in it."""
    return get_plugins().registry


def get_array_factory() -> ArrayFactory | None:
    """Return the factory that makes the arrays of ``shmreduce.empty`` and the like, or None."""
    plugins = get_plugins()
    known = _process.array_factory
    if known.is_current(plugins):
        found: ArrayFactory = known.value
        return found
    factory = plugins.array_factory()
    prepare = getattr(factory, "prepare", None)
    if prepare is not None:
        while_importing(prepare)
    _process.array_factory = _Answer(plugins, plugins.settled_with, factory)
    return factory


def get_memory_handlers() -> MemoryHandlers | None:
    """Return a plugin's memory handlers, for ``shared_allocations``, or None."""
    plugins = get_plugins()
    known = _process.memory_handlers
    if known.is_current(plugins):
        found: MemoryHandlers = known.value
        return found
    handlers = while_importing(_ask_for_memory_handlers, plugins)
    _process.memory_handlers = _Answer(plugins, plugins.settled_with, handlers)
    return handlers


def _ask_for_memory_handlers(plugins: Plugins) -> MemoryHandlers | None:
    with _process.lock:
        return plugins.memory_handlers()


def plugin_report(*, ask: bool = False) -> list[PluginReport]:
    """Return a report on each installed plugin; conflicts are reported, not raised.

    With ``ask``, it also says which of the reducers do not work on this machine.

    Examples
    --------
    >>> [report.distribution for report in plugin_report() if report.name == "file_system"]
    ['shmreduce']
    """
    try:
        return get_plugins().reports(ask=ask)
    except (ReducerConflictError, StrategyConflictError):
        if _process.plugins is None:
            raise
        return _process.plugins.reports(ask=ask)


def tell_found() -> Told | None:
    """Return what a child needs instead of a search for plugins; None if it must search."""
    return None if _process.plugins is None else _process.plugins.tell()


def take_over_found(told: Told | None) -> None:
    """Use the plugins that the parent process found, instead of searching again."""
    _process.found_by_parent = told


def warned_plugins() -> tuple[str, ...]:
    """Return the names of the plugins that this process has warned about."""
    return () if _process.plugins is None else _process.plugins.warned()


def mark_plugins_as_warned(names: Iterable[str]) -> None:
    """Do not warn about these plugins: the parent process has done so."""
    _process.warned_by_parent = frozenset(names)


def register_reducer(reducer: Reducer) -> None:
    """Let a reducer handle its types in this process and in its children.

    This is for programs. A package that others install declares a plugin instead.
    Children started with ``spawn`` or ``forkserver`` get a copy of the reducer, so it
    must be picklable and its class importable by name.

    Parameters
    ----------
    reducer : Reducer
        An instance, kept until :func:`unregister_reducer`. Registering it again
        changes nothing.

    Raises
    ------
    ReducerError
        If it is not a Reducer, or its ``types`` are not classes and names.
    ReducerConflictError
        If another reducer has one of its types. A plugin that claims the same type
        and is loaded later fails with the same error.

    Examples
    --------
    >>> from shmreduce import Reducer, register_reducer, unregister_reducer
    >>> class Plain(Reducer):
    ...     types = ("mypackage.Signal",)
    ...     def reduce(self, obj, message):
    ...         return NotImplemented
    >>> plain = Plain()
    >>> register_reducer(plain)
    >>> unregister_reducer(plain)
    """
    caller = sys._getframe(1)
    origin = f"registered in {caller.f_code.co_filename}, line {caller.f_lineno}"
    with _process.lock:
        for inherited in list(_process.taken_over):
            # A child that runs the parent's main module registers the same reducer again.
            if _equivalent(inherited, reducer):
                unregister_reducer(inherited)
        _process.registry.register(reducer, origin)
        if all(known is not reducer for known in _process.by_hand):
            _process.by_hand.append(reducer)


def unregister_reducer(reducer: Reducer) -> None:
    """Undo :func:`register_reducer`.

    Parameters
    ----------
    reducer : Reducer
        The instance that was registered. Objects that were received with it stay
        valid.

    Raises
    ------
    ReducerError
        If this instance is not registered.

    Examples
    --------
    >>> from shmreduce import Reducer, unregister_reducer
    >>> class Plain(Reducer):
    ...     types = ("mypackage.Signal",)
    ...     def reduce(self, obj, message):
    ...         return NotImplemented
    >>> unregister_reducer(Plain())
    Traceback (most recent call last):
        ...
    shmreduce.errors.ReducerError: reducer ...Plain is not registered: ...
    """
    with _process.lock:
        _process.registry.unregister(reducer)
        _process.by_hand = [known for known in _process.by_hand if known is not reducer]
        _process.taken_over = [known for known in _process.taken_over if known is not reducer]


def registered_by_hand() -> list[Reducer]:
    """List the reducers that were not registered by a plugin, which children must be sent."""
    return list(_process.by_hand)


def take_over_reducers(reducers: Iterable[Reducer]) -> None:
    """Register the reducers that the parent process had registered by hand.

    If this process has registered an equal one, for example while it imported its main
    module, that one stays.
    """
    with _process.lock:
        for reducer in reducers:
            if any(_equivalent(known, reducer) for known in _process.by_hand):
                continue
            _process.registry.register(reducer, f"{describe(reducer)}, taken over from parent")
            _process.by_hand.append(reducer)
            _process.taken_over.append(reducer)


def _equivalent(first: Reducer, second: Reducer) -> bool:
    return type(first) is type(second) and tuple(first.types) == tuple(second.types)
