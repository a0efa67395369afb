"""Finds the entry points of plugins among the installed distributions.

May import errors, signals, ``free_descriptors`` and ``hookspecs``. It does not import the
plugins that it finds.

Looking through all distributions takes longer than everything else that a child does
before its first array. So a child is told what its parent has found.
"""

from __future__ import annotations

import functools
import importlib
import sys
from multiprocessing import process
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from shmreduce import hookspecs
from shmreduce.errors import PluginError
from shmreduce.free_descriptors import need_descriptors
from shmreduce.signals import is_from_handler

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from importlib.metadata import Distribution, EntryPoint
    from pathlib import Path

__all__ = [
    "Found",
    "Told",
    "ToldEntryPoint",
    "UnreadableEntryPoints",
    "installed_entry_points",
    "name_and_version",
    "search_path",
    "sorted_and_unique",
    "tell",
]


class UnreadableEntryPoints:
    """Stands for the entry points of a distribution that cannot be read."""

    value = "entry_points.txt"

    def __init__(self, dist: Distribution, error: Exception) -> None:
        self.dist = dist
        self.error = error

    @property
    def name(self) -> str:
        """The name of the distribution."""
        return name_and_version(self.dist)[0]

    def load(self) -> Any:
        """Raise an error that says what is wrong."""
        raise PluginError(
            f"its entry points cannot be read ({type(self.error).__name__}: {self.error})",
            plugin=None,
            distribution=self.name,
            reason="unreadable entry points",
        )


class ToldDistribution(NamedTuple):
    """Stands for a distribution that another process has found."""

    name: str
    version: str
    folder: str

    @property
    def metadata(self) -> dict[str, str]:
        """The metadata that shmreduce reads."""
        return {"Name": self.name, "Version": self.version}

    def locate_file(self, path: str) -> Path:
        """Return the path of a file of the distribution."""
        # Imported here: only a report on the plugins asks for it, and a child makes none.
        from pathlib import Path

        return Path(self.folder, path)


class ToldEntryPoint(NamedTuple):
    """Stands for an entry point that another process has found.

    It is sent as a plain tuple of strings, so that the child need not import this module
    to unpickle it: a child without arrays never does.
    """

    name: str
    value: str
    module: str
    attributes: str
    distribution: str
    version: str
    folder: str

    @property
    def dist(self) -> ToldDistribution:
        """The distribution that ships it."""
        return ToldDistribution(self.distribution, self.version, self.folder)

    def load(self) -> Any:
        """Import the object that it names."""
        attributes = filter(None, self.attributes.split("."))
        return functools.reduce(getattr, attributes, importlib.import_module(self.module))


Found: TypeAlias = "EntryPoint | ToldEntryPoint | UnreadableEntryPoints"
Told: TypeAlias = tuple[tuple[str, ...], tuple[tuple[str, ...], ...]]
"""The search path of a process, and the fields of the entry points that it has found."""


def search_path() -> tuple[str, ...]:
    """Return ``sys.path`` in the form in which children are told it."""
    # ORIGINAL_DIR for "", as in multiprocessing.spawn.get_preparation_data(), which cannot be
    # called in a child that is still being started. (The type stubs lack the name.) Without
    # duplicates: what a main module adds is there twice in a child, which runs it again.
    places = (process.ORIGINAL_DIR if each == "" else each for each in sys.path)  # type: ignore[attr-defined]
    return tuple(dict.fromkeys(places))


def tell(searched: tuple[str, ...], found: Iterable[Found]) -> Told | None:
    """Return what a child needs instead of a search; None if it must search.

    Parameters
    ----------
    searched : tuple of str
        The result of :func:`search_path` at the time of the search.
    found : iterable
        The entry points. If one cannot be read, the child must search, so that it reports
        the same error.
    """
    if searched != search_path():
        return None
    try:
        return searched, tuple(tuple(_told(each)) for each in found)
    except Exception as error:
        if is_from_handler(error):
            raise
        # For example, a value cannot be parsed or a distribution is not in a folder.
        return None


def _told(found: Found) -> ToldEntryPoint:
    if isinstance(found, ToldEntryPoint):
        return found
    if isinstance(found, UnreadableEntryPoints) or found.dist is None:
        raise ValueError(found.name)
    name, version = name_and_version(found.dist)
    folder = str(found.dist.locate_file(""))
    return ToldEntryPoint(
        found.name, found.value, found.module, found.attr or "", name, version, folder
    )


def installed_entry_points(told: Told | None = None) -> list[Found]:
    """Return the entry points of all installed distributions, unreadable ones included.

    Does not search if this process has the same search path as the one that told it what it
    had found.

    Raises
    ------
    SegmentError
        If no descriptor is free to search with.
    """
    if told is not None and told[0] == search_path():
        return [ToldEntryPoint(*fields) for fields in told[1]]
    # Imported late: it takes longer to import than everything else in this module.
    from importlib.metadata import entry_points

    # entry_points() takes a folder that it cannot list for an empty one, even if only no
    # descriptor is free, and remembers that. This process would never have any plugins.
    need_descriptors(1, "look for plugins")
    try:
        return [*entry_points(group=hookspecs.PROJECT)]
    except Exception as error:
        if is_from_handler(error):
            raise
        # A single file that cannot be read or parsed makes entry_points() fail.
        return list(_one_by_one())


def _one_by_one() -> Iterator[EntryPoint | UnreadableEntryPoints]:
    from importlib.metadata import distributions

    names = set()
    for distribution in distributions():
        name, _ = name_and_version(distribution)
        if name in names:
            # Imports find the first one on sys.path.
            continue
        names.add(name)
        try:
            yield from distribution.entry_points.select(group=hookspecs.PROJECT)
        except Exception as error:
            if is_from_handler(error):
                raise
            if _may_have_plugins(distribution):
                yield UnreadableEntryPoints(distribution, error)


def _may_have_plugins(distribution: Distribution) -> bool:
    try:
        text = distribution.read_text("entry_points.txt")
    except Exception as error:
        if is_from_handler(error):
            raise
        # The file is not text, or cannot be opened.
        return True
    return f"[{hookspecs.PROJECT}]" in (text or "")


def sorted_and_unique(found: Iterable[Found]) -> list[Found]:
    """Sort by name, distribution and value; drop entries that were found twice."""

    def key(each: Found) -> tuple[str, str, str]:
        return each.name, name_and_version(each.dist)[0], each.value

    unique: dict[tuple[str, str, str], Found] = {}
    for each in found:
        # Keep the first, since imports find the first one on sys.path.
        unique.setdefault(key(each), each)
    return [unique[each] for each in sorted(unique)]


@functools.cache
def name_and_version(distribution: Distribution | ToldDistribution | None) -> tuple[str, str]:
    """Return a distribution's name and version, "unknown" if they cannot be read."""
    # Cached: each access to Distribution.metadata reads and parses the file again.
    if distribution is None:
        return "unknown", "unknown"
    try:
        metadata = distribution.metadata
        return metadata["Name"] or "unknown", metadata["Version"] or "unknown"
    except Exception as error:
        if is_from_handler(error):
            raise
        # The file is not text, or lacks a field, for which newer versions of Python raise.
        return "unknown", "unknown"
