"""The limits for the figures, and whether a report meets them.

May import ``measurements``, ``payloads``, ``reasons``, every module of ``systems`` and
of ``workloads``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from shmreduce.bench.measurements import TIME
from shmreduce.bench.payloads import size_name
from shmreduce.bench.reasons import reason_for
from shmreduce.bench.systems.catalog import SYSTEMS
from shmreduce.bench.systems.one_copy import OneCopy
from shmreduce.bench.systems.ours import OURS, BornShared, Installed
from shmreduce.bench.systems.queues import Stock, TenBytes, TenBytesByPipe, Torch
from shmreduce.bench.workloads import burst, import_time, killed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from shmreduce.bench.measurements import Report

__all__ = ["COMPARED", "TARGETS", "Target", "Verdict", "judge"]

_KIB, _MIB, _GIB = 1 << 10, 1 << 20, 1 << 30
_INSTALLED = Installed().name
_BORN = BornShared().name
_STOCK = Stock().name
_TORCH = Torch().name
_TORCH_NAMED = "torch file_system"
_TORCHES = (_TORCH, _TORCH_NAMED)
_COPY = OneCopy().name
_QUEUE = TenBytes().name
_PIPE = TenBytesByPipe().name


@dataclass(frozen=True)
class Target:
    """One figure and its limit.

    Parameters
    ----------
    title : str
        What is measured.
    figure : callable
        Computes the figure from a report; returns None if the report lacks a measurement.
    at_least, at_most : float or None
        The limit.
    reason : str
        Why it is not met, if that is known.
    """

    title: str
    figure: Callable[[Report], float | None]
    at_least: float | None = None
    at_most: float | None = None
    reason: str = ""


@dataclass(frozen=True)
class Verdict:
    """A target, the figure that was found, whether it meets the limit, and why not."""

    title: str
    wanted: str
    found: float
    met: bool
    reason: str = ""


def _least(report: Report, workload: str, row: str, systems: tuple[str, ...]) -> float | None:
    """Return the smallest median of several systems."""
    values = [report.value(workload, system, row) for system in systems]
    return min((value for value in values if value is not None), default=None)


def _ratio(
    workload: str,
    row: str,
    above: str | tuple[str, ...],
    below: str | tuple[str, ...],
    *,
    workload_below: str | None = None,
    row_below: str | None = None,
) -> Callable[[Report], float | None]:
    """Return a figure that divides medians; of several systems, the best one counts."""

    def figure(report: Report) -> float | None:
        over = _least(report, workload, row, _several(above))
        under = _least(report, workload_below or workload, row_below or row, _several(below))
        return None if over is None or under is None else over / under

    return figure


def _several(names: str | tuple[str, ...]) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else names


def _largest(workload: str, system: str, *rows: str) -> Callable[[Report], float | None]:
    def figure(report: Report) -> float | None:
        found = [report.value(workload, system, row) for row in rows]
        return None if None in found else max(value for value in found if value is not None)

    return figure


def _growth(system: str) -> Callable[[Report], float | None]:
    """Return a figure: the time of the slowest size of shared arrays over the fastest."""

    def figure(report: Report) -> float | None:
        found = [report.value("shared", system, row) for row in report.rows("shared")]
        values = [value for value in found if value is not None]
        return max(values) / min(values) if values else None

    return figure


def _memory_share(report: Report) -> float | None:
    """Return the peak of shared memory divided by the bytes of the results that are alive."""
    found = report.find("results", OURS, "64 MiB filled", "shared memory")
    return None if found is None or not found.nbytes else found.median / found.nbytes


def _import_milliseconds(report: Report) -> float | None:
    ours = report.value("import", "shmreduce", import_time.ROW)
    bare = report.value("import", import_time.BARE, import_time.ROW)
    return None if ours is None or bare is None else (ours - bare) * 1000


def _against_one_copy() -> Iterator[Target]:
    for system, limit, sizes in (
        (OURS, 1.25, (8 * _MIB, 64 * _MIB, 256 * _MIB, _GIB)),
        (_INSTALLED, 1.5, (64 * _MIB, 256 * _MIB, _GIB)),
    ):
        for row in map(size_name, sizes):
            yield Target(
                f"fresh {row}: {system} / one copy",
                _ratio("fresh", row, system, _COPY),
                at_most=limit,
            )


def _against_ten_bytes() -> Iterator[Target]:
    """Against ten bytes over a stock pipe, and shared arrays also over the stock queue."""
    for workload, system, references in (
        ("shared", OURS, (_PIPE, _QUEUE)),
        ("born", _BORN, (_PIPE,)),
    ):
        for row in map(size_name, (128, 64 * _KIB, _MIB, 64 * _MIB, _GIB)):
            for reference in references:
                yield Target(
                    f"{workload} {row}: {system} / {reference}",
                    _ratio(workload, row, system, reference),
                    at_most=1.3,
                )
    for system in (OURS, _INSTALLED):
        yield Target(f"shared: slowest / quickest size of {system}", _growth(system), at_most=1.5)


def _against_stock() -> Iterator[Target]:
    for system, limit, sizes in (
        (OURS, 1.1, (10, 128, _KIB)),
        (_INSTALLED, 1.2, (10, 128, _KIB, 4 * _KIB, 16 * _KIB, 64 * _KIB)),
    ):
        for row in map(size_name, sizes):
            yield Target(
                f"fresh {row}: {system} / {_STOCK}",
                _ratio("fresh", row, system, _STOCK),
                at_most=limit,
            )
    yield Target(
        f"stream 100 B: {_STOCK} / {OURS}", _ratio("stream", "100 B", _STOCK, OURS), at_least=1
    )
    for row, system, least in (
        ("64 MiB filled", OURS, 20),
        ("64 MiB bare", OURS, 20),
        ("256 MiB filled", _BORN, 50),
        ("256 MiB bare", _BORN, 50),
    ):
        yield Target(
            f"results {row}: {_STOCK} / {system}",
            _ratio("results", row, _STOCK, system),
            at_least=least,
        )
    yield Target("results 64 MiB: shared memory / arrays alive", _memory_share, at_most=1.2)


def _against_torch() -> Iterator[Target]:
    for size, least in (
        (64 * _KIB, 3),
        (_MIB, 8),
        (8 * _MIB, 10),
        (64 * _MIB, 10),
        (256 * _MIB, 10),
        (_GIB, 10),
    ):
        row = size_name(size)
        yield Target(
            f"fresh {row}: best of torch / {OURS}",
            _ratio("fresh", row, _TORCHES, OURS),
            at_least=least,
        )
    for size, least in ((_MIB, 5), (8 * _MIB, 8), (64 * _MIB, 8), (256 * _MIB, 8)):
        row = size_name(size)
        yield Target(
            f"fresh {row}: torch / {_INSTALLED}",
            _ratio("fresh", row, _TORCH, _INSTALLED),
            at_least=least,
        )
    for size in (128, 64 * _KIB, _MIB, 64 * _MIB, _GIB):
        row = size_name(size)
        yield Target(
            f"shared {row}: best of torch / {OURS}",
            _ratio("shared", row, _TORCHES, OURS),
            at_least=1.5,
        )
        yield Target(
            f"shared {row}: torch file_system / {_INSTALLED}",
            _ratio("shared", row, _TORCH_NAMED, _INSTALLED),
            at_least=1,
        )
    for size in (64 * _KIB, _MIB, 8 * _MIB, 64 * _MIB, 256 * _MIB):
        row = size_name(size)
        yield Target(
            f"first-use {row}: best of torch / {OURS}",
            _ratio("first-use", row, _TORCHES, OURS),
            at_least=1,
        )
    for size in (100, 1_000, 10_000, 100_000):
        row = f"10000 x {size_name(size)}"
        yield Target(
            f"small-arrays {row}: best of torch / {OURS}",
            _ratio("small-arrays", row, _TORCHES, OURS),
            at_least=20,
        )
    for row in ("64 MiB filled", "64 MiB bare"):
        yield Target(
            f"results {row}: best of torch / {OURS}",
            _ratio("results", row, _TORCHES, OURS),
            at_least=5,
        )


def _of_ourselves() -> Iterator[Target]:
    for size in (10, 64 * _KIB, _MIB):
        name = size_name(size)
        yield Target(
            f"exchange {name}: a message among 16 / among 2",
            _ratio("exchange", f"{name} among 16", OURS, OURS, row_below=f"{name} among 2"),
            at_most=1.5,
        )
    for what, limit in (("descriptors", 32), ("mappings", 64)):
        yield Target(
            f"live arrays: {what} of a process",
            _largest("live", OURS, f"{what}, sender", f"{what}, receiver"),
            at_most=limit,
        )
    yield Target(
        f"burst: seconds until under {burst.BACK_UNDER >> 20} MiB",
        _largest("burst", OURS, "back under 300 MiB"),
        at_most=10,
    )
    yield Target(
        "killed worker: seconds until told", _largest("killed", OURS, killed.ROW), at_most=1
    )
    yield Target("import shmreduce: ms beyond bare Python", _import_milliseconds, at_most=15)


TARGETS = [
    *_against_one_copy(),
    *_against_ten_bytes(),
    *_against_stock(),
    *_against_torch(),
    *_of_ourselves(),
]
"""All targets, except that of being the fastest in every row, see :func:`_places`."""

COMPARED = (
    "fresh",
    "shared",
    "born",
    "first-use",
    "read",
    "stream",
    "fan-out",
    "results",
    "pipeline",
    "objects",
    "small-arrays",
    "exchange",
    "start",
)
"""The workloads whose rows compare systems."""


def _places(report: Report) -> Iterator[Target]:
    """Yield one target for each row: the best peer is not faster than the best of ours."""
    ours = tuple(system.name for system in SYSTEMS if system.ours)
    peers = tuple(system.name for system in SYSTEMS if system.is_peer)
    for workload in COMPARED:
        for row in report.rows(workload):
            best = _best_name(report, workload, row, peers)
            if best is not None:
                yield Target(
                    f"{workload} {row}: best peer ({best}) / best of ours",
                    _ratio(workload, row, best, ours),
                    at_least=1,
                    reason=reason_for(workload, row, best),
                )


def _best_name(report: Report, workload: str, row: str, systems: tuple[str, ...]) -> str | None:
    found = {
        each.system: each.median
        for each in report.measurements
        if (each.workload, each.row, each.metric) == (workload, row, TIME)
        and each.system in systems
    }
    return min(found, key=found.__getitem__) if found else None


def judge(report: Report) -> list[Verdict]:
    """Compare a report with all targets for which it has the measurements."""
    verdicts = []
    for target in [*TARGETS, *_places(report)]:
        found = target.figure(report)
        if found is None:
            continue
        if target.at_least is not None:
            wanted, met = f"at least {target.at_least:g}", found >= target.at_least
        else:
            limit = target.at_most or 0.0
            wanted, met = f"at most {limit:g}", found <= limit
        reason = "" if met else target.reason or reason_for(target.title)
        verdicts.append(Verdict(target.title, wanted, found, met, reason))
    return verdicts
