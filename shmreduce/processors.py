"""How many processors this process may use, whether all are busy, and how large caches are.

Imports nothing of shmreduce.
"""

from __future__ import annotations

import os

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
    """Return whether more threads run, or wait to run, than there are processors.

    Reads the number of this instant from proc_loadavg(5). True if it cannot be read.

    Examples
    --------
    >>> all_taken() in (True, False)
    True
    """
    try:
        # As bytes: importing a codec for text would take longer than everything else here.
        with open("/proc/loadavg", "rb", buffering=0) as file:
            running, _, _ = file.read().split()[3].partition(b"/")
            return int(running) > usable_processors()
    except (OSError, ValueError, IndexError):
        return True


def cache_size() -> int | None:
    """Return the size in bytes of a processor's largest cache; None if it is not known.

    It is what the kernel reports (https://docs.kernel.org/admin-guide/abi-stable.html). The C
    library (sysconf(3)) is not asked: on a virtual machine it sometimes returns the sum of all
    caches of the host.

    Examples
    --------
    >>> size = cache_size()
    >>> size is None or size > 0
    True
    """
    try:
        names = os.listdir(_CACHES)
    except OSError:
        # The kernel does not tell, or no descriptor is free. A copy need not fail for that.
        return None
    found = []
    for name in names:
        try:
            with open(f"{_CACHES}/{name}/size", "rb", buffering=0) as file:
                text = file.read().decode().strip()
            unit = _UNITS.get(text[-1:], 0)
            found.append(int(text[:-1]) * unit if unit else int(text))
        except (OSError, ValueError):
            # The size of this cache is not known; that of another may be.
            continue
    return max(found, default=0) or None
