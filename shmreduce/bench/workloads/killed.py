"""Kills a worker in the middle of a task, and measures when its caller gets the error.

May import ``measurements``, errors, ``fresh_process``, ``executor`` and the public
names of shmreduce. A pool of plain multiprocessing is not among the systems, since it
waits for ever.
"""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from typing import TYPE_CHECKING, Any

from shmreduce.bench.measurements import Measurement
from shmreduce.errors import WorkerDied
from shmreduce.fresh_process import FreshProcess

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection

__all__ = ["ROW", "measure_killed_workers"]

ROW = "from SIGKILL to the error"


def measure_killed_workers(workload: str, rounds: int) -> list[Measurement]:
    """Kill a worker in each round, in a new pool."""
    rows = {name: Measurement(workload, name, ROW, "s") for name in _SYSTEMS}
    for _ in range(rounds):
        for name, row in rows.items():
            with FreshProcess(name, _serve, name) as process:
                row.samples.append(process.receive())
    return list(rows.values())


def _serve(connection: Connection, name: str) -> None:
    reader, writer = get_context("spawn").Pipe(duplex=False)
    try:
        _SYSTEMS[name](writer)
    except (WorkerDied, BrokenProcessPool):
        # The monotonic clock is the same for all processes.
        connection.send(time.monotonic() - reader.recv())


def _die(writer: Any) -> None:
    writer.send(time.monotonic())
    os.kill(os.getpid(), signal.SIGKILL)


def _keep(writer: Any) -> None:
    global _writer
    _writer = writer


_writer: Any = None


def _die_here(_item: int) -> None:
    _die(_writer)


def _in_pool(writer: Any) -> None:
    import shmreduce

    with shmreduce.get_context("spawn").Pool(2, initializer=_keep, initargs=(writer,)) as pool:
        pool.map(_die_here, [0])


def _in_our_executor(writer: Any) -> None:
    import shmreduce
    from shmreduce.executor import ProcessPoolExecutor as OurExecutor

    context = shmreduce.get_context("spawn")
    with OurExecutor(2, context, initializer=_keep, initargs=(writer,)) as executor:
        executor.submit(_die_here, 0).result()


def _in_executor(writer: Any) -> None:
    context = get_context("spawn")
    with ProcessPoolExecutor(2, context, initializer=_keep, initargs=(writer,)) as executor:
        executor.submit(_die_here, 0).result()


_SYSTEMS: dict[str, Callable[[Any], None]] = {
    "shmreduce": _in_pool,
    "shmreduce executor": _in_our_executor,
    "ProcessPoolExecutor": _in_executor,
}
