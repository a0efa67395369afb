"""Lets systems take turns at the rows of a workload.

May import errors, ``measurements``, ``plan``, ``resources``, ``systems.base``,
``workloads.base`` and :mod:`shmreduce.fresh_process`.

Each system has its own measuring process, which starts its own workers. The coordinator
asks the measuring processes in turn, so that a busy moment of the machine affects all of
them. Each turn has new processes if those of all systems together would not fit into
memory, or if only the first message counts.
"""

from __future__ import annotations

import os
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import TYPE_CHECKING

from shmreduce.bench.measurements import TIME, Measurement, Trace
from shmreduce.bench.resources import Watch, descendants, fits, usage
from shmreduce.errors import ShmreduceError
from shmreduce.fresh_process import FreshProcess, fail

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from multiprocessing.connection import Connection

    from shmreduce.bench.measurements import Unit
    from shmreduce.bench.plan import Effort
    from shmreduce.bench.systems.base import Session, System
    from shmreduce.bench.workloads.base import Action, Row, Workload

__all__ = ["METRICS", "take_turns"]

_LONG_WARM_UP = 4.0
"""Seconds. The second message, too, may use memory for the first time, since the answer to
the first message is still held."""

METRICS: dict[str, Unit] = {
    "CPU time": "s",
    "context switches": "count",
    "shared memory": "bytes",
    "PSS": "bytes",
    "descriptors": "count",
    "mappings": "count",
}
"""What is recorded in addition to the time, and its unit, of all processes of a system
together: the first two per message, the others at their peak."""


@dataclass(frozen=True)
class _Turn:
    """A request of the coordinator: round trips of a row for some seconds."""

    row: Row
    seconds: float
    warm_up: int


@dataclass(frozen=True)
class _Done:
    """An answer: what was done in a turn.

    Parameters
    ----------
    actions : list of (float, int)
        Seconds and messages of each action, the first ``warm_up`` of them included.
    warm_up : int
        How many actions do not count.
    spent : float
        Seconds from the first to the last action, with what is not timed in them.
    """

    actions: list[tuple[float, int]]
    warm_up: int
    spent: float

    @property
    def seconds(self) -> float:
        """Seconds for a message: the median, so that a turn is one sample, fast or slow."""
        return median(seconds / count for seconds, count in self.actions[self.warm_up :])


@dataclass
class _Samples:
    """One system's samples of one row, one for each turn."""

    seconds: list[float] = field(default_factory=list)
    others: dict[str, list[float]] = field(default_factory=dict)
    trace: Trace | None = None
    spent: float = 0.0

    def add(self, metric: str, value: float) -> None:
        self.others.setdefault(metric, []).append(value)


class _Runner:
    """One system at one workload, and its measuring process, which is started when needed."""

    def __init__(self, system: System, workload: Workload) -> None:
        self.system = system
        self._workload = workload
        self._process: FreshProcess | None = None
        self._prepared: Row | None = None
        self._answered = False

    def turn(self, row: Row, seconds: float, warm_up: int) -> _Done:
        """Let the measuring process take a turn."""
        process = self.ready(row)
        process.send(_Turn(row, seconds, warm_up))
        done: _Done = process.receive()
        return done

    def pids(self, row: Row) -> list[int]:
        """Return the ids of the measuring process and of all that it has started for a row."""
        return descendants(self.ready(row).pid)

    def start(self, row: Row) -> FreshProcess:
        """Ask the measuring process to prepare a row, without waiting for it."""
        process = self._process
        if process is None:
            process = FreshProcess(self.system.name, _serve, self.system, self._workload)
            self._process = process
        if self._prepared != row:
            process.send(row)
            self._prepared, self._answered = row, False
        return process

    def stop(self, *, at_once: bool = False) -> None:
        """End the measuring process and its workers, which get little time for it if at once."""
        process, self._process = self._process, None
        self._prepared = None
        if process is not None:
            process.__exit__(KeyboardInterrupt if at_once else None, None, None)

    def ready(self, row: Row) -> FreshProcess:
        """Wait until the measuring process has prepared a row, and return the process."""
        process = self.start(row)
        if not self._answered:
            process.receive()
            self._answered = True
        return process


