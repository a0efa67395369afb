"""Imports plugins, though other threads, or the plugins themselves, may be doing so.

May import ``free_descriptors``, ``plugin``, ``signals`` and, for types alone, ``settings``.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, NamedTuple

from shmreduce.free_descriptors import refuse_lack
from shmreduce.plugin import wanted_by
from shmreduce.signals import is_from_handler

if TYPE_CHECKING:
    from shmreduce.plugin import Plugin, Wanted
    from shmreduce.settings import Settings

__all__ = ["Imported", "Importer"]


class Imported(NamedTuple):
    """The result of an attempt to import a plugin: the plugin's object, or why it failed."""

    plugin: Plugin
    wanted: Wanted
    instance: Any = None
    failure: str = ""


class _Here(threading.local):
    """What one thread imports. Per thread, so a forked child does not inherit other threads'."""

    def __init__(self) -> None:
        self.plugins: list[tuple[Plugin, Settings]] = []
        """The plugins whose modules the thread is executing, and for which settings."""


class Importer:
    """Imports plugins, and knows which of them each thread is importing."""

    def __init__(self) -> None:
        self._here = _Here()

    @property
    def settings(self) -> Settings | None:
        """The settings for which this thread is importing a plugin now, if it is."""
        importing = self._here.plugins
        return importing[-1][1] if importing else None

    def attempt(self, plugin: Plugin, settings: Settings) -> Imported | None:
        """Import a plugin; return None if there is nothing to take, or nothing yet."""
        wanted = wanted_by(settings)
        if plugin.outcome(wanted) is not None:
            # A plugin's module that used shmreduce, or another thread, has imported it.
            return None
        if any(plugin is each for each, _ in self._here.plugins):
            return None
        self._here.plugins.append((plugin, settings))
        try:
            instance = plugin.entry_point.load()
            if instance is None:
                # Otherwise it would count as not imported, and be imported again each time.
                raise TypeError("the entry point names None")
        except BaseException as error:
            # BaseException: PyO3's PanicException does not derive from Exception, and a
            # script that an entry point names by mistake may call sys.exit().
            if isinstance(error, KeyboardInterrupt) or is_from_handler(error):
                # Not the plugin's fault: the next call imports it again.
                raise
            refuse_lack(error, f"import {plugin.origin}")
            if _is_deadlock(error) or plugin.is_half_imported:
                return None
            return Imported(plugin, wanted, failure=f"{type(error).__name__}: {error}")
        finally:
            self._here.plugins.pop()
        # The program itself may be importing the module, which used shmreduce before it
        # defined its hooks.
        return None if plugin.is_half_imported else Imported(plugin, wanted, instance)


def _is_deadlock(error: BaseException) -> bool:
    """Return whether importlib stopped this thread, since two wait for each other's modules."""
    return type(error).__name__ == "_DeadlockError"
