"""One plugin: its entry point, what its hooks returned, and what became of it.

May import ``entry_points``, ``registry``, and for types alone ``contracts`` and ``settings``.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from shmreduce.entry_points import name_and_version
from shmreduce.registry import qualified_name

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shmreduce.contracts import ArrayFactory, Reducer, SharingStrategy
    from shmreduce.entry_points import Found
    from shmreduce.settings import Settings

__all__ = ["Plugin", "PluginReport", "Status", "Wanted", "wanted_by"]

Status = Literal["loaded", "blocked", "not loaded", "broken", "conflict"]

Wanted = tuple[bool, tuple[str, ...], tuple[str, ...]]
"""The settings that concern plugins: ``autoload``, ``plugins`` and ``blocked``."""


@dataclass(frozen=True)
class PluginReport:
    """What is known about one plugin.

    Parameters
    ----------
    name : str
        The entry point's name; ``SHMREDUCE_BLOCK`` takes it.
    module : str
        The module, or the object in it, that the entry point names.
    distribution, version : str
        The distribution that ships it.
    path : str
        The plugin's file, or the folder of its distribution if it is not
        loaded.
    status : str
        ``loaded``, ``blocked`` (by name), ``not loaded`` (autoload is off),
        ``broken`` or ``conflict``.
    reason : str
        Why it is not loaded; empty if it is.
    reducers : tuple of str
        The types it claims.
    strategies : tuple of str
        The names of its sharing strategies.
    array_factory : bool
        Whether it makes arrays for ``shmreduce.empty`` and the like.
    unusable : tuple of str
        Which of its reducers do not work on this machine, and why. Empty if they were
        not asked, see :meth:`Plugins.reports`.
    """

    name: str
    module: str
    distribution: str
    version: str
    path: str
    status: Status
    reason: str
    reducers: tuple[str, ...]
    strategies: tuple[str, ...]
    array_factory: bool
    unusable: tuple[str, ...] = ()


@dataclass
class Plugin:
    """One entry point, and what its hooks returned when it was loaded."""

    name: str
    entry_point: Found
    status: Status = "not loaded"
    reason: str = ""
    warned: bool = False
    conflict: Exception | None = None
    instance: Any = None
    failure: str = ""
    """Why the last attempt to import it failed."""
    failed_with: Wanted | None = None
    """The settings of that attempt: with other settings it is tried again."""
    reducers: list[Reducer] = field(default_factory=list)
    strategies: list[SharingStrategy] = field(default_factory=list)
    array_factory: ArrayFactory | None = None

    @property
    def distribution(self) -> str:
        """The name of the distribution that ships it."""
        return name_and_version(self.entry_point.dist)[0]

    @property
    def version(self) -> str:
        """The version of that distribution."""
        return name_and_version(self.entry_point.dist)[1]

    @property
    def path(self) -> str:
        """Its file, or the folder of its distribution if it was not imported."""
        file = getattr(self.instance, "__file__", None)
        if file is None:
            # Not EntryPoint.module, which raises if it cannot parse the value.
            named = self.entry_point.value.partition(":")[0].strip()
            module = sys.modules.get(getattr(self.instance, "__module__", named))
            file = getattr(module, "__file__", None)
        if file is not None:
            return str(file)
        distribution = self.entry_point.dist
        return "unknown" if distribution is None else str(distribution.locate_file(""))

    def outcome(self, wanted: Wanted) -> Literal["imported", "failed"] | None:
        """Return how its import ended; None if it was not tried with these settings."""
        if self.instance is not None:
            return "imported"
        return "failed" if self.failed_with == wanted else None

    @property
    def is_half_imported(self) -> bool:
        """Whether its module is being executed now: its hooks may not be defined yet."""
        module = sys.modules.get(self.entry_point.value.partition(":")[0].strip())
        # importlib sets this while it executes a module, so that other threads wait for it.
        return bool(getattr(getattr(module, "__spec__", None), "_initializing", False))

    @property
    def origin(self) -> str:
        """What it is called in messages."""
        return (
            f"plugin {self.name!r} of distribution {self.distribution} {self.version}, {self.path}"
        )

    def report(self, *, ask: bool) -> PluginReport:
        """Return what is known about it; with ``ask``, whether its reducers work here, too."""
        return PluginReport(
            name=self.name,
            module=self.entry_point.value,
            distribution=self.distribution,
            version=self.version,
            path=self.path,
            status=self.status,
            reason=self.reason,
            reducers=tuple(
                each if isinstance(each, str) else qualified_name(each)
                for reducer in self.reducers
                # What a plugin in conflict has returned besides was never checked.
                for each in getattr(reducer, "types", ())
            ),
            strategies=tuple(str(getattr(each, "name", each)) for each in self.strategies),
            array_factory=self.array_factory is not None,
            unusable=tuple(self._unusable()) if ask and self.status == "loaded" else (),
        )

    def _unusable(self) -> Iterator[str]:
        for reducer in self.reducers:
            try:
                reason = reducer.unusable_reason()
            except Exception as error:
                reason = f"{type(error).__name__}: {error}"
            if reason is not None:
                yield f"{type(reducer).__qualname__}: {reason}"


def wanted_by(settings: Settings) -> Wanted:
    """Return the settings that concern plugins."""
    return settings.autoload, settings.plugins, settings.blocked
