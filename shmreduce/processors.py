"""How many processors this process may use, whether all are busy, and how large caches are.

Imports nothing of shmreduce.
"""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["all_taken", "cache_size", "usable_processors"]

_CACHES = "/sys/devices/system/cpu/cpu0/cache"
_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def usable_processors() -> int:
    """Return how many processors this process may run on at once.

    ``os.cpu_count()`` also counts processors that a container or taskset(1) does not let
    it use.

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


def cache_size() -> int | None:
    """Return how many bytes the largest cache of a processor has, or None where nobody tells.

    As the kernel says (https://docs.kernel.org/admin-guide/abi-stable.html). What the
    C library says is at times that of the host, all sockets of it, on a virtual machine.

    Examples
    --------
    >>> size = cache_size()
    >>> size is None or size > 0
    True
    """
    try:
        paths = list(Path(_CACHES).glob("index*/size"))
    except OSError:
        # No descriptor is free: no reason why a copy should fail.
        return None
    found = []
    for path in paths:
        try:
            text = path.read_bytes().decode().strip()
            unit = _UNITS.get(text[-1:], 0)
            found.append(int(text[:-1]) * unit if unit else int(text))
        except (OSError, ValueError):
            continue
    return max(found, default=0) or None
