"""Each workload measures what it says, with few and small arrays."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from shmreduce import ConfigurationError
from shmreduce.bench import burst, import_time, live_arrays, suite
from shmreduce.bench.echo import COPY, Effort, measure_echo
from shmreduce.bench.measurements import Measurement, Report
from shmreduce.bench.systems import Pipe, Shmreduce, Stock, System, Torch
from shmreduce.cli import main
from shmreduce.fresh_process import RunFailedError

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np

ONCE = Effort(rounds=2, seconds=0.0, warm_up=1)
SIZES = (128, 1 << 20)
OURS = (Shmreduce(), Shmreduce("shmreduce file_system", "file_system"))


@dataclass(frozen=True)
class DyingWorker(System):
    """A system whose worker dies at the start."""

    name: str = "dying"

    def prepare_worker(self) -> None:
        os._exit(3)


@dataclass(frozen=True)
class Refusing(System):
    """A system that raises in the measuring process."""

    name: str = "refusing"

    def prepare_parent(self) -> None:
        raise ConfigurationError("not today", setting="day", value="today")


@dataclass(frozen=True)
class Wrong(System):
    """A system that delivers other values."""

    name: str = "wrong"

    def fresh(self, source: np.ndarray[Any, Any]) -> Any:
        return source + 1


@dataclass(frozen=True)
class Absent(System):
    """A system that is not installed."""

    name: str = "absent"

    def unusable_reason(self) -> str:
        return "it was never written"


def quiet(_text: str) -> None:
    """Hear nothing."""


def test_fresh_arrays_are_echoed_by_every_system() -> None:
    """Each system has one sample a round at each size; one warm copy stands beside them."""
    measurements = measure_echo("fresh", "fresh", [*OURS, Stock()], SIZES, ONCE, quiet)
    report = Report(measurements=measurements)
    assert report.rows("fresh") == ["128 B", "1 MiB"]
    assert report.systems("fresh") == [
        "shmreduce",
        "shmreduce file_system",
        "multiprocessing",
        COPY,
    ]
    for measurement in measurements:
        assert len(measurement.samples) == ONCE.rounds
        assert all(sample > 0 for sample in measurement.samples)


def test_shared_arrays_are_echoed() -> None:
    """A shared array, and one byte for comparison, are sent again and again."""
    measurements = measure_echo("shared", "shared", [*OURS, Pipe()], SIZES, ONCE, quiet)
    assert len(measurements) == 3 * len(SIZES)
    assert all(len(measurement.samples) == ONCE.rounds for measurement in measurements)


@pytest.mark.parametrize("kind", ["fresh", "shared"])
@pytest.mark.parametrize("strategy", ["file_descriptor", "file_system"])
def test_torch_is_measured_with_both_strategies(strategy: str, kind: Any) -> None:
    """Tensors are sent where torch is installed."""
    pytest.importorskip("torch")
    system = Torch(strategy=strategy)
    assert system.unusable_reason() is None
    measurements = measure_echo("any", kind, [system], SIZES, ONCE, quiet)
    ours = [each for each in measurements if each.system == system.name]
    assert len(ours) == len(SIZES)


@pytest.mark.parametrize(
    ("system", "reason"),
    [
        (DyingWorker(), "echo worker ended with exit code 3"),
        (Wrong(), "other values"),
    ],
)
def test_a_system_that_fails_is_told_and_the_others_go_on(system: System, reason: str) -> None:
    """A dead worker or a wrong value ends that system's part only, and soon."""
    told: list[str] = []
    measurements = measure_echo("fresh", "fresh", [system, Stock()], SIZES, ONCE, told.append)
    assert {each.system for each in measurements} == {"multiprocessing", COPY}
    assert any(reason in text for text in told)


def test_many_live_arrays_are_counted_on_both_sides() -> None:
    """Descriptors and mappings are counted where the arrays are held, and are few."""
    found = {
        (each.system, each.row): each.median
        for each in live_arrays.measure_live_arrays("live", OURS, count=2000)
    }
    for system in OURS:
        for side in ("sender", "receiver"):
            assert 0 < found[system.name, f"descriptors, {side}"] <= 32
            assert 0 < found[system.name, f"mappings, {side}"] <= 64
        assert found[system.name, "time to send one"] > 0


