"""Runs the stress of first uses: ``python -m tests.stress.first_uses --seed 1 --seconds 10``.

It starts one new process after the other, some at a time, each with a seed of its own. The
threads of such a process use shared memory for the first time while others of them fork, and
their children do the same. So what is imported late, made late, or prepared for a later fork,
meets forks. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass

from tests.stress.first_use import SECONDS
from tests.stress.reports import leave

__all__ = ["main"]

_AT_A_TIME = 3
_SEEDS = 100_000
"""As many as one run may need."""
_LONGEST = SECONDS / 2
"""Seconds after which a process and its children have to say where they are."""
_PATIENCE = 5.0
"""Seconds that they have to print that."""
_PAUSE = 0.01


@dataclass
class Running:
    """A process that has been started."""

    seed: int
    process: subprocess.Popen[bytes]
    began: float

    def has_ended(self) -> bool:
        """Return whether it has; one that hangs prints its stacks, and is ended."""
        if self.process.poll() is not None:
            return True
        if time.monotonic() - self.began <= _LONGEST:
            return False
        # Its children, too: the signal ends each of them when it has printed its stacks.
        os.killpg(self.process.pid, signal.SIGALRM)
        end = time.monotonic() + _PATIENCE
        while self._group_lives() and time.monotonic() < end:
            time.sleep(_PAUSE)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        return True

    def _group_lives(self) -> bool:
        self.process.poll()
        try:
            os.killpg(self.process.pid, 0)
        except ProcessLookupError:
            return False
        return True

    def complaint(self) -> str:
        """Return what is wrong with it, after its end; an empty string if all was well."""
        # If children are left, they have the pipe until their alarms end them.
        output, _ = self.process.communicate()
        code = self.process.returncode
        if not code and not output:
            return ""
        return f"seed {self.seed} ended with {code}: {output.decode(errors='replace')[-5000:]}"


def start(seed: int, strategy: str) -> Running:
    """Start a process."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.stress.first_use"]
    process = subprocess.Popen(
        [*command, "--seed", str(seed), "--strategy", strategy],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    return Running(seed, process, time.monotonic())


def run(first_seed: int, strategy: str, seconds: float) -> dict[str, object]:
    """Start processes for some seconds, and return what has become of them."""
    end = time.monotonic() + seconds
    seeds = itertools.count(first_seed)
    running: list[Running] = []
    bad: list[str] = []
    ended = 0
    while running or (time.monotonic() < end and not bad):
        while len(running) < _AT_A_TIME and time.monotonic() < end and not bad:
            running.append(start(next(seeds), strategy))
        for each in [each for each in running if each.has_ended()]:
            running.remove(each)
            ended += 1
            bad += filter(None, [each.complaint()])
        time.sleep(_PAUSE)
    return {"seed": first_seed, "bad": bad, "counts": {"ended": ended}}


def main() -> int:
    """Run, print the report, and say by the exit code whether all was well."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--strategy", default="file_descriptor")
    options = parser.parse_args()
    return leave(run(options.seed * _SEEDS, options.strategy, options.seconds))


if __name__ == "__main__":
    sys.exit(main())
