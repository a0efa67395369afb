"""Plays seeded fault runs: ``python -m tests.faults.run --runs 2000 --seed 1``.

Prints one table. Each run is also a line of JSON in the journal, so that what
was begun can be gone on with: runs that stand in the journal are not played
again. ``--only NUMBER`` replays one run and prints all about it.

As root it plays in namespaces of its own (``unshare(1)``): an empty /dev/shm,
and pids that can be given again at once. Otherwise pids are not reused.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.faults.leader import PRIVATE_PIDS
from tests.faults.plan import SYSTEMS, make_plan
from tests.faults.table import table
from tests.faults.watcher import Outcome, Watcher

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["main", "privately", "read_journal"]

_UNSHARE = ["unshare", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child"]


def privately(command: list[str]) -> list[str]:
    """Return how to run a command with pids and a /dev/shm of its own, if that is allowed."""
    mount = "mount -t tmpfs tmpfs /dev/shm"
    try:
        subprocess.run([*_UNSHARE, "sh", "-c", mount], check=True, capture_output=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return command
    return [
        *_UNSHARE,
        "env",
        f"{PRIVATE_PIDS}=1",
        "sh",
        "-c",
        f'{mount} && exec "$@"',
        "sh",
        *command,
    ]


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.run", description=__doc__)
    parser.add_argument("--runs", type=int, default=100, help="of each strategy")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--against", choices=[each for each in SYSTEMS if each != "shmreduce"])
    parser.add_argument("--strategy", action="append", help="default: all that there are")
    parser.add_argument("--shard", default="0/1", metavar="K/N", help="every Nth run, from K on")
    parser.add_argument("--jobs", type=int, default=1, help="how many shards to play at once")
    parser.add_argument("--journal", type=Path, help="file with a line for each run")
    parser.add_argument("--table", action="store_true", help="only print the journal's table")
    parser.add_argument("--only", type=int, metavar="NUMBER", help="play this run alone")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Play runs; return 0 if nothing was lost, corrupted, left or stuck."""
    options = _options(arguments)
    if options.table:
        outcomes = list(read_journal(options.journal))
        sys.stdout.write(table(outcomes) + "\n")
        return 0
    if options.jobs > 1:
        # Each shard in a /dev/shm of its own: at the end of a run it removes what it finds.
        _play_shards(options)
    elif PRIVATE_PIDS not in os.environ:
        given = list(sys.argv[1:] if arguments is None else arguments)
        command = privately([sys.executable, "-m", "tests.faults.run", *given])
        if command[0] == _UNSHARE[0]:
            return subprocess.run(command, check=False).returncode
    outcomes = list(_play(options)) if options.jobs == 1 else []
    if options.journal is not None:
        outcomes = list(read_journal(options.journal))
    sys.stdout.write(table(outcomes) + "\n")
    return 0 if all(each.clean for each in outcomes) else 1


def _play_shards(options: argparse.Namespace) -> None:
    """Play every shard in a process of its own, into journals that are put together."""
    journal = options.journal or Path(f"faults-{os.getpid()}.jsonl")
    options.journal = journal
    command = [sys.executable, "-m", "tests.faults.run", "--runs", str(options.runs)]
    command += ["--seed", str(options.seed), "--journal", str(journal)]
    for strategy in options.strategy or ():
        command += ["--strategy", strategy]
    if options.against:
        command += ["--against", options.against]
    shards = [
        subprocess.Popen(
            [*command, "--shard", f"{number}/{options.jobs}"], stdout=subprocess.DEVNULL
        )
        for number in range(options.jobs)
    ]
    for shard in shards:
        shard.wait()


def _play(options: argparse.Namespace) -> Iterator[Outcome]:
    system = options.against or "shmreduce"
    strategies = options.strategy or SYSTEMS[system]
    shard, shards = (int(each) for each in options.shard.split("/"))
    numbers = range(shard, options.runs, shards) if options.only is None else [options.only]
    known = {
        (each.seed, each.number, each.system, each.strategy)
        for each in (read_journal(options.journal) if options.journal else ())
    }
    began = time.monotonic()
    # Others have no bounds of their own on what they wait for.
    with Watcher(run_seconds=60.0 if system == "shmreduce" else 12.0) as watcher:
        for done, number in enumerate(numbers, 1):
            for strategy in strategies:
                if (options.seed, number, system, strategy) in known:
                    continue
                plan = make_plan(options.seed, number, system, strategy)
                outcome = watcher.run(plan)
                yield outcome
                if options.journal is not None:
                    with options.journal.open("a") as file:
                        file.write(json.dumps(asdict(outcome)) + "\n")
                if options.only is not None or (not outcome.clean and system == "shmreduce"):
                    sys.stderr.write(f"{plan}\n{outcome}\n")
            if done % 50 == 0:
                spent = time.monotonic() - began
                sys.stderr.write(f"{done} of {len(numbers)} in {spent:.0f} s\n")


def read_journal(path: Path) -> Iterator[Outcome]:
    """Yield the runs of a journal."""
    if not path.exists():
        return
    for line in path.read_text().splitlines():
        facts: dict[str, Any] = json.loads(line)
        yield Outcome(**facts)


if __name__ == "__main__":
    sys.exit(main())
