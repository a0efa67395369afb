"""The stress of several threads in one process; see ``tests.stress.threads``.

Its seed replays the choices of a run; not the instants at which threads take turns, so
another run with it may go well.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from tests.conftest import STRATEGIES
from tests.stress.programs import SECONDS, SEED, SLACK, run_stress

if TYPE_CHECKING:
    from pathlib import Path

_SECONDS = min(10.0, SECONDS / 6)
_PROGRAM = ("-W", "error", "-m", "tests.stress.threads")


@pytest.mark.timeout(_SECONDS + 2 * SLACK)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_threads_of_one_process_are_not_in_each_others_way(strategy: str, tmp_path: Path) -> None:
    """Whatever others close, give back or fork meanwhile, every array keeps its bytes, no
    thread and no destructor meets an error, and nothing is left.
    """
    report = run_stress(tmp_path, _SECONDS, "--strategy", strategy, program=_PROGRAM)
    assert not report["bad"], f"seed {SEED}: {json.dumps(report['bad'], indent=1)}"
    assert (report["exit"], report["errors"]) == (0, "")
    for what in ("received", "sent", "forks", "failed", "ended"):
        assert report["counts"][what] > 0
