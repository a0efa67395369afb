"""``shmreduce bench``: figures of this machine, in one run beside others."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import TYPE_CHECKING

from shmreduce.cli.text import Table, print_json, size_text, time_text
from shmreduce.errors import ConfigurationError

if TYPE_CHECKING:
    import argparse

    from shmreduce.bench.measurements import Measurement, Report
    from shmreduce.bench.targets import Verdict

__all__ = ["add_command"]

_TITLES = {
    "fresh": "Round trip of a fresh float64 array through SimpleQueue",
    "shared": "Round trip of an array that is shared already",
    "live": "Shared arrays of 4 KiB, all alive, with at most 256 open files",
    "burst": "Shared memory of a burst of arrays, and of idle processes after it",
    "import": "Time of an interpreter that imports",
}


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add this command and its options to the parser."""
    parser = commands.add_parser(
        "bench",
        help="measure this machine, beside plain multiprocessing and torch",
        description=(
            "Measure round trips, descriptors, memory and import time. Systems take turns in "
            "processes of their own; what is not installed is skipped with a notice."
        ),
    )
    parser.add_argument(
        "--only",
        metavar="NAME[,NAME...]",
        help=f"some of: {', '.join(_TITLES)}",
    )
    parser.add_argument("--quick", action="store_true", help="smaller sizes, fewer rounds")
    parser.add_argument("--json", action="store_true", help="print JSON, all samples in it")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    from shmreduce.bench.suite import Plan, quick_plan, run
    from shmreduce.bench.targets import judge

    plan = quick_plan() if options.quick else Plan()
    report = run(_chosen(options.only), plan, _tell)
    verdicts = judge(report)
    if options.json:
        print_json({**report.as_json(), "figures": [asdict(verdict) for verdict in verdicts]})
    else:
        _print(report, verdicts)
    return 0 if report.measurements else 1


def _chosen(names: str | None) -> list[str]:
    from shmreduce.bench.suite import WORKLOADS

    chosen = list(WORKLOADS) if names is None else [name.strip() for name in names.split(",")]
    for name in chosen:
        if name not in WORKLOADS:
            raise ConfigurationError(
                f"there is no workload {name!r}; there are {', '.join(WORKLOADS)}",
                setting="--only",
                value=name,
            )
    return chosen


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _print(report: Report, verdicts: list[Verdict]) -> None:
    print(", ".join(f"{name} {value}" for name, value in report.machine.items()))
    for workload in report.workloads():
        print()
        _medians(report, workload).print()
        ratios = _ratios(report, workload)
        if ratios.rows:
            print()
            ratios.print()
    if verdicts:
        print()
        table = Table("Figures", ("figure", "wanted", "found", ""))
        for verdict in verdicts:
            table.add(
                verdict.title,
                verdict.wanted,
                f"{verdict.found:.3g}",
                "met" if verdict.met else "NOT MET",
            )
        table.print()


def _medians(report: Report, workload: str) -> Table:
    systems = report.systems(workload)
    table = Table(f"{_TITLES[workload]}: median, spread", ("", *systems))
    for row in report.rows(workload):
        found = [report.find(workload, system, row) for system in systems]
        table.add(row, *("-" if each is None else _value_text(each) for each in found))
    return table


def _ratios(report: Report, workload: str) -> Table:
    """Tell how many times our time the others take."""
    from shmreduce.bench.systems import OURS

    others = [system for system in report.systems(workload) if system != OURS]
    table = Table(f"Times the time of {OURS}", ("", *others))
    for row in report.rows(workload):
        ours = report.find(workload, OURS, row)
        if ours is None or ours.unit != "s" or workload not in ("fresh", "shared"):
            continue
        values = [report.value(workload, other, row) for other in others]
        table.add(
            row, *("-" if value is None else f"{value / ours.median:.2f}" for value in values)
        )
    return table


def _value_text(measurement: Measurement) -> str:
    value = measurement.median
    if measurement.unit == "bytes":
        return size_text(value)
    if measurement.unit == "count":
        return f"{value:g}"
    if len(measurement.samples) < 2:
        return time_text(value)
    return f"{time_text(value)} ±{measurement.spread * 100:.0f}%"
