"""Takes guards away on purpose, so that tests can see the harness notice.

``python -m tests.faults.breaking`` plays, for each guard, runs in which it
matters, with it and without it, and prints what was found as JSON.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from shmreduce.memory import process_memory, segment_creation
from shmreduce.memory.message import Message
from shmreduce.memory.segment import Segment
from shmreduce.packets import Packet
from shmreduce_filesystem.strategy import FileSystemStrategy
from tests.faults.plan import Injection, Plan, Strike
from tests.stress import breaking

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.faults.watcher import Outcome

__all__ = ["BREAKS", "Break", "apply_break", "findings"]

_TRIES = 8
_HANG_SECONDS = 5.0
_LEAK_SECONDS = 1.0


@dataclass(frozen=True)
class Break:
    """One guard.

    Parameters
    ----------
    apply : callable
        Takes it away in the process that calls it.
    plan : Plan
        Runs in which that shows.
    finds : str
        Which of the :func:`findings` it must cause.
    """

    apply: Callable[[], None]
    plan: Plan
    finds: str


def _call_everybody_dead() -> None:
    patch: Any = Segment
    patch.holder_alive = lambda segment, word: word == segment.importer


def _keep_leases_of_the_dead() -> None:
    patch: Any = Segment
    patch._drop_dead = lambda _segment, _block: None


def _send_no_descriptors() -> None:
    patch: Any = Packet
    patch.descriptors = lambda _packet: []


def _forget_to_roll_back() -> None:
    patch: Any = Message
    patch.rollback = lambda message: message._taken.clear()


def _leave_files_open() -> None:
    patch: Any = segment_creation
    patch._discard_file = lambda _strategy, _file: None


def _leave_names() -> None:
    patch: Any = FileSystemStrategy
    patch.unlink = lambda _strategy, _name: None
    patch = process_memory
    patch.sweep = lambda _strategy: None


def _keep_locks() -> None:
    patch: Any = Segment
    patch.unlock_block = lambda _segment, _block, _mark: None


def _leave_a_process() -> None:
    if os.fork() == 0:
        time.sleep(20.0)
        os._exit(0)


_QUIET = Plan(actors=3, seconds=0.2)
_OWN_PIPE = replace(_QUIET, actors=2, channels=("own pipe",))
_SENT_UNSEEN = (Strike(0, "stop", after=0.0, seconds=0.4), Strike(1, "kill", after=0.3))
"""The reader is stopped while the sender sends, and goes on when it is dead."""

BREAKS: dict[str, Break] = {
    "release at once": Break(breaking.release_at_once, _QUIET, "corrupted"),
    "free at export": Break(breaking.free_at_export, _QUIET, "corrupted"),
    "call everybody dead": Break(_call_everybody_dead, _QUIET, "corrupted"),
    "keep leases of the dead": Break(
        _keep_leases_of_the_dead,
        replace(_QUIET, strikes=(Strike(1, "kill", after=0.15),)),
        "leaks",
    ),
    "send no descriptors": Break(
        _send_no_descriptors, replace(_OWN_PIPE, strikes=_SENT_UNSEEN, seconds=0.5), "lost"
    ),
    "forget to roll back": Break(
        _forget_to_roll_back,
        replace(_QUIET, injections=(Injection(0, "fallocate", 28, 0.5),), idle=True, seconds=1.5),
        "leaks",
    ),
    "leave files open": Break(
        _leave_files_open,
        replace(_QUIET, injections=(Injection(0, "fallocate", 28, 1.0),)),
        "leaks",
    ),
    "leave names": Break(_leave_names, replace(_QUIET, strategy="file_system"), "left to others"),
    "keep locks": Break(_keep_locks, _QUIET, "hangs"),
    "leave a process": Break(_leave_a_process, _QUIET, "leaks"),
}


def apply_break(name: str) -> None:
    """Break this process, once, unless the name is empty."""
    if name and name not in _broken:
        _broken.add(name)
        BREAKS[name].apply()


_broken: set[str] = set()


def findings(outcome: Outcome) -> list[str]:
    """Return what went wrong in a run, by kinds."""
    wrong = {
        "corrupted": outcome.corrupted,
        "lost": outcome.lost,
        "hangs": outcome.hangs,
        "leaks": outcome.leaks,
        "errors": outcome.errors,
        # The run's own processes have to do it if any of them ends normally.
        "left to others": outcome.swept and not outcome.group_killed,
    }
    return [kind for kind, found in wrong.items() if found]


def main() -> int:
    """Play all, and print for each break what was found with and without it."""
    from tests.faults.watcher import Watcher

    found: dict[str, Any] = {}
    for name, each in BREAKS.items():
        with Watcher() as watcher:
            intact = watcher.run(each.plan)
        broken: list[str] = []
        number = 0
        # A run that is stuck is what one of them is about; the others are to end.
        patience = _HANG_SECONDS if each.finds == "hangs" else 60.0
        with Watcher(patience, _LEAK_SECONDS) as watcher:
            while each.finds not in broken and number < _TRIES:
                plan = replace(each.plan, number=number, broken=name)
                broken = findings(watcher.run(plan))
                number += 1
        found[name] = {
            "intact": findings(intact),
            "facts": [*intact.leaks, *intact.errors, intact.stderr],
            "broken": broken,
            "tries": number,
        }
    json.dump(found, sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
