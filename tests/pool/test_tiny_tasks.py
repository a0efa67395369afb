"""Tasks of microseconds: several go to a worker in one packet."""

from __future__ import annotations

import collections
import multiprocessing
import os
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import shmreduce
from shmreduce import WorkerDied, pool_channel
from shmreduce.pool import Pool
from shmreduce.pool_dispatch import _MOST_AHEAD, Dispatcher
from shmreduce.pool_supervisor import Supervisor
from tests.channels.channels import eventually
from tests.conftest import PATIENCE
from tests.pool.holding import held
from tests.pool.work import LARGE, give_none_back, noted, set_first, square

if TYPE_CHECKING:
    from pathlib import Path

    from shmreduce.pool_worker_handle import WorkerHandle
    from tests.conftest import Children


@pytest.fixture
def packets(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tasks went in each packet that was sent ahead; all tasks count as short.

    Forked workers give none back.
    """
    monkeypatch.setattr("shmreduce.pool_dispatch._SHORT_TASK", PATIENCE)
    monkeypatch.setattr("shmreduce.pool_worker._LONG_TASK", PATIENCE)
    counts: list[int] = []
    join = pool_channel._join

    def counting(tasks: list[Any], returns: int) -> bytes:
        counts.append(len(tasks))
        return join(tasks, returns)

    monkeypatch.setattr(pool_channel, "_join", counting)
    return counts


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


def test_each_is_done_once(context: Any, packets: list[int], tmp_path: Path) -> None:
    """And its result is in its place."""
    done = tmp_path / "done"
    with Pool(2, context=context) as pool:
        with held(pool, 300):
            result = pool.map_async(noted, [(str(done), x, None) for x in range(300)], chunksize=1)
        assert result.get(PATIENCE) == [x * x for x in range(300)]
        pool.close()
        pool.join()
    assert sorted(int(line.split()[0]) for line in done.read_text().splitlines()) == [*range(300)]
    assert max(packets) > 1


@pytest.mark.parametrize("retries", [0, 1])
def test_a_death_costs_the_task_that_was_begun(
    context: Any, packets: list[int], tmp_path: Path, retries: int
) -> None:
    """Those behind it in the packet go to the next worker, those before it are not done again."""
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
    assert max(packets) > 1


def test_a_worker_gets_no_more_than_it_may_do(
    context: Any, packets: list[int], tmp_path: Path
) -> None:
    """With ``maxtasksperchild`` it leaves after so many, also when they come together."""
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
    assert 1 < max(packets) < 5


def test_a_packet_for_which_a_worker_has_no_memory_fails_one_task(
    packets: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """How many others were in it nobody knows: the worker leaves, and they go to the next."""
    done, failed = tmp_path / "done", tmp_path / "failed"
    receive = pool_channel.Channel.receive_tasks

    def without_memory(channel: pool_channel.Channel) -> tuple[list[bytes], int | None]:
        tasks, returns = receive(channel)
        if len(tasks) > 1 and not failed.exists():
            failed.touch()
            raise MemoryError
        return tasks, returns

    monkeypatch.setattr(pool_channel.Channel, "receive_tasks", without_memory)
    with Pool(1, context=shmreduce.get_context("fork")) as pool:
        calls = [(str(done), x, None) for x in range(50)]
        with held(pool, 50):
            result = pool.map_async(noted, calls, chunksize=1)
        with pytest.raises(MemoryError):
            result.get(PATIENCE)
        pool.close()
        pool.join()
    numbers = [int(line.split()[0]) for line in done.read_text().splitlines()]
    assert len(numbers) == len(set(numbers)) == 49
    assert max(packets) > 1


def test_shared_arrays_go_with_each_of_them(children: Children, packets: list[int]) -> None:
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
    assert max(packets) > 1


def test_large_tasks_go_alone(packets: list[int]) -> None:
    """A worker that is not reading is sent no more than its connection takes."""
    with Pool(1, context=shmreduce.get_context("fork")) as pool:
        for size, most in (32 << 10, 0), (4 << 10, 3), (1, _MOST_AHEAD - 1):
            packets.clear()
            items = [os.urandom(size)] * 50
            with held(pool, 50):
                result = pool.map_async(repr, items, chunksize=1)
            assert result.get(PATIENCE) == [repr(item) for item in items]
            assert max(packets, default=0) == most
    pool.join()


@pytest.mark.parametrize(
    ("seconds", "ahead"), [(1.0, 1), (1e-3, 1), (9e-4, 4), (1e-4, 10), (1e-5, 32), (0.0, 32)]
)
def test_as_many_wait_at_a_worker_as_take_a_millisecond(seconds: float, ahead: int) -> None:
    """Not more: the others may be idle before they are done."""
    dispatcher = Dispatcher(None, WorkerDied, lambda error: error)
    dispatcher._mean_seconds = seconds
    assert dispatcher._tasks_ahead() == ahead


def test_answers_that_are_there_are_read_in_one_turn(
    context: Any, packets: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A turn for each would be most of the work of the pool's thread."""
    turns: list[int] = []
    receive, receive_one = Supervisor._receive, Supervisor._receive_one

    def turn(supervisor: Supervisor, worker: WorkerHandle) -> None:
        # All that it was sent is answered by now, so the number is certain.
        eventually(lambda: worker.progress.begun == worker.sent)
        turns.append(0)
        receive(supervisor, worker)

    def one(supervisor: Supervisor, worker: WorkerHandle) -> bool:
        turns[-1] += 1
        return receive_one(supervisor, worker)

    # A worker that another process keeps from its processor for a millisecond would give tasks
    # back, and then not begin with all.
    with Pool(1, give_none_back, context=context) as pool:
        monkeypatch.setattr(Supervisor, "_receive", turn)
        monkeypatch.setattr(Supervisor, "_receive_one", one)
        with held(pool, 100):
            result = pool.map_async(square, range(100), chunksize=1)
        assert result.get(PATIENCE) == [x * x for x in range(100)]
        pool.close()
        pool.join()
    # But for the last, whose answer may be under way.
    assert max(turns) >= max(packets) - 1 > 1


@pytest.mark.parametrize("context", ["shmreduce", "multiprocessing"])
def test_what_waits_behind_a_long_task_goes_back(
    context: str, packets: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is done once all the same, and those that a killed worker gave back are not lost."""
    # Inherited by the workers: any task is a long one.
    monkeypatch.setattr("shmreduce.pool_worker._LONG_TASK", 0.0)
    returned: list[int] = []
    take_returned = Dispatcher.take_returned

    def taking(dispatcher: Dispatcher, worker: WorkerHandle, count: int, returns: int) -> None:
        returned.append(count)
        take_returned(dispatcher, worker, count, returns)

    monkeypatch.setattr(Dispatcher, "take_returned", taking)
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
    assert max(returned) > 1
