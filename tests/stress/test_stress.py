"""The stress itself, and the stress with the rules of reuse broken on purpose.

A seed replays the choices of a run; instants at which processes are killed are as exact as
the machine's clock and load allow.
"""

from __future__ import annotations

import itertools
import json
import time
from typing import TYPE_CHECKING

import psutil
import pytest

from shmreduce.memory.inspection import SegmentState, list_segments
from shmreduce.memory.sweep import sweep
from shmreduce.strategies import find_strategy
from tests.stress.breaking import BREAKS
from tests.stress.programs import SECONDS, SEED, SLACK, run_stress

if TYPE_CHECKING:
    from pathlib import Path

RUNS = (
    ("fork", "file_descriptor"),
    ("fork", "file_system"),
    ("spawn", "file_descriptor"),
)
_BROKEN_SECONDS = 20.0
_PATIENCE = 30.0
"""Seconds until what a run has left is left for good."""


@pytest.mark.timeout(SECONDS + 2 * SLACK)
@pytest.mark.parametrize(("method", "strategy"), RUNS)
def test_no_array_is_ever_overwritten_or_lost(method: str, strategy: str, tmp_path: Path) -> None:
    """Whoever sends, holds, forwards, forks, drops, lends or dies, every array keeps its
    bytes, messages are lost only with killed processes, and nothing is left.
    """
    seconds = SECONDS / len(RUNS)
    began = time.monotonic()
    report = run_stress(tmp_path, seconds, "--method", method, "--strategy", strategy)
    assert not report["bad"], f"seed {SEED}: {json.dumps(report['bad'], indent=1)}"
    assert report["counts"]["checks"] > 100
    assert report["counts"]["forks"] > 0
    # Workers that are spawned may come too late for a short run.
    assert method != "fork" or report["counts"]["made where others were"] > 0
    pids = set(report["pids"])
    assert [each for each in pids if psutil.pid_exists(each)] == []
    assert _swept(tmp_path) == []
    assert _left(pids, began) == []


def _left(pids: set[int], began: float) -> list[SegmentState]:
    """Return the segments that processes of a run have made, or have open, for long.

    An actor that is killed in the last round may leave a forked child, which ends soon.
    What is older than the run is of others that had the same numbers.
    """
    deadline = time.monotonic() + _PATIENCE
    while True:
        left = [
            segment
            for segment in list_segments()
            if (segment.owner in pids or pids & set(segment.holders))
            and segment.age < time.monotonic() - began
        ]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.05)


def _swept(folder: Path) -> list[Path]:
    """Return what is left after the next user has swept, as every user does.

    The last process of a run may have been killed, and a file that was not
    finished counts as left behind only after a while.
    """
    strategy = find_strategy("file_system")
    deadline = time.monotonic() + _PATIENCE
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SHMREDUCE_DIRECTORY", str(folder))
        while True:
            sweep(strategy)
            left = list(folder.iterdir())
            if not left or time.monotonic() > deadline:
                return left
            time.sleep(0.05)


BREAKS_OFF = """
import sys
from tests.stress.pooled import PoolUser
from tests.stress.run import main

def fail(*_):
    raise ArithmeticError("while others are at work")

PoolUser.finish = fail
sys.exit(main())
"""


def test_a_round_that_breaks_off_says_why_and_nothing_else(tmp_path: Path) -> None:
    """What the other actors still have at that moment is not taken for what they left."""
    report = run_stress(tmp_path, 10.0, seed=2, program=("-c", BREAKS_OFF))
    # Its memory is that of a dead process, which others have.
    assert report["counts"]["kills"] > 0
    (bad,) = report["bad"]
    assert "while others are at work" in bad["error"]


@pytest.mark.timeout(_BROKEN_SECONDS + 2 * SLACK)
@pytest.mark.parametrize("name", BREAKS)
def test_the_stress_notices_a_broken_rule(name: str, tmp_path: Path) -> None:
    """With one rule of reuse broken, the stress finds arrays with others' bytes."""
    end = time.monotonic() + _BROKEN_SECONDS
    found: dict[str, int] = {}
    for seed in itertools.count(SEED):
        left = end - time.monotonic()
        if left <= 0 or "mismatch" in found:
            break
        # One run in thirty ends by a StaleHandleError before an array is looked at: a
        # block is asked for that has been given to somebody else.
        report = run_stress(tmp_path, left, "--until-bad", seed=seed, broken=name)
        found = report["found"]
    assert "mismatch" in found, found
