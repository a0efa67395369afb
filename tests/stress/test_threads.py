"""The stress of several threads in one process; see ``tests.stress.threads``.

``SHMREDUCE_STRESS_SEED`` replays the choices of a run; not the instants at which threads
take turns, so another run with it may go well.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.conftest import STRATEGIES

if TYPE_CHECKING:
    from pathlib import Path

SECONDS = min(10.0, float(os.environ.get("SHMREDUCE_STRESS_SECONDS", "60")) / 6)
SEED = int(os.environ.get("SHMREDUCE_STRESS_SEED", "1"))
_PATIENCE = 100.0


@pytest.mark.timeout(SECONDS + 2 * _PATIENCE)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_threads_of_one_process_are_not_in_each_others_way(strategy: str, tmp_path: Path) -> None:
    """Whatever others close, give back or fork meanwhile, every array keeps its bytes, no
    thread and no destructor meets an error, and nothing is left.
    """
    command = [sys.executable, "-W", "error", "-m", "tests.stress.threads"]
    command += ["--seed", str(SEED), "--seconds", str(SECONDS), "--strategy", strategy]
    finished = subprocess.run(
        command,
        env={**os.environ, "SHMREDUCE_DIRECTORY": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=SECONDS + _PATIENCE,
        check=False,
    )
    lines = finished.stdout.splitlines()
    assert lines, f"no report, exit code {finished.returncode}:\n{finished.stderr[-3000:]}"
    report = json.loads(lines[-1])
    assert not report["bad"], f"seed {SEED}: {json.dumps(report['bad'], indent=1)}"
    assert (finished.returncode, finished.stderr) == (0, "")
    for what in ("received", "sent", "forks", "failed", "ended"):
        assert report["counts"][what] > 0
