"""How many processors this process may use, and whether all are taken.

Imports nothing of shmreduce.
"""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["all_taken", "usable_processors"]


def usable_processors() -> int:
    """Return how many processors this process may run on at once.

    Not ``os.cpu_count()``, which counts those, too, that a container or taskset(1)
    keeps from it.

    Examples
    --------
    >>> 1 <= usable_processors() <= (os.cpu_count() or 1)
    True
    """
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def all_taken() -> bool:
    """Return whether more runs, or waits to run, than there are processors for.

    That is what proc_loadavg(5) says of this instant. True where nobody tells.

    Examples
    --------
    >>> all_taken() in (True, False)
    True
    """
    try:
        # As bytes: to import the codec of a text file takes longer than all the rest.
        with Path("/proc/loadavg").open("rb", buffering=0) as file:
            running, _, _ = file.read().split()[3].partition(b"/")
            return int(running) > usable_processors()
    except (OSError, ValueError, IndexError):
        return True
