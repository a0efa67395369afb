"""Each workload measures what it says, with few and small arrays."""

from __future__ import annotations

import json
import os
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import count
from multiprocessing import current_process, get_context
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pytest

from shmreduce import ConfigurationError
from shmreduce.bench import resources, suite, turns
from shmreduce.bench.measurements import Measurement, Report
from shmreduce.bench.plan import Effort, Plan
from shmreduce.bench.survivors import Survivors
from shmreduce.bench.systems import by_hand, tasks
from shmreduce.bench.systems.base import Session
from shmreduce.bench.systems.by_hand import ByHand
from shmreduce.bench.systems.catalog import SYSTEMS
from shmreduce.bench.systems.one_copy import OneCopy
from shmreduce.bench.systems.ours import BornShared, Installed, Shmreduce
from shmreduce.bench.systems.queues import Stock, TenBytes, TenBytesByPipe, Torch
from shmreduce.bench.systems.tasks import Executor, Joblib, Loky, OurExecutor
from shmreduce.bench.turns import METRICS, take_turns
from shmreduce.bench.workloads import burst, import_time, killed, live_arrays, stages, start
from shmreduce.bench.workloads.base import Row
from shmreduce.bench.workloads.echo import Echo, EchoFirstUse, EchoObjects, EchoSmallArrays
from shmreduce.bench.workloads.many import Exchange, FanOut, Pipeline, Read, Results, Stream
from shmreduce.cli import main
from shmreduce.cli.bench import value_text
from shmreduce.fresh_process import RunFailedError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shmreduce.bench.systems.base import Ability, System
    from shmreduce.bench.workloads.base import Workload

ONCE = Effort(rounds=2, seconds=0.0, warm_up=1, watched=False)
FRESH = Echo("fresh", "Echo")
TINY = Plan(
    effort=ONCE,
    fresh_sizes=(10, 1 << 20),
    shared_sizes=(128, 1 << 20),
    first_use_sizes=(1 << 20,),
    read_sizes=(1 << 20,),
    stream_sizes=(100, 1_000_000),
    fan_out_sizes=(1 << 20,),
    fan_out_workers=2,
    results_sizes=(1 << 20,),
    results_items=3,
    pipeline_sizes=(1 << 20,),
    object_sizes=(1 << 20,),
    small_array_sizes=(1000,),
    small_arrays=50,
    exchange_sizes=(1 << 20,),
    exchange_workers=(2,),
    import_rounds=1,
)


@dataclass(frozen=True)
class DyingWorker(Stock):
    """A system whose worker dies after the start."""

    name: str = "dying"

    def release(self, message: object) -> None:
        # Workers are daemons, the measuring process is not.
        if message is not None and current_process().daemon:
            os._exit(3)


@dataclass(frozen=True)
class Stillborn(Stock):
    """A system whose workers die before they are ready."""

    name: str = "stillborn"

    def prepare(self) -> None:
        if current_process().daemon:
            os._exit(4)


@dataclass(frozen=True)
class Refusing(Stock):
    """A system that raises in the measuring process."""

    name: str = "refusing"

    def prepare(self) -> None:
        raise ConfigurationError("not today", setting="day", value="today")


@dataclass(frozen=True)
class Wrong(Stock):
    """A system that delivers other values."""

    name: str = "wrong"

    def fresh(self, array: np.ndarray[Any, Any]) -> Any:
        return array + 1


@dataclass(frozen=True)
class WrongLater(Stock):
    """A system that delivers other values from its fourth message on."""

    name: str = "wrong later"

    def fresh(self, array: np.ndarray[Any, Any]) -> Any:
        return array + (next(_MESSAGES) >= 3)


_MESSAGES = count()


@dataclass(frozen=True)
class SlowStart(Stock):
    """A system that takes long to start, and not for its messages."""

    name: str = "slow start"

    def prepare(self) -> None:
        if not current_process().daemon:
            time.sleep(_LONG_START)


_LONG_START = 1.0


@dataclass(frozen=True)
class Tidy(Wrong):
    """A system that delivers other values, and leaves a file when it is closed."""

    name: str = "tidy"
    path: str = ""

    def open(self, ability: Ability, workers: int) -> Session:
        session = super().open(ability, workers)
        close = session.close

        def close_and_note() -> None:
            close()
            Path(self.path).touch()

        session.close = close_and_note  # type: ignore[method-assign]
        return session


@dataclass(frozen=True)
class Lingering(Stock):
    """A system that takes a minute to end."""

    name: str = "lingering"

    def open(self, ability: Ability, workers: int) -> Session:
        session = super().open(ability, workers)
        session.close = partial(time.sleep, 60)  # type: ignore[method-assign]
        return session


