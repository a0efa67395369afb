"""Loads plugins and says what became of each.

May import :mod:`shmreduce.errors`, ``free_descriptors``, :mod:`shmreduce.contracts`,
:mod:`shmreduce.settings`, :mod:`shmreduce.hookspecs`, :mod:`shmreduce.registry`,
:mod:`shmreduce.entry_points`, ``plugin``, ``plugin_import``, :mod:`shmreduce.signals` and
pluggy.

Plugins are the entry points of group ``shmreduce``. If one cannot be used,
shmreduce records the reason, warns once and goes on with the others. If two
plugins claim the same type or name, it raises: choosing either would be a guess.
"""

from __future__ import annotations

import threading
import warnings
from typing import TYPE_CHECKING, Any

import pluggy

from shmreduce import hookspecs
from shmreduce.contracts import ArrayFactory, MemoryHandlers
from shmreduce.entry_points import (
    installed_entry_points,
    search_path,
    sorted_and_unique,
    tell,
)
from shmreduce.errors import (
    PluginError,
    ReducerConflictError,
    ShmreduceWarning,
    StrategyConflictError,
)
from shmreduce.free_descriptors import refuse_lack
from shmreduce.plugin import Plugin, wanted_by
from shmreduce.plugin_import import Importer
from shmreduce.signals import is_from_handler

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator

    from shmreduce.entry_points import Found, Told
    from shmreduce.plugin import PluginReport, Status, Wanted
    from shmreduce.plugin_import import Imported
    from shmreduce.registry import Registry
    from shmreduce.settings import Settings

__all__ = ["Plugins"]

_HOOKS = [name for name in hookspecs.__all__ if name.startswith("shmreduce_")]


class _Thread(threading.local):
    """What one thread is doing. Per thread, so a forked child does not inherit other threads'."""

    def __init__(self) -> None:
        self.asking: list[tuple[Plugin, str]] = []
        """The plugins whose hooks the thread is executing, and which hook."""


