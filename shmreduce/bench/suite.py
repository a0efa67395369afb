"""Runs the workloads and collects one report.

May import every module of this package.
"""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

from shmreduce.bench import burst, echo, import_time, live_arrays
from shmreduce.bench.measurements import Report
from shmreduce.bench.systems import Shmreduce, System
from shmreduce.errors import ShmreduceError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from shmreduce.bench.measurements import Measurement

__all__ = ["WORKLOADS", "Plan", "quick_plan", "run"]

_KIB, _MIB, _GIB = 1 << 10, 1 << 20, 1 << 30


@dataclass(frozen=True)
class Plan:
    """How much to measure; sizes in bytes."""

    fresh_sizes: tuple[int, ...] = (
        128,
        4 * _KIB,
        16 * _KIB,
        64 * _KIB,
        _MIB,
        8 * _MIB,
        64 * _MIB,
        256 * _MIB,
    )
    shared_sizes: tuple[int, ...] = (128, 64 * _KIB, _MIB, 64 * _MIB, _GIB)
    effort: echo.Effort = field(default_factory=echo.Effort)
    live_arrays: int = 100_000
    burst_arrays: int = 64
    burst_array_bytes: int = 64 * _MIB
    import_rounds: int = 30


def quick_plan() -> Plan:
    """Return a plan that takes seconds, not minutes, and says less."""
    return Plan(
        fresh_sizes=(128, 64 * _KIB, _MIB, 8 * _MIB),
        shared_sizes=(128, _MIB, 8 * _MIB),
        effort=echo.Effort(rounds=3, seconds=0.05, warm_up=1),
        live_arrays=10_000,
        burst_arrays=16,
        burst_array_bytes=32 * _MIB,
        import_rounds=5,
    )


def _fresh(plan: Plan, notice: Callable[[str], None]) -> list[Measurement]:
    systems = _usable(echo.FRESH_SYSTEMS, notice)
    # Each measuring process and worker holds the array, its pickle and a copy.
    sizes = _that_fit(plan.fresh_sizes, 4 * len(systems), notice)
    return echo.measure_echo("fresh", "fresh", systems, sizes, plan.effort, notice)


def _shared(plan: Plan, notice: Callable[[str], None]) -> list[Measurement]:
    systems = _usable(echo.SHARED_SYSTEMS, notice)
    sizes = _that_fit(plan.shared_sizes, 2 * len(systems), notice)
    return echo.measure_echo("shared", "shared", systems, sizes, plan.effort, notice)


def _live(plan: Plan, notice: Callable[[str], None]) -> list[Measurement]:
    systems = _usable(_OUR_SYSTEMS, notice)
    return live_arrays.measure_live_arrays("live", systems, plan.live_arrays)


def _burst(plan: Plan, notice: Callable[[str], None]) -> list[Measurement]:
    systems = _usable(_OUR_SYSTEMS, notice)
    if not _that_fit((plan.burst_arrays * plan.burst_array_bytes,), 1.5, notice):
        return []
    return burst.measure_burst("burst", systems, plan.burst_array_bytes, plan.burst_arrays)


def _import(plan: Plan, _notice: Callable[[str], None]) -> list[Measurement]:
    return import_time.measure_import_time("import", plan.import_rounds)


_OUR_SYSTEMS = (Shmreduce(), Shmreduce("shmreduce file_system", "file_system"))

WORKLOADS: dict[str, Callable[[Plan, Callable[[str], None]], list[Measurement]]] = {
    "fresh": _fresh,
    "shared": _shared,
    "live": _live,
    "burst": _burst,
    "import": _import,
}
"""Name to function of a plan and of somebody to tell what is going on."""


def run(names: Sequence[str], plan: Plan, progress: Callable[[str], None]) -> Report:
    """Run workloads one after the other.

    A workload that fails is named in the report's notices; the others go on.

    Parameters
    ----------
    names : sequence of str
        Keys of :data:`WORKLOADS`.
    plan : Plan
        How much to measure.
    progress : callable
        Told what is going on, in words.
    """
    report = Report(machine=_machine())
    for name in names:
        progress(f"{name} ...")

        def notice(text: str) -> None:
            report.notices.append(text)
            progress(text)

        try:
            report.measurements += WORKLOADS[name](plan, notice)
        except ShmreduceError as error:
            notice(f"{name} failed: {error}")
    return report


def _usable(systems: Sequence[System], notice: Callable[[str], None]) -> list[System]:
    usable = []
    for system in systems:
        reason = system.unusable_reason()
        if reason is None:
            usable.append(system)
        else:
            notice(f"{system.name} skipped: {reason}")
    return usable


def _that_fit(sizes: Sequence[int], copies: float, notice: Callable[[str], None]) -> list[int]:
    """Leave out sizes for which there is not memory enough."""
    available = _memory("MemAvailable")
    fit = [size for size in sizes if available is None or size * copies < available]
    for size in sizes:
        if size not in fit:
            notice(f"{echo.size_row(size)} skipped: it takes {copies:g} times that in memory")
    return fit


def _machine() -> dict[str, str]:
    total = _memory("MemTotal")
    return {
        "processor": _processor(),
        "processors": str(os.cpu_count()),
        "memory": "unknown" if total is None else f"{total / _GIB:.1f} GiB",
        "system": f"{platform.system()} {platform.release()}",
        "Python": platform.python_version(),
        **{name: _version(name) for name in ("shmreduce", "numpy", "torch")},
    }


def _processor() -> str:
    for line in _lines("/proc/cpuinfo"):
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _memory(key: str) -> int | None:
    for line in _lines("/proc/meminfo"):
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * _KIB
    return None


def _lines(name: str) -> list[str]:
    path = Path(name)
    return path.read_text().splitlines() if path.exists() else []


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "not installed"
