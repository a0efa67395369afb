"""How many processors this process may use.

Imports nothing of shmreduce.
"""

from __future__ import annotations

import os

__all__ = ["usable_processors"]


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