class Plugins:
    """The plugins of one registry.

    Loading has two steps. First the plugins' modules are imported, and the caller must hold
    no lock meanwhile: importing takes the module's own lock, and the thread that has it may
    be waiting for shmreduce. Then the imported plugins are registered; the caller makes sure
    that one thread at a time does so.

    Parameters
    ----------
    registry : Registry
        What the plugins provide is registered there, and unregistered when they are blocked.
    found : iterable of EntryPoint, optional
        The plugins; by default those of the installed distributions.
    told : tuple, optional
        What the parent process found, see :meth:`tell`.

    Examples
    --------
    >>> from shmreduce import Settings
    >>> from shmreduce.registry import Registry
    >>> plugins = Plugins(Registry())
    >>> settings = Settings(blocked=("numpy",))
    >>> for imported in plugins.import_wanted(settings):
    ...     plugins.take(imported)
    >>> plugins.register_wanted(settings)
    >>> [report.status for report in plugins.reports() if report.name == "numpy"]
    ['blocked']
    """

    def __init__(
        self, registry: Registry, found: Iterable[Found] | None = None, told: Told | None = None
    ) -> None:
        self.registry = registry
        self._searched = search_path()
        entries = installed_entry_points(told) if found is None else found
        self._plugins = [Plugin(each.name, each) for each in sorted_and_unique(entries)]
        self._manager = pluggy.PluginManager(hookspecs.PROJECT)
        self._manager.add_hookspecs(hookspecs)
        self._registered: tuple[object, ...] | None = None
        """The result of :meth:`_state` when the plugins were last registered."""
        self._importer = Importer()
        self._thread = _Thread()
        self.settled_with: Settings | None = None
        """Settings for which every plugin is loaded, and every fault has been reported."""

    def import_wanted(self, settings: Settings) -> Iterator[Imported]:
        """Import the plugins that the settings ask for; yield each for :meth:`take`.

        The caller must not hold a lock that other code which uses shmreduce takes. This
        does not change the object, so several threads may do it at the same time. The
        import system executes a module once for all of them; but a module that fails is
        executed again for each thread that waited. A plugin is not imported again if it
        was taken before, or if it failed with the same settings.

        Raises
        ------
        PluginError
            If ``settings.plugins`` names a plugin that is not installed.
        """
        if self._registered == self._state(wanted_by(settings)) and not self._missing(settings):
            return
        self._refuse_hooks()
        self._check_names(settings)
        for plugin in self._missing(settings):
            imported = self._importer.attempt(plugin, settings)
            if imported is not None:
                yield imported

    def take(self, imported: Imported) -> None:
        """Store what :meth:`import_wanted` has yielded; the first of several threads wins."""
        plugin = imported.plugin
        if plugin.instance is not None:
            return
        if imported.failure:
            plugin.failure, plugin.failed_with = imported.failure, imported.wanted
        else:
            plugin.instance = imported.instance

    def register_wanted(self, settings: Settings) -> None:
        """Register the imported plugins that the settings ask for; unregister the others.

        Does nothing if the settings and the imported plugins are those of the last call.
        What a plugin's hooks returned is kept in case it is unblocked again.

        Raises
        ------
        ReducerConflictError, StrategyConflictError
            If two plugins claim the same type or name. Everything else is loaded nevertheless.

        Warns
        -----
        ShmreduceWarning
            Once for each broken plugin.
        """
        self.settled_with = None
        state = self._state(wanted_by(settings))
        if state != self._registered:
            self._refuse_hooks()
            # If anything interrupts this, such as Ctrl-C, the next call starts afresh.
            self._registered = None
            self._judge_all(settings)
            self._register_all()
            self._registered = state
        self._report_faults()
        if not self._missing(settings):
            self.settled_with = settings

    def _state(self, wanted: Wanted) -> tuple[object, ...]:
        """Return what determines which plugins are registered, to notice a change."""
        return (wanted, *(each.outcome(wanted) for each in self._plugins))

    def _missing(self, settings: Settings) -> list[Plugin]:
        """List the wanted plugins that have been neither imported nor found to fail.

        A plugin's module may use shmreduce while it is imported, which leads back here. The
        plugin is still missing then: the others are registered, and all of them again once
        the import has ended.
        """
        wanted = wanted_by(settings)
        return [
            plugin
            for plugin in self._plugins
            if plugin.outcome(wanted) is None and _verdict(plugin.name, settings)[0] == "loaded"
        ]

    def _judge_all(self, settings: Settings) -> None:
        """Withdraw every plugin, and decide which to register, as far as that is known."""
        wanted = wanted_by(settings)
        for plugin in self._plugins:
            self._withdraw(plugin)
            plugin.status, plugin.reason = _verdict(plugin.name, settings)
            if plugin.status == "loaded" and plugin.outcome(wanted) == "failed":
                plugin.status, plugin.reason = "broken", plugin.failure

    def _register_all(self) -> None:
        """Register the imported plugins, and what they provide."""
        imported = [each for each in self._plugins if each.instance is not None]
        # Reversed: pluggy calls the hooks of the plugin that was registered last first.
        for plugin in reversed(imported):
            if plugin.status == "loaded":
                self._attempt(plugin, self._register)
        # In order of names: of two plugins with the same claim, the first gets it.
        for plugin in imported:
            if plugin.status == "loaded":
                self._attempt(plugin, self._claim)

    def array_factory(self) -> ArrayFactory | None:
        """Return the first array factory, in order of the plugins' names."""
        answer: ArrayFactory | None = self._manager.hook.shmreduce_array_factory()
        return answer

    def memory_handlers(self) -> MemoryHandlers | None:
        """Return the first memory handler, in order of the plugins' names.

        The hook is not called when plugins are loaded, since few programs need it. So
        each plugin is tried here, and those that raise are withdrawn first.

        Warns
        -----
        ShmreduceWarning
            Once for each broken plugin.
        """
        self._refuse_hooks()
        for plugin in self._plugins:
            if plugin.status == "loaded":
                self._attempt(plugin, self._ask_for_memory_handlers)
        self._report_faults()
        answer: MemoryHandlers | None = self._manager.hook.shmreduce_memory_handlers()
        return answer

    def reports(self, *, ask: bool = False) -> list[PluginReport]:
        """Return a report on every plugin that was found, loaded or not.

        With ``ask``, the plugins' reducers are asked whether they work on this machine.
        """
        return [plugin.report(ask=ask) for plugin in self._plugins]

    def tell(self) -> Told | None:
        """Return what a child needs instead of a search for plugins; None if it must search."""
        return tell(self._searched, (plugin.entry_point for plugin in self._plugins))

    def warned(self) -> tuple[str, ...]:
        """Return the names of the plugins that were warned about."""
        return tuple(plugin.name for plugin in self._plugins if plugin.warned)

    def mark_as_warned(self, names: Collection[str]) -> None:
        """Count these plugins as warned about."""
        for plugin in self._plugins:
            plugin.warned = plugin.warned or plugin.name in names

    def _check_names(self, settings: Settings) -> None:
        installed = [plugin.name for plugin in self._plugins]
        for name in settings.plugins:
            if name not in installed:
                raise PluginError(
                    f"there is no plugin {name!r}; installed are {sorted(set(installed))}: "
                    "install its distribution, or take it out of SHMREDUCE_PLUGINS or "
                    "install(plugins=...)",
                    plugin=name,
                    distribution=None,
                    reason="not installed",
                )

    def settings_of_import(self) -> Settings | None:
        """Return the settings for which this thread is importing a plugin now, if it is.

        They may not be in force yet. If the plugin's module uses shmreduce, that must not
        load plugins that these settings block.
        """
        return self._importer.settings

    def _refuse_hooks(self) -> None:
        """Raise if this thread is in a plugin's hook, which has used shmreduce."""
        for plugin, hook in self._thread.asking:
            raise PluginError(
                f"{hook}() of {plugin.origin} uses shmreduce, which is still calling the hooks of "
                "its plugins: use it when the plugin's module is imported, or when the object "
                "that the hook returns is used",
                plugin=plugin.name,
                distribution=plugin.distribution,
                reason=f"{hook}() needs the plugins",
            )

    def _register(self, plugin: Plugin) -> None:
        namesake = self._manager.get_plugin(plugin.name)
        if namesake is not None:
            other = self._owner_of(namesake, but=plugin)
            plugin.status, plugin.reason = "broken", f"its name is taken by {other.origin}"
            return
        if self._manager.is_registered(plugin.instance):
            # Not withdrawn: the registration belongs to the other entry point.
            other = self._owner_of(plugin.instance, but=plugin)
            # pluggy compares plugins by ==.
            is_same = other.instance is plugin.instance
            how = "it is the same object as" if is_same else "its object equals that of"
            plugin.status, plugin.reason = "broken", f"{how} {other.origin}"
            return
        self._manager.register(plugin.instance, plugin.name)
        # Without these, pluggy would silently ignore a misspelt hook, and one without its mark.
        self._manager.check_pending()
        self._check_marks(plugin)
        self._ask(plugin)

    def _check_marks(self, plugin: Plugin) -> None:
        for hook in _HOOKS:
            if callable(getattr(plugin.instance, hook, None)) and not self._has(plugin, hook):
                raise PluginError(
                    f"{hook}() is not marked as a hook: put @shmreduce.hookimpl in front of it",
                    plugin=plugin.name,
                    distribution=plugin.distribution,
                    reason=f"{hook}() is not marked",
                )

    def _has(self, plugin: Plugin, hook: str) -> bool:
        callers = self._manager.get_hookcallers(plugin.instance) or []
        return any(caller.name == hook for caller in callers)

    def _claim(self, plugin: Plugin) -> None:
        for reducer in plugin.reducers:
            self.registry.register(reducer, plugin.origin)
        for strategy in plugin.strategies:
            self.registry.register_strategy(strategy, plugin.origin)

    def _attempt(self, plugin: Plugin, step: Callable[[Plugin], None]) -> None:
        """Take a step with a plugin; withdraw the plugin if the step fails."""
        try:
            step(plugin)
        except (ReducerConflictError, StrategyConflictError) as error:
            self._withdraw(plugin)
            plugin.status, plugin.reason, plugin.conflict = "conflict", str(error), error
        except BaseException as error:
            # BaseException for the same reason as in Importer.attempt().
            if isinstance(error, KeyboardInterrupt) or is_from_handler(error):
                # Not the plugin's fault: the next call asks all plugins again.
                raise
            refuse_lack(error, f"call the hooks of {plugin.origin}")
            self._withdraw(plugin)
            plugin.reducers, plugin.strategies, plugin.array_factory = [], [], None
            plugin.status, plugin.reason = "broken", f"{type(error).__name__}: {error}"

    def _owner_of(self, instance: object, but: Plugin) -> Plugin:
        """Return the plugin under whose name an object is registered."""
        name = self._manager.get_name(instance)
        return next(
            each
            for each in self._plugins
            if each.name == name
            and each is not but
            and each.instance is self._manager.get_plugin(each.name)
        )

    def _ask(self, plugin: Plugin) -> None:
        """Call the hooks of this plugin only, and keep what they return."""
        if plugin.reducers or plugin.strategies or plugin.array_factory:
            return

        def answers(hook: str) -> list[Any]:
            found = self._call(plugin, hook)
            if not found and self._has(plugin, hook):
                # pluggy leaves None out.
                raise PluginError(
                    f"{hook}() returned None: it must return a list",
                    plugin=plugin.name,
                    distribution=plugin.distribution,
                    reason=f"{hook}() returned None",
                )
            return [each for answer in found for each in answer]

        reducers = answers("shmreduce_reducers")
        strategies = answers("shmreduce_strategies")
        factory = self._call_for_one(plugin, "shmreduce_array_factory", ArrayFactory)
        plugin.reducers, plugin.strategies = reducers, strategies
        plugin.array_factory = factory

    def _ask_for_memory_handlers(self, plugin: Plugin) -> None:
        self._call_for_one(plugin, "shmreduce_memory_handlers", MemoryHandlers)

    def _call_for_one(self, plugin: Plugin, hook: str, kind: type) -> Any:
        """Call a hook that returns one object or None, and raise if it returns another kind."""
        answer = self._call(plugin, hook)
        if answer is not None and not isinstance(answer, kind):
            raise PluginError(
                f"{hook}() returned {answer!r}: it must return an object with the methods of "
                f"{kind.__name__}, or None",
                plugin=plugin.name,
                distribution=plugin.distribution,
                reason=f"{hook}() returned no {kind.__name__}",
            )
        return answer

    def _call(self, plugin: Plugin, hook: str) -> Any:
        """Call a hook of this plugin only, and return its result."""
        others = [each for each in self._manager.get_plugins() if each is not plugin.instance]
        self._thread.asking.append((plugin, hook))
        try:
            return self._manager.subset_hook_caller(hook, remove_plugins=others)()
        finally:
            self._thread.asking.pop()

    def _withdraw(self, plugin: Plugin) -> None:
        plugin.conflict = None
        # By name: pluggy would take an equal object for this one.
        if (
            plugin.instance is not None
            and self._manager.get_plugin(plugin.name) is plugin.instance
        ):
            self._manager.unregister(name=plugin.name)
        registered = {id(claim.reducer) for claim in self.registry.reducers()}
        for reducer in plugin.reducers:
            if id(reducer) in registered:
                self.registry.unregister(reducer)
        for strategy in plugin.strategies:
            self.registry.unregister_strategy(strategy)

    def _report_faults(self) -> None:
        """Warn about each broken plugin once, and raise if two are in conflict."""
        for plugin in self._plugins:
            if plugin.status == "broken" and not plugin.warned:
                # Before the call, since warnings may be turned into errors.
                plugin.warned = True
                # A name is blocked, not a distribution: that would also block a namesake that
                # works.
                is_alone = [each.name for each in self._plugins].count(plugin.name) == 1
                block = f", or block it with SHMREDUCE_BLOCK={plugin.name}" if is_alone else ""
                warnings.warn(
                    f"shmreduce works without {plugin.origin}: {plugin.reason}; repair or "
                    f"uninstall it{block}",
                    ShmreduceWarning,
                    stacklevel=3,
                )
        for plugin in self._plugins:
            if plugin.conflict is not None:
                raise plugin.conflict


def _verdict(name: str, settings: Settings) -> tuple[Status, str]:
    if name in settings.blocked:
        return "blocked", "blocked by name (SHMREDUCE_BLOCK or install(blocked=...))"
    if not settings.autoload and name not in settings.plugins:
        return "not loaded", "autoload is off and SHMREDUCE_PLUGINS does not name it"
    return "loaded", ""
