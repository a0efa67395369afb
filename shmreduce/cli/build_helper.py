"""``shmreduce build-helper``: compiles the parts of shmreduce that are written in C.

May import ``text`` of this package, :mod:`shmreduce.building`, :mod:`shmreduce.compiled`
and errors.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from shmreduce.cli.text import print_json

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
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    from shmreduce.building import build
    from shmreduce.compiled import PARTS
    from shmreduce.errors import CompilationError

    found: list[dict[str, Any]] = []
    for part in PARTS:
        reason = None
        try:
            path = str(build(part))
        except CompilationError as error:
            path, reason = part.library, error.reason
            print(f"shmreduce build-helper: {error}", file=sys.stderr)
        else:
            if not options.json:
                print(f"built {path}")
        found.append({"part": part.title, "path": path, "built": reason is None, "reason": reason})
    if options.json:
        print_json(found)
    return 0 if all(each["built"] for each in found) else 1
