"""Counts the descriptors and mappings that many live shared arrays take.

This is done with a low limit of open files, since the default limits of containers and
desktops are low compared with the number of arrays that programs keep.

May import ``measurements`` and ``systems`` of the benchmarks,
:mod:`shmreduce.fresh_process` and NumPy.
"""

from __future__ import annotations

import resource
import time
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shmreduce.bench.measurements import Measurement, Unit
from shmreduce.fresh_process import FreshProcess, RunFailedError

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from shmreduce.bench.systems.channels import ChannelSystem

__all__ = ["DESCRIPTOR_LIMIT", "measure_live_arrays"]

DESCRIPTOR_LIMIT = 256
"""RLIMIT_NOFILE of sender and receiver."""

_ARRAY_BYTES = 4096
_BATCH = 1000
"""Arrays in one message."""


def measure_live_arrays(workload: str, system: ChannelSystem, count: int) -> list[Measurement]:
    """Share ``count`` arrays of 4 KiB, send them all, and count while both sides hold them.

    Raises
    ------
    RunFailedError
        If the system fails.
    """
    with FreshProcess(system.name, _serve, system, count) as process:
        found: dict[str, tuple[Unit, float]] = process.receive()
    return [
        Measurement(workload, system.name, row, unit, [value])
        for row, (unit, value) in found.items()
    ]


def _serve(connection: Connection, system: ChannelSystem, count: int) -> None:
    import numpy as np

    resource.setrlimit(resource.RLIMIT_NOFILE, (DESCRIPTOR_LIMIT, DESCRIPTOR_LIMIT))
    system.prepare()
    context = system.context()
    there = system.queue(_BATCH * _ARRAY_BYTES)
    answer, theirs = get_context("spawn").Pipe(duplex=False)
    receiver = context.Process(target=_receive, args=(system, there, theirs, count), daemon=True)
    receiver.start()
    theirs.close()

    started = time.perf_counter()
    source = np.empty(_ARRAY_BYTES // 8)
    arrays = []
    for number in range(count):
        source[:] = number
        arrays.append(system.shared(source.copy()))
    shared = time.perf_counter()
    for first in range(0, count, _BATCH):
        there.put(arrays[first : first + _BATCH])
    # EOFError if the receiver dies, which closes its end of the pipe.
    checksum, descriptors, mappings = answer.recv()
    sent = time.perf_counter()
    if checksum != sum(range(count)):
        raise RunFailedError(
            f"{system.name} delivered other values than were sent",
            process=system.name,
            reason="wrong values",
        )
    connection.send(
        {
            "descriptors, sender": ("count", _descriptors()),
            "descriptors, receiver": ("count", descriptors),
            "mappings, sender": ("count", _mappings()),
            "mappings, receiver": ("count", mappings),
            "time to share one": ("s", (shared - started) / count),
            "time to send one": ("s", (sent - shared) / count),
        }
    )


def _receive(system: ChannelSystem, there: Any, answer: Connection, count: int) -> None:
    system.prepare()
    arrays: list[Any] = []
    while len(arrays) < count:
        arrays += there.get()
    checksum = sum(int(system.payload(array)[-1]) for array in arrays)
    answer.send((checksum, _descriptors(), _mappings()))


def _descriptors() -> int:
    # Without the descriptor by which iterdir() reads the folder.
    return len(list(Path("/proc/self/fd").iterdir())) - 1


def _mappings() -> int:
    """Count this process's mappings of shared memory."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sum("/memfd:" in line or "/dev/shm/" in line for line in lines)  # noqa: S108
