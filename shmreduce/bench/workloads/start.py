"""Starts children that make one small array, and waits for their end.

May import ``measurements``, ``survivors`` and :mod:`shmreduce.fresh_process`. NumPy is
imported in the processes that are measured.
"""

from __future__ import annotations

import time
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from shmreduce.bench.measurements import Measurement
from shmreduce.fresh_process import FreshProcess

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection

    from shmreduce.bench.survivors import Survivors

__all__ = ["installed_systems", "measure_starts"]

_MODULES = {
    "shmreduce": "shmreduce",
    "multiprocessing": "multiprocessing",
    "torch": "torch.multiprocessing",
}
_STARTS = 5
"""How many children of each kind a process starts; the first does not count."""
_WORKERS = 2


def measure_starts(survivors: Survivors, rounds: int) -> list[Measurement]:
    """Time starts and ends in processes of their own, in turn."""
    rows = {
        (name, row): Measurement(survivors.workload, name, row, "s")
        for row in _ROWS
        for name in survivors.names
    }

    def start_by(name: str) -> None:
        with FreshProcess(name, _serve, name) as process:
            for row, samples in process.receive().items():
                rows[name, row].samples += samples

    for number in range(rounds):
        for name in survivors.in_turn(number):
            survivors.attempt(name, partial(start_by, name))
    return [found for (name, _), found in rows.items() if name in survivors.names]


def installed_systems() -> list[str]:
    """List the systems that start children, and are installed."""
    return [name for name, module in _MODULES.items() if find_spec(module.split(".")[0])]


def _serve(connection: Connection, name: str) -> None:
    module = import_module(_MODULES[name])
    found: dict[str, list[float]] = {}
    for row, (method, once) in _ROWS.items():
        context = module.get_context(method)
        samples = []
        for _ in range(_STARTS):
            started = time.perf_counter()
            once(context)
            samples.append(time.perf_counter() - started)
        found[row] = samples[1:]
    connection.send(found)


def _child(context: Any) -> None:
    from numpy import zeros

    # The child imports NumPy for it, as programs do for which this package is made.
    process = context.Process(target=zeros, args=(1,))
    process.start()
    process.join()


def _pool(context: Any) -> None:
    from numpy import zeros

    with context.Pool(_WORKERS) as pool:
        pool.map(zeros, range(_WORKERS))
    pool.join()


_ROWS: dict[str, tuple[str, Callable[[Any], None]]] = {
    "fork": ("fork", _child),
    "forkserver": ("forkserver", _child),
    "spawn": ("spawn", _child),
    f"fork, Pool({_WORKERS})": ("fork", _pool),
}
