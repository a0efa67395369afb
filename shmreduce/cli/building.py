"""``shmreduce build-helper``: compiles the allocator that ``shared_allocations`` needs.

May import :mod:`shmreduce.born.building`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import argparse

__all__ = ["add_command"]


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add this command and its options to the parser."""
    parser = commands.add_parser(
        "build-helper",
        help="compile the allocator for shared_allocations",
        description=(
            "Compile the allocator that shmreduce.shared_allocations() needs, and put it beside "
            "the package's modules. Needs a C compiler ($CC, cc, gcc or clang) and a folder that "
            "this user may write to. Everything else works without it."
        ),
    )
    parser.set_defaults(run=_run)


def _run(_options: argparse.Namespace) -> int:
    from shmreduce.born.building import build

    print(f"built {build()}")
    return 0
