"""How many processors this process may use, whether they are busy, and how large caches are.

May import :mod:`shmreduce.stack`.
"""

from __future__ import annotations

import os
import threading
import time

from shmreduce.stack import need_stack

__all__ = ["all_taken", "cache_size", "is_crowded", "lets_others_run", "usable_processors"]

_READ_AGAIN = 0.01
"""Seconds between two readings of how long a thread waited: one takes as long as a message."""
_CROWDED = 0.75
"""The least ratio of the time that a thread waits for a processor to the time that it runs.

With two processors it is about 1 if 16 processes send small messages to each other, and 0 if
two do. In a pipeline of three, where polling pays, it is seldom more than 0.6.
"""
_NEGLIGIBLE = 1e-4
"""Seconds. Even on an idle processor a thread is not run in the instant it is woken."""
_SOMEBODY_RAN = 1e-5
"""Seconds that sched_yield() takes at least if it let another thread run; less than 1e-6 else."""
_UNKNOWN = float("inf")
"""A time that could not be read."""
_CALLS = 20
"""Calls for which there must be room on the stack before a file is opened."""
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
        running, _, _ = _read("/proc/loadavg").split()[3].partition(b"/")
        return int(running) > usable_processors()
    except (OSError, ValueError, IndexError, RecursionError):
        return True


def lets_others_run() -> bool:
    """Let threads run that wait for this thread's processor; return whether there were any.

    The kernel often queues a thread behind the one that has woken it, even if other processors
    are idle. :func:`all_taken` cannot tell: two threads run then, for two processors.

    Examples
    --------
    >>> lets_others_run() in (True, False)
    True
    """
    if not hasattr(os, "sched_yield"):
        return False
    began = time.perf_counter()
    os.sched_yield()
    return time.perf_counter() - began > _SOMEBODY_RAN


class _Reading(threading.local):
    """What a thread has read last about itself, in seconds."""

    at = 0.0
    ran = waited = _UNKNOWN
    crowded = False


_last = _Reading()


def is_crowded() -> bool:
    """Return whether this thread often waits for a processor, because others use them all.

    Unlike the number of running threads, the time that a thread waits depends only on those
    processors that it may use, also in a container. It is read every 10 ms.

    Examples
    --------
    >>> is_crowded() in (True, False)
    True
    """
    now = time.monotonic()
    if now - _last.at >= _READ_AGAIN:
        ran, waited = _times_of_this_thread()
        # Negative after an unknown time, and in a forked child, where the last reading is its
        # parent's. If the time now is unknown, the comparison is false as well.
        lately = waited - _last.waited
        _last.crowded = lately > max(_CROWDED * (ran - _last.ran), _NEGLIGIBLE)
        _last.at, _last.ran, _last.waited = now, ran, waited
    return _last.crowded


def _times_of_this_thread() -> tuple[float, float]:
    """Return how long it has run and how long it has waited for a processor, in seconds.

    The numbers are those of https://docs.kernel.org/scheduler/sched-stats.html; ``_UNKNOWN`` if
    they cannot be read.
    """
    try:
        ran, waited, _ = map(int, _read("/proc/thread-self/schedstat").split())
    except (OSError, ValueError, RecursionError):
        return _UNKNOWN, _UNKNOWN
    return ran / 1e9, waited / 1e9


def _read(path: str) -> bytes:
    """Return the contents of a file, as bytes: a codec for text may have to be imported first.

    Raises
    ------
    OSError
        If it cannot be read.
    RecursionError
        If the stack is short. CPython's open() needs less of it than the end of the block, so
        the file could be left to its destructor, which warns.
    """
    need_stack(_CALLS)
    with open(path, "rb", buffering=0) as file:
        return file.read()


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
            text = _read(f"{_CACHES}/{name}/size").decode().strip()
            unit = _UNITS.get(text[-1:], 0)
            found.append(int(text[:-1]) * unit if unit else int(text))
        except (OSError, ValueError):
            # The size of this cache is not known; that of another may be.
            continue
    return max(found, default=0) or None
