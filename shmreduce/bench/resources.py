"""Measures the resources that a process and its descendants use.

May import :mod:`shmreduce.memory.headroom`. Everything is read from outside, from ``/proc``
(proc(5)) and from the clocks of processes. So it works for all systems that are compared,
and takes no time of the measured processes.
"""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Self

from shmreduce.memory.headroom import headroom

if TYPE_CHECKING:
    from types import TracebackType

__all__ = [
    "Footprint",
    "Usage",
    "Watch",
    "counts",
    "descendants",
    "fits",
    "memory",
    "usage",
]

_PROC = Path("/proc")
_SHARED = "/dev/shm"  # noqa: S108 - its size is asked, nothing is written
_GONE = (FileNotFoundError, ProcessLookupError, PermissionError)
_PAUSE = 0.02
"""Seconds between two looks at the memory."""
_RARELY = 10
"""One look in this many is also at which processes there are and what they have open."""


@dataclass(frozen=True)
class Usage:
    """Resources whose use adds up while processes run.

    Parameters
    ----------
    cpu : dict
        From a process id to its seconds on processors. Threads that have ended count, too.
    switches : dict
        From a thread id to its context switches, voluntary and forced. The kernel tells those
        of threads that are alive only.
    """

    cpu: dict[int, float]
    switches: dict[int, int]

    def since(self, before: Usage) -> tuple[float, int]:
        """Return the seconds and the switches that were added after an earlier look.

        Processes and threads that have begun since then count from their beginning. What has
        ended since then is missing: processes, and the switches of threads.
        """
        seconds = sum(value - before.cpu.get(pid, 0.0) for pid, value in self.cpu.items())
        switches = sum(
            value - before.switches.get(thread, 0) for thread, value in self.switches.items()
        )
        return seconds, switches


@dataclass(frozen=True)
class Footprint:
    """Resources that processes have at one moment.

    Parameters
    ----------
    shared : int
        Bytes of shared memory in their page tables; a page that several processes have is
        counted once.
    pss : int
        Proportional set size: the same for all memory.
    descriptors, mappings : int
        Their number, of all processes together.
    """

    shared: int = 0
    pss: int = 0
    descriptors: int = 0
    mappings: int = 0


def descendants(pid: int) -> list[int]:
    """Return a process and all processes that it started, directly or indirectly."""
    children: dict[int, list[int]] = {}
    for folder in _PROC.glob("[0-9]*"):
        with suppress(*_GONE):
            # pid (name) state parent; the name may contain any characters (proc_pid_stat(5)).
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            children.setdefault(int(fields[1]), []).append(int(folder.name))
    found = [pid]
    for each in found:
        found += children.get(each, [])
    return found


def usage(pids: list[int]) -> Usage:
    """Look at what processes have used so far."""
    seconds: dict[int, float] = {}
    switches: dict[int, int] = {}
    for pid in pids:
        # EINVAL if there is no such process any more.
        with suppress(OSError):
            seconds[pid] = time.clock_gettime(_processor_clock(pid))
        with suppress(*_GONE):
            for thread in (_PROC / str(pid) / "task").iterdir():
                with suppress(*_GONE):
                    switches[int(thread.name)] = _switches_of(thread)
    return Usage(seconds, switches)


def _processor_clock(pid: int) -> int:
    """Return what ``clock_getcpuclockid`` does for a process, see clock_getcpuclockid(3)."""
    return (~pid << 3) | 2


def _switches_of(thread: Path) -> int:
    """Return how often a thread was switched out, of its own accord or not."""
    lines = (thread / "status").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if "ctxt_switches" in line)


def memory(pids: list[int]) -> tuple[int, int]:
    """Return the bytes in the page tables of processes: of shared memory, and of all memory."""
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


def fits(nbytes: int) -> bool:
    """Return whether processes can get memory, half of which is in ``/dev/shm``.

    Programs that write more into ``/dev/shm`` than fits are killed by SIGBUS.
    """
    available = headroom()
    if available is not None and nbytes >= available:
        return False
    try:
        folder = os.statvfs(_SHARED)
    except FileNotFoundError:
        return True
    return nbytes < 2 * folder.f_bavail * folder.f_frsize


@dataclass
class Watch:
    """Measures a process and its descendants repeatedly, in a thread.

    Reading page tables holds a lock of the watched process, so this is only for turns whose
    time does not count.

    Parameters
    ----------
    pid : int
        The process.
    history : list of (float, int)
        Seconds since the beginning, and the proportional set size at that time.
    peak : Footprint
        The largest value of each resource, not necessarily at the same moment.
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
            # Which processes there are, since pools may start workers late, and what they
            # have open takes long to find, so it is done less often.
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
