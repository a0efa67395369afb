"""Runs the workloads and collects one report.

May import every module of this package, errors, ``compiled`` and
``processors``.
"""

from __future__ import annotations

import json
import os
import platform
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from shmreduce.bench.measurements import Report
from shmreduce.bench.resources import fits
from shmreduce.bench.survivors import Survivors
from shmreduce.bench.systems.base import System, why_unusable
from shmreduce.bench.systems.catalog import OURS_BOTH_STRATEGIES, SYSTEMS
from shmreduce.bench.turns import take_turns
from shmreduce.bench.workloads import burst, import_time, killed, live_arrays, stages, start
from shmreduce.bench.workloads.echo import Echo, EchoFirstUse, EchoObjects, EchoSmallArrays
from shmreduce.bench.workloads.many import Exchange, FanOut, Pipeline, Read, Results, Stream
from shmreduce.compiled import reason_unused
from shmreduce.errors import ConfigurationError, ShmreduceError
from shmreduce.processors import usable_processors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from shmreduce.bench.measurements import Measurement, Trace
    from shmreduce.bench.plan import Plan
    from shmreduce.bench.systems.channels import ChannelSystem
    from shmreduce.bench.workloads.base import Workload

_AnySystem = TypeVar("_AnySystem", bound=System)

__all__ = [
    "TITLES",
    "Found",
    "load_report",
    "machine",
    "rows_of",
    "run",
    "save_report",
    "selection",
]

_TURNS: dict[str, Workload] = {
    each.name: each
    for each in (
        Echo("fresh", "Round trip of an array that was not sent before"),
        Echo("shared", "Round trip of an array that is shared already", "shared"),
        Echo("born", "Round trip of a new array that NumPy made in shared memory", "born"),
        EchoFirstUse("first-use", "Round trip of the first array that new processes send"),
        Read("read", "An array to a worker, which adds its values up and answers"),
        Stream("stream", "Messages one way: time of each"),
        FanOut("fan-out", "One array to several workers, until all have looked at it"),
        Results("results", "pool.map that returns new arrays: time of each"),
        Pipeline("pipeline", "An array from A to B, and on to C"),
        EchoObjects("objects", "Round trip of objects that contain arrays, and of records"),
        EchoSmallArrays("small-arrays", "Round trip of a list of small arrays"),
        Exchange("exchange", "Processes in a ring on two processors: time of each message"),
    )
}


@dataclass
class Found:
    """The results of a workload in which systems do not take turns."""

    measurements: list[Measurement] = field(default_factory=list)
    traces: list[Trace] = field(default_factory=list)


def _stages(plan: Plan, _notice: Callable[[str], None]) -> Found:
    return Found(stages.measure_stages("stages", plan.stage_sizes, plan.stage_rounds))


def _fork(plan: Plan, _notice: Callable[[str], None]) -> Found:
    return Found(stages.measure_fork("fork", plan.live_arrays))


def _live(plan: Plan, notice: Callable[[str], None]) -> Found:
    def measure(system: ChannelSystem) -> tuple[list[Measurement], list[Trace]]:
        return live_arrays.measure_live_arrays("live", system, plan.live_arrays), []

    return _each_of_ours("live", plan, notice, measure)


def _burst(plan: Plan, notice: Callable[[str], None]) -> Found:
    if not fits(int(plan.burst_arrays * plan.burst_array_bytes * 1.5)):
        notice("burst skipped: it takes more memory than there is")
        return Found()

    def measure(system: ChannelSystem) -> tuple[list[Measurement], list[Trace]]:
        return burst.measure_burst("burst", system, plan.burst_array_bytes, plan.burst_arrays)

    return _each_of_ours("burst", plan, notice, measure)


def _each_of_ours(
    workload: str,
    plan: Plan,
    notice: Callable[[str], None],
    measure: Callable[[ChannelSystem], tuple[list[Measurement], list[Trace]]],
) -> Found:
    found = Found()
    systems = _usable(OURS_BOTH_STRATEGIES, plan, notice)
    survivors = Survivors(workload, [system.name for system in systems], notice)

    def add(system: ChannelSystem) -> None:
        measurements, traces = measure(system)
        found.measurements += measurements
        found.traces += traces

    for system in systems:
        survivors.attempt(system.name, partial(add, system))
    return found


def _killed(plan: Plan, notice: Callable[[str], None]) -> Found:
    survivors = Survivors("killed", _chosen(killed.SYSTEMS, plan), notice)
    return Found(killed.measure_killed_workers(survivors, plan.effort.rounds))


