"""Forks, interrupts, no room, the end of the interpreter: each in an interpreter of its own."""

from __future__ import annotations

import pytest

from tests.born.allocator import LARGE, in_fresh_interpreter
from tests.born.scenarios import RUN, SCENARIOS

pytestmark = pytest.mark.usefixtures("allocator")

SHOWN = {"module": 1, "cycle": 2, "sys": 4, "inside": 5}


@pytest.mark.parametrize("name", SCENARIOS)
def test_scenarios_end_well(name: str) -> None:
    """What the scenario of this name says holds, and nothing is complained of."""
    done = in_fresh_interpreter(RUN, name)
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    if name == "arrays_live_to_the_very_end":
        shown = [line.split() for line in done.stdout.splitlines()]
        assert {name: int(last) for name, last, _ in shown} == SHOWN
        assert all(int(count) == LARGE for _, _, count in shown)