@dataclass(frozen=True)
class Broken(Stock):
    """A system whose package cannot be imported."""

    name: str = "broken"

    def unusable_reason(self) -> str:
        raise OSError("libabacus.so: cannot open shared object file")


@dataclass(frozen=True)
class Absent(Stock):
    """A system that is not installed."""

    name: str = "absent"

    def unusable_reason(self) -> str:
        return "it was never written"


def quiet(_text: str) -> None:
    """Hear nothing."""


def unexpected(text: str) -> None:
    """Fail: no notice should come."""
    pytest.fail(text)


def measure(
    workload: Workload,
    systems: Sequence[System],
    rows: Sequence[Row] | None = None,
    effort: Effort = ONCE,
) -> Report:
    """Let systems take turns at all rows of the tiny plan; nothing may fail."""
    report = Report()
    taken = take_turns(
        workload,
        systems,
        workload.rows(TINY) if rows is None else rows,
        effort,
        notice=report.notices.append,
        progress=quiet,
    )
    for _, measurements, traces in taken:
        report.measurements += measurements
        report.traces += traces
    assert report.notices == []
    return report


def test_fresh_arrays_are_echoed() -> None:
    """Each system has one sample a round at each size; one warm copy stands beside them."""
    report = measure(FRESH, [Shmreduce(), Installed(), OneCopy(), Stock(), ByHand(), Executor()])
    assert report.rows("fresh") == ["10 B", "1 MiB"]
    assert len(report.systems("fresh")) == 6
    for each in report.measurements:
        assert len(each.samples) == ONCE.rounds
        assert all(sample >= 0 for sample in each.samples)


def test_shared_arrays_are_echoed() -> None:
    """A shared array, and ten bytes for comparison, are sent again and again."""
    workload = Echo("shared", "Echo", "shared")
    systems = [Shmreduce(), Installed(), ByHand(), TenBytes(), TenBytesByPipe()]
    report = measure(workload, systems)
    assert len(report.systems("shared")) == 5


def test_ten_bytes_go_by_a_pipe_or_a_queue_of_the_standard_library() -> None:
    """Each name says which."""
    assert TenBytes().queue(0).__class__.__name__ == "SimpleQueue"
    ends = TenBytesByPipe().queue(0)
    assert ends.put.__self__.__class__ is ends.get.__self__.__class__ is Connection
    ends.put(b"0123456789")
    assert ends.get() == b"0123456789"


def test_segments_made_by_hand_are_unlinked_after_their_round_trip() -> None:
    """A message of kind ``born`` is one segment, which is the one that comes back."""
    session = ByHand().open("echo", 1)
    names = []

    def message(payload: Any, kind: Any) -> Any:
        made = ByHand().message(payload, kind)
        names.append(made.memory.name)
        return made

    session.message = message  # type: ignore[method-assign]
    action = Echo("born", "", "born").begin(session, Row("1 KiB", 1 << 10))
    try:
        for _ in range(3):
            action.once()
        assert len(set(names)) == 3
        assert [name for name in names if Path("/dev/shm", name).exists()] == []
    finally:
        action.close()
        session.close()


def test_a_segment_made_by_hand_is_forwarded_by_its_name() -> None:
    """Whoever forwards copies nothing: the worker's queue gets the name that it got."""
    put: list[Any] = []
    queue = SimpleNamespace(put=put.append)
    held = by_hand._copy(np.arange(3.0), kept=False)
    label, memory = held.label, held.memory
    ByHand().send_on(by_hand._HandQueue(queue), [held])
    assert put == [label]
    memory.unlink()


def test_arrays_born_shared_are_echoed_and_collected() -> None:
    """Messages and results are made by NumPy inside ``shared_allocations()``."""
    system = BornShared()
    reason = system.unusable_reason()
    if reason is not None:
        pytest.skip(reason)
    report = measure(Echo("born", "Echo", "born"), [system])
    assert report.systems("born") == [system.name]
    report = measure(Results("results", "Results"), [system])
    assert report.systems("results") == [system.name]


