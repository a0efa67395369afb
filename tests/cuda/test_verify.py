"""The script that verifies the plugin on a GPU works, unchanged, on the stand-in."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from shmreduce_cuda.verify import __main__ as script
from shmreduce_cuda.verify import libraries
from tests.cuda.conftest import standing_in

if TYPE_CHECKING:
    from pathlib import Path

    from tests.cuda.conftest import Standin

LIBRARIES = {case.name for case in libraries.CASES}
# What takes longest, apart, so that both halves end at about the same time.
SLOW = {"round trip", "loads", "order", "many", "receiver dies", "sender dies", "latency"}


def start(*options: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "shmreduce_cuda.verify", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )


def finish(process: subprocess.Popen[str], status: int = 0) -> str:
    output, errors = process.communicate(timeout=110)
    assert process.returncode == status, output + errors
    return output


def test_every_case_passes(standin_library: Path, tmp_path: Path) -> None:
    """All cases that need no library pass, none leaves anything undefined, and the JSON
    says on what they ran.
    """
    names = {case.name for case in script.CASES}
    halves = [names - SLOW, SLOW]
    running = []
    for number, half in enumerate(halves):
        with standing_in(standin_library, tmp_path / f"device{number}") as standin:
            options = ("--quick", "--json", "--only", ",".join(half))
            running.append((standin, start(*options, STANDIN_CUDA_NO_LOG="1")))
    cases: dict[str, Any] = {}
    for standin, process in running:
        report = json.loads(finish(process))
        assert report["environment"]["devices"][0]["name"] == "Stand-in 0"
        assert report["environment"]["packages"]["shmreduce"]
        cases |= {case["name"]: case for case in report["cases"]}
        assert not standin.violations()
    assert set(cases) == names
    assert {name for name, case in cases.items() if case["status"] == "failed"} == set()
    assert {name for name, case in cases.items() if case["status"] == "skipped"} <= LIBRARIES
    assert cases["views"]["figures"] == {"opened": 1, "closed": 1}
    assert cases["fork"]["figures"] == {"code": 3}


def test_a_case_that_fails_is_told(standin: Standin, tmp_path: Path) -> None:
    """The exit status is 1, the table has the reason, and so has the file."""
    file = tmp_path / "report.json"
    process = start(
        "--only", "refusals,views", "--output", str(file), STANDIN_CUDA_FAIL="cuMemAlloc_v2:2"
    )
    output = finish(process, 1)
    assert "failed  views" in output
    assert "CUDA_ERROR_OUT_OF_MEMORY" in output
    assert "passed  refusals" in output
    assert "1 passed, 1 failed, 0 skipped" in output
    found = {case["name"]: case["status"] for case in json.loads(file.read_text())["cases"]}
    assert found == {"refusals": "passed", "views": "failed"}
    assert standin.folder.exists()


def test_a_case_that_hangs_is_ended(standin: Standin) -> None:
    """A case has a time limit; the processes that it started end with it."""
    case = next(each for each in script.CASES if each.name == "many")
    outcome = script._run_apart(replace(case, timeout=0.3), quick=False)
    assert (outcome.status, outcome.detail) == ("failed", "not done within 0 s")
    assert standin.folder.exists()


def test_without_a_driver_the_exit_status_is_2(standin: Standin) -> None:
    """The reason is on standard error."""
    process = start("--only", "views", CUDA_VISIBLE_DEVICES="")
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "NO_DEVICE" in errors
    assert standin.folder.exists()


def test_unknown_cases_are_refused() -> None:
    """A name that does not exist is an error of the command line, which lists the others."""
    process = start("--only", "viewz")
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "there is no case ['viewz']" in errors
    assert "receiver dies" in errors


@pytest.mark.parametrize("case", script.CASES, ids=lambda case: case.name)
def test_cases_say_what_they_are_about(case: Any) -> None:
    """Each has a name that a comma does not split, a sentence, and a time limit."""
    assert case.name
    assert "," not in case.name
    assert len(case.about) > 15
    assert 0 < case.timeout <= 600
