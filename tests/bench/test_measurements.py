"""Medians, spreads, reports and what we ask of the figures."""

from __future__ import annotations

import json

import pytest

from shmreduce.bench import echo, import_time, targets
from shmreduce.bench.measurements import Measurement, Report
from shmreduce.bench.systems import OURS


def test_the_spread_is_half_the_quartile_distance_over_the_median() -> None:
    """Outliers beyond the quartiles do not count."""
    measurement = Measurement("fresh", OURS, "1 MiB", "s", [1.0, 9.0, 10.0, 11.0, 500.0])
    assert measurement.median == 10.0
    assert measurement.spread == pytest.approx(0.1)


def test_one_sample_has_no_spread() -> None:
    """The spread of one sample, or of nothing but zeros, is zero."""
    assert Measurement("live", OURS, "descriptors", "count", [5.0]).spread == 0.0
    assert Measurement("burst", OURS, "later", "bytes", [0.0, 0.0, 0.0]).spread == 0.0


def test_a_report_finds_rows_and_systems_in_order() -> None:
    """Rows and systems are listed once, as they came; what is missing is None."""
    report = Report(
        measurements=[
            Measurement("fresh", "b", "128 B", "s", [2.0]),
            Measurement("fresh", "a", "128 B", "s", [1.0]),
            Measurement("fresh", "b", "4 KiB", "s", [3.0]),
            Measurement("import", "c", "start", "s", [4.0]),
        ]
    )
    assert report.workloads() == ["fresh", "import"]
    assert report.systems("fresh") == ["b", "a"]
    assert report.rows("fresh") == ["128 B", "4 KiB"]
    assert report.value("fresh", "b", "4 KiB") == 3.0
    assert report.value("fresh", "a", "4 KiB") is None


def test_a_report_becomes_json_with_all_samples() -> None:
    """JSON has the samples, medians and spreads, and the notices."""
    report = Report(
        machine={"processors": "2"},
        measurements=[Measurement("fresh", "a", "128 B", "s", [1.0, 3.0])],
        notices=["torch skipped"],
    )
    told = json.loads(json.dumps(report.as_json()))
    assert told["machine"] == {"processors": "2"}
    assert told["notices"] == ["torch skipped"]
    assert told["measurements"][0]["samples"] == [1.0, 3.0]
    assert told["measurements"][0]["median"] == 2.0


@pytest.mark.parametrize(("ours", "met"), [(1.0, True), (0.1, True), (2.0, False)])
def test_a_ratio_is_judged_by_its_limit(ours: float, met: bool) -> None:
    """Torch at 8 MiB must take at least eight times as long as we."""
    report = Report(
        measurements=[
            Measurement("fresh", "torch", "8 MiB", "s", [8.0]),
            Measurement("fresh", OURS, "8 MiB", "s", [ours]),
        ]
    )
    (verdict,) = targets.judge(report)
    assert verdict.title == "fresh 8 MiB: torch / shmreduce"
    assert verdict.found == 8.0 / ours
    assert verdict.wanted == "at least 8"
    assert verdict.met is met


def test_figures_are_judged_only_where_they_were_measured() -> None:
    """An empty report has no verdicts, and a full one has all."""
    assert targets.judge(Report()) == []
    rows = [echo.size_row(128 * 8**step) for step in range(10)]
    rows += ["4 KiB", "16 KiB", "64 KiB", "1 MiB", "8 MiB", "64 MiB", "256 MiB", "1 GiB"]
    systems = [OURS, "multiprocessing", "torch", "torch file_system", echo.COPY]
    full = [
        Measurement(workload, system, row, "s", [1.0])
        for workload in ("fresh", "shared")
        for system in systems
        for row in rows
    ]
    full += [
        Measurement("live", OURS, f"{what}, {side}", "count", [20.0])
        for what in ("descriptors", "mappings")
        for side in ("sender", "receiver")
    ]
    full += [
        Measurement("import", name, import_time.ROW, "s", [1.0])
        for name in (import_time.BARE, "shmreduce")
    ]
    full.append(Measurement("burst", OURS, "back under 300 MiB", "s", [5.0]))
    verdicts = targets.judge(Report(measurements=full))
    assert len(verdicts) == len(targets.TARGETS)
    assert len({verdict.title for verdict in verdicts}) == len(verdicts)
