"""``shmreduce doctor``: checks everything that shared memory needs on this machine.

``limits``, ``system`` and ``installation`` have the checks. Each returns ``Finding``
objects (see ``findings``): a verdict, what was found, and what to do.

May import these four, ``text`` of the command line, errors and ``headroom`` of the
memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import TYPE_CHECKING

from shmreduce.cli.doctor import installation, limits, system
from shmreduce.cli.doctor.findings import Finding
from shmreduce.cli.text import Table, print_json
from shmreduce.errors import ShmreduceError
from shmreduce.memory.headroom import Machine

if TYPE_CHECKING:
    import argparse

__all__ = ["CHECKS", "add_command", "examine"]

Check = Callable[[Machine], Finding | Iterable[Finding]]

CHECKS: tuple[Check, ...] = (
    system.kernel,
    system.python,
    system.container,
    system.user_namespace,
    limits.available_memory,
    limits.cgroup_memory,
    limits.shared_memory_directory,
    limits.open_files,
    limits.mappings,
    limits.address_space,
    limits.overcommit,
    system.anonymous_files,
    system.byte_locks,
    system.process_files,
    system.other_processes,
    installation.settings,
    installation.plugins,
    installation.strategies,
    installation.allocator,
    installation.compiled_modules,
    installation.leftovers,
)
"""The checks, in the order in which they are printed."""


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add this command and its options to the parser."""
    parser = commands.add_parser(
        "doctor",
        help="check limits, shared memory, container, permissions, strategies, plugins",
        description="Exit status 1 if there is a problem, 0 if not; warnings do not count.",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=_run)


def examine(machine: Machine) -> list[Finding]:
    """Make all checks; if one raises, that is a finding, too."""
    return [finding for check in CHECKS for finding in _findings(check, machine)]


def _findings(check: Check, machine: Machine) -> list[Finding]:
    try:
        answer = check(machine)
        return [answer] if isinstance(answer, Finding) else list(answer)
    except Exception as error:
        # On an odd machine a check may raise anything; the other checks must still be made.
        name = check.__name__.replace("_", " ")
        what = str(error)
        if not isinstance(error, ShmreduceError | OSError):
            what = f"{type(error).__name__}: {error}"
        return [Finding(name, "problem", f"could not be checked: {what}", "mend that first")]


def _run(options: argparse.Namespace) -> int:
    findings = examine(Machine())
    if options.json:
        print_json([asdict(finding) for finding in findings])
    else:
        table = Table("Doctor", ("", "verdict", "found"))
        for finding in findings:
            table.add(finding.name, finding.verdict, finding.value)
        table.print()
        for finding in findings:
            if finding.remedy:
                print(f"{finding.verdict}: {finding.name}: {finding.remedy}")
    return 1 if any(finding.verdict == "problem" for finding in findings) else 0
