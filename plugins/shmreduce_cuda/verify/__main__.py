"""Verifies the plugin against the driver and devices of this machine.

``python -m shmreduce_cuda.verify`` runs each case in its own process, with a time limit,
and prints a table or JSON. May import the plugin and this package.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict, replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from shmreduce_cuda.driver import unusable_reason
from shmreduce_cuda.verify import facts, libraries, timing, transfers
from shmreduce_cuda.verify.outcomes import (
    Case,
    Outcome,
    Scale,
    SkippedCaseError,
    UnexpectedResultError,
)

CASES: list[Case] = [*facts.CASES, *transfers.CASES, *libraries.CASES, *timing.CASES]
QUICK = Scale(trials=12, sends=100, messages=10, largest=1 << 24, busy=1 << 18)
_PACKAGES = (
    "shmreduce",
    "numpy",
    "cupy-cuda12x",
    "cupy-cuda13x",
    "numba",
    "numba-cuda",
    "torch",
    "jax",
)


def main() -> int:
    """Run the cases that the command line asks for; return the exit status."""
    options = _read_options()
    scale = QUICK if options.quick else Scale()
    if options.case is not None:
        _run_here(next(case for case in CASES if case.name == options.case), scale)
        return 0
    reason = unusable_reason()
    if reason is not None:
        print(reason, file=sys.stderr)
        return 2
    wanted = None if options.only is None else options.only.split(",")
    outcomes = []
    for case in CASES:
        if wanted is None or case.name in wanted:
            outcomes.append(_run_apart(case, quick=options.quick))
            if not options.json:
                _print(outcomes[-1])
    report = {"environment": _environment(), "cases": [asdict(each) for each in outcomes]}
    text = json.dumps(report, indent=2)
    if options.output is not None:
        options.output.write_text(text + "\n")
    if options.json:
        print(text)
    else:
        count = dict.fromkeys(("passed", "failed", "skipped"), 0)
        for each in outcomes:
            count[each.status] += 1
        print(", ".join(f"{number} {status}" for status, number in count.items()))
    return 1 if any(each.status == "failed" for each in outcomes) else 0


def _read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m shmreduce_cuda.verify",
        description="Exit status 0 if nothing failed, 1 if a case did, 2 without a driver.",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="write the JSON to a file, too"
    )
    parser.add_argument("--quick", action="store_true", help="few trials, small arrays")
    names = ", ".join(case.name for case in CASES)
    parser.add_argument("--only", metavar="NAME[,NAME...]", help=f"some of: {names}")
    parser.add_argument("--case", choices=[case.name for case in CASES], help=argparse.SUPPRESS)
    options = parser.parse_args()
    unknown = set((options.only or CASES[0].name).split(",")) - {case.name for case in CASES}
    if unknown:
        parser.error(f"there is no case {sorted(unknown)}; there are {names}")
    return options


def _run_here(case: Case, scale: Scale) -> None:
    """Run a case in this process; print its outcome as JSON on the last line."""
    outcome = Outcome(case.name, case.about, "passed")
    began = time.monotonic()
    try:
        outcome = replace(outcome, figures=case.run(scale))
    except SkippedCaseError as error:
        outcome = replace(outcome, status="skipped", detail=str(error))
    except UnexpectedResultError as error:
        outcome = replace(outcome, status="failed", detail=str(error))
    except Exception as error:
        detail = f"{type(error).__name__}: {error}"
        outcome = replace(outcome, status="failed", detail=detail)
    print(json.dumps(asdict(replace(outcome, seconds=round(time.monotonic() - began, 2)))))


def _run_apart(case: Case, *, quick: bool) -> Outcome:
    """Run a case in its own process, which is killed if it takes too long."""
    command = [sys.executable, "-m", "shmreduce_cuda.verify", "--case", case.name]
    if quick:
        command.append("--quick")
    child = subprocess.Popen(  # noqa: S603 - this very program
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        output, errors = child.communicate(timeout=case.timeout)
    except subprocess.TimeoutExpired:
        # The whole group: also the processes that it has started.
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.communicate()
        detail = f"not done within {case.timeout:.0f} s"
        return Outcome(case.name, case.about, "failed", detail, seconds=case.timeout)
    lines = output.splitlines()
    if child.returncode or not lines:
        last = errors.strip().splitlines()[-1:] or ["no output"]
        detail = f"exit status {child.returncode}: {last[0]}"
        return Outcome(case.name, case.about, "failed", detail)
    outcome = Outcome(**json.loads(lines[-1]))
    # Not the line of code that Python prints below a warning.
    said = [line for line in errors.splitlines() if line.strip() and not line.startswith(" ")]
    if outcome.status == "failed" and said:
        # Perhaps a process that the case had started has printed the reason.
        outcome = replace(outcome, detail=f"{outcome.detail} ({said[-1]})")
    return outcome


def _print(outcome: Outcome) -> None:
    found = outcome.detail or ", ".join(f"{key}: {each}" for key, each in outcome.figures.items())
    print(f"{outcome.status:8}{outcome.name:15}{outcome.seconds:7.2f} s  {outcome.about}")
    if found:
        print(f"{'':8}{'':15}{'':9}  {found}")


def _environment() -> dict[str, Any]:
    packages = {}
    for name in _PACKAGES:
        with suppress(PackageNotFoundError):
            packages[name] = version(name)
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "python": platform.python_version(),
        "kernel": platform.release(),
        "packages": packages,
        **facts.machine(),
    }


if __name__ == "__main__":
    sys.exit(main())