def take_turns(
    workload: Workload,
    systems: Sequence[System],
    rows: Sequence[Row],
    effort: Effort,
    *,
    notice: Callable[[str], None],
    progress: Callable[[str], None],
) -> Iterator[tuple[Row, list[Measurement], list[Trace]]]:
    """Measure rows one after the other.

    Parameters
    ----------
    workload : Workload
        What is done.
    systems : sequence of System
        The systems to measure, which must be usable.
    rows : sequence of Row
        What is sent.
    effort : Effort
        How long to measure.
    notice : callable
        Called with a text that says which system failed, and why.
    progress : callable
        Called with a text that says what is being done.

    Yields
    ------
    tuple of Row, list of Measurement, list of Trace
        If a system failed at a row, it has no measurement of that row and the later ones.
    """
    runners = [_Runner(system, workload) for system in systems]
    try:
        for row in rows:
            progress(f"{workload.name}: {row.name} ...")
            samples = _measure_row(workload, row, runners, effort, notice)
            yield (
                row,
                [
                    each
                    for name, found in samples.items()
                    for each in _measurements(workload, row, name, found, effort.rounds)
                ],
                [found.trace for found in samples.values() if found.trace is not None],
            )
    except BaseException:
        # Interrupted, or nobody asks for more rows.
        _stop(runners, at_once=True)
        raise
    _stop(runners)


def _fit(workload: Workload, row: Row, systems: int) -> bool:
    return fits(int(row.nbytes * workload.copies * systems))


def _stop(runners: list[_Runner], *, at_once: bool = False) -> None:
    # All at the same time, since several systems take seconds to stop.
    with ThreadPoolExecutor(max(1, len(runners))) as executor:
        list(executor.map(partial(_Runner.stop, at_once=at_once), runners))


def _measure_row(
    workload: Workload,
    row: Row,
    runners: list[_Runner],
    effort: Effort,
    notice: Callable[[str], None],
) -> dict[str, _Samples]:
    together = _fit(workload, row, len(runners))
    if workload.cold or not together:
        _stop(runners)

    def attempt(runner: _Runner, act: Callable[[], object]) -> bool:
        try:
            act()
        except ShmreduceError as error:
            # The system is left out from here on.
            notice(f"{workload.name}: {row.name}: {error}")
            runners.remove(runner)
            runner.stop()
            # Its earlier turns may have been wrong as well.
            del samples[runner.system.name]
            return False
        return True

    samples = {runner.system.name: _Samples() for runner in runners}
    turns = [_time] * effort.rounds + [_watch] * effort.watched
    for number, turn in enumerate(turns):
        due = [
            runner
            for runner in runners
            if number == 0 or turn is _watch or samples[runner.system.name].spent <= effort.longest
        ]
        _shuffle(due, number)
        if together:
            # All at the same time, since several systems take seconds to start.
            for runner in due:
                runner.start(row)
            # Wait for all before the first turn, which would get no processor otherwise.
            due = [runner for runner in due if attempt(runner, partial(runner.ready, row))]
        for runner in due:
            act = partial(turn, workload, row, runner, effort, samples[runner.system.name])
            if attempt(runner, act) and not together:
                runner.stop()
        if workload.cold:
            _stop(runners)
    return samples


def _shuffle(runners: list[_Runner], number: int) -> None:
    """Put systems into an order that differs from round to round, but not from run to run.

    If one system always followed the same other, it would always find that one's memory and
    caches.
    """
    random.Random(number).shuffle(runners)  # noqa: S311 - an order, no secret


def _time(workload: Workload, row: Row, runner: _Runner, effort: Effort, found: _Samples) -> None:
    pids = runner.pids(row)
    before = usage(pids)
    done = runner.turn(row, *_length(workload, effort))
    # Also what has begun during the turn, or ended.
    after = usage(list({*pids, *runner.pids(row)}))
    seconds, switches = after.since(before)
    messages = sum(count for _, count in done.actions)
    found.add("CPU time", seconds / messages)
    found.add("context switches", switches / messages)
    found.seconds.append(done.seconds)
    found.spent += done.spent


