"""Measures how long an interpreter takes that imports a package.

May import ``measurements`` and :mod:`shmreduce.fresh_process`.
"""

from __future__ import annotations

import subprocess
import sys
import time
from importlib.util import find_spec

from shmreduce.bench.measurements import Measurement
from shmreduce.fresh_process import RunFailedError

__all__ = ["BARE", "ROW", "measure_import_time"]

BARE = "bare Python"
ROW = "start to end"

_STATEMENTS = {
    BARE: "pass",
    "shmreduce": "import shmreduce",
    "multiprocessing": "import multiprocessing.connection",
    "numpy": "import numpy",
}
_PATIENCE = 60.0


def measure_import_time(workload: str, rounds: int) -> list[Measurement]:
    """Time interpreters from start to end, in turn.

    Raises
    ------
    RunFailedError
        If one fails or takes more than a minute.
    """
    statements = dict(_STATEMENTS)
    if find_spec("torch") is not None:
        statements["torch"] = "import torch.multiprocessing"
    rows = {name: Measurement(workload, name, ROW, "s") for name in statements}
    for number in range(rounds + 1):
        # The order is reversed every other time: after a large package caches are cold.
        for name, statement in list(statements.items())[:: 1 if number % 2 else -1]:
            # Importing it is so slow that three samples are enough.
            if name == "torch" and number > 3:
                continue
            seconds = _run(statement)
            # The first time is not counted: it reads files that are not in memory yet.
            if number > 0:
                rows[name].samples.append(seconds)
    return list(rows.values())


def _run(statement: str) -> float:
    started = time.perf_counter()
    try:
        # With captured output, since waiting for its end is exact. Waiting for a process with
        # a timeout checks only every few milliseconds.
        subprocess.run(  # noqa: S603 - the statements are those above
            [sys.executable, "-c", statement], check=True, timeout=_PATIENCE, capture_output=True
        )
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        raise _failed(statement, error) from error
    return time.perf_counter() - started


def _failed(statement: str, error: Exception) -> RunFailedError:
    return RunFailedError(
        f"`python -c {statement!r}` failed: {error}", process=statement, reason=str(error)
    )
