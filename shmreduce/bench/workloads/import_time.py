"""Measures how long an interpreter takes that imports a package.

May import ``measurements``, ``survivors`` and :mod:`shmreduce.fresh_process`.
"""

from __future__ import annotations

import subprocess
import sys
import time
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING

from shmreduce.bench.measurements import Measurement
from shmreduce.fresh_process import RunFailedError

if TYPE_CHECKING:
    from shmreduce.bench.survivors import Survivors

__all__ = ["BARE", "REFERENCES", "ROW", "installed_packages", "measure_import_time"]

BARE = "bare Python"
ROW = "start to end"

_STATEMENTS = {
    BARE: "pass",
    "shmreduce": "import shmreduce",
    "multiprocessing": "import multiprocessing.connection",
    "numpy": "import numpy",
    "torch": "import torch.multiprocessing",
}
REFERENCES = (BARE, "numpy")
"""What is measured for comparison, and is none of the systems."""
_PATIENCE = 60.0


def measure_import_time(survivors: Survivors, rounds: int) -> list[Measurement]:
    """Time interpreters from start to end, in turn."""
    rows = {name: Measurement(survivors.workload, name, ROW, "s") for name in survivors.names}

    def time_one(name: str, *, counts: bool) -> None:
        seconds = _run(_STATEMENTS[name])
        if counts:
            rows[name].samples.append(seconds)

    for number in range(rounds + 1):
        for name in survivors.in_turn(number):
            # Importing it is so slow that three samples are enough.
            if name == "torch" and number > 3:
                continue
            # The first time is not counted: it reads files that are not in memory yet.
            survivors.attempt(name, partial(time_one, name, counts=number > 0))
    return [rows[name] for name in survivors.names]


def installed_packages() -> list[str]:
    """List what can be imported here."""
    return [name for name in _STATEMENTS if name == BARE or find_spec(name) is not None]


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
