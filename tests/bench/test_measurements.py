"""Medians, spreads, reports and what we ask of the figures."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import pytest

from shmreduce import ConfigurationError
from shmreduce.bench import plots, reasons, suite, targets
from shmreduce.bench.measurements import Measurement, Report, Trace
from shmreduce.bench.plan import Plan, quick_plan
from shmreduce.bench.systems.catalog import SYSTEMS
from shmreduce.bench.systems.ours import OURS
from shmreduce.bench.workloads import import_time, killed
from shmreduce.cli.bench import ratios

if TYPE_CHECKING:
    from pathlib import Path


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
    """Rows, systems and metrics are listed once, as they came; what is missing is None."""
    report = Report(
        measurements=[
            Measurement("fresh", "b", "128 B", "s", [2.0]),
            Measurement("fresh", "b", "128 B", "bytes", [7.0], "PSS"),
            Measurement("fresh", "a", "128 B", "s", [1.0]),
            Measurement("fresh", "b", "4 KiB", "s", [3.0]),
            Measurement("import", "c", "start", "s", [4.0]),
        ]
    )
    assert report.workloads() == ["fresh", "import"]
    assert report.systems("fresh") == ["b", "a"]
    assert report.rows("fresh") == ["128 B", "4 KiB"]
    assert report.metrics("fresh") == ["time", "PSS"]
    assert report.value("fresh", "b", "4 KiB") == 3.0
    assert report.value("fresh", "b", "128 B", "PSS") == 7.0
    assert report.value("fresh", "a", "4 KiB") is None


def test_memory_is_drawn_of_the_largest_row_whenever_it_was_measured() -> None:
    """Rows that were added to a report later may be smaller."""
    rows = [("64 MiB filled", 64), ("64 MiB bare", 64), ("1 MiB filled", 1)]
    report = Report(
        measurements=[Measurement("results", OURS, row, "s", [1.0], nbytes=n) for row, n in rows],
        traces=[Trace("results", OURS, row, [0.0], [1.0]) for row, _ in rows],
    )
    assert [each.row for each in plots.traces_of_largest_row(report, "results")] == ["64 MiB bare"]
    assert plots.traces_of_largest_row(report, "burst") == []


def full_report() -> Report:
    """Return a report in which every system takes a second for everything."""
    measurements = [
        Measurement(name, system.name, row, "s", [1.0], nbytes=1 << 28)
        for name in suite.TITLES
        for row in suite.rows_of(name, Plan())
        for system in SYSTEMS
    ]
    measurements += [
        Measurement("live", OURS, f"{what}, {side}", "count", [20.0])
        for what in ("descriptors", "mappings")
        for side in ("sender", "receiver")
    ]
    measurements += [
        Measurement("import", name, import_time.ROW, "s", [1.0])
        for name in (import_time.BARE, "shmreduce")
    ]
    measurements += [
        Measurement("burst", OURS, "back under 300 MiB", "s", [5.0]),
        Measurement("killed", OURS, killed.ROW, "s", [0.1]),
        Measurement(
            "results", OURS, "64 MiB filled", "bytes", [1 << 28], "shared memory", 1 << 28
        ),
    ]
    report = Report(
        machine=suite.machine(),
        notices=["torch skipped"],
        run={"command": "shmreduce bench"},
        plan=Plan().as_json(),
    )
    report.add(measurements, [Trace("burst", OURS, "after", [0.0, 1.0], [1e9, 1e6])])
    return report


def test_a_report_becomes_json_with_all_samples() -> None:
    """JSON has samples, medians and spreads, and becomes the same report again."""
    report = full_report()
    told = json.loads(json.dumps(report.as_json()))
    assert told["notices"] == ["torch skipped"]
    assert told["measurements"][0]["samples"] == [1.0]
    assert told["measurements"][0]["median"] == 1.0
    assert Report.from_json(told) == report


@pytest.mark.parametrize(("ours", "met"), [(1.0, True), (0.1, True), (2.0, False)])
def test_a_ratio_is_judged_by_its_limit(ours: float, met: bool) -> None:
    """The better strategy of torch at 8 MiB must take at least ten times as long as we."""
    report = Report(
        measurements=[
            Measurement("fresh", "torch", "8 MiB", "s", [99.0]),
            Measurement("fresh", "torch file_system", "8 MiB", "s", [10.0]),
            Measurement("fresh", OURS, "8 MiB", "s", [ours]),
        ]
    )
    ratio, place = targets.judge(report)
    assert ratio.title == f"fresh 8 MiB: best of torch / {OURS}"
    assert ratio.found == 10.0 / ours
    assert ratio.wanted == "at least 10"
    assert ratio.met is met
    assert place.title == "fresh 8 MiB: best peer (torch file_system) / best of ours"
    assert place.met


def test_shared_arrays_are_compared_with_ten_bytes_over_pipe_and_queue() -> None:
    """Each has a target of its own; moved arrays are compared with the pipe."""
    report = Report(
        measurements=[
            Measurement(workload, system, "1 MiB", "s", [seconds])
            for workload, ours in (("shared", OURS), ("born", "shmreduce born shared"))
            for system, seconds in ((ours, 12.0), ("ten bytes", 10.0), ("ten bytes by Pipe", 6.0))
        ]
    )
    found = {each.title: (each.found, each.met) for each in targets.judge(report)}
    assert {title: value for title, value in found.items() if "ten bytes" in title} == {
        f"shared 1 MiB: {OURS} / ten bytes": (1.2, True),
        f"shared 1 MiB: {OURS} / ten bytes by Pipe": (2.0, False),
        "born 1 MiB: shmreduce born shared / ten bytes by Pipe": (2.0, False),
    }


def test_figures_are_judged_only_where_they_were_measured() -> None:
    """An empty report has no verdicts, and a full one has all: no title names a missing row."""
    assert targets.judge(Report()) == []
    report = full_report()
    verdicts = targets.judge(report)
    rows = sum(len(report.rows(workload)) for workload in targets.COMPARED)
    assert len(verdicts) == len(targets.TARGETS) + rows
    assert len({verdict.title for verdict in verdicts}) == len(verdicts)


def test_a_row_that_a_peer_wins_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reason is told beside the verdict, if it is not met."""
    monkeypatch.setitem(reasons.REASONS, "stream 1 MB pyzmq", "it is")
    report = Report(
        measurements=[
            Measurement("stream", "pyzmq", "1 MB", "s", [1.0]),
            Measurement("stream", OURS, "1 MB", "s", [2.0]),
        ]
    )
    (verdict,) = targets.judge(report)
    assert (verdict.met, verdict.reason) == (False, "it is")


