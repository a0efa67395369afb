"""How much memory the system can still give, from what the kernel tells.

May import :mod:`shmreduce.signals`.

Shared memory counts as memory of the cgroup that touches it first. A memfd has
no file system whose size would bound it, so asking for more than there is does
not fail: the kernel kills somebody instead. Hence the look beforehand.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from shmreduce.signals import is_from_system

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Machine", "cgroup_limits", "headroom"]


class Machine:
    """The files in which the kernel tells about itself.

    Parameters
    ----------
    root : path
        Where the file system begins; tests put files of their own there.
    """

    def __init__(self, root: Path = Path("/")) -> None:
        self.root = root

    def path(self, name: str) -> Path:
        """Return where the file of this absolute name is."""
        return self.root / name.lstrip("/")

    def text(self, name: str) -> str | None:
        """Return a file's text, or None if it cannot be read."""
        try:
            # Unbuffered, and no Path is made: a heap that grows reads a dozen of them.
            with open(f"{self.root}/{name}", "rb", buffering=0) as file:
                return file.read().decode(errors="replace").strip()
        except OSError as error:
            if not is_from_system(error):
                raise
            return None

    def number(self, name: str) -> int | None:
        """Return a file's number, or None if there is none (``max``, say)."""
        text = self.text(name)
        return int(text) if text is not None and text.isdigit() else None

    def field(self, name: str, key: str) -> str | None:
        """Return the text after ``key:`` in a file of such lines."""
        return _field(self.text(name) or "", key)

    def memory(self, *keys: str) -> list[int | None]:
        """Return lines of ``/proc/meminfo`` in bytes (proc_meminfo(5)), None where none tells."""
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

    The smaller of MemAvailable (proc_meminfo(5)) and what the limits of the
    cgroups leave, pages of files that can be dropped included.
    """
    total, available = machine.memory("MemTotal", "MemAvailable")
    found = [left for left, _, _ in _limits_below(machine, total)]
    if available is not None:
        found.append(available)
    return min(found) if found else None


def cgroup_limits(machine: Machine) -> Iterator[tuple[int, int, str]]:
    """Yield headroom, limit and name of every limited cgroup that this process is in.

    Version 2 puts one line ``0::/path`` into /proc/self/cgroup, version 1 a line
    for each controller (cgroups(7)). Pages of files can be dropped, so they do
    not count as used.
    """
    yield from _limits_below(machine, *machine.memory("MemTotal"))


def _limits_below(machine: Machine, total: int | None) -> Iterator[tuple[int, int, str]]:
    for line in (machine.text("/proc/self/cgroup") or "").splitlines():
        _number, colon, rest = line.partition(":")
        controllers, second, path = rest.partition(":")
        if not (colon and second):
            # Not in any format that is known: emulated kernels have theirs.
            continue
        if controllers == "":
            files = "memory.max", "memory.current", "inactive_file"
            yield from _limits_upwards(machine, total, "/sys/fs/cgroup", path, *files)
        elif "memory" in controllers.split(","):
            files = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
            yield from _limits_upwards(machine, total, "/sys/fs/cgroup/memory", path, *files)


def _limits_upwards(
    machine: Machine,
    total: int | None,
    mount: str,
    path: str,
    limit: str,
    usage: str,
    droppable: str,
) -> Iterator[tuple[int, int, str]]:
    parts = [part for part in path.split("/") if part]
    for length in range(len(parts), -1, -1):
        folder = "/".join([mount, *parts[:length]])
        most = machine.number(f"{folder}/{limit}")
        # Version 1 says "no limit" by a number that no machine reaches.
        if most is None or (total is not None and most >= total):
            continue
        used = machine.number(f"{folder}/{usage}")
        if used is not None:
            yield max(0, most - used + _statistic(machine, folder, droppable)), most, folder


def _statistic(machine: Machine, folder: str, key: str) -> int:
    for line in (machine.text(f"{folder}/memory.stat") or "").splitlines():
        name, _, value = line.partition(" ")
        if name == key and value.isdigit():
            return int(value)
    return 0
