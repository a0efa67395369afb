"""Short calls that are sent ahead to a busy worker, and taken back if they wait there too long."""

from __future__ import annotations

import collections
import itertools
import multiprocessing
import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

import shmreduce
from shmreduce import WorkerDied
from shmreduce.pool import Pool
from shmreduce.pool_dispatch import Dispatcher
from tests.channels.channels import eventually
from tests.conftest import PATIENCE
from tests.pool.holding import held
from tests.pool.work import noted, own_pid, square, touch, wait_for_files

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shmreduce.pool_worker_handle import WorkerHandle
    from tests.conftest import Children

AHEAD = 32
"""How many tasks a worker may have here; the pool sends some ahead if twice as many wait."""


class Busy(NamedTuple):
    """What counts of a worker."""

    busy_since: float
    may_have_unread: bool


@pytest.fixture(autouse=True)
def _all_are_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Send tasks ahead whatever they took so far; they are late after a second."""
    monkeypatch.setattr(Dispatcher, "_tasks_ahead", lambda _: AHEAD)
    monkeypatch.setattr("shmreduce.pool_dispatch._SHORT_TASK", 1.0)


@pytest.fixture
def taken_back(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tasks were taken back, each time that the pool looked for some."""
    counts: list[int] = []
    take_back = Dispatcher._take_back_from

    def counting(dispatcher: Dispatcher, worker: WorkerHandle) -> None:
        before = len(worker.tasks)
        take_back(dispatcher, worker)
        counts.append(before - len(worker.tasks))

    monkeypatch.setattr(Dispatcher, "_take_back_from", counting)
    return counts


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch, taken_back: list[int]) -> list[int]:
    """Take tasks back whenever that is allowed, while the worker reads them."""

    def take_back_ahead(dispatcher: Dispatcher, workers: Sequence[WorkerHandle]) -> None:
        for worker in workers:
            if worker.may_have_unread and worker.is_doing_oldest:
                dispatcher._take_back_from(worker)

    monkeypatch.setattr(Dispatcher, "_take_back_ahead", take_back_ahead)
    return taken_back


@pytest.mark.parametrize("module", [shmreduce, multiprocessing], ids=lambda each: each.__name__)
def test_a_call_may_wait_for_those_behind_it(
    children: Children, taken_back: list[int], tmp_path: Path, module: Any
) -> None:
    """Another worker does them, although nothing else happens meanwhile."""
    with Pool(2, context=module.get_context(children.method)) as pool:
        count = 5 * AHEAD
        with held(pool, 1 + count):
            waiting = pool.apply_async(wait_for_files, (str(tmp_path), count))
            others = [pool.apply_async(touch, (str(tmp_path / str(n)),)) for n in range(count)]
        assert waiting.get(PATIENCE) == count
        for other in others:
            other.get(PATIENCE)
        pool.close()
        pool.join()
    if module is shmreduce:
        assert max(taken_back) > 1
    else:
        # Over a pipe nothing is taken back, so no call is sent ahead of another.
        assert not taken_back


def test_each_is_done_once_whoever_reads_it(
    children: Children, at_once: list[int], tmp_path: Path
) -> None:
    """The pool and the worker read at the same time, and workers are killed or leave."""
    done = tmp_path / "done"
    killed = range(100, 1000, 100)
    with Pool(2, context=shmreduce.get_context(children.method), maxtasksperchild=150) as pool:
        with held(pool, 1000):
            results = [
                pool.apply_async(noted, ((str(done), n, "SIGKILL" if n in killed else None),))
                for n in range(1000)
            ]
        for number, result in enumerate(results):
            if number in killed:
                with pytest.raises(WorkerDied):
                    result.get(PATIENCE)
            else:
                assert result.get(PATIENCE) == number**2
        pool.close()
        pool.join()
    numbers = [int(line.split()[0]) for line in done.read_text().splitlines()]
    assert sorted(numbers) == [*range(1000)]
    pids = collections.Counter(line.split()[1] for line in done.read_text().splitlines())
    assert max(pids.values()) <= 150
    assert sum(at_once) > 0


