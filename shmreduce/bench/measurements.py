"""What was measured, and what to make of it.

May import the standard library only.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median, quantiles
from typing import Any, Literal

__all__ = ["Measurement", "Report", "Unit"]

Unit = Literal["s", "bytes", "count"]


@dataclass
class Measurement:
    """One system's samples of one row of one workload.

    Parameters
    ----------
    workload, system, row : str
        What was done, by whom, and with what (a size, say).
    unit : {"s", "bytes", "count"}
        Of the samples.
    samples : list of float
        In the order in which they were taken.

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
    """

    machine: dict[str, str] = field(default_factory=dict)
    measurements: list[Measurement] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)

    def find(self, workload: str, system: str, row: str) -> Measurement | None:
        """Return a measurement, or None if it was not made."""
        for each in self.measurements:
            if (each.workload, each.system, each.row) == (workload, system, row):
                return each
        return None

    def value(self, workload: str, system: str, row: str) -> float | None:
        """Return the median of a measurement, or None if it was not made."""
        found = self.find(workload, system, row)
        return None if found is None else found.median

    def rows(self, workload: str) -> list[str]:
        """List a workload's rows, each once."""
        return _unique(each.row for each in self.measurements if each.workload == workload)

    def systems(self, workload: str) -> list[str]:
        """List the systems that a workload was measured with, each once."""
        return _unique(each.system for each in self.measurements if each.workload == workload)

    def workloads(self) -> list[str]:
        """List the workloads, each once."""
        return _unique(each.workload for each in self.measurements)

    def as_json(self) -> dict[str, Any]:
        """Return everything as values that JSON knows."""
        return {
            "machine": self.machine,
            "notices": self.notices,
            "measurements": [
                {**vars(each), "median": each.median, "spread": each.spread}
                for each in self.measurements
            ],
        }


def _unique(names: Any) -> list[str]:
    return list(dict.fromkeys(names))
