"""``shmreduce ls``: the live segments of this user on this machine.

May import ``text`` and ``warned`` of this package and :mod:`shmreduce.memory.inspection`.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from shmreduce.cli.text import Table, print_json, size_text, time_text
from shmreduce.cli.warned import warnings_told

if TYPE_CHECKING:
    import argparse

    from shmreduce.memory.inspection import SegmentState

__all__ = ["add_command"]


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add this command and its options to the parser."""
    parser = commands.add_parser(
        "ls", help="list the live segments: owner, age, bytes, blocks, leases, descriptors"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    from shmreduce.memory.inspection import list_segments

    with warnings_told("ls") as told:
        segments = list_segments()
    if options.json:
        print_json([_facts(segment) for segment in segments])
    elif not segments:
        print("No segments of this user are alive on this machine.")
    else:
        reserved = sum(segment.reserved for segment in segments)
        _print_segments(f"Segments: {len(segments)}, {size_text(reserved)} reserved", segments)
    return 1 if told else 0


def _facts(segment: SegmentState) -> dict[str, object]:
    leases = segment.messages + segment.holds
    return {**asdict(segment), "leases": leases, "fds": sum(segment.holders.values())}


def _print_segments(title: str, segments: list[SegmentState]) -> None:
    table = Table(
        title,
        (
            "segment",
            "strategy",
            "kind",
            "owner",
            "age",
            "reserved",
            "size",
            "blocks",
            "in flight",
            "held",
            "open in",
        ),
    )
    for segment in segments:
        table.add(
            segment.name or segment.token[:12],
            segment.strategy,
            "shared" if segment.shared else "by value",
            f"{segment.owner}{'' if segment.owner_alive else ' (dead)'}",
            time_text(segment.age),
            size_text(segment.reserved),
            size_text(segment.size),
            segment.blocks,
            segment.messages,
            segment.holds,
            _holders_text(segment.holders),
        )
    table.print()


def _holders_text(holders: dict[int, int]) -> str:
    """Return the pids, each with its number of descriptors if that is not 1."""
    return (
        ", ".join(
            f"{pid}" if count == 1 else f"{pid} ({count} descriptors)"
            for pid, count in sorted(holders.items())
        )
        or "no process"
    )