def test_nothing_is_taken_back_from_a_worker_that_has_read_nothing(
    taken_back: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The oldest task is not in a packet that can be taken back."""
    looks: list[float] = []
    until_long = Dispatcher.until_long

    def looking(dispatcher: Dispatcher, workers: Sequence[WorkerHandle]) -> float | None:
        seconds = until_long(dispatcher, workers)
        if seconds is not None:
            looks.append(seconds)
        return seconds

    monkeypatch.setattr("shmreduce.pool_dispatch._SHORT_TASK", 0.1)
    monkeypatch.setattr(Dispatcher, "until_long", looking)
    with Pool(1, context=shmreduce.get_context("fork")) as pool:
        pid = pool.apply(own_pid)
        with held(pool, 3 * AHEAD):
            # The worker has answered, and waits for what comes next.
            os.kill(pid, signal.SIGSTOP)
            results = [pool.apply_async(own_pid) for _ in range(3 * AHEAD)]
        try:
            # Looked for several times after the task became late.
            eventually(lambda: len(looks) > 20)
            assert not taken_back
        finally:
            os.kill(pid, signal.SIGCONT)
        assert {result.get(PATIENCE) for result in results} == {pid}
        pool.close()
        pool.join()


def test_an_idle_pool_does_not_look_for_any(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would wake up again and again."""
    answers: list[float | None] = []
    until_long = Dispatcher.until_long

    def noting(dispatcher: Dispatcher, workers: Sequence[WorkerHandle]) -> float | None:
        answers.append(until_long(dispatcher, workers))
        return answers[-1]

    monkeypatch.setattr(Dispatcher, "until_long", noting)
    with Pool(1, context=shmreduce.get_context("fork")) as pool:
        with held(pool, 5 * AHEAD):
            results = [pool.apply_async(square, (n,)) for n in range(5 * AHEAD)]
        assert [result.get(PATIENCE) for result in results] == [n * n for n in range(5 * AHEAD)]
        # Its thread may not be back in its wait yet.
        eventually(lambda: answers[-1] is None)
        pool.close()
        pool.join()
    assert any(answers)


def test_a_worker_that_is_late_already_does_not_delay_the_look_at_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever their order."""
    now = 100.0
    clock = SimpleNamespace(monotonic=lambda: now)
    monkeypatch.setattr("shmreduce.pool_dispatch.time", clock)
    dispatcher = Dispatcher(None, WorkerDied, lambda error: error)
    late: Any = Busy(now - 5.0, may_have_unread=True)
    busy: Any = Busy(now - 0.999, may_have_unread=True)
    idle: Any = Busy(now - 0.9999, may_have_unread=False)
    for workers in itertools.permutations((late, busy, idle)):
        assert dispatcher.until_long(workers) == pytest.approx(0.001)
    assert dispatcher.until_long([late]) == pytest.approx(0.01)
    assert dispatcher.until_long([idle]) is None


def test_futures_stay_cancellable_until_a_worker_is_free(tmp_path: Path) -> None:
    """None waits at a busy worker."""
    started, go = tmp_path / "started", tmp_path / "go"
    go.mkdir()
    with shmreduce.ProcessPoolExecutor(1, shmreduce.get_context("fork")) as executor:
        executor.submit(touch, str(started)).result(PATIENCE)
        first = executor.submit(wait_for_files, str(go), 1)
        others = [executor.submit(square, n) for n in range(5 * AHEAD)]
        eventually(first.running)
        assert all(other.cancel() for other in others)
        (go / "now").touch()
        assert first.result(PATIENCE) == 1


def test_workers_have_no_end_of_another_workers_connection() -> None:
    """A forked worker inherits both ends of those that were started before it."""
    with Pool(4, context=shmreduce.get_context("fork")) as pool:
        workers = pool._supervisor.workers
        eventually(lambda: all(worker.ready for worker in workers))
        for worker in workers:
            for end in _ends(worker.channel):
                holders = [each for each in workers if end in _files_of(each.process.pid)]
                assert holders in ([], [worker])
        pool.close()
        pool.join()


def _ends(channel: Any) -> list[str]:
    """Return the names of the two sockets of a connection, which this process has both."""
    fds = [channel.fileno(), channel._other_end.fileno()]
    return [str(Path(f"/proc/self/fd/{fd}").readlink()) for fd in fds]


def _files_of(pid: int | None) -> set[str]:
    return {str(entry.readlink()) for entry in Path(f"/proc/{pid}/fd").iterdir()}
