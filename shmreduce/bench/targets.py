"""What we ask of the figures.

May import ``measurements`` and the names in ``systems`` and the workloads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from shmreduce.bench import burst, echo, import_time
from shmreduce.bench.systems import OURS, Stock, Torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from shmreduce.bench.measurements import Report

__all__ = ["TARGETS", "Target", "Verdict", "judge"]

_TORCH = Torch().name
_TORCH_NAMED = "torch file_system"
_STOCK = Stock().name


@dataclass(frozen=True)
class Target:
    """One figure and its limit.

    Parameters
    ----------
    title : str
        What is asked.
    figure : callable
        Takes it from a report; None if the report has not what it needs.
    at_least, at_most : float or None
        The limit.
    """

    title: str
    figure: Callable[[Report], float | None]
    at_least: float | None = None
    at_most: float | None = None


@dataclass(frozen=True)
class Verdict:
    """A target, what was found, and whether that is good enough."""

    title: str
    wanted: str
    found: float
    met: bool


def _ratio(workload: str, row: str, above: str, below: str) -> Callable[[Report], float | None]:
    def figure(report: Report) -> float | None:
        over, under = report.value(workload, above, row), report.value(workload, below, row)
        return None if over is None or under is None else over / under

    return figure


def _largest(workload: str, *rows: str) -> Callable[[Report], float | None]:
    def figure(report: Report) -> float | None:
        found = [report.value(workload, OURS, row) for row in rows]
        return None if None in found else max(value for value in found if value is not None)

    return figure


def _growth(report: Report) -> float | None:
    """Slowest over quickest size of a shared array."""
    found = [report.value("shared", OURS, row) for row in report.rows("shared")]
    values = [value for value in found if value is not None]
    return max(values) / min(values) if values else None


def _import_milliseconds(report: Report) -> float | None:
    ours = report.value("import", "shmreduce", import_time.ROW)
    bare = report.value("import", import_time.BARE, import_time.ROW)
    return None if ours is None or bare is None else (ours - bare) * 1000


def _targets() -> list[Target]:
    small = [128, 4 << 10, 16 << 10, 64 << 10]
    large = [8 << 20, 64 << 20, 256 << 20]
    targets = [
        Target(
            f"fresh {echo.size_row(size)}: shmreduce / multiprocessing",
            _ratio("fresh", echo.size_row(size), OURS, _STOCK),
            at_most=1.2,
        )
        for size in small
    ]
    targets.append(
        Target(
            "fresh 1 MiB: torch / shmreduce",
            _ratio("fresh", "1 MiB", _TORCH, OURS),
            at_least=5,
        )
    )
    targets += [
        Target(
            f"fresh {echo.size_row(size)}: torch / shmreduce",
            _ratio("fresh", echo.size_row(size), _TORCH, OURS),
            at_least=8,
        )
        for size in large
    ]
    targets += [
        Target(
            f"fresh {echo.size_row(size)}: shmreduce / one copy",
            _ratio("fresh", echo.size_row(size), OURS, echo.COPY),
            at_most=1.5,
        )
        for size in large[1:]
    ]
    targets += [
        Target("shared: slowest size / quickest size", _growth, at_most=1.5),
        *(
            Target(
                f"shared {row}: torch file_system / shmreduce",
                _ratio("shared", row, _TORCH_NAMED, OURS),
                at_least=1,
            )
            for row in ("128 B", "1 MiB", "1 GiB")
        ),
        Target(
            "live arrays: descriptors of a process",
            _largest("live", "descriptors, sender", "descriptors, receiver"),
            at_most=32,
        ),
        Target(
            "live arrays: mappings of a process",
            _largest("live", "mappings, sender", "mappings, receiver"),
            at_most=64,
        ),
        Target("import shmreduce: ms beyond bare Python", _import_milliseconds, at_most=15),
        Target(
            f"burst: seconds until under {burst.BACK_UNDER >> 20} MiB",
            _largest("burst", "back under 300 MiB"),
            at_most=10,
        ),
    ]
    return targets


TARGETS = _targets()
"""Every figure that is asked for."""


def judge(report: Report) -> list[Verdict]:
    """Compare a report with the targets that it has figures for."""
    verdicts = []
    for target in TARGETS:
        found = target.figure(report)
        if found is None:
            continue
        if target.at_least is not None:
            wanted, met = f"at least {target.at_least:g}", found >= target.at_least
        else:
            limit = target.at_most or 0.0
            wanted, met = f"at most {limit:g}", found <= limit
        verdicts.append(Verdict(target.title, wanted, found, met))
    return verdicts
