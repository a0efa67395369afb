"""The stress of new processes whose threads fork; see ``tests.stress.first_uses``.

A seed replays the choices of a process; not the instants at which its threads take turns, so
another run with it may go well.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from tests.conftest import STRATEGIES
from tests.stress.programs import SECONDS, SLACK, run_stress

if TYPE_CHECKING:
    from pathlib import Path

_SECONDS = min(5.0, SECONDS / 12)
_PROGRAM = ("-m", "tests.stress.first_uses")


@pytest.mark.timeout(_SECONDS + 2 * SLACK)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_first_use_beside_forks_goes_well_here_and_in_the_children(
    strategy: str, tmp_path: Path
) -> None:
    """No child waits for what a thread of its parent had begun, and arrays keep their bytes."""
    report = run_stress(tmp_path, _SECONDS, "--strategy", strategy, program=_PROGRAM)
    assert not report["bad"], json.dumps(report["bad"], indent=1)
    assert (report["exit"], report["errors"]) == (0, "")
    assert report["counts"]["ended"] > 0
