"""Sends many large arrays through a queue, and measures when their memory is given back.

It counts the pages that the kernel has allocated for the segments of the sender and of
the receiver (``st_blocks``, see inode(7)).

May import ``measurements`` and ``systems`` of the benchmarks,
:mod:`shmreduce.fresh_process`, :mod:`shmreduce.memory.inspection` and NumPy.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from multiprocessing import get_context
from typing import TYPE_CHECKING, Any

from shmreduce.bench.measurements import Measurement, Trace
from shmreduce.fresh_process import FreshProcess
from shmreduce.memory.inspection import list_segments

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from shmreduce.bench.systems.channels import ChannelSystem

__all__ = ["BACK_UNDER", "measure_burst"]

BACK_UNDER = 300 << 20
"""Bytes of shared memory that a family of idle processes may keep."""

_LONGEST = 30.0
"""Seconds for which the memory is watched at most."""
_PAUSE = 0.1
"""Seconds between two looks at it."""


def measure_burst(
    workload: str, system: ChannelSystem, array_bytes: int, count: int
) -> tuple[list[Measurement], list[Trace]]:
    """Send ``count`` arrays before the first is read, read all, and watch for 30 s at most.

    Raises
    ------
    RunFailedError
        If the system fails.
    """
    with FreshProcess(system.name, _serve, system, array_bytes, count) as process:
        pids: list[int] = process.receive()
        process.send("burst")
        process.receive()
        at_peak = _shared_memory(pids)
        process.send("read")
        process.receive()
        history = _watch(pids)
    rows = {
        "sent, not yet read": at_peak,
        "read and dropped": history[0][1],
        **{
            f"{second} s later": _at(history, second)
            for second in (2, 5, 10, 20, 30)
            if second <= history[-1][0]
        },
    }
    measurements = [
        Measurement(workload, system.name, row, "bytes", [value]) for row, value in rows.items()
    ]
    back = [when for when, value in history if value < BACK_UNDER]
    if back:
        measurements.append(
            Measurement(workload, system.name, "back under 300 MiB", "s", [back[0]])
        )
    trace = Trace(
        workload,
        system.name,
        f"after {count} arrays",
        [0.0, *(when for when, _ in history)],
        [float(at_peak), *(float(value) for _, value in history)],
    )
    return measurements, [trace]


def _watch(pids: list[int]) -> list[tuple[float, int]]:
    """Sample until the memory is back, and a little longer."""
    started = time.monotonic()
    history: list[tuple[float, int]] = []
    while True:
        when = time.monotonic() - started
        history.append((when, _shared_memory(pids)))
        back = next((at for at, value in history if value < BACK_UNDER), _LONGEST)
        if when > min(_LONGEST, back + 5.5):
            return history
        time.sleep(_PAUSE)


def _at(history: list[tuple[float, int]], second: float) -> int:
    return next(value for when, value in history if when >= second)


def _shared_memory(pids: list[int]) -> int:
    """Return the bytes allocated for segments that these processes made."""
    return sum(segment.reserved for segment in list_segments() if segment.owner in pids)


def _serve(connection: Connection, system: ChannelSystem, array_bytes: int, count: int) -> None:
    import numpy as np

    system.prepare()
    context = system.context()
    there = system.queue(array_bytes)
    answer, theirs = get_context("spawn").Pipe()
    receiver = context.Process(target=_receive, args=(system, there, theirs, count), daemon=True)
    receiver.start()
    theirs.close()
    source = np.ones(array_bytes // 8)
    answer.recv()
    connection.send([os.getpid(), receiver.pid])

    connection.recv()
    for _ in range(count):
        there.put(system.fresh(source))
    connection.send("sent")

    connection.recv()
    answer.send("read")
    answer.recv()
    connection.send("read")

    # Idle until the coordinator closes its end.
    with suppress(EOFError):
        connection.recv()


def _receive(system: ChannelSystem, there: Any, answer: Connection, count: int) -> None:
    system.prepare()
    answer.send("ready")
    answer.recv()
    for _ in range(count):
        there.get()
    answer.send("read")
    # Stays idle, with the memory that it keeps, until the sender ends.
    with suppress(EOFError):
        answer.recv()
