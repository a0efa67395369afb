"""Kills a worker in the middle of a task, and measures when its caller gets the error.

May import ``measurements``, ``survivors``, errors, ``fresh_process``, ``executor`` and
the public names of shmreduce. A pool of plain multiprocessing is not among the systems,
since it waits for ever.
"""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from multiprocessing import get_context
from typing import TYPE_CHECKING, Any

from shmreduce.bench.measurements import Measurement
from shmreduce.errors import WorkerDied
from shmreduce.fresh_process import FreshProcess, RunFailedError

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection

    from shmreduce.bench.survivors import Survivors

__all__ = ["ROW", "SYSTEMS", "measure_killed_workers"]

ROW = "from SIGKILL to the error"


SYSTEMS = ("shmreduce", "shmreduce executor", "ProcessPoolExecutor")


def measure_killed_workers(survivors: Survivors, rounds: int) -> list[Measurement]:
    """Kill a worker in each round, in a new pool."""
    rows = {name: Measurement(survivors.workload, name, ROW, "s") for name in survivors.names}

    def kill_in(name: str) -> None:
        with FreshProcess(name, _serve, name) as process:
            rows[name].samples.append(process.receive())

    for number in range(rounds):
        for name in survivors.in_turn(number):
            survivors.attempt(name, partial(kill_in, name))
    return [rows[name] for name in survivors.names]


def _serve(connection: Connection, name: str) -> None:
    reader, writer = get_context("spawn").Pipe(duplex=False)
    told = _USES[name](writer)
    # The monotonic clock is the same for all processes.
    connection.send(told - reader.recv())


def _when_told(call: Callable[[], object]) -> float:
    """Return the time at which a call fails. What follows it, the pool's end, is not timed."""
    try:
        call()
    except (WorkerDied, BrokenProcessPool):
        return time.monotonic()
    raise RunFailedError(
        "a killed worker's task gave a result", process="pool", reason="the worker lived"
    )


def _die(writer: Any) -> None:
    writer.send(time.monotonic())
    os.kill(os.getpid(), signal.SIGKILL)


def _keep(writer: Any) -> None:
    global _writer
    _writer = writer


_writer: Any = None


def _die_here(_item: int) -> None:
    _die(_writer)


def _in_pool(writer: Any) -> float:
    import shmreduce

    with shmreduce.get_context("spawn").Pool(2, initializer=_keep, initargs=(writer,)) as pool:
        return _when_told(partial(pool.map, _die_here, [0]))


def _in_our_executor(writer: Any) -> float:
    import shmreduce
    from shmreduce.executor import ProcessPoolExecutor as OurExecutor

    context = shmreduce.get_context("spawn")
    with OurExecutor(2, context, initializer=_keep, initargs=(writer,)) as executor:
        return _when_told(executor.submit(_die_here, 0).result)


def _in_executor(writer: Any) -> float:
    context = get_context("spawn")
    with ProcessPoolExecutor(2, context, initializer=_keep, initargs=(writer,)) as executor:
        return _when_told(executor.submit(_die_here, 0).result)


_USES: dict[str, Callable[[Any], float]] = {
    "shmreduce": _in_pool,
    "shmreduce executor": _in_our_executor,
    "ProcessPoolExecutor": _in_executor,
}
