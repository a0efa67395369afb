"""Counts what this process holds of shared memory, and finds leaks.

May import public names of :mod:`shmreduce` and
:mod:`shmreduce.memory.inspection`.

Memory that is kept warm for the next array is not a leak. A leak is an array that is
still referenced, a message that nobody has read, a block that another process still
holds, an open descriptor, or a file.
"""

from __future__ import annotations

import gc
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import shmreduce
from shmreduce.memory.inspection import all_names, look_at, process_state

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Census", "find_leaks", "take_census"]

_PAUSE = 0.01
"""Seconds between two checks whether other processes have released what they held."""


@dataclass(frozen=True)
class Census:
    """What one process holds at one moment; :func:`take_census` makes it.

    Parameters
    ----------
    arrays : int
        Number of blocks that have views in this process.
    unread : int
        Number of messages from this process that nobody has read.
    held : int
        Number of blocks of this process that only other processes use.
    descriptors : dict of int to str
        What each open descriptor leads to, without those that the core and the
        standard library's own servers keep open.
    names : frozenset of str
        Names of segments made by this process that the core no longer knows.
    """

    arrays: int
    unread: int
    held: int
    descriptors: dict[int, str]
    names: frozenset[str]


def take_census() -> Census:
    """Return what this process holds now, after a garbage collection.

    Returns
    -------
    Census
        To be passed to :func:`find_leaks` later.

    Examples
    --------
    >>> import shmreduce
    >>> before = take_census()
    >>> block = shmreduce.allocate(8)
    >>> take_census().arrays - before.arrays
    1
    """
    # So that everything that the core opens once and keeps is open now.
    shmreduce.allocate(1)
    gc.collect()
    state = process_state()
    kept = state.descriptors | _standard_library_descriptors()
    descriptors = {fd: target for fd, target in _descriptors().items() if fd not in kept}
    return Census(
        arrays=state.arrays,
        unread=state.unread,
        held=state.held,
        descriptors=descriptors,
        names=frozenset(_forgotten_names(set(state.segments))),
    )


def find_leaks(before: Census, patience: float = 5.0) -> list[str]:
    """Return one line for each thing that this process holds now and did not hold before.

    Parameters
    ----------
    before : Census
        What it held before.
    patience : float
        Seconds to wait for other processes to release what they hold.

    Returns
    -------
    list of str
        Empty if nothing has leaked.

    Examples
    --------
    >>> import shmreduce
    >>> before = take_census()
    >>> forgotten = shmreduce.allocate(8)
    >>> find_leaks(before, patience=0)[0]
    '1 block of shared memory still has views in this process'
    >>> del forgotten
    >>> find_leaks(before)
    []
    """
    deadline = time.monotonic() + patience
    while True:
        leaks = _compare(before, take_census())
        if not leaks or time.monotonic() >= deadline:
            return leaks
        time.sleep(_PAUSE)


def _compare(before: Census, now: Census) -> list[str]:
    leaks = []
    if now.arrays > before.arrays:
        count = _count(now.arrays - before.arrays, "block")
        leaks.append(f"{count} of shared memory still has views in this process")
    if now.unread > before.unread:
        count = _count(now.unread - before.unread, "message")
        leaks.append(f"{count} from this process still unread")
    held_elsewhere = now.held - before.held
    if held_elsewhere > 0 and now.unread <= before.unread:
        count = _count(held_elsewhere, "block")
        leaks.append(f"{count} of this process's memory is held by another process")
    leaks += [
        f"descriptor {fd} is still open: {target}"
        for fd, target in sorted(now.descriptors.items())
        if before.descriptors.get(fd) != target
    ]
    leaks += [
        f"{name} exists, and the segment is not in use"
        for name in sorted(now.names - before.names)
    ]
    return leaks


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _descriptors() -> dict[int, str]:
    """Return what each open descriptor of this process leads to."""
    found = {}
    for link in Path("/proc/self/fd").iterdir():
        try:
            found[int(link.name)] = str(link.readlink())
        except FileNotFoundError:
            # The descriptor by which iterdir() read the folder.
            continue
    return found


def _forgotten_names(in_use: set[str]) -> Iterator[str]:
    """Yield the names of this process's segments that the core does not know any more.

    Segments of other processes do not count, not even of killed ones: their families
    remove them.
    """
    for name in all_names():
        state = look_at(name)
        if state is not None and state.owner == os.getpid() and state.token not in in_use:
            yield name


def _standard_library_descriptors() -> set[int]:
    """Return descriptors that multiprocessing opens on first use and keeps."""
    tracker = multiprocessing.resource_tracker._resource_tracker
    server = multiprocessing.forkserver._forkserver
    kept = [getattr(tracker, "_fd", None), getattr(server, "_forkserver_alive_fd", None)]
    # By which it gives connections to other processes.
    sharer: Any = sys.modules.get("multiprocessing.resource_sharer")
    listener = getattr(getattr(sharer, "_resource_sharer", None), "_listener", None)
    opened = getattr(getattr(listener, "_listener", None), "_socket", None)
    if opened is not None:
        kept.append(opened.fileno())
    return {fd for fd in kept if fd is not None}
