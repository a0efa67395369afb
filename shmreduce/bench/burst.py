"""Many large arrays at once through a queue, then nothing: the memory must come back.

Shared memory is what the kernel counts as such (``Shmem`` in proc_meminfo(5)),
so other programs' shared memory is in it when it changes meanwhile.
"""

from __future__ import annotations

import time
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shmreduce.bench.measurements import Measurement
from shmreduce.fresh_process import FreshProcess

if TYPE_CHECKING:
    from collections.abc import Sequence
    from multiprocessing.connection import Connection
    from multiprocessing.queues import SimpleQueue

    from shmreduce.bench.systems import System

__all__ = ["BACK_UNDER", "measure_burst"]

BACK_UNDER = 300 << 20
"""Bytes of shared memory that a family of idle processes may keep."""

_LONGEST = 30.0
_PAUSE = 0.1


def measure_burst(
    workload: str, systems: Sequence[System], array_bytes: int, count: int
) -> list[Measurement]:
    """Send ``count`` arrays before the first is read, read all, and watch for 30 s at most."""
    measurements = []
    for system in systems:
        with FreshProcess(system.name, _serve, system, array_bytes, count) as process:
            process.receive()
            before = _shared_memory()
            process.send("burst")
            process.receive()
            at_peak = _shared_memory() - before
            process.send("read")
            process.receive()
            history = _watch(before)
        rows = {
            "sent, not yet read": at_peak,
            "read and dropped": history[0][1],
            **{
                f"{second} s later": _at(history, second)
                for second in (2, 5, 10, 20, 30)
                if second <= history[-1][0]
            },
        }
        measurements += [
            Measurement(workload, system.name, row, "bytes", [value])
            for row, value in rows.items()
        ]
        back = [when for when, value in history if value < BACK_UNDER]
        if back:
            measurements.append(
                Measurement(workload, system.name, "back under 300 MiB", "s", [back[0]])
            )
    return measurements


def _watch(before: int) -> list[tuple[float, int]]:
    """Sample until the memory is back, and a little longer."""
    started = time.monotonic()
    history: list[tuple[float, int]] = []
    while True:
        when = time.monotonic() - started
        history.append((when, max(0, _shared_memory() - before)))
        back = next((at for at, value in history if value < BACK_UNDER), _LONGEST)
        if when > min(_LONGEST, back + 5.5):
            return history
        time.sleep(_PAUSE)


def _at(history: list[tuple[float, int]], second: float) -> int:
    return next(value for when, value in history if when >= second)


def _shared_memory() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("Shmem:"):
            return int(line.split()[1]) * 1024
    return 0


def _serve(connection: Connection, system: System, array_bytes: int, count: int) -> None:
    import numpy as np

    system.prepare_parent()
    context = get_context("spawn")
    there: SimpleQueue[Any] = context.SimpleQueue()
    answer, theirs = context.Pipe()
    receiver = context.Process(target=_receive, args=(system, there, theirs, count), daemon=True)
    receiver.start()
    theirs.close()
    source = np.ones(array_bytes // 8)
    answer.recv()
    connection.send("ready")

    connection.recv()
    for _ in range(count):
        there.put(system.fresh(source))
    connection.send("sent")

    connection.recv()
    answer.send("read")
    answer.recv()
    connection.send("read")

    # Idle until the coordinator closes its end.
    connection.recv()


def _receive(system: System, there: SimpleQueue[Any], answer: Connection, count: int) -> None:
    system.prepare_worker()
    answer.send("ready")
    answer.recv()
    for _ in range(count):
        there.get()
    answer.send("read")
    # Idle, and in possession of whatever it keeps; ends with the sender.
    answer.recv()