def test_a_burst_is_followed_until_its_memory_is_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The peak is what was sent; afterwards the memory is watched."""
    monkeypatch.setattr(burst, "_LONGEST", 1.0)
    monkeypatch.setattr(burst, "_PAUSE", 0.05)
    measurements = burst.measure_burst("burst", [Shmreduce()], array_bytes=4 << 20, count=8)
    found = {each.row: each for each in measurements}
    assert found["sent, not yet read"].unit == "bytes"
    assert found["sent, not yet read"].median >= 8 * (4 << 20)
    assert "read and dropped" in found
    # 32 MiB are under 300 MiB at once.
    assert found["back under 300 MiB"].median < 1.0


def test_import_times_are_taken_in_turn() -> None:
    """Bare Python and shmreduce have one sample for each round."""
    found = {each.system: each for each in import_time.measure_import_time("import", rounds=1)}
    assert len(found[import_time.BARE].samples) == 1
    assert len(found["shmreduce"].samples) == 1


def test_a_statement_that_fails_is_an_error() -> None:
    """An interpreter that ends badly is not timed."""
    with pytest.raises(RunFailedError, match="no_such_module"):
        import_time._run("import no_such_module")


def test_what_cannot_be_measured_is_told() -> None:
    """A system that is missing and a size for which memory is short are notices."""
    told: list[str] = []
    assert suite._usable([Stock(), Absent()], told.append) == [Stock()]
    assert suite._that_fit([128, 1 << 60], 2, told.append) == [128]
    assert told == [
        "absent skipped: it was never written",
        f"{(1 << 60) >> 30} GiB skipped: it takes 2 times that in memory",
    ]


def test_a_workload_that_fails_spares_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """The report has the failure as a notice and the other workload's figures."""

    def fail(_plan: suite.Plan, _notice: Callable[[str], None]) -> list[Measurement]:
        return live_arrays.measure_live_arrays("live", [Refusing()], count=1)

    def succeed(_plan: suite.Plan, _notice: Callable[[str], None]) -> list[Measurement]:
        return [Measurement("import", "python", "start", "s", [1.0])]

    monkeypatch.setattr(suite, "WORKLOADS", {"live": fail, "import": succeed})
    report = suite.run(["live", "import"], suite.quick_plan(), quiet)
    assert report.workloads() == ["import"]
    assert report.notices == ["live failed: not today"]
    assert {"processor", "memory", "Python", "numpy"} <= set(report.machine)


@pytest.fixture
def tiny_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ``--quick`` be quicker still, and torch be absent."""
    monkeypatch.setattr(
        suite, "quick_plan", lambda: suite.Plan(fresh_sizes=(128,), effort=ONCE, import_rounds=1)
    )
    monkeypatch.setattr(Torch, "unusable_reason", lambda _self: "not wanted here")


@pytest.mark.usefixtures("tiny_plan")
def test_the_command_prints_tables_ratios_and_figures(capsys: pytest.CaptureFixture[str]) -> None:
    """For people: medians, ratios to ours, and which figures are met."""
    assert main(["bench", "--quick", "--only", "fresh"]) == 0
    told = capsys.readouterr()
    assert "Round trip of a fresh float64 array" in told.out
    assert "Times the time of shmreduce" in told.out
    assert "fresh 128 B: shmreduce / multiprocessing" in told.out
    assert "torch skipped: not wanted here" in told.err


@pytest.mark.usefixtures("tiny_plan")
def test_the_command_refuses_unknown_workloads(capsys: pytest.CaptureFixture[str]) -> None:
    """An unknown name is an error that lists those there are."""
    assert main(["bench", "--quick", "--only", "fresh,stale"]) == 2
    assert "there is no workload 'stale'; there are fresh, shared" in capsys.readouterr().err