def test_what_shmreduce_is_compared_with_is_never_ours() -> None:
    """One copy and ten bytes are neither ours nor peers; everything else is one of both."""
    neither = {system.name for system in SYSTEMS if not system.ours and not system.is_peer}
    assert neither == {"one copy", "ten bytes", "ten bytes by Pipe"}
    assert len({system.name for system in SYSTEMS}) == len(SYSTEMS)


def test_results_are_kept_and_read_again(tmp_path: Path) -> None:
    """A file of results becomes the same report; without a file it is empty."""
    path = tmp_path / "results.json"
    assert suite.load_report(path, Plan()).measurements == []
    report = full_report()
    suite.save_report(report, path)
    assert suite.load_report(path, Plan()) == report
    assert [each.name for each in tmp_path.iterdir()] == ["results.json"]


def test_results_of_another_machine_are_refused(tmp_path: Path) -> None:
    """Ratios between machines would mean nothing."""
    path = tmp_path / "results.json"
    report = full_report()
    report.machine["processor"] = "abacus"
    suite.save_report(report, path)
    with pytest.raises(ConfigurationError, match="another machine"):
        suite.load_report(path, Plan())


def test_results_of_another_effort_are_refused(tmp_path: Path) -> None:
    """A quick row beside a full one would be compared with it. Systems may differ."""
    path = tmp_path / "results.json"
    suite.save_report(full_report(), path)
    assert suite.load_report(path, Plan(systems=("torch",))).measurements
    with pytest.raises(ConfigurationError, match=r"another effort: its effort is .'rounds': 5"):
        suite.load_report(path, quick_plan())


def test_a_report_says_when_each_row_was_measured_with_which_systems() -> None:
    """Systems without a measurement are not among them."""
    report = Report()
    report.add(
        [
            Measurement("fresh", "a", "128 B", "s", [1.0]),
            Measurement("fresh", "a", "128 B", "bytes", [7.0], "PSS"),
            Measurement("fresh", "b", "128 B", "s", [2.0]),
        ],
        [],
    )
    (taken,) = report.taken
    assert (taken.workload, taken.row, taken.systems) == ("fresh", "128 B", ["a", "b"])
    assert datetime.fromisoformat(taken.date) <= datetime.now(UTC)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"machine": 1}'])
def test_a_file_that_is_no_report_is_refused(tmp_path: Path, text: str) -> None:
    """Whatever else is in the file is left alone."""
    path = tmp_path / "notes.txt"
    path.write_text(text)
    with pytest.raises(ConfigurationError, match=r"notes\.txt is not a report"):
        suite.load_report(path, Plan())
    assert path.read_text() == text


def test_ratios_are_to_ours_also_where_only_born_arrays_are_sent() -> None:
    """Plain shmreduce cannot do that workload."""
    report = Report(
        measurements=[
            Measurement("born", "shmreduce born shared", "1 MiB", "s", [2.0]),
            Measurement("born", "torch", "1 MiB", "s", [5.0]),
        ]
    )
    table = ratios(report, "born")
    assert table.title == "Times the time of shmreduce born shared"
    assert table.rows == [("shmreduce born shared", "1.00"), ("torch", "2.50")]


def test_unknown_workloads_are_refused() -> None:
    """An unknown name is an error that lists those there are."""
    with pytest.raises(ConfigurationError, match="no workload 'stale'; there are fresh, shared"):
        suite.selection("fresh,stale")
