"""``shmreduce bench``: figures of this machine, in one run beside the peers."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import argparse

__all__ = ["add_command"]


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add this command and its options to the parser."""
    commands.add_parser("doctor", help="measure this machine beside the peers")
