"""``shmreduce build-helper``: compiles the parts of shmreduce that are written in C.

May import :mod:`shmreduce.building`, :mod:`shmreduce.compiled` and errors.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import argparse

__all__ = ["add_command"]


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add this command and its options to the parser."""
    parser = commands.add_parser(
        "build-helper",
        help="compile the parts that are written in C",
        description=(
            "Compile the allocator that shmreduce.shared_allocations() needs, and the modules "
            "that make the rest quicker, and put them beside those of the package. Needs a C "
            "compiler ($CC, cc, gcc or clang), for the modules the headers of Python, and a "
            "folder that this user may write to. Exit status 1 if any could not be made."
        ),
    )
    parser.set_defaults(run=_run)


def _run(_options: argparse.Namespace) -> int:
    from shmreduce.building import build
    from shmreduce.compiled import PARTS
    from shmreduce.errors import CompilationError

    failed = False
    for part in PARTS:
        try:
            print(f"built {build(part)}")
        except CompilationError as error:
            print(f"shmreduce build-helper: {error}", file=sys.stderr)
            failed = True
    return int(failed)
