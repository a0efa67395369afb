"""The measurements of a run, and their statistics.

May import the standard library only.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime
from statistics import median, quantiles
from typing import TYPE_CHECKING, Any, Literal, Self

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["TIME", "Measurement", "Report", "Taken", "Trace", "Unit"]

Unit = Literal["s", "bytes", "count"]

TIME = "time"
"""The metric by which rows are compared by default."""


@dataclass
class Measurement:
    """One system's samples of one metric of one row of one workload.

    Parameters
    ----------
    workload, system, row : str
        What was done, by which system, and with what (for example a size).
    unit : {"s", "bytes", "count"}
        The unit of the samples.
    samples : list of float
        The samples in the order in which they were taken. Where systems take turns, each turn
        gives one: the median of its messages.
    metric : str
        What was measured: the time, or another resource.
    nbytes : int
        Bytes of arrays in one message; 0 if that does not apply.
    planned : int
        How many turns the system was to get. A slow one gets fewer. 0 if that does not apply.

    Examples
    --------
    >>> Measurement("echo", "stock", "1 MiB", "s", [3.0, 1.0, 2.0]).median
    2.0
    """

    workload: str
    system: str
    row: str
    unit: Unit
    samples: list[float] = field(default_factory=list)
    metric: str = TIME
    nbytes: int = 0
    planned: int = 0

    @property
    def median(self) -> float:
        """The middle sample."""
        return median(self.samples)

    @property
    def spread(self) -> float:
        """Half the distance between the quartiles, as a share of the median."""
        if len(self.samples) < 2 or self.median == 0:
            return 0.0
        first, _, third = quantiles(self.samples, n=4, method="inclusive")
        return (third - first) / 2 / self.median


@dataclass
class Trace:
    """Memory over time, of one system in one row.

    Parameters
    ----------
    workload, system, row : str
        As for :class:`Measurement`.
    seconds, nbytes : list of float
        The coordinates of the points.
    """

    workload: str
    system: str
    row: str
    seconds: list[float] = field(default_factory=list)
    nbytes: list[float] = field(default_factory=list)


@dataclass
class Taken:
    """When a row was measured, or a workload as a whole, and with which systems.

    Parameters
    ----------
    workload, row : str
        What was measured.
    systems : list of str
        Those that have a measurement.
    date : str
        When it was finished, in UTC.
    """

    workload: str
    row: str
    systems: list[str]
    date: str


@dataclass
class Report:
    """All measurements of a run, and what was left out.

    Parameters
    ----------
    machine : dict
        Processor, memory, versions.
    measurements : list of Measurement
        In the order in which rows were measured.
    notices : list of str
        What was skipped, and why.
    traces : list of Trace
        Memory over time.
    run : dict
        When it was measured, and by which command.
    plan : dict
        How much was measured, as values for JSON; empty if nothing was.
    taken : list of Taken
        When each row was measured.
    """

    machine: dict[str, str] = field(default_factory=dict)
    measurements: list[Measurement] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    traces: list[Trace] = field(default_factory=list)
    run: dict[str, str] = field(default_factory=dict)
    plan: dict[str, Any] = field(default_factory=dict)
    taken: list[Taken] = field(default_factory=list)

    def add(self, measurements: list[Measurement], traces: Sequence[Trace]) -> None:
        """Add what was measured just now."""
        self.measurements += measurements
        self.traces += traces
        date = datetime.now(UTC).isoformat(timespec="seconds")
        systems: dict[tuple[str, str], list[str]] = {}
        for each in measurements:
            systems.setdefault((each.workload, each.row), []).append(each.system)
        for (workload, row), names in systems.items():
            self.taken.append(Taken(workload, row, _unique(names), date))

    def find(self, workload: str, system: str, row: str, metric: str = TIME) -> Measurement | None:
        """Return a measurement, or None if it was not made."""
        for each in self.measurements:
            if (each.workload, each.system, each.row, each.metric) == (
                workload,
                system,
                row,
                metric,
            ):
                return each
        return None

    def value(self, workload: str, system: str, row: str, metric: str = TIME) -> float | None:
        """Return the median of a measurement, or None if it was not made."""
        found = self.find(workload, system, row, metric)
        return None if found is None else found.median

    def rows(self, workload: str) -> list[str]:
        """List a workload's rows, each once."""
        return _unique(each.row for each in self.measurements if each.workload == workload)

    def systems(self, workload: str) -> list[str]:
        """List the systems that a workload was measured with, each once."""
        return _unique(each.system for each in self.measurements if each.workload == workload)

    def metrics(self, workload: str) -> list[str]:
        """List the metrics of a workload, each once."""
        return _unique(each.metric for each in self.measurements if each.workload == workload)

    def workloads(self) -> list[str]:
        """List the workloads, each once."""
        return _unique(each.workload for each in self.measurements)

    def tell(self, notice: str) -> None:
        """Add a notice, once."""
        if notice not in self.notices:
            self.notices.append(notice)

    def as_json(self) -> dict[str, Any]:
        """Return everything as values for JSON."""
        return {
            "machine": self.machine,
            "run": self.run,
            "plan": self.plan,
            "taken": [vars(each) for each in self.taken],
            "notices": self.notices,
            "measurements": [
                {**vars(each), "median": each.median, "spread": each.spread}
                for each in self.measurements
            ],
            "traces": [vars(each) for each in self.traces],
        }

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Self:
        """Return a report from the values of :meth:`as_json`.

        Examples
        --------
        >>> report = Report(notices=["torch skipped"])
        >>> Report.from_json(report.as_json()) == report
        True
        """
        return cls(
            machine=values["machine"],
            run=values["run"],
            plan=values["plan"],
            taken=[Taken(**each) for each in values["taken"]],
            notices=values["notices"],
            measurements=[
                Measurement(**{name: each[name] for name in Measurement.__dataclass_fields__})
                for each in values["measurements"]
            ],
            traces=[Trace(**each) for each in values["traces"]],
        )


def _unique(names: Any) -> list[str]:
    return list(dict.fromkeys(names))