@pytest.mark.parametrize(
    ("workload", "systems"),
    [
        (EchoFirstUse("first-use", ""), [Shmreduce()]),
        (EchoObjects("objects", ""), [Shmreduce(), Stock()]),
        (EchoSmallArrays("small-arrays", ""), [Shmreduce(), Stock()]),
        (Read("read", ""), [Shmreduce(), Installed(), Stock(), ByHand()]),
        (Stream("stream", ""), [Shmreduce(), ByHand()]),
        (FanOut("fan-out", ""), [Shmreduce(), ByHand(), Executor()]),
        (Pipeline("pipeline", ""), [Shmreduce(), ByHand(), Executor()]),
        (Results("results", ""), [Shmreduce(), Stock(), Executor()]),
        (Exchange("exchange", ""), [Shmreduce(), ByHand()]),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_every_other_workload_is_measured(workload: Workload, systems: Sequence[System]) -> None:
    """Values arrive as they were sent, through ours and through peers of each kind."""
    assert all(workload.suits(system) for system in systems)
    report = measure(workload, systems)
    assert report.rows(workload.name) == [row.name for row in workload.rows(TINY)]
    assert report.systems(workload.name) == [system.name for system in systems]


PEERS = [
    system
    for system in SYSTEMS
    if system.is_peer
    and system.name not in ("multiprocessing", "ProcessPoolExecutor", "torch file_system")
]


@pytest.mark.parametrize("system", PEERS, ids=lambda system: system.name)
def test_peers_are_measured_where_they_are_installed(system: System) -> None:
    """Each peer echoes one array."""
    reason = system.unusable_reason()
    if reason is not None:
        pytest.skip(reason)
    report = measure(FRESH, [system], [Row("1 MiB", 1 << 20)])
    assert report.systems("fresh") == [system.name]


def test_what_a_system_uses_is_recorded() -> None:
    """Beside the time: processor, memory, descriptors; and memory over time."""
    effort = Effort(rounds=1, seconds=0.0, warm_up=0)
    report = measure(FRESH, [Shmreduce()], [Row("8 MiB", 8 << 20)], effort)
    assert set(report.metrics("fresh")) == {"time", *METRICS}
    assert (report.value("fresh", "shmreduce", "8 MiB", "shared memory") or 0) >= 8 << 20
    assert (report.value("fresh", "shmreduce", "8 MiB", "CPU time") or 0) > 0
    (trace,) = report.traces
    assert len(trace.seconds) == len(trace.nbytes) > 0


@dataclass(frozen=True)
class EchoApart(Echo):
    """An echo for which memory is short unless systems are measured one by one."""

    copies: ClassVar[float] = 1e9


def test_systems_that_do_not_fit_together_are_measured_apart() -> None:
    """Each turn has new processes then, and as many samples as ever."""
    report = measure(EchoApart("fresh", ""), [Shmreduce(), Stock()], [Row("1 MiB", 1 << 20)])
    assert [len(each.samples) for each in report.measurements if each.metric == "time"] == [2, 2]


@pytest.mark.parametrize("workload", [FRESH, EchoFirstUse("first-use", "First")])
def test_no_turn_begins_while_another_system_starts(
    workload: Workload, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A system that starts takes the processors from who is being measured."""
    seen: list[str] = []

    def noting(name: str) -> None:
        method = getattr(turns._Runner, name)

        def call(runner: Any, *arguments: Any) -> Any:
            answer = method(runner, *arguments)
            seen.append(name)
            return answer

        monkeypatch.setattr(turns._Runner, name, call)

    for name in ("ready", "turn"):
        noting(name)
    measure(workload, [Shmreduce(), Installed(), Stock()], [Row("1 KiB", 1 << 10)])
    assert seen[:3] == ["ready"] * 3
    assert seen.count("turn") == 3 * ONCE.rounds


@pytest.mark.parametrize(
    ("system", "reason"),
    [
        (DyingWorker(), "worker of it ended with exit code 3"),
        (Stillborn(), "exit codes: [4]"),
        (Refusing(), "not today"),
        (Wrong(), "other values"),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_a_system_that_fails_is_told_and_the_others_go_on(system: System, reason: str) -> None:
    """A dead worker or a wrong value ends that system's part only, and soon."""
    told: list[str] = []
    rows = [Row("1 KiB", 1 << 10)]
    (turn,) = take_turns(FRESH, [system, Stock()], rows, ONCE, notice=told.append, progress=quiet)
    assert {each.system for each in turn[1]} == {"multiprocessing"}
    assert any(reason in text for text in told)


def test_a_system_that_fails_in_a_later_turn_has_no_samples() -> None:
    """What it delivered in its first turn may have been wrong as well."""
    told: list[str] = []
    rows = [Row("1 KiB", 1 << 10)]
    (turn,) = take_turns(
        FRESH, [WrongLater(), Stock()], rows, ONCE, notice=told.append, progress=quiet
    )
    assert {each.system for each in turn[1]} == {"multiprocessing"}
    assert len(told) == 1


@dataclass(frozen=True)
class Stale(Stock):
    """A system that delivers what it sent first, again and again."""

    name: str = "stale"

    def fresh(self, array: np.ndarray[Any, Any]) -> Any:
        return _FIRST.setdefault(array.shape, array.copy())


_FIRST: dict[Any, Any] = {}


@pytest.mark.parametrize(
    "workload",
    [
        FRESH,
        EchoSmallArrays("small-arrays", ""),
        Read("read", ""),
        Stream("stream", ""),
        FanOut("fan-out", ""),
        Pipeline("pipeline", ""),
        Exchange("exchange", ""),
    ],
    ids=lambda workload: workload.name,
)
def test_a_system_that_delivers_an_earlier_message_is_told(workload: Workload) -> None:
    """Each message has values of its own, so it cannot be taken for another one."""
    told: list[str] = []
    rows = workload.rows(TINY)[-1:]
    (turn,) = take_turns(workload, [Stale()], rows, ONCE, notice=told.append, progress=quiet)
    assert turn[1] == []
    assert "other values" in told[0]


def test_each_message_is_a_new_array_over_the_same_memory() -> None:
    """Joblib sends an array that it knows by reference, and new memory would be cold."""
    sent = []
    shared = np.arange(128.0)

    class Noting(Session):
        def message(self, payload: Any, kind: str) -> Any:
            return shared if kind == "shared" else payload

        def echo(self, box: list[Any]) -> Any:
            sent.append(box[0])
            return box.pop().copy()

    action = FRESH.begin(Noting(), Row("1 KiB", 1 << 10))
    for _ in range(3):
        action.once()
    assert len({id(array) for array in sent}) == 3
    assert len({array.ctypes.data for array in sent}) == 1
    sent.clear()
    action = Echo("shared", "", "shared").begin(Noting(), Row("1 KiB", 1 << 10))
    for number in range(1, 4):
        action.once()
        assert [shared[0], shared[64], shared[-1]] == [number] * 3
    assert all(array is shared for array in sent)


def test_each_turn_is_one_sample_however_many_messages_it_had() -> None:
    """The median of the messages after the warm-up."""
    done = turns._Done([(9.0, 1), (1.0, 1), (4.0, 2), (6.0, 2)], warm_up=1, spent=20.0)
    assert done.seconds == 2.0
    effort = Effort(rounds=3, seconds=0.05, warm_up=1, watched=False)
    report = measure(FRESH, [Stock()], [Row("1 KiB", 1 << 10)], effort)
    found = report.find("fresh", "multiprocessing", "1 KiB")
    assert found is not None
    assert len(found.samples) == found.planned == 3


def test_a_slow_system_gets_fewer_turns_and_the_table_says_so() -> None:
    """Only the time of its turns counts, not that of its start."""
    row = [Row("1 KiB", 1 << 10)]
    effort = Effort(rounds=3, seconds=0.05, warm_up=0, longest=0.04, watched=False)
    slow = measure(FRESH, [Stock()], row, effort).measurements[0]
    assert len(slow.samples) == 1
    assert value_text(slow).endswith(" (1 of 3)")
    effort = Effort(rounds=3, seconds=0.0, warm_up=0, longest=_LONG_START, watched=False)
    quick = measure(EchoApart("fresh", ""), [SlowStart()], row, effort).measurements[0]
    assert len(quick.samples) == 3
    assert " of " not in value_text(quick)


@pytest.mark.parametrize(
    "system",
    [Executor(), OurExecutor(), Loky(), Joblib()],
    ids=lambda system: system.name,
)
def test_all_workers_have_started_before_the_first_turn(system: Any) -> None:
    """Otherwise their start would be timed, and their processor time would be missed."""
    reason = system.unusable_reason()
    if reason is not None:
        pytest.skip(reason)
    session = system.open("fan_out", 3)
    try:
        before = set(resources.descendants(os.getpid()))
        assert len(set(session.collect(worker_pid, range(3))) - before) == 0
        session.fan_out(np.arange(3))
        assert set(resources.descendants(os.getpid())) <= before
        assert len(before) > 3
    finally:
        session.close()


def worker_pid(_item: int) -> int:
    """Return the process in which this is called."""
    return os.getpid()


def test_processor_time_of_threads_that_have_ended_counts() -> None:
    """Copies are made by threads that end."""
    pid = os.getpid()
    before = resources.usage([pid])
    started = time.thread_time()

    def work() -> None:
        while time.thread_time() < 0.1:
            pass

    thread = Thread(target=work)
    thread.start()
    thread.join()
    seconds, switches = resources.usage([pid]).since(before)
    assert seconds >= 0.1 + (time.thread_time() - started) * 0.5
    assert switches > 0


def test_a_process_that_began_during_a_turn_counts_from_its_beginning() -> None:
    """One that has ended meanwhile, or a thread, does not make the sum smaller."""
    before = resources.Usage({1: 5.0, 2: 7.0}, {1: 50, 2: 70, 20: 900})
    after = resources.Usage({2: 7.5, 3: 0.25}, {2: 71, 3: 4})
    assert after.since(before) == (0.75, 5)


def test_many_live_arrays_are_counted_on_both_sides() -> None:
    """Descriptors and mappings are counted where the arrays are held, and are few."""
    system = Installed()
    found = {
        each.row: each.median
        for each in live_arrays.measure_live_arrays("live", system, count=2000)
    }
    for side in ("sender", "receiver"):
        assert 0 < found[f"descriptors, {side}"] <= 32
        assert 0 < found[f"mappings, {side}"] <= 64
    assert found["time to send one"] > 0


def test_a_burst_is_followed_until_its_memory_is_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The peak is what was sent; afterwards the memory is watched."""
    monkeypatch.setattr(burst, "_LONGEST", 1.0)
    monkeypatch.setattr(burst, "_PAUSE", 0.05)
    measurements, traces = burst.measure_burst("burst", Installed(), array_bytes=4 << 20, count=8)
    found = {each.row: each for each in measurements}
    assert found["sent, not yet read"].unit == "bytes"
    assert found["sent, not yet read"].median >= 8 * (4 << 20)
    assert "read and dropped" in found
    # 32 MiB are under 300 MiB at once.
    assert found["back under 300 MiB"].median < 1.0
    assert traces[0].nbytes[0] == found["sent, not yet read"].median


def test_every_stage_of_a_message_is_timed() -> None:
    """A by-value array goes through all stages, a shared one is neither allocated nor copied.

    How long the pickling of a large array takes without its copy cannot be told.
    """
    found = stages.measure_stages("stages", [1 << 20, 2 << 20], rounds=2)
    by_row = {
        row: [each.system for each in found if each.row == row]
        for row in ("1 MiB fresh", "1 MiB shared", "2 MiB fresh")
    }
    assert set(by_row["1 MiB fresh"]) == set(stages.STAGES)
    assert set(by_row["2 MiB fresh"]) == set(stages.STAGES) - {"reduce"}
    assert set(by_row["1 MiB shared"]) == set(stages.STAGES) - {"allocate", "copy"}
    assert all(len(each.samples) == 2 for each in found)


def test_forks_are_timed_with_and_without_arrays() -> None:
    """There is a row for none, for arrays of NumPy and for shared ones."""
    assert len(stages.measure_fork("fork", count=10)) == 3


def test_the_error_of_a_killed_worker_is_timed() -> None:
    """Each system tells its caller, after the kill."""
    found = killed.measure_killed_workers(
        Survivors("killed", killed.SYSTEMS, unexpected), rounds=1
    )
    assert {each.system for each in found} >= {"shmreduce", "shmreduce executor"}
    assert all(each.samples[0] > 0 for each in found)


def test_starts_of_children_are_timed() -> None:
    """By each start method, and of a pool; what is not installed is left out."""
    found = start.measure_starts(
        Survivors("start", start.installed_systems(), unexpected), rounds=1
    )
    times = {(each.system, each.row): each.samples for each in found}
    assert {row for _, row in times} == {"fork", "forkserver", "spawn", "fork, Pool(2)"}
    assert {"shmreduce", "multiprocessing"} <= {system for system, _ in times}
    assert {len(samples) for samples in times.values()} == {4}


def test_records_are_echoed() -> None:
    """One and many, which come back equal."""
    workload = EchoObjects("objects", "Objects")
    rows = [row for row in workload.rows(TINY) if row.form == "records"]
    assert [row.name for row in rows] == ["a record", f"{TINY.records} records"]
    report = measure(workload, [Shmreduce(), Stock()], rows)
    assert report.rows("objects") == [row.name for row in rows]


def test_import_times_are_taken_in_turn() -> None:
    """Bare Python and shmreduce have one sample for each round."""
    found = {
        each.system: each
        for each in import_time.measure_import_time(
            Survivors("import", import_time.installed_packages(), unexpected), rounds=1
        )
    }
    assert len(found[import_time.BARE].samples) == 1
    assert len(found["shmreduce"].samples) == 1


def test_a_statement_that_fails_is_an_error() -> None:
    """An interpreter that ends badly is not timed."""
    with pytest.raises(RunFailedError, match="no_such_module"):
        import_time._run("import no_such_module")


def test_what_is_not_installed_is_told() -> None:
    """A system that is missing is a notice; one that nobody asked for is not."""
    told: list[str] = []
    plan = Plan(systems=("multiprocessing", "absent"))
    assert suite._usable([Stock(), Absent(), Torch()], plan, told.append) == [Stock()]
    assert told == ["absent skipped: it was never written"]


def test_a_package_that_cannot_be_imported_is_told() -> None:
    """Whatever it raises is the reason for leaving its system out."""
    told: list[str] = []
    assert suite._usable([Broken(), Stock()], Plan(), told.append) == [Stock()]
    assert told == ["broken skipped: OSError: libabacus.so: cannot open shared object file"]


def test_one_that_fails_does_not_spoil_starts_kills_and_imports(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is told once, and the others have their samples."""
    monkeypatch.setitem(import_time._STATEMENTS, "absent", "import absent")
    told: list[str] = []
    for workload, measured, measure_all in (
        ("start", "multiprocessing", start.measure_starts),
        ("killed", "ProcessPoolExecutor", killed.measure_killed_workers),
        ("import", import_time.BARE, import_time.measure_import_time),
    ):
        survivors = Survivors(workload, ["absent", measured], told.append)
        found = measure_all(survivors, 2)
        assert {(each.workload, each.system) for each in found} == {(workload, measured)}
        assert len(told) == 1
        assert told.pop().startswith(f"{workload}: absent: ")


def test_one_that_fails_does_not_spoil_live_arrays_and_bursts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is told, and the others have their rows."""
    monkeypatch.setattr(suite, "OURS_BOTH_STRATEGIES", (Refusing(), Installed()))
    monkeypatch.setattr(burst, "_LONGEST", 0.2)
    plan = Plan(live_arrays=1000, burst_arrays=2, burst_array_bytes=1 << 20)
    for workload, find in (("live", suite._live), ("burst", suite._burst)):
        told: list[str] = []
        found = find(plan, told.append)
        assert {each.system for each in found.measurements} == {"shmreduce install"}
        assert told == [f"{workload}: refusing: not today"]


def test_systems_are_chosen_for_every_workload(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that ``--systems`` does not name are not measured; references always are."""
    seen: list[list[str]] = []

    def note(survivors: Survivors, _rounds: int) -> list[Measurement]:
        seen.append(survivors.names)
        return []

    monkeypatch.setattr(start, "measure_starts", note)
    monkeypatch.setattr(killed, "measure_killed_workers", note)
    monkeypatch.setattr(import_time, "measure_import_time", note)
    plan = Plan(systems=("multiprocessing", "ProcessPoolExecutor"))
    for each in (suite._start, suite._killed, suite._import):
        each(plan, unexpected)
    assert seen == [
        ["multiprocessing"],
        ["ProcessPoolExecutor"],
        [import_time.BARE, "multiprocessing", "numpy"],
    ]


def test_systems_change_their_order_from_round_to_round() -> None:
    """Otherwise one would always find the caches of the same other."""
    survivors = Survivors("start", ["a", "b", "c"], unexpected)
    assert survivors.in_turn(0) == ["a", "b", "c"]
    assert survivors.in_turn(1) == ["c", "b", "a"]


def test_the_end_of_the_pool_is_not_timed_with_a_kill(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time is that at which the caller gets the error."""
    closed: list[float] = []

    class Closing(ProcessPoolExecutor):
        def __exit__(self, *arguments: object) -> None:
            closed.append(time.monotonic())
            super().__exit__(None, None, None)

    monkeypatch.setattr(killed, "ProcessPoolExecutor", Closing)
    reader, writer = get_context("spawn").Pipe(duplex=False)
    told = killed._in_executor(writer)
    assert reader.recv() < told <= closed[0]


def test_a_task_that_survives_is_an_error() -> None:
    """Nothing was measured then."""
    with pytest.raises(RunFailedError, match="gave a result"):
        killed._when_told(int)


def test_a_session_is_closed_after_a_failure(tmp_path: Path) -> None:
    """What a system has outside of its processes, such as folders, would stay otherwise."""
    told: list[str] = []
    system = Tidy(path=str(tmp_path / "closed"))
    rows = [Row("1 KiB", 1 << 10)]
    list(take_turns(FRESH, [system], rows, ONCE, notice=told.append, progress=quiet))
    assert "other values" in told[0]
    assert Path(system.path).exists()


def test_an_interrupt_does_not_wait_for_systems_that_take_long_to_end() -> None:
    """They have two seconds, and are killed then."""
    interrupted: list[float] = []

    def interrupt(text: str) -> None:
        if text.startswith("fresh: 2 KiB"):
            interrupted.append(time.monotonic())
            raise KeyboardInterrupt

    rows = [Row("1 KiB", 1 << 10), Row("2 KiB", 2 << 10)]
    turns_taken = take_turns(
        FRESH, [Lingering()], rows, ONCE, notice=unexpected, progress=interrupt
    )
    with pytest.raises(KeyboardInterrupt):
        list(turns_taken)
    assert time.monotonic() - interrupted[0] < 15


@pytest.mark.parametrize(
    ("headroom", "free", "fits"),
    [(None, 100, True), (1000, 100, True), (100, 100, False), (1000, 49, False)],
)
def test_memory_is_limited_by_cgroups_and_by_shared_memory(
    monkeypatch: pytest.MonkeyPatch, headroom: int | None, free: int, fits: bool
) -> None:
    """Half of what is needed is taken to be in ``/dev/shm``."""
    monkeypatch.setattr(resources, "headroom", lambda: headroom)
    folder = SimpleNamespace(f_bavail=free, f_frsize=1)
    monkeypatch.setattr(os, "statvfs", lambda _path: folder)
    assert resources.fits(100) is fits


@dataclass(frozen=True)
class Busy(Stock):
    """A system whose processes also work when it is not its turn."""

    name: str = "busy"

    apart: ClassVar[bool] = True


def test_systems_that_disturb_others_are_measured_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has its turns after the others', whose processes have ended. A file may lack them."""
    groups: list[list[str]] = []

    def note(_workload: Workload, systems: Sequence[System], rows: Any, *_: Any, **__: Any) -> Any:
        groups.append([system.name for system in systems])
        for row in rows:
            made = [Measurement("fresh", each.name, row.name, "s", [1.0]) for each in systems]
            yield row, made, []

    monkeypatch.setattr(suite, "take_turns", note)
    monkeypatch.setattr(suite, "SYSTEMS", (Busy(), Busy("busier"), Shmreduce(), Stock()))
    report = Report()
    suite.run({"fresh": None}, TINY, quiet, report)
    together = ["shmreduce", "multiprocessing"]
    assert groups == [together, ["busy"], ["busier"]]
    groups.clear()
    report.measurements = [each for each in report.measurements if each.system != "busier"]
    suite.run({"fresh": None}, TINY, quiet, report)
    assert groups == [["busier"]]


def test_ray_gets_a_function_once() -> None:
    """It is kept in the actors, so calls have only its number."""
    sent: list[Any] = []
    actor = tasks._Actor()

    def learn(function: Any) -> None:
        sent.append(function)
        actor.learn(function)

    def call(number: int, argument: Any) -> Any:
        sent.append((number, argument))
        return actor.call(number, argument)

    handle = SimpleNamespace(
        learn=SimpleNamespace(remote=learn), call=SimpleNamespace(remote=call)
    )
    session: Any = object.__new__(tasks._RaySession)
    session._workers, session._next, session._known = 1, 0, []
    session._ray, session._actors = SimpleNamespace(get=list), [handle]
    assert [session.start(abs, -1), session.start(str, 2), session.start(abs, -3)] == [1, "2", 3]
    assert sent == [abs, (0, -1), str, (1, 2), (0, -3)]


def test_servers_are_measured_apart() -> None:
    """They are those whose processes work all the time."""
    assert {system.name for system in SYSTEMS if system.apart} == {"joblib", "Ray", "Dask"}


def test_a_workload_that_fails_spares_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """The report has the failure as a notice and the other workload's figures."""

    def fail(_plan: Plan, _notice: object) -> suite.Found:
        raise ConfigurationError("not today", setting="day", value="today")

    def succeed(_plan: Plan, _notice: object) -> suite.Found:
        return suite.Found([Measurement("import", "python", "start", "s", [1.0])])

    monkeypatch.setattr(suite, "_OTHERS", {"live": fail, "import": succeed})
    report = Report()
    suite.run({"live": None, "import": None}, TINY, quiet, report)
    assert report.workloads() == ["import"]
    assert report.notices == ["live failed: not today"]


@pytest.mark.parametrize(
    ("name", "there_are"),
    [("fresh", "there are 10 B, 1 MiB"), ("import", "it is measured as a whole")],
)
def test_a_row_that_there_is_not_is_refused(name: str, there_are: str) -> None:
    """An unknown row names those there are, before anything is measured."""
    report = Report()
    with pytest.raises(ConfigurationError, match=f"{name} has no row '3 B'; {there_are}"):
        suite.run({"shared": None, name: {"3 B"}}, TINY, quiet, report)
    assert not report.workloads()


# The command


@pytest.fixture
def tiny_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ``--quick`` be quicker still."""
    monkeypatch.setattr("shmreduce.bench.plan.quick_plan", lambda: TINY)


QUICK = ["bench", "--quick", "--systems", "shmreduce,multiprocessing", "--only", "fresh:10 B"]


@pytest.mark.usefixtures("tiny_plan")
def test_the_command_prints_tables_ratios_and_figures(capsys: pytest.CaptureFixture[str]) -> None:
    """For people: medians, ratios to ours, and which figures are met."""
    assert main([*QUICK, "--resources"]) == 0
    told = capsys.readouterr()
    assert "Round trip of an array that was not sent before" in told.out
    assert "Times the time of shmreduce" in told.out
    assert "context switches" in told.out
    assert "fresh 10 B: shmreduce / multiprocessing" in told.out


@pytest.mark.usefixtures("tiny_plan")
def test_an_interrupted_run_prints_what_it_has(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """After Ctrl-C the exit status is that of an interrupted program."""

    def run(_chosen: object, _plan: Plan, _tell: object, report: Report, _save: object) -> None:
        report.measurements.append(Measurement("fresh", "multiprocessing", "10 B", "s", [1.5]))
        raise KeyboardInterrupt

    monkeypatch.setattr(suite, "run", run)
    assert main(QUICK) == 130
    told = capsys.readouterr()
    assert "multiprocessing  1.5 s" in told.out
    assert "interrupted" in told.err


@pytest.mark.usefixtures("tiny_plan")
def test_a_plot_that_fails_does_not_lose_the_figures(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """They are printed and written, without the picture."""

    def fail(_report: Report, _path: Path) -> None:
        raise RuntimeError("no fonts")

    monkeypatch.setattr("shmreduce.cli.bench.import_extra", lambda *_, **__: None)
    monkeypatch.setattr("shmreduce.bench.plots.plot", fail)
    page = tmp_path / "page.md"
    arguments = ["bench", "--quick", "--only=import", f"--report={page}"]
    assert main([*arguments, f"--plot={tmp_path / 'figures.png'}"]) == 1
    told = capsys.readouterr()
    assert "bare Python" in told.out
    assert "no fonts" in told.err
    assert "bare Python" in page.read_text()
    assert "figures.png" not in page.read_text()


@pytest.mark.usefixtures("tiny_plan")
def test_rows_that_were_measured_are_not_measured_again(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A second run with the same file goes on where the first one ended."""
    arguments = [*QUICK, "--results", str(tmp_path / "results.json")]
    assert main(arguments) == 0
    assert "fresh: 10 B ..." in capsys.readouterr().err
    arguments[arguments.index("fresh:10 B")] = "fresh"
    assert main(arguments) == 0
    told = capsys.readouterr().err
    assert "10 B" not in told
    assert "fresh: 1 MiB ..." in told


@pytest.mark.usefixtures("tiny_plan")
@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_the_command_draws_and_writes_a_page(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, suffix: str
) -> None:
    """A picture and a page of what is in the file of results."""
    pytest.importorskip("matplotlib")
    results = str(tmp_path / "results.json")
    picture, page = tmp_path / f"figures.{suffix}", tmp_path / "page.md"
    options = ["--results", results, "--plot", str(picture), "--report", str(page)]
    assert main([*QUICK, *options]) == 0
    capsys.readouterr()
    assert picture.stat().st_size > 1000
    text = page.read_text()
    assert "| multiprocessing |" in text
    assert "date" in text
    assert "shmreduce" in text


@pytest.mark.usefixtures("tiny_plan")
def test_the_command_lists_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    """Workloads with their rows, and systems with what keeps them from being measured."""
    assert main(["bench", "--quick", "--list"]) == 0
    told = capsys.readouterr().out
    assert "10 B, 1 MiB" in told
    assert "multiprocessing" in told
    assert main(["bench", "--quick", "--list", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    fresh = next(each for each in found["workloads"] if each["name"] == "fresh")
    assert fresh["rows"] == ["10 B", "1 MiB"]
    assert {"name": "multiprocessing", "unusable": None} in found["systems"]
    only = ["--only", "stream,fresh:1 MiB", "--systems", "multiprocessing"]
    assert main(["bench", "--quick", "--list", "--json", *only]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [each["name"] for each in found["workloads"]] == ["stream", "fresh"]
    assert found["workloads"][1]["rows"] == ["1 MiB"]
    assert found["systems"] == [{"name": "multiprocessing", "unusable": None}]


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--only", "fresh,stale"], "there is no workload 'stale'; there are fresh, shared"),
        (["--systems", "abacus"], "there is no system 'abacus'; there are shmreduce"),
        (["--systems", "abacus"], "--list says which of them"),
    ],
)
def test_the_command_refuses_unknown_names(
    capsys: pytest.CaptureFixture[str], options: list[str], complaint: str
) -> None:
    """An unknown name is an error that lists those there are."""
    assert main(["bench", "--quick", *options]) == 2
    assert complaint in capsys.readouterr().err


@pytest.mark.usefixtures("tiny_plan")
def test_the_command_does_not_measure_for_a_folder_that_is_read_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A page that is there can be written all the same; results are replaced, so they cannot."""
    page = tmp_path / "page.md"
    page.touch()
    # Root, who may run the tests, may write anywhere.
    monkeypatch.setattr(os, "access", lambda path, _: path != tmp_path)
    for option in (f"--report={tmp_path / 'other.md'}", f"--results={page}"):
        assert main(["bench", "--quick", "--only=import", option]) == 2
        told = capsys.readouterr().err
        assert f"this user may not write to {tmp_path}" in told
        assert "import ..." not in told
    assert main(["bench", "--quick", "--only=import", f"--report={page}"]) == 0
    assert "import" in page.read_text()
