"""The page that ``shmreduce bench --report`` writes.

May import ``bench`` of this package, ``text`` and :mod:`shmreduce.bench`.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from shmreduce.cli.bench import ABOUT_CELLS, medians, ratios, resources
from shmreduce.cli.text import size_text

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from shmreduce.bench.measurements import Report
    from shmreduce.bench.targets import Verdict
    from shmreduce.cli.text import Table

__all__ = ["page", "write_page"]

_HEAD = """\
# Benchmarks

Written by `shmreduce bench --report docs/benchmarks.md`; do not edit it by hand.
[The command line](reference/command-line.md#bench) says what each workload does,
[performance](explanation/performance.md) what the figures mean.

Systems took turns in one run. joblib, Ray and Dask had theirs after the others', because
their processes also work when it is not their turn. Compare ratios between machines, not times.
"""


def write_page(
    report: Report, verdicts: Sequence[Verdict], path: Path, plot: Path | None = None
) -> None:
    """Write the page of a report, which shows the plot if there is one."""
    image = None if plot is None else os.path.relpath(plot, path.parent)
    path.write_text(page(report, verdicts, image))


def page(report: Report, verdicts: Sequence[Verdict], image: str | None = None) -> str:
    """Return the page of a report as Markdown."""
    lines = "\n".join(_parts(report, verdicts)).rstrip()
    if image is not None:
        lines += f"\n\n## Plots\n\n![Times over sizes, and memory over time]({image})"
    return lines + "\n"


def _parts(report: Report, verdicts: Sequence[Verdict]) -> Iterator[str]:
    yield f"{_HEAD}{ABOUT_CELLS}\n"
    if not report.measurements:
        yield "No run is recorded yet.\n"
        return
    yield from _section("Run", ("", ""), [*report.run.items(), *report.machine.items()])
    yield from _section(
        "Figures",
        ("figure", "wanted", "found", "", "why not"),
        [
            (
                each.title,
                each.wanted,
                f"{each.found:.3g}",
                "met" if each.met else "**not met**",
                each.reason,
            )
            for each in verdicts
        ],
    )
    for workload in report.workloads():
        yield f"## {workload}\n"
        for table in (medians(report, workload), ratios(report, workload)):
            yield from _table(table)
        yield from _rates(report, workload)
        # Only for the largest row; those of the others are in the JSON.
        yield from _table(resources(report, workload, report.rows(workload)[-1]))
    if report.notices:
        yield "## Left out\n"
        yield "\n".join(f"- {_brief(notice)}" for notice in report.notices)


def _brief(notice: str) -> str:
    """Return a notice with only the last line of its traceback, if it has one."""
    first, *more = notice.splitlines()
    return f"{first.removesuffix('Traceback (most recent call last):')}{more[-1] if more else ''}"


def _section(heading: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    if rows:
        yield f"## {heading}\n"
        yield _markdown(columns, rows)


def _table(table: Table) -> Iterator[str]:
    if table.rows:
        yield f"{table.title}\n"
        yield _markdown(table.columns, table.rows)


def _rates(report: Report, workload: str) -> Iterator[str]:
    """Yield messages and bytes per second, for messages that go one way."""
    if workload != "stream":
        return
    rows = report.rows(workload)
    lines = []
    for system in report.systems(workload):
        found = [report.find(workload, system, row) for row in rows]
        lines.append(
            (
                system,
                *(
                    "-"
                    if each is None
                    else f"{1 / each.median:,.0f}/s, {size_text(each.nbytes / each.median)}/s"
                    for each in found
                ),
            )
        )
    yield "Messages and bytes a second\n"
    yield _markdown(("", *rows), lines)


def _markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [tuple(columns), ("---",) * len(columns), *rows]
    cells = (" | ".join(cell.replace("|", "\\|") for cell in line) for line in lines)
    return "\n".join(f"| {line} |" for line in cells) + "\n"
