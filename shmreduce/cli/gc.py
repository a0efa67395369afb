"""``shmreduce gc``: removes the segments that killed owners left.

May import ``text`` and ``warned`` of this package and :mod:`shmreduce.memory.inspection`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shmreduce.cli.text import print_json, size_text, time_text
from shmreduce.cli.warned import warnings_told

if TYPE_CHECKING:
    import argparse

    from shmreduce.memory.inspection import SegmentState

__all__ = ["add_command"]


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add this command and its options to the parser."""
    parser = commands.add_parser(
        "gc",
        help="remove segments that killed processes left behind",
        description=(
            "Remove named segments whose owner, with all its forked children, is dead. "
            "Processes that have one open keep it. Only the file_system strategy, and others "
            "that use names, can leave any."
        ),
    )
    parser.add_argument("--dry-run", action="store_true", help="say what would be removed")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    from shmreduce.memory.inspection import leftovers, list_segments, remove_leftovers

    with warnings_told("gc") as told:
        states = {state.name: state for state in list_segments()}
        found = leftovers()
        names = found if options.dry_run else remove_leftovers()
        # Only those found before: others may have been left behind in the meantime.
        stuck = [] if options.dry_run else [name for name in leftovers() if name in found]
    status = 1 if stuck or told else 0
    if options.json:
        print_json(
            {
                "dry_run": options.dry_run,
                "segments": [_as_json(name, states.get(name)) for name in names],
                "not_removed": [_as_json(name, states.get(name)) for name in stuck],
            }
        )
        return status
    verb = "would remove" if options.dry_run else "removed"
    for name in names:
        print(f"{verb} {name}{_details(states.get(name))}")
    for name in stuck:
        print(f"could not remove {name}: check the permissions of its folder")
    if not names and not status:
        print("Nothing is left behind by killed processes.")
    return status


def _details(state: SegmentState | None) -> str:
    if state is None:
        # Its maker was killed before it wrote the header.
        return ""
    return (
        f": {size_text(state.reserved)}, made {time_text(state.age)} ago by process {state.owner}"
    )


def _as_json(name: str, state: SegmentState | None) -> dict[str, Any]:
    return {
        "name": name,
        "reserved": None if state is None else state.reserved,
        "owner": None if state is None else state.owner,
        "age": None if state is None else state.age,
    }
