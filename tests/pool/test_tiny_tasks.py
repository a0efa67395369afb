"""Tasks of microseconds: workers take them by themselves."""

from __future__ import annotations

import collections
import itertools
import multiprocessing
import os
import signal
from multiprocessing import forkserver
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
import pytest

import shmreduce
from shmreduce import WorkerDied, pool_channel
from shmreduce.compiled import PACKETS
from shmreduce.pool import Pool
from shmreduce.pool_dispatch import Dispatcher
from shmreduce.pool_supervisor import Supervisor
from shmreduce.pool_task_ring import PublishedTasks, TaskRing
from tests.channels.channels import eventually
from tests.compiler import needs_module
from tests.conftest import PATIENCE
from tests.pool.holding import held
from tests.pool.work import (
    LARGE,
    filled,
    ignore_sigterm,
    noted,
    set_first,
    square,
    square_in_two,
    wait_for_files,
)

if TYPE_CHECKING:
    from pathlib import Path

    from shmreduce.pool_results import ApplyResult
    from shmreduce.pool_tasks import Task
    from shmreduce.pool_worker_handle import WorkerHandle
    from tests.conftest import Children


@pytest.fixture
def claimed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Which workers took tasks by themselves; all tasks count as short."""
    needs_module(PACKETS)
    monkeypatch.setattr("shmreduce.pool_dispatch._SHORT_TASK", PATIENCE)
    owners: list[int] = []
    give = Dispatcher._give_claimed

    def noting(dispatcher: Dispatcher, owner: int, task: Task) -> None:
        owners.append(owner)
        give(dispatcher, owner, task)

    monkeypatch.setattr(Dispatcher, "_give_claimed", noting)
    return owners


@pytest.fixture(params=["shmreduce", "multiprocessing"])
def context(request: pytest.FixtureRequest, children: Children) -> Any:
    """A context whose connections are ours, and one of the standard library's."""
    if request.param == "shmreduce":
        return shmreduce.get_context(children.method)
    return children.context


def squares_but_one(results: Any, killed: int) -> None:
    """Take a hundred results, of which the worker of one was killed."""
    for number in range(100):
        if number == killed:
            with pytest.raises(WorkerDied) as caught:
                results.next(PATIENCE)
            assert caught.value.index == killed
        else:
            assert results.next(PATIENCE) == number**2


def test_each_is_done_once(context: Any, claimed: list[int], tmp_path: Path) -> None:
    """And its result is in its place."""
    done = tmp_path / "done"
    with Pool(2, context=context) as pool:
        with held(pool, 300):
            result = pool.map_async(noted, [(str(done), x, None) for x in range(300)], chunksize=1)
        assert result.get(PATIENCE) == [x * x for x in range(300)]
        pool.close()
        pool.join()
    assert sorted(int(line.split()[0]) for line in done.read_text().splitlines()) == [*range(300)]
    assert len(claimed) > 1


@pytest.mark.parametrize("retries", [0, 1])
def test_a_death_costs_the_task_that_was_begun(
    context: Any, claimed: list[int], tmp_path: Path, retries: int
) -> None:
    """Those that the worker had not begun go to the next, those before are not done again."""
    done = tmp_path / "done"
    calls = [(str(done), x, "SIGKILL" if x == 50 else None) for x in range(100)]
    with Pool(1, context=context, retries=retries) as pool:
        with held(pool, 100):
            results = pool.imap(noted, calls)
        squares_but_one(results, 50)
        pool.close()
        pool.join()
    begun = collections.Counter(int(line.split()[0]) for line in done.read_text().splitlines())
    assert begun == {number: 1 + retries * (number == 50) for number in range(100)}
    assert len(claimed) > 1


