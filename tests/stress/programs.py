"""Runs the stresses, each in processes of its own.

``SHMREDUCE_STRESS_SECONDS`` says for how long all runs of one kind together last, and
``SHMREDUCE_STRESS_SEED`` replays the choices of a run.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

from tests.stress.breaking import VARIABLE

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["SECONDS", "SEED", "SLACK", "run_stress"]

SECONDS = float(os.environ.get("SHMREDUCE_STRESS_SECONDS", "60"))
SEED = int(os.environ.get("SHMREDUCE_STRESS_SEED", "1"))
SLACK = 100.0
"""Seconds that a run may take longer than it should."""


def run_stress(
    folder: Path,
    seconds: float,
    *arguments: str,
    seed: int = SEED,
    broken: str = "",
    program: tuple[str, ...] = ("-m", "tests.stress.run"),
) -> dict[str, Any]:
    """Return the report of one run, in processes of its own."""
    environment = {**os.environ, "SHMREDUCE_DIRECTORY": str(folder), VARIABLE: broken}
    command = [sys.executable, *program, "--seed", str(seed), "--seconds", str(seconds)]
    command += arguments
    finished = subprocess.run(
        command,
        env=environment,
        capture_output=True,
        text=True,
        timeout=seconds + SLACK,
        check=False,
    )
    lines = finished.stdout.splitlines()
    assert lines, f"no report, exit code {finished.returncode}:\n{finished.stderr[-3000:]}"
    report: dict[str, Any] = json.loads(lines[-1])
    report["errors"], report["exit"] = finished.stderr, finished.returncode
    return report
