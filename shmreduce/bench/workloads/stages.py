"""Measures each stage of a message, to find where a regression is.

May import settings, ``measurements``, ``payloads``, ``fresh_process`` and the public names
of shmreduce. It measures what public functions do: after ``install()``, with a pipe of plain
multiprocessing and the functions that reducers call.
"""

from __future__ import annotations

import os
import pickle
import time
from functools import partial
from multiprocessing import get_context
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any

from shmreduce.bench.measurements import Measurement
from shmreduce.bench.payloads import make_payload, size_name
from shmreduce.fresh_process import FreshProcess

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from multiprocessing.connection import Connection

__all__ = ["STAGES", "measure_fork", "measure_stages"]

STAGES = ("reduce", "allocate", "copy", "send", "receive", "rebuild", "release")
"""The stages, in the order in which a message passes them."""

_WARM_UP = 5
"""Rounds that do not count."""
_MOST_REDUCED = 1 << 20
"""Bytes. ``reduce`` is a difference, of which the copy of a larger array leaves nothing."""
_FORKS = 20
"""How often a fork is timed."""


def measure_stages(workload: str, sizes: Sequence[int], rounds: int) -> list[Measurement]:
    """Time the stages of by-value and of shared arrays.

    ``reduce`` is pickling without the time of ``allocate`` and ``copy``; for large arrays it is
    less than the spread of ``copy``, and left out. ``receive`` does not include waiting for the
    message. The receiver is another process, since an array of
    the same process is rebuilt in another way.
    """
    measurements = []
    with FreshProcess("stages", _serve, rounds) as process:
        for size in sizes:
            for kind in ("fresh", "shared"):
                process.send((size, kind))
                stages: dict[str, list[float]] = process.receive()
                measurements += [
                    Measurement(
                        workload, stage, f"{size_name(size)} {kind}", "s", samples, nbytes=size
                    )
                    for stage, samples in stages.items()
                ]
    return measurements


def measure_fork(workload: str, count: int) -> list[Measurement]:
    """Time ``os.fork`` in a process with many arrays."""
    rows = []
    for name, what in (
        ("no arrays", "nothing"),
        (f"{count:,} arrays of NumPy", "arrays"),
        (f"{count:,} shared arrays", "blocks"),
    ):
        with FreshProcess(name, _serve_forks, what, count) as process:
            rows.append(Measurement(workload, "fork", name, "s", process.receive()))
    return rows


# The measuring process


def _serve(connection: Connection, rounds: int) -> None:
    import shmreduce

    shmreduce.install()
    context = get_context("spawn")
    here, there = context.Pipe()
    answer, theirs = context.Pipe(duplex=False)
    receiver = context.Process(target=_receive, args=(there, theirs), daemon=True)
    receiver.start()
    there.close()
    theirs.close()
    while True:
        try:
            size, kind = connection.recv()
        except EOFError:
            break
        source = make_payload("array", size)
        array = source if kind == "fresh" else shmreduce.share(source)
        stages: dict[str, list[float]] = {stage: [] for stage in STAGES}
        for number in range(rounds + _WARM_UP):
            found = _one(array, here, answer, copied=kind == "fresh")
            if number >= _WARM_UP:
                for stage, seconds in found.items():
                    stages[stage].append(seconds)
        connection.send({stage: samples for stage, samples in stages.items() if samples})
    here.close()
    receiver.join()


def _one(array: Any, here: Connection, answer: Connection, *, copied: bool) -> dict[str, float]:
    found = _allocate_and_copy(array) if copied else {}
    data, seconds = _timed(partial(ForkingPickler.dumps, array))
    if not copied or array.nbytes <= _MOST_REDUCED:
        found["reduce"] = max(0.0, seconds - sum(found.values()))
    _, found["send"] = _timed(partial(here.send_bytes, data))
    del data
    found.update(answer.recv())
    return found


def _allocate_and_copy(array: Any) -> dict[str, float]:
    """Do what the reducer of arrays does; nothing for an array that it would pickle."""
    from shmreduce import Message, copy_bytes
    from shmreduce.settings import inline_limit

    if array.nbytes < inline_limit(in_pipe=True):
        return {}
    message = Message()
    taken, allocating = _timed(partial(message.allocate, array.nbytes))
    if taken is None:
        return {}
    view, _ = taken
    _, copying = _timed(partial(copy_bytes, view, array))
    del view, taken
    message.rollback()
    return {"allocate": allocating, "copy": copying}


def _receive(there: Connection, answer: Connection) -> None:
    while True:
        try:
            there.poll(None)
            data, receiving = _timed(there.recv_bytes)
        except EOFError:
            break
        array, rebuilding = _timed(partial(pickle.loads, data))
        arrays = [array]
        del array
        _, releasing = _timed(arrays.clear)
        answer.send({"receive": receiving, "rebuild": rebuilding, "release": releasing})


def _timed(call: Callable[[], Any]) -> tuple[Any, float]:
    started = time.perf_counter()
    value = call()
    return value, time.perf_counter() - started


def _serve_forks(connection: Connection, what: str, count: int) -> None:
    import numpy as np

    import shmreduce

    shmreduce.install()
    if what == "blocks":
        arrays = [shmreduce.zeros(8) for _ in range(count)]
    else:
        arrays = [np.zeros(8) for _ in range(count if what == "arrays" else 0)]
    samples = []
    for _ in range(_FORKS):
        started = time.perf_counter()
        child = os.fork()
        if child == 0:
            os._exit(0)
        samples.append(time.perf_counter() - started)
        os.waitpid(child, 0)
    del arrays
    connection.send(samples)
