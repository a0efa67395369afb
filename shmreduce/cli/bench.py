"""``shmreduce bench``: measures shmreduce and other systems on this machine, in one run.

May import ``text`` and ``bench_page`` of this package, errors, extras and
:mod:`shmreduce.bench`.
"""

from __future__ import annotations

import os
import shlex
import signal
import sys
from dataclasses import asdict, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from shmreduce.cli.text import Table, print_json, size_text, time_text
from shmreduce.errors import ConfigurationError
from shmreduce.extras import import_extra

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping, Sequence

    from shmreduce.bench.measurements import Measurement, Report
    from shmreduce.bench.plan import Plan
    from shmreduce.bench.targets import Verdict

__all__ = ["ABOUT_CELLS", "add_command", "medians", "ratios", "resources", "value_text"]

ABOUT_CELLS = """\
A cell is the median of the turns of a system, and its spread: half the distance between the
quartiles, as a share of the median. A turn counts as one sample, the median of its messages.
`(2 of 5)` stands where a system was so slow that it got 2 of 5 turns."""
"""Stands above the tables."""

_INTERRUPTED = "interrupted: the workloads and rows that follow were not measured"
_PICTURES = (".png", ".svg")


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add this command and its options to the parser."""
    parser = commands.add_parser(
        "bench",
        help="measure this machine, beside plain multiprocessing, torch, Ray and others",
        description=(
            "Measure round trips, streams, pools, descriptors, memory and import time. Systems "
            "take turns in processes of their own; what is not installed is skipped with a notice."
        ),
    )
    parser.add_argument(
        "--only",
        metavar="NAME[:ROW][,...]",
        help="some workloads, or rows of them; --list names them",
    )
    parser.add_argument("--systems", metavar="NAME[,NAME...]", help="measure only these systems")
    parser.add_argument("--list", action="store_true", help="name workloads, rows and systems")
    parser.add_argument(
        "--quick", action="store_true", help="smaller sizes, fewer rounds, systems"
    )
    parser.add_argument(
        "--results",
        metavar="FILE",
        type=Path,
        help="keep results in this file; rows that it has are not measured again",
    )
    parser.add_argument("--json", action="store_true", help="print JSON, all samples in it")
    parser.add_argument(
        "--resources", action="store_true", help="print CPU time, memory and descriptors, too"
    )
    parser.add_argument(
        "--plot", metavar="FILE", type=Path, help="draw the figures into a .png or .svg"
    )
    parser.add_argument(
        "--report", metavar="FILE", type=Path, help="write the figures into a Markdown page"
    )
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    from shmreduce.bench.measurements import Report
    from shmreduce.bench.plan import Plan, quick_plan
    from shmreduce.bench.suite import load_report, machine, run, selection

    plan = quick_plan() if options.quick else Plan()
    if options.systems is not None:
        plan = replace(plan, systems=_known_systems(options.systems))
    chosen = selection(options.only)
    if options.list:
        _list(chosen, plan, as_json=options.json)
        return 0
    _check_files(options)
    path: Path | None = options.results
    if path is None:
        report = Report(machine=machine(), plan=plan.as_json())
    else:
        report = load_report(path, plan)
    report.run = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "command": shlex.join(["shmreduce", *sys.argv[1:]]),
        "load average before": Path("/proc/loadavg").read_text().split()[0],
        **report.run,
    }
    save = None if path is None else partial(_save, path)
    interrupted = False
    try:
        run(chosen, plan, _tell, report, save)
    except KeyboardInterrupt:
        interrupted = True
        report.tell(_INTERRUPTED)
        _tell(_INTERRUPTED)
    written = _write(options, report)
    if interrupted:
        return 128 + signal.SIGINT
    return 0 if written and report.measurements else 1


def _save(path: Path, report: Report) -> None:
    from shmreduce.bench.suite import save_report

    save_report(report, path)


def _write(options: argparse.Namespace, report: Report) -> bool:
    """Print and write everything that was asked for; return False if the plot failed."""
    from shmreduce.bench.targets import judge

    verdicts = judge(report)
    if options.json:
        print_json({**report.as_json(), "figures": [asdict(verdict) for verdict in verdicts]})
    else:
        _print(report, verdicts, with_resources=options.resources)
    drawn = options.plot is not None and _draw(report, options.plot)
    if options.report is not None:
        from shmreduce.cli.bench_page import write_page

        write_page(report, verdicts, options.report, options.plot if drawn else None)
    return drawn or options.plot is None


def _draw(report: Report, path: Path) -> bool:
    """Draw, or tell why that is not possible: hours of measuring must not be lost."""
    from shmreduce.bench.plots import plot

    try:
        plot(report, path)
    except Exception as error:
        _tell(f"cannot draw {path}: {type(error).__name__}: {error}")
        return False
    return True


def _check_files(options: argparse.Namespace) -> None:
    """Raise if a file cannot be written, before hours of measuring and not after."""
    for name in ("results", "plot", "report"):
        path: Path | None = getattr(options, name)
        reason = None if path is None else _reason_against(path, replaced=name == "results")
        if reason is not None:
            raise ConfigurationError(
                f"cannot write {path}: {reason}", setting=f"--{name}", value=str(path)
            )
    if options.plot is not None:
        if options.plot.suffix not in _PICTURES:
            raise ConfigurationError(
                f"cannot draw {options.plot}: its name must end in {' or '.join(_PICTURES)}",
                setting="--plot",
                value=str(options.plot),
            )
        import_extra("matplotlib.figure", extra="bench")


def _reason_against(path: Path, *, replaced: bool) -> str | None:
    """Return why a file could not be written, or replaced by another; None if it could."""
    if not path.parent.is_dir():
        return f"there is no folder {path.parent}"
    if path.is_dir():
        return "it is a folder"
    changed = path if path.exists() and not replaced else path.parent
    return None if os.access(changed, os.W_OK) else f"this user may not write to {changed}"


def _known_systems(text: str) -> tuple[str, ...]:
    from shmreduce.bench.systems.catalog import SYSTEMS

    known = [system.name for system in SYSTEMS]
    chosen = tuple(name.strip() for name in text.split(","))
    for name in chosen:
        if name not in known:
            raise ConfigurationError(
                f"there is no system {name!r}; there are {', '.join(known)} (--list says which "
                "of them can be used here)",
                setting="--systems",
                value=name,
            )
    return chosen


def _list(chosen: Mapping[str, set[str] | None], plan: Plan, *, as_json: bool) -> None:
    from shmreduce.bench.suite import TITLES, rows_of
    from shmreduce.bench.systems.base import why_unusable
    from shmreduce.bench.systems.catalog import SYSTEMS

    rows = {
        name: [row for row in rows_of(name, plan) if wanted is None or row in wanted]
        for name, wanted in chosen.items()
    }
    listed = [each for each in SYSTEMS if plan.systems is None or each.name in plan.systems]
    if as_json:
        print_json(
            {
                "workloads": [
                    {"name": name, "measures": TITLES[name], "rows": found}
                    for name, found in rows.items()
                ],
                "systems": [
                    {"name": system.name, "unusable": why_unusable(system)} for system in listed
                ],
            }
        )
        return
    workloads = Table("Workloads", ("name", "measures", "rows"))
    for name, found in rows.items():
        workloads.add(name, TITLES[name], ", ".join(found))
    workloads.print()
    print()
    systems = Table("Systems", ("name", "here"))
    for system in listed:
        systems.add(system.name, why_unusable(system) or "usable")
    systems.print()


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _print(report: Report, verdicts: Sequence[Verdict], *, with_resources: bool) -> None:
    print(", ".join(f"{name} {value}" for name, value in report.machine.items()))
    print(ABOUT_CELLS)
    for workload in report.workloads():
        tables = [medians(report, workload), ratios(report, workload)]
        if with_resources:
            tables += [resources(report, workload, row) for row in report.rows(workload)]
        for table in tables:
            if table.rows:
                print()
                table.print()
    if verdicts:
        print()
        table = Table("Figures", ("figure", "wanted", "found", "", "why not"))
        for verdict in verdicts:
            table.add(
                verdict.title,
                verdict.wanted,
                f"{verdict.found:.3g}",
                "met" if verdict.met else "NOT MET",
                verdict.reason,
            )
        table.print()


def medians(report: Report, workload: str) -> Table:
    """Return a table of medians and spreads, with a line for each system."""
    from shmreduce.bench.suite import TITLES

    rows = report.rows(workload)
    table = Table(f"{workload}. {TITLES[workload]}: median, spread", ("", *rows))
    for system in report.systems(workload):
        found = [report.find(workload, system, row) for row in rows]
        table.add(system, *("-" if each is None else value_text(each) for each in found))
    return table


def ratios(report: Report, workload: str) -> Table:
    """Return a table of the other systems' times as multiples of ours."""
    from shmreduce.bench.systems.ours import OURS, BornShared
    from shmreduce.bench.targets import COMPARED

    rows = report.rows(workload)
    systems = report.systems(workload)
    base = OURS if OURS in systems else BornShared().name
    table = Table(f"Times the time of {base}", ("", *rows))
    if workload not in COMPARED or base not in systems:
        return table
    ours = [report.value(workload, base, row) for row in rows]
    for system in systems:
        theirs = [report.value(workload, system, row) for row in rows]
        table.add(
            system,
            *(
                "-" if above is None or below is None else f"{above / below:.2f}"
                for above, below in zip(theirs, ours, strict=True)
            ),
        )
    return table


def resources(report: Report, workload: str, row: str) -> Table:
    """Return a table of the resources, other than time, that a row took."""
    from shmreduce.bench.turns import METRICS

    metrics = [metric for metric in METRICS if metric in report.metrics(workload)]
    table = Table(f"{workload} {row}: of all processes of a system together", ("", *metrics))
    for system in report.systems(workload):
        found = [report.find(workload, system, row, metric) for metric in metrics]
        if any(found):
            table.add(system, *("-" if each is None else value_text(each) for each in found))
    return table


def value_text(measurement: Measurement) -> str:
    """Return a median, and if it is a time its spread, and how few turns it had."""
    value = measurement.median
    if measurement.unit == "bytes":
        return size_text(value)
    if measurement.unit == "count":
        return f"{value:.3g}" if value < 100 else f"{value:.0f}"
    count = len(measurement.samples)
    spread = f" ±{measurement.spread * 100:.0f}%" if count > 1 else ""
    turns = f" ({count} of {measurement.planned})" if count < measurement.planned else ""
    return f"{time_text(value)}{spread}{turns}"
