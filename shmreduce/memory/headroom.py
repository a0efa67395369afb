"""Finds out from the kernel how much memory the system can still give.

May import :mod:`shmreduce.signals`.

Shared memory is charged to the cgroup that touches it first. No file system limits the size
of a memfd, so asking for more memory than there is does not fail: the kernel kills a
process instead. So it is checked beforehand.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from shmreduce.signals import is_from_system

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

__all__ = ["Machine", "cgroup_limits", "headroom"]


class Machine:
    """The files in which the kernel describes the machine.

    Parameters
    ----------
    root : path
        The root of the file system. Tests give a folder with files of their own.
    """

    def __init__(self, root: str | os.PathLike[str] = "/") -> None:
        self.root = os.fspath(root)

    def path(self, name: str) -> Path:
        """Return the path of the file with this absolute name."""
        # Imported here, since only ``doctor`` asks for paths, but every child imports this module.
        from pathlib import Path

        return Path(self.root, name.lstrip("/"))

    def text(self, name: str) -> str | None:
        """Return a file's text, or None if it cannot be read."""
        try:
            # Unbuffered, and without a Path: a heap that grows reads a dozen files.
            with open(f"{self.root}/{name}", "rb", buffering=0) as file:
                return file.read().decode(errors="replace").strip()
        except OSError as error:
            if not is_from_system(error):
                raise
            return None

    def number(self, name: str) -> int | None:
        """Return the number in a file, or None if there is none (``max``, for example)."""
        text = self.text(name)
        return int(text) if text is not None and text.isdigit() else None

    def field(self, name: str, key: str) -> str | None:
        """Return the text after ``key:`` in a file with such lines."""
        return _field(self.text(name) or "", key)

    def memory(self, *keys: str) -> list[int | None]:
        """Return lines of ``/proc/meminfo`` in bytes (proc_meminfo(5)), None for missing ones."""
        text = self.text("/proc/meminfo") or ""
        numbers = [(_field(text, key) or "").partition(" ")[0] for key in keys]
        return [int(number) * 1024 if number.isdigit() else None for number in numbers]


def _field(text: str, key: str) -> str | None:
    for line in text.splitlines():
        before, colon, after = line.partition(":")
        if colon and before == key:
            return after.strip()
    return None


_THIS_MACHINE = Machine()


def headroom(machine: Machine = _THIS_MACHINE) -> int | None:
    """Return how many bytes of memory the system can still give, None if unknown.

    It is the smaller of MemAvailable (proc_meminfo(5)) and what the cgroups' limits leave,
    including file pages that the kernel can drop.
    """
    total, available = machine.memory("MemTotal", "MemAvailable")
    found = [left for left, _, _ in _limits_below(machine, total)]
    if available is not None:
        found.append(available)
    return min(found) if found else None


def cgroup_limits(machine: Machine) -> Iterator[tuple[int, int, str]]:
    """Yield headroom, limit and name of every limited cgroup that this process is in.

    Version 2 puts one line ``0::/path`` into /proc/self/cgroup, version 1 a line
    for each controller (cgroups(7)). The kernel can drop pages of files, so they do not count
    as used.
    """
    yield from _limits_below(machine, *machine.memory("MemTotal"))


def _limits_below(machine: Machine, total: int | None) -> Iterator[tuple[int, int, str]]:
    for line in (machine.text("/proc/self/cgroup") or "").splitlines():
        _number, colon, rest = line.partition(":")
        controllers, second, path = rest.partition(":")
        if not (colon and second):
            # An unknown format: emulated kernels have their own.
            continue
        if controllers == "":
            # Above memory.high the kernel slows the processes down until they seem to hang. It
            # drops pages of files first, and lets them take all that there is below.
            for limit, droppable in (
                ("memory.max", ("inactive_file",)),
                ("memory.high", ("inactive_file", "active_file")),
            ):
                files = limit, "memory.current", droppable
                yield from _limits_upwards(machine, total, "/sys/fs/cgroup", path, *files)
        elif "memory" in controllers.split(","):
            files = "memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file",)
            yield from _limits_upwards(machine, total, "/sys/fs/cgroup/memory", path, *files)


def _limits_upwards(
    machine: Machine,
    total: int | None,
    mount: str,
    path: str,
    limit: str,
    usage: str,
    droppable: Sequence[str],
) -> Iterator[tuple[int, int, str]]:
    parts = [part for part in path.split("/") if part]
    for length in range(len(parts), -1, -1):
        folder = "/".join([mount, *parts[:length]])
        most = machine.number(f"{folder}/{limit}")
        # Version 1 expresses "no limit" by a number larger than any memory.
        if most is None or (total is not None and most >= total):
            continue
        used = machine.number(f"{folder}/{usage}")
        if used is not None:
            files = sum(_statistic(machine, folder, key) for key in droppable)
            yield max(0, most - used + files), most, folder


def _statistic(machine: Machine, folder: str, key: str) -> int:
    for line in (machine.text(f"{folder}/memory.stat") or "").splitlines():
        name, _, value = line.partition(" ")
        if name == key and value.isdigit():
            return int(value)
    return 0
