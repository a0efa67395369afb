"""Finds the entry points of plugins among the installed distributions.

May import errors, signals, ``free_descriptors`` and ``hookspecs``. Nothing is imported of
what is found.

To look through all distributions takes longer than all else that a child does
before its first array. So children are told what their parent has found.
"""

from __future__ import annotations

import functools
import importlib
import sys
from dataclasses import dataclass
from multiprocessing import process
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from shmreduce import hookspecs
from shmreduce.errors import PluginError
from shmreduce.free_descriptors import need_descriptors
from shmreduce.signals import is_from_handler

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from importlib.metadata import Distribution, EntryPoint

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


@dataclass(frozen=True)
class ToldDistribution:
    """Stands for a distribution that another process has found."""

    name: str
    version: str
    folder: str

    @property
    def metadata(self) -> dict[str, str]:
        """What is asked of its metadata."""
        return {"Name": self.name, "Version": self.version}

    def locate_file(self, path: str) -> Path:
        """Return where a file of it is."""
        return Path(self.folder, path)


class ToldEntryPoint(NamedTuple):
    """Stands for an entry point that another process has found.

    As a plain tuple of strings it travels without this module, which a child
    that is sent no arrays never imports.
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
        """Who ships it."""
        return ToldDistribution(self.distribution, self.version, self.folder)

    def load(self) -> Any:
        """Import what it names."""
        attributes = filter(None, self.attributes.split("."))
        return functools.reduce(getattr, attributes, importlib.import_module(self.module))


Found: TypeAlias = "EntryPoint | ToldEntryPoint | UnreadableEntryPoints"
Told: TypeAlias = tuple[tuple[str, ...], tuple[tuple[str, ...], ...]]
"""Where a process has looked for plugins, and the fields of what it has found."""


def search_path() -> tuple[str, ...]:
    """Return where imports look, written as children are told it."""
    # As multiprocessing.spawn writes it. Its own function for that refuses to be called by
    # a child that is still being loaded, and the type stubs do not know the name. What a
    # main module puts there stands there twice in a child, which runs it, too.
    places = (process.ORIGINAL_DIR if each == "" else each for each in sys.path)  # type: ignore[attr-defined]
    return tuple(dict.fromkeys(places))


def tell(searched: tuple[str, ...], found: Iterable[Found]) -> Told | None:
    """Return what spares a child the search, None if it has to look itself.

    Parameters
    ----------
    searched : tuple of str
        What :func:`search_path` was when they were found.
    found : iterable
        What was found. Of what is damaged everybody must hear in the same words.
    """
    if searched != search_path():
        return None
    try:
        return searched, tuple(tuple(_told(each)) for each in found)
    except Exception as error:
        if is_from_handler(error):
            raise
        # A name that cannot be parsed, a distribution in no folder.
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
    """Return the entry points of all installed distributions, those in damaged files too.

    Nobody looks for them where imports look in the same places as those of the
    process that has ``told``.

    Raises
    ------
    SegmentError
        If no descriptor is free to look with.
    """
    if told is not None and told[0] == search_path():
        return [ToldEntryPoint(*fields) for fields in told[1]]
    # Only here: to import it takes longer than all else of this module and its imports.
    from importlib.metadata import entry_points

    # It takes a folder that it cannot list, also for want of a descriptor, for an empty one,
    # and remembers that: there would be no plugins as long as this process lives.
    need_descriptors(1, "look for plugins")
    try:
        return [*entry_points(group=hookspecs.PROJECT)]
    except Exception as error:
        if is_from_handler(error):
            raise
        # One file that cannot be read or parsed takes the others with it.
        return list(_one_by_one())


def _one_by_one() -> Iterator[EntryPoint | UnreadableEntryPoints]:
    from importlib.metadata import distributions

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
        # Not text, or not to be opened.
        return True
    return f"[{hookspecs.PROJECT}]" in (text or "")


def sorted_and_unique(found: Iterable[Found]) -> list[Found]:
    """Order by name, distribution and value; drop the same entry found twice."""

    def key(each: Found) -> tuple[str, str, str]:
        return each.name, name_and_version(each.dist)[0], each.value

    unique: dict[tuple[str, str, str], Found] = {}
    for each in found:
        # The first on sys.path is the one that imports find.
        unique.setdefault(key(each), each)
    return [unique[each] for each in sorted(unique)]


@functools.cache
def name_and_version(distribution: Distribution | ToldDistribution | None) -> tuple[str, str]:
    """Return what a distribution says that it is called, as far as it can be read."""
    # Each look at either reads and parses the distribution's metadata again.
    if distribution is None:
        return "unknown", "unknown"
    try:
        metadata = distribution.metadata
        return metadata["Name"] or "unknown", metadata["Version"] or "unknown"
    except Exception as error:
        if is_from_handler(error):
            raise
        # Not text, or one of the two is missing, which later Pythons raise for.
        return "unknown", "unknown"
