"""What a process and its descendants use, as the kernel tells it.

May import the standard library only. Everything is read from outside, from
``/proc`` (proc(5)), so that it works for any system that is compared, and costs
the measured processes nothing while they are timed.
"""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from types import TracebackType

__all__ = [
    "Footprint",
    "Usage",
    "Watch",
    "counts",
    "descendants",
    "memory",
    "memory_available",
    "usage",
]

_PROC = Path("/proc")
_GONE = (FileNotFoundError, ProcessLookupError, PermissionError)
_PAUSE = 0.02
_RARELY = 10


@dataclass(frozen=True)
class Usage:
    """What grows as processes run.

    Parameters
    ----------
    cpu : float
        Seconds on a processor, of all threads that live.
    switches : int
        Context switches, voluntary and forced.
    """

    cpu: float = 0.0
    switches: int = 0


@dataclass(frozen=True)
class Footprint:
    """What processes have at one moment.

    Parameters
    ----------
    shared : int
        Bytes of shared memory in their page tables, a page that several have
        counted once.
    pss : int
        Proportional set size: the same for all memory.
    descriptors, mappings : int
        Of all of them together.
    """

    shared: int = 0
    pss: int = 0
    descriptors: int = 0
    mappings: int = 0


def descendants(pid: int) -> list[int]:
    """Return a process and all that it started, directly or not."""
    children: dict[int, list[int]] = {}
    for folder in _PROC.glob("[0-9]*"):
        with suppress(*_GONE):
            # pid (name) state parent; the name may hold anything (proc_pid_stat(5)).
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            children.setdefault(int(fields[1]), []).append(int(folder.name))
    found = [pid]
    for each in found:
        found += children.get(each, [])
    return found


def usage(pids: list[int]) -> Usage:
    """Add up what processes have used so far."""
    nanoseconds = switches = 0
    for pid in pids:
        with suppress(*_GONE):
            for task in (_PROC / str(pid) / "task").iterdir():
                with suppress(*_GONE):
                    nanoseconds += int((task / "schedstat").read_text().split()[0])
                    for line in (task / "status").read_text().splitlines():
                        if "ctxt_switches" in line:
                            switches += int(line.split()[1])
    return Usage(nanoseconds / 1e9, switches)


def memory(pids: list[int]) -> tuple[int, int]:
    """Add up the bytes that processes have in their page tables: of shared memory, of all."""
    shared = pss = 0
    for pid in pids:
        with suppress(*_GONE):
            for line in (_PROC / str(pid) / "smaps_rollup").read_text().splitlines():
                if line.startswith("Pss_Shmem:"):
                    shared += int(line.split()[1]) << 10
                elif line.startswith("Pss:"):
                    pss += int(line.split()[1]) << 10
    return shared, pss


def counts(pids: list[int]) -> tuple[int, int]:
    """Count the descriptors and the mappings of processes."""
    descriptors = mappings = 0
    for pid in pids:
        folder = _PROC / str(pid)
        with suppress(*_GONE):
            descriptors += len(os.listdir(folder / "fd"))  # noqa: PTH208 - counted, not used
            mappings += (folder / "maps").read_text().count("\n")
    return descriptors, mappings


def memory_available() -> int | None:
    """Return the bytes that programs can still have, None where the kernel does not say."""
    with suppress(FileNotFoundError):
        for line in (_PROC / "meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    return None


@dataclass
class Watch:
    """Looks at a process and its descendants again and again, in a thread.

    Walking through page tables holds a lock of the watched process, so this is
    for turns whose time does not count.

    Parameters
    ----------
    pid : int
        The first of them.
    history : list of (float, int)
        Seconds since the beginning, and the proportional set size then.
    peak : Footprint
        The greatest value of each, which need not have been at one moment.
    """

    pid: int
    history: list[tuple[float, int]] = field(default_factory=list)
    peak: Footprint = Footprint()

    def __enter__(self) -> Self:
        self._finished = threading.Event()
        self._thread = threading.Thread(target=self._look, name="watch", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._finished.set()
        self._thread.join()

    def _look(self) -> None:
        self._started = time.monotonic()
        finished = False
        pids: list[int] = []
        while True:
            # Who is there, and what is open, is looked up more rarely: pools may start
            # workers late, and it takes long to find out.
            if len(self.history) % _RARELY == 0 or finished:
                pids = descendants(self.pid)
                self._note(*memory(pids), *counts(pids))
            else:
                self._note(*memory(pids), 0, 0)
            if finished:
                break
            finished = self._finished.wait(_PAUSE)

    def _note(self, shared: int, pss: int, descriptors: int, mappings: int) -> None:
        self.history.append((time.monotonic() - self._started, pss))
        self.peak = Footprint(
            max(shared, self.peak.shared),
            max(pss, self.peak.pss),
            max(descriptors, self.peak.descriptors),
            max(mappings, self.peak.mappings),
        )