def _start(plan: Plan, notice: Callable[[str], None]) -> Found:
    survivors = Survivors("start", _chosen(start.installed_systems(), plan), notice)
    return Found(start.measure_starts(survivors, plan.effort.rounds))


def _import(plan: Plan, notice: Callable[[str], None]) -> Found:
    names = _chosen(import_time.installed_packages(), plan, always=import_time.REFERENCES)
    survivors = Survivors("import", names, notice)
    return Found(import_time.measure_import_time(survivors, plan.import_rounds))


def _chosen(names: Iterable[str], plan: Plan, always: Sequence[str] = ()) -> list[str]:
    """List the names that the plan has, and those that are always measured."""
    return [
        name for name in names if plan.systems is None or name in plan.systems or name in always
    ]


_OTHERS: dict[str, Callable[[Plan, Callable[[str], None]], Found]] = {
    "stages": _stages,
    "fork": _fork,
    "live": _live,
    "burst": _burst,
    "killed": _killed,
    "start": _start,
    "import": _import,
}

TITLES = {
    **{name: workload.title for name, workload in _TURNS.items()},
    "stages": "What each stage of a message costs",
    "fork": "os.fork in a process with many arrays",
    "live": "Shared arrays of 4 KiB, all alive, with at most 256 open files",
    "burst": "Shared memory of a burst of arrays, and of idle processes after it",
    "killed": "A worker is killed in the middle of a task",
    "start": "A child or a pool is started, makes a small array, and ends",
    "import": "Time of an interpreter that imports",
}
"""The names of all workloads, in the order in which they run, and what they measure."""


def selection(text: str | None) -> dict[str, set[str] | None]:
    """Parse the argument of ``--only``: workloads, or rows of them.

    Returns
    -------
    dict
        From the name of a workload to its wanted rows; None for all.

    Raises
    ------
    ConfigurationError
        If there is no workload of that name.

    Examples
    --------
    >>> selection("stream, fresh:1 MiB")
    {'stream': None, 'fresh': {'1 MiB'}}
    """
    if text is None:
        return dict.fromkeys(TITLES)
    chosen: dict[str, set[str] | None] = {}
    for part in text.split(","):
        name, colon, row = (word.strip() for word in part.partition(":"))
        if name not in TITLES:
            raise ConfigurationError(
                f"there is no workload {name!r}; there are {', '.join(TITLES)}",
                setting="--only",
                value=name,
            )
        rows = chosen.setdefault(name, set())
        if not colon:
            chosen[name] = None
        elif rows is not None:
            rows.add(row)
    return chosen


def rows_of(name: str, plan: Plan) -> list[str]:
    """Return the names of a workload's rows, which ``--only`` can select."""
    return [row.name for row in _TURNS[name].rows(plan)] if name in _TURNS else []


def run(
    chosen: Mapping[str, set[str] | None],
    plan: Plan,
    progress: Callable[[str], None],
    report: Report,
    save: Callable[[Report], None] | None = None,
) -> None:
    """Run workloads one after the other.

    If a workload fails, that is noted in the report's notices, and the others go on.

    Parameters
    ----------
    chosen : mapping
        The result of :func:`selection`.
    plan : Plan
        How much to measure.
    progress : callable
        Called with a text that says what is being done.
    report : Report
        Measurements are added to it. Rows that it has are not measured again.
    save : callable, optional
        Called with the report after each row.

    Raises
    ------
    ConfigurationError
        If a selected row does not exist. Nothing is measured then.
    """
    for name, rows in chosen.items():
        _check_rows(name, rows or set(), plan)

    def notice(text: str) -> None:
        report.tell(text)
        progress(text)

    def keep(found: list[Measurement], traces: Sequence[Trace]) -> None:
        report.add(found, traces)
        if save is not None:
            save(report)

    for name, rows in chosen.items():
        try:
            if name in _TURNS:
                _take_turns(_TURNS[name], rows, plan, report, notice, progress, keep)
            elif name not in report.workloads():
                progress(f"{name} ...")
                found = _OTHERS[name](plan, notice)
                keep(found.measurements, found.traces)
        except ShmreduceError as error:
            notice(f"{name} failed: {error}")


def _check_rows(name: str, wanted: set[str], plan: Plan) -> None:
    rows = rows_of(name, plan)
    unknown = sorted(wanted.difference(rows))
    if unknown:
        there_are = f"there are {', '.join(rows)}" if rows else "it is measured as a whole"
        raise ConfigurationError(
            f"{name} has no row {', '.join(map(repr, unknown))}; {there_are}",
            setting="--only",
            value=unknown[0],
        )


