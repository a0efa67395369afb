"""Draws a report: time over size, and memory over time.

May import ``measurements`` and :mod:`shmreduce.extras`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shmreduce.extras import import_extra

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from shmreduce.bench.measurements import Report, Trace

__all__ = ["plot", "traces_of_largest_row"]

_OVER_SIZE = ("fresh", "shared", "born", "first-use", "read", "stream", "fan-out", "pipeline")
_OVER_TIME = ("results", "burst")
_COLUMNS = 2


def plot(report: Report, path: Path) -> None:
    """Write one picture, with a panel for each workload.

    Parameters
    ----------
    report : Report
        The measurements.
    path : Path
        Its suffix determines the format, such as ``.png`` or ``.svg``.

    Raises
    ------
    MissingExtraError
        If matplotlib is not installed.
    """
    figure_class: Any = import_extra("matplotlib.figure", extra="bench").Figure
    sized = [name for name in _OVER_SIZE if len(report.rows(name)) > 0]
    traced = [traces for name in _OVER_TIME if (traces := traces_of_largest_row(report, name))]
    count = len(sized) + len(traced)
    lines = max(1, -(-count // _COLUMNS))
    figure = figure_class(figsize=(8 * _COLUMNS, 5.5 * lines), layout="constrained")
    axes = iter(figure.subplots(lines, _COLUMNS, squeeze=False).flat)
    for name in sized:
        _draw_sizes(next(axes), report, name)
    for traces in traced:
        _draw_memory(next(axes), traces)
    for unused in axes:
        unused.set_axis_off()
    figure.savefig(path)


def _draw_sizes(axes: Any, report: Report, workload: str) -> None:
    for system in report.systems(workload):
        found = [
            each
            for row in report.rows(workload)
            if (each := report.find(workload, system, row)) is not None and each.nbytes
        ]
        axes.loglog(
            [each.nbytes for each in found],
            [each.median for each in found],
            marker=".",
            linewidth=2 if system.startswith("shmreduce") else 1,
            linestyle="-" if system.startswith("shmreduce") else "--",
            label=system,
        )
    axes.set(title=workload, xlabel="bytes", ylabel="seconds")
    axes.grid(visible=True, which="major", alpha=0.3)
    axes.legend(fontsize="x-small")


def traces_of_largest_row(report: Report, workload: str) -> list[Trace]:
    """Return the memory over time of each system in the largest row of a workload."""
    traces = [each for each in report.traces if each.workload == workload]
    # Not the row that was measured last: a report may have been added to.
    largest = max(reversed(traces), key=lambda each: _row_bytes(report, each), default=None)
    return [each for each in traces if largest is not None and each.row == largest.row]


def _row_bytes(report: Report, trace: Trace) -> int:
    found = report.find(trace.workload, trace.system, trace.row)
    return found.nbytes if found is not None else 0


def _draw_memory(axes: Any, traces: Sequence[Trace]) -> None:
    for trace in traces:
        axes.plot(trace.seconds, [each / (1 << 20) for each in trace.nbytes], label=trace.system)
    first = traces[0]
    axes.set(
        title=f"memory over time: {first.workload}, {first.row}", xlabel="seconds", ylabel="MiB"
    )
    axes.grid(visible=True, alpha=0.3)
    axes.legend(fontsize="x-small")
