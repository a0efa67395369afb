"""``shmreduce plugins``: lists the plugins, where they come from, and why some do not work.

May import ``text`` of this package, errors, process_registry and, for a type, ``plugin``.
"""

from __future__ import annotations

import warnings
from dataclasses import asdict
from typing import TYPE_CHECKING

from shmreduce.cli.text import Table, print_json

if TYPE_CHECKING:
    import argparse

    from shmreduce.plugin import PluginReport

__all__ = ["add_command", "find_plugins", "is_usable"]


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add this command and its options to the parser."""
    parser = commands.add_parser(
        "plugins", help="list the plugins, where they come from and what they provide"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=_run)


def find_plugins() -> list[PluginReport]:
    """Return a report on each installed plugin."""
    from shmreduce.errors import ShmreduceWarning
    from shmreduce.process_registry import plugin_report

    with warnings.catch_warnings():
        # The reports have the same information as the warnings.
        warnings.simplefilter("ignore", ShmreduceWarning)
        return plugin_report(ask=True)


def is_usable(report: PluginReport) -> bool:
    """Return False for a plugin that should work but does not."""
    return report.status not in ("broken", "conflict")


def _run(options: argparse.Namespace) -> int:
    reports = find_plugins()
    if options.json:
        print_json([asdict(report) for report in reports])
    else:
        _print(reports)
    return 0 if all(map(is_usable, reports)) else 1


def _print(reports: list[PluginReport]) -> None:
    table = Table("Plugins", ("name", "status", "provides", "distribution", "from"))
    for report in reports:
        origin = f"{report.distribution} {report.version}"
        table.add(report.name, report.status, _provides(report), origin, report.path)
    table.print()
    for report in reports:
        if report.reason:
            print(f"{report.name}: {report.status}: {report.reason}")
        for reason in report.unusable:
            print(f"{report.name}: does not work here: {reason}")


def _provides(report: PluginReport) -> str:
    parts = []
    if report.reducers:
        parts.append(f"reducers of {', '.join(report.reducers)}")
    if report.strategies:
        parts.append(f"strategies {', '.join(report.strategies)}")
    if report.array_factory:
        parts.append("arrays for shmreduce.empty and the like")
    return "; ".join(parts) or "-"
