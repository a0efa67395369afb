"""Checks the arguments of pools and executors.

May import :mod:`shmreduce.errors` and ``born``. If the pool or executor of the standard
library has the argument too, an impossible value raises the same error as there; if only
shmreduce has it, ``ConfigurationError``.
"""

from __future__ import annotations

import os
from typing import NoReturn

from shmreduce.born.allocations import check_allocator
from shmreduce.errors import ConfigurationError

__all__ = [
    "check_initializer",
    "check_max_tasks_per_child",
    "check_maxtasksperchild",
    "check_progress",
    "check_shared_allocations",
    "checked_retries",
    "default_worker_count",
]


def default_worker_count() -> int:
    """Return the number of processors; from Python 3.13 on, of those this process may use."""
    count = getattr(os, "process_cpu_count", os.cpu_count)
    return count() or 1


def check_initializer(initializer: object) -> None:
    """Raise TypeError if it is neither None nor callable."""
    if initializer is not None and not callable(initializer):
        raise TypeError("initializer must be a callable")


def check_maxtasksperchild(limit: object) -> None:
    """Raise what :class:`multiprocessing.pool.Pool` raises for an impossible number of tasks."""
    if limit is not None and (not isinstance(limit, int) or limit <= 0):
        raise ValueError("maxtasksperchild must be a positive int or None")


def check_max_tasks_per_child(limit: int | None, *, forks: bool) -> None:
    """Raise what the executor of :mod:`concurrent.futures` raises for such a number of tasks."""
    if limit is None:
        return
    if not isinstance(limit, int):
        raise TypeError("max_tasks_per_child must be an integer")
    if limit <= 0:
        raise ValueError("max_tasks_per_child must be >= 1")
    if forks:
        # As in the standard library: https://github.com/python/cpython/issues/90622
        raise ValueError(
            "max_tasks_per_child is incompatible with the 'fork' multiprocessing start method;"
            " supply a different mp_context."
        )


def checked_retries(retries: int) -> int:
    """Return a number of retries.

    Raises
    ------
    ConfigurationError
        If it is not an integer of 0 or more.
    """
    if not isinstance(retries, int) or retries < 0:
        _refuse(
            "retries",
            retries,
            "give how often a task is tried again if its worker was killed, 0 or more",
        )
    return retries


def check_progress(progress: object) -> None:
    """Raise ConfigurationError if ``progress`` is neither a bool nor a string."""
    if not isinstance(progress, bool | str):
        _refuse("progress", progress, "give True, False, or a text to show beside the bar")


def check_shared_allocations(shared_allocations: object) -> None:
    """Check whether tasks can run in :func:`shmreduce.shared_allocations`, if they are to.

    Raises
    ------
    ConfigurationError
        If it is neither True nor False.
    AllocatorUnavailableError
        If the compiled allocator is missing.
    """
    if not isinstance(shared_allocations, bool):
        _refuse("shared_allocations", shared_allocations, "give True or False")
    if shared_allocations:
        # Checked in the parent, so that the caller gets the error.
        check_allocator()


def _refuse(setting: str, value: object, remedy: str) -> NoReturn:
    raise ConfigurationError(f"{setting}={value!r}: {remedy}", setting=setting, value=value)