def test_a_death_that_is_seen_with_the_last_answer_costs_the_task_that_was_begun(
    context: Any, claimed: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although the pool had not seen before that the worker had taken it."""
    done, folder = tmp_path / "done", tmp_path / "folder"
    folder.mkdir()
    await_events = Supervisor._wait_for_events

    def after_the_death(supervisor: Supervisor) -> None:
        if len(supervisor._dispatcher._published._tasks) == 2:
            sentinel = supervisor.workers[0].sentinel
            (folder / "published").touch()
            assert wait([sentinel], PATIENCE)
        await_events(supervisor)

    with Pool(1, context=context) as pool:
        monkeypatch.setattr(Supervisor, "_wait_for_events", after_the_death)
        with held(pool, 3):
            pool._supervisor._dispatcher._mean_seconds = 0.0
            waiting = pool.apply_async(wait_for_files, (str(folder), 1))
            killed = pool.apply_async(noted, ((str(done), 5, "SIGKILL"),))
            last = pool.apply_async(noted, ((str(done), 6, None),))
        assert waiting.get(PATIENCE) == 1
        with pytest.raises(WorkerDied):
            killed.get(PATIENCE)
        assert last.get(PATIENCE) == 36
        pool.close()
        pool.join()
    assert [line.split()[0] for line in done.read_text().splitlines()] == ["5", "6"]
    assert claimed == [1]


def test_workers_that_only_look_dead_take_no_tasks_with_them(
    claimed: list[int], tmp_path: Path
) -> None:
    """As all do whose fork server is killed. They claim a task and cannot answer it; others, of
    which some have their places, do it.
    """
    folders = [tmp_path / name for name in ("old", "new")]
    for folder in folders:
        folder.mkdir()
    with Pool(2, ignore_sigterm, context=shmreduce.get_context("forkserver")) as pool:

        def hold_all(folder: Path) -> list[ApplyResult[int]]:
            eventually(lambda: len(pool._pool) == 2 and all(w.ready for w in workers))
            found = [pool.apply_async(wait_for_files, (str(folder), 1)) for _ in range(2)]
            eventually(lambda: all(worker.progress.begun == 1 for worker in workers))
            return found

        workers = pool._supervisor.workers
        lost = hold_all(folders[0])
        old = [psutil.Process(process.pid) for process in pool._pool]
        server: Any = forkserver._forkserver
        os.kill(server._forkserver_pid, signal.SIGKILL)
        eventually(lambda: not {each.pid for each in old} & {p.pid for p in pool._pool})
        pool._supervisor._dispatcher._mean_seconds = 0.0
        kept = hold_all(folders[1])
        results = [pool.apply_async(square, (number,)) for number in range(20)]
        eventually(lambda: len(pool._supervisor._dispatcher._published._tasks) == 20)
        assert all(each.is_running() for each in old)
        (folders[0] / "go").touch()
        assert not psutil.wait_procs(old, PATIENCE)[1]
        (folders[1] / "go").touch()
        assert [each.get(PATIENCE) for each in kept] == [1, 1]
        assert [each.get(PATIENCE) for each in results] == [number**2 for number in range(20)]
        for each in lost:
            with pytest.raises(WorkerDied):
                each.get(PATIENCE)
        pool.close()
        pool.join()
    assert {1, 2} & set(claimed)


def test_a_child_in_which_a_task_returns_too_takes_none(context: Any, claimed: list[int]) -> None:
    """Nor does it answer: the pool knows its workers only."""
    with Pool(2, context=context) as pool:
        pool._supervisor._dispatcher._mean_seconds = 0.0
        result = pool.map_async(square_in_two, range(40), chunksize=1)
        assert result.get(PATIENCE) == [x * x for x in range(40)]
        pool.close()
        pool.join()
    assert claimed


def test_a_worker_gets_no_more_than_it_may_do(
    context: Any, claimed: list[int], tmp_path: Path
) -> None:
    """With ``maxtasksperchild`` it leaves after so many, also if it takes them by itself."""
    done = tmp_path / "done"
    with Pool(1, context=context, maxtasksperchild=5) as pool:
        calls = [(str(done), x, None) for x in range(23)]
        with held(pool, 23):
            result = pool.map_async(noted, calls, chunksize=1)
        assert result.get(PATIENCE) == [x * x for x in range(23)]
        pool.close()
        pool.join()
    pids = collections.Counter(line.split()[1] for line in done.read_text().splitlines())
    # The first had another before.
    assert sorted(pids.values()) == [4, 4, 5, 5, 5]
    assert len(claimed) > 5


def test_a_task_for_which_a_worker_has_no_memory_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is left of it may be in the way: the worker leaves, and the others go to the next."""
    done, failed = tmp_path / "done", tmp_path / "failed"
    receive, pool_process = pool_channel.Channel.receive_bytes, os.getpid()

    def without_memory(channel: pool_channel.Channel) -> bytes:
        task = receive(channel)
        if os.getpid() != pool_process and not failed.exists():
            failed.touch()
            raise MemoryError
        return task

    monkeypatch.setattr(pool_channel.Channel, "receive_bytes", without_memory)
    with Pool(1, context=shmreduce.get_context("fork")) as pool:
        calls = [(str(done), x, None) for x in range(50)]
        result = pool.map_async(noted, calls, chunksize=1)
        with pytest.raises(MemoryError):
            result.get(PATIENCE)
        pool.close()
        pool.join()
    numbers = [int(line.split()[0]) for line in done.read_text().splitlines()]
    assert len(numbers) == len(set(numbers)) == 49


def test_a_task_that_a_worker_has_no_memory_to_take_is_done_all_the_same(
    claimed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stays where it is, and the pool sends it."""
    claim = TaskRing.claim
    calls = itertools.count()

    def without_memory(ring: TaskRing, owner: int) -> bytes | None:
        if next(calls) % 3 == 0:
            raise MemoryError
        return claim(ring, owner)

    monkeypatch.setattr(TaskRing, "claim", without_memory)
    with Pool(2, context=shmreduce.get_context("fork")) as pool:
        with held(pool, 200):
            result = pool.map_async(square, range(200), chunksize=1)
        assert result.get(PATIENCE) == [x * x for x in range(200)]
        pool.close()
        pool.join()
    assert len(claimed) > 1


def test_shared_arrays_go_with_each_of_them(children: Children, claimed: list[int]) -> None:
    """Parts of one, which the worker reads and writes in place."""
    shared = shmreduce.array(np.arange(LARGE // 8, dtype=float))
    parts = [shared[10 * x : 10 * x + 10] for x in range(1000)]
    with Pool(2, context=shmreduce.get_context(children.method)) as pool:
        with held(pool, len(parts)):
            result = pool.map_async(set_first, parts, chunksize=1)
        result.get(PATIENCE)
        pool.close()
        pool.join()
    assert (shared[:10_000:10] == 7).all()
    assert len(claimed) > 1


def test_after_a_large_answer_tasks_are_sent(
    claimed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only with those can memory be lent for the next large one."""
    monkeypatch.setattr("shmreduce.memory.lending._SMALLEST", LARGE // 2)
    with Pool(1, context=shmreduce.get_context("fork")) as pool:
        # Kept, so that there is nothing to lend.
        large = pool.map(filled, range(2), chunksize=1)
        pool._supervisor._dispatcher._mean_seconds = 0.0
        for count, are_claimed in (20, False), (60, True):
            with held(pool, count):
                result = pool.map_async(square, range(count), chunksize=1)
            assert result.get(PATIENCE) == [x * x for x in range(count)]
            assert bool(claimed) == are_claimed
        assert len(large) == 2
        pool.close()
        pool.join()


def test_large_tasks_are_sent_to_idle_workers(claimed: list[int]) -> None:
    """Small ones are not."""
    with Pool(1, context=shmreduce.get_context("fork")) as pool:
        for size, are_claimed in (80 << 10, False), (32 << 10, False), (1, True):
            items = [os.urandom(size)] * 50
            with held(pool, 50):
                result = pool.map_async(repr, items, chunksize=1)
            assert result.get(PATIENCE) == [repr(item) for item in items]
            assert bool(claimed) == are_claimed
        pool.close()
        pool.join()


def test_answers_that_are_there_are_read_in_one_turn(
    context: Any, claimed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A turn for each would be most of the work of the pool's thread."""
    turns: list[int] = []
    receive, receive_one = Supervisor._receive, Supervisor._receive_one

    def turn(supervisor: Supervisor, worker: WorkerHandle) -> None:
        dispatcher = supervisor._dispatcher
        dispatcher.note_claims()
        if len(worker.tasks) > 1 and len(dispatcher._published._tasks) >= 5:
            # It goes on until the ring is empty. The first of these are answered by then.
            eventually(lambda: worker.progress.begun >= worker.answered + 6)
        turns.append(0)
        receive(supervisor, worker)

    def one(supervisor: Supervisor, worker: WorkerHandle) -> bool:
        turns[-1] += 1
        return receive_one(supervisor, worker)

    with Pool(1, context=context) as pool:
        monkeypatch.setattr(Supervisor, "_receive", turn)
        monkeypatch.setattr(Supervisor, "_receive_one", one)
        with held(pool, 100):
            result = pool.map_async(square, range(100), chunksize=1)
        assert result.get(PATIENCE) == [x * x for x in range(100)]
        pool.close()
        pool.join()
    assert max(turns) >= 5
    assert len(claimed) > 5


@pytest.mark.parametrize("context", ["shmreduce", "multiprocessing"])
def test_what_turns_out_to_be_long_is_taken_back(
    context: str, claimed: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is done once all the same, and what a killed worker had taken is not lost."""
    withdrawn: list[int] = []
    assign, withdraw_all = Dispatcher.assign, PublishedTasks.withdraw_all
    turns = itertools.count()

    def assigning(dispatcher: Dispatcher, *, may_publish: bool) -> None:
        short = PATIENCE if next(turns) % 3 else 0.0
        monkeypatch.setattr("shmreduce.pool_dispatch._SHORT_TASK", short)
        assign(dispatcher, may_publish=may_publish)

    def noting(published: PublishedTasks, give: Any) -> list[Task]:
        found = withdraw_all(published, give)
        withdrawn.append(len(found))
        return found

    monkeypatch.setattr(Dispatcher, "assign", assigning)
    monkeypatch.setattr(PublishedTasks, "withdraw_all", noting)
    done = tmp_path / "done"
    calls = [(str(done), x, "SIGKILL" if x == 70 else None) for x in range(100)]
    module = {"shmreduce": shmreduce, "multiprocessing": multiprocessing}[context]
    with Pool(2, context=module.get_context("fork"), retries=1, maxtasksperchild=40) as pool:
        with held(pool, 100):
            results = pool.imap(noted, calls)
        squares_but_one(results, 70)
        pool.close()
        pool.join()
    begun = collections.Counter(int(line.split()[0]) for line in done.read_text().splitlines())
    assert begun == {number: 1 + (number == 70) for number in range(100)}
    assert max(withdrawn) > 1
    assert claimed