def _take_turns(
    workload: Workload,
    wanted: set[str] | None,
    plan: Plan,
    report: Report,
    notice: Callable[[str], None],
    progress: Callable[[str], None],
    keep: Callable[[list[Measurement], Sequence[Trace]], None],
) -> None:
    systems = _usable([each for each in SYSTEMS if workload.suits(each)], plan, notice)
    rows = [row for row in workload.rows(plan) if wanted is None or row.name in wanted]
    for group in _groups(systems):
        missing = [row for row in rows if not _has(report, workload.name, row.name, group)]
        fitting = [row for row in missing if fits(int(row.nbytes * min(workload.copies, 8)))]
        for row in missing:
            if row not in fitting:
                notice(f"{workload.name}: {row.name} skipped: it takes more memory than there is")
        if not fitting:
            continue
        if group[0].apart:
            progress(f"{workload.name}: {group[0].name}, apart from the others ...")
        for _, found, traces in take_turns(
            workload, group, fitting, plan.effort, notice=notice, progress=progress
        ):
            keep(found, traces)


def _groups(systems: Sequence[System]) -> list[list[System]]:
    """Return the systems that take turns together, and then each other one by itself."""
    together = [system for system in systems if not system.apart]
    apart = [[system] for system in systems if system.apart]
    return [together, *apart] if together else apart


def _has(report: Report, workload: str, row: str, group: Sequence[System]) -> bool:
    """Return whether a row was measured, with any systems that could have been in a group."""
    if group[0].apart:
        names = {group[0].name}
    else:
        names = {system.name for system in SYSTEMS if not system.apart}
    return any(report.find(workload, name, row) is not None for name in names)


def _usable(
    systems: Sequence[_AnySystem], plan: Plan, notice: Callable[[str], None]
) -> list[_AnySystem]:
    usable = []
    for system in systems:
        if plan.systems is not None and system.name not in plan.systems:
            continue
        reason = why_unusable(system)
        if reason is None:
            usable.append(system)
        else:
            notice(f"{system.name} skipped: {reason}")
    return usable


def save_report(report: Report, path: Path) -> None:
    """Write a report, in such a way that the file is never incomplete."""
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(json.dumps(report.as_json()))
    partial.replace(path)


def load_report(path: Path, plan: Plan) -> Report:
    """Read what :func:`save_report` wrote; return an empty report if there is no file.

    Raises
    ------
    ConfigurationError
        If it is not a report, or was measured on another machine, with other versions, or by
        another plan.
    """
    if not path.exists():
        return Report(machine=machine(), plan=plan.as_json())
    try:
        report = Report.from_json(json.loads(path.read_text()))
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigurationError(
            f"{path} is not a report of shmreduce bench: {error!r}; name another file",
            setting="--results",
            value=str(path),
        ) from error
    if report.machine != machine():
        raise ConfigurationError(
            f"{path} was measured on another machine or with other versions; name another file",
            setting="--results",
            value=str(path),
        )
    _check_plan(report, plan, path)
    return report


def _check_plan(report: Report, plan: Plan, path: Path) -> None:
    """Raise if rows of different effort would stand beside each other."""
    theirs, ours = report.plan, plan.as_json()
    for part in ours:
        if theirs.get(part) != ours[part]:
            raise ConfigurationError(
                f"{path} was measured with another effort: its {part.replace('_', ' ')} is "
                f"{theirs.get(part)}, this command's {ours[part]}; name another file, or measure "
                "with --quick if it was, and without if it was not",
                setting="--results",
                value=str(path),
            )


def machine() -> dict[str, str]:
    """Describe this machine, and the versions of the packages that are compared."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "processor": _processor(),
        "processors": str(usable_processors()),
        "memory": f"{total / (1 << 30):.1f} GiB",
        # The part after a dash names a build of the kernel.
        "system": " ".join((platform.system(), platform.release().partition("-")[0])),
        "Python": platform.python_version(),
        "compiled modules": reason_unused() or "used",
        **{name: _version(name) for name in _DISTRIBUTIONS},
    }


_DISTRIBUTIONS = (
    "shmreduce",
    "numpy",
    "torch",
    "joblib",
    "loky",
    "ray",
    "distributed",
    "faster-fifo",
    "pyzmq",
    "pandas",
)


def _processor() -> str:
    with suppress(FileNotFoundError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "not installed"
