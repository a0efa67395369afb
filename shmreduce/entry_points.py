"""Finds the entry points of plugins among the installed distributions.

May import errors and ``hookspecs``. Nothing is imported of what is found.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from importlib.metadata import distributions, entry_points
from typing import TYPE_CHECKING, Any

from shmreduce import hookspecs
from shmreduce.errors import PluginError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from importlib.metadata import Distribution, EntryPoint

__all__ = [
    "UnreadableEntryPoints",
    "installed_entry_points",
    "name_and_version",
    "sorted_and_unique",
]


@dataclass(frozen=True)
class UnreadableEntryPoints:
    """Stands for the entry points of a distribution that cannot be read."""

    dist: Distribution
    error: Exception

    value = "entry_points.txt"

    @property
    def name(self) -> str:
        """Name of the distribution."""
        return name_and_version(self.dist)[0]

    def load(self) -> Any:
        """Say what is wrong."""
        raise PluginError(
            f"its entry points cannot be read ({type(self.error).__name__}: {self.error})",
            plugin=None,
            distribution=self.name,
            reason="unreadable entry points",
        )


def installed_entry_points() -> list[EntryPoint | UnreadableEntryPoints]:
    """Return the entry points of all installed distributions, those in damaged files too."""
    try:
        return [*entry_points(group=hookspecs.PROJECT)]
    except Exception:
        # One file that cannot be read or parsed takes the others with it.
        return list(_one_by_one())


def _one_by_one() -> Iterator[EntryPoint | UnreadableEntryPoints]:
    names = set()
    for distribution in distributions():
        name, _ = name_and_version(distribution)
        if name in names:
            # The first on sys.path is the one that imports find.
            continue
        names.add(name)
        try:
            yield from distribution.entry_points.select(group=hookspecs.PROJECT)
        except Exception as error:
            if _may_have_plugins(distribution):
                yield UnreadableEntryPoints(distribution, error)


def _may_have_plugins(distribution: Distribution) -> bool:
    try:
        text = distribution.read_text("entry_points.txt")
    except Exception:
        # Not text, or not to be opened.
        return True
    return f"[{hookspecs.PROJECT}]" in (text or "")


def sorted_and_unique(
    found: Iterable[EntryPoint | UnreadableEntryPoints],
) -> list[EntryPoint | UnreadableEntryPoints]:
    """Order by name, distribution and value; drop the same entry found twice."""

    def key(each: EntryPoint | UnreadableEntryPoints) -> tuple[str, str, str]:
        return each.name, name_and_version(each.dist)[0], each.value

    unique: dict[tuple[str, str, str], EntryPoint | UnreadableEntryPoints] = {}
    for each in found:
        # The first on sys.path is the one that imports find.
        unique.setdefault(key(each), each)
    return [unique[each] for each in sorted(unique)]


@functools.cache
def name_and_version(distribution: Distribution | None) -> tuple[str, str]:
    """Return what a distribution says that it is called, as far as it can be read."""
    # Each look at either reads and parses the distribution's metadata again.
    if distribution is None:
        return "unknown", "unknown"
    try:
        metadata = distribution.metadata
        return metadata["Name"] or "unknown", metadata["Version"] or "unknown"
    except Exception:
        # Not text, or one of the two is missing, which later Pythons raise for.
        return "unknown", "unknown"
