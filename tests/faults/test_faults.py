"""Seeded runs with faults, in a short form; ``python -m tests.faults.run`` plays thousands.

``SHMREDUCE_FAULT_RUNS`` says how many of each strategy are played here, and
``SHMREDUCE_FAULT_SEED`` which.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.faults.breaking import BREAKS
from tests.faults.plan import make_plan
from tests.faults.points import GROUPS, code_of
from tests.faults.run import privately

RUNS = int(os.environ.get("SHMREDUCE_FAULT_RUNS", "6"))
SEED = int(os.environ.get("SHMREDUCE_FAULT_SEED", "1"))
_ROOT = Path(__file__).parent.parent.parent
_PATIENCE = 90.0 + 10.0 * RUNS


def run(*arguments: str, patience: float = _PATIENCE) -> subprocess.CompletedProcess[str]:
    """Run a module of the harness, with pids and a /dev/shm of its own where that is allowed."""
    return subprocess.run(
        privately([sys.executable, "-m", *arguments]),
        cwd=_ROOT,
        capture_output=True,
        text=True,
        timeout=patience,
        check=False,
    )


@pytest.mark.timeout(_PATIENCE + 20.0)
def test_nothing_is_lost_corrupted_stuck_or_left() -> None:
    """Whoever is killed, stopped or refused by the kernel: all other messages arrive as
    they were sent, everybody ends, and nothing is left.
    """
    finished = run("tests.faults.run", "--runs", str(RUNS), "--seed", str(SEED))
    assert finished.returncode == 0, finished.stdout + finished.stderr[-6000:]
    table = finished.stdout.splitlines()
    assert len(table) == 4, finished.stdout


@pytest.fixture(scope="module")
def found() -> Any:
    """What the harness found with each guard and without it."""
    finished = run("tests.faults.breaking", patience=150.0)
    assert finished.returncode == 0, finished.stderr[-3000:]
    return json.loads(finished.stdout)


@pytest.mark.timeout(170)
@pytest.mark.parametrize("name", BREAKS)
def test_the_harness_notices_a_missing_guard(name: str, found: Any) -> None:
    """With one guard taken away the harness finds what it stands for, and nothing with it."""
    assert found[name]["intact"] == [], found[name]["facts"]
    assert BREAKS[name].finds in found[name]["broken"], found[name]


@pytest.mark.parametrize("group", GROUPS)
def test_points_name_functions_that_there_are(group: str) -> None:
    """Each named point is a function of the product or of the standard library."""
    for point in GROUPS[group]:
        assert code_of(point).co_name in point


def test_a_plan_can_be_replayed() -> None:
    """The same seed and number give the same plan, in every process."""
    code = "from tests.faults.plan import make_plan; print(make_plan(5, 77))"
    there = subprocess.run(
        [sys.executable, "-c", code],
        cwd=_ROOT,
        capture_output=True,
        text=True,
        timeout=_PATIENCE,
        check=True,
    )
    assert there.stdout.strip() == str(make_plan(5, 77))
    assert make_plan(5, 77) != make_plan(5, 78)