def _length(workload: Workload, effort: Effort) -> tuple[float, int]:
    """Return seconds and warm-up of a turn; none if only the first message counts."""
    return (0.0, 0) if workload.cold else (effort.seconds, effort.warm_up)


def _watch(workload: Workload, row: Row, runner: _Runner, effort: Effort, found: _Samples) -> None:
    pids = runner.pids(row)
    with Watch(pids[0]) as watch:
        runner.turn(row, *_length(workload, effort))
    peak = watch.peak
    found.add("shared memory", peak.shared)
    found.add("PSS", peak.pss)
    found.add("descriptors", peak.descriptors)
    found.add("mappings", peak.mappings)
    found.trace = Trace(
        workload.name,
        runner.system.name,
        row.name,
        [when for when, _ in watch.history],
        [float(pss) for _, pss in watch.history],
    )


def _measurements(
    workload: Workload, row: Row, system: str, found: _Samples, rounds: int
) -> Iterator[Measurement]:
    if not found.seconds:
        return
    yield Measurement(
        workload.name, system, row.name, "s", found.seconds, TIME, row.nbytes, planned=rounds
    )
    for metric, unit in METRICS.items():
        if metric in found.others:
            values = found.others[metric]
            yield Measurement(workload.name, system, row.name, unit, values, metric, row.nbytes)


# The measuring process


def _serve(connection: Connection, system: System, workload: Workload) -> None:
    if workload.processors is not None:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: workload.processors])
    place = _Place(connection, system, workload)
    try:
        for request in _requests(connection):
            if isinstance(request, _Turn):
                connection.send(_act(place.action(request.row), request))
            else:
                place.action(request)
                connection.send("ready")
    except Exception as error:
        # Before leaving, which may take long if workers are no longer as they should be.
        fail(connection, error)
    finally:
        place.leave()


class _Place:
    """Keeps the session as long as rows have the same number of workers, and a row's action."""

    def __init__(self, connection: Connection, system: System, workload: Workload) -> None:
        self._connection = connection
        self._system = system
        self._workload = workload
        self._row: Row | None = None
        self._session: Session | None = None
        self._action: Action | None = None
        self._left = threading.Event()

    def action(self, row: Row) -> Action:
        """Return the action of a row."""
        if self._action is not None and row == self._row:
            return self._action
        self._close_action()
        if self._session is None or self._row is None or row.workers != self._row.workers:
            self.leave()
            self._left = threading.Event()
            self._session = self._system.open(self._workload.ability, row.workers)
            threading.Thread(
                target=_report_death,
                args=(self._session, self._left, self._connection),
                daemon=True,
            ).start()
        self._row = row
        self._action = self._workload.begin(self._session, row)
        return self._action

    def leave(self) -> None:
        """End the session."""
        self._close_action()
        self._left.set()
        if self._session is not None:
            self._session.close()
            self._session = None

    def _close_action(self) -> None:
        if self._action is not None:
            self._action.close()
            self._action = None


def _report_death(session: Session, left: threading.Event, connection: Connection) -> None:
    """Report a worker's death, after which a queue would wait for ever."""
    while not left.wait(0.5):
        for process in session.processes():
            if process.exitcode not in (None, 0) and not left.is_set():
                fail(connection, f"a worker of it ended with exit code {process.exitcode}")
                return


def _requests(connection: Connection) -> Iterator[Row | _Turn]:
    """Yield requests until the coordinator closes its end."""
    while True:
        try:
            request: Row | _Turn = connection.recv()
        except (EOFError, ConnectionResetError):
            return
        yield request


def _act(action: Action, turn: _Turn) -> _Done:
    """Do the warm-up, and then the action at least once and until the time is over."""
    done: list[tuple[float, int]] = []
    started = time.perf_counter()
    while len(done) < turn.warm_up and time.perf_counter() - started < _LONG_WARM_UP:
        done.append(action.once())
    warm_up = len(done)
    deadline = time.perf_counter() + turn.seconds
    done.append(action.once())
    while time.perf_counter() < deadline:
        done.append(action.once())
    return _Done(done, warm_up, time.perf_counter() - started)
