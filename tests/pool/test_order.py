"""Tasks that wait for each other: which of them a pool must not let stay behind which."""

from __future__ import annotations

import collections
import contextlib
import multiprocessing
import pickle
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import shmreduce
from shmreduce import WorkerDied, pool_worker
from shmreduce.pool import Pool
from shmreduce.pool_channel import RETURNED, make_channels
from shmreduce.pool_dispatch import Dispatcher
from shmreduce.pool_tasks import ONCE, make_task
from tests.channels.channels import within
from tests.conftest import PATIENCE
from tests.pool.holding import held
from tests.pool.work import (
    keep,
    set_kept_flag,
    square,
    touch,
    wait_for_files,
    wait_for_kept_flag,
    wait_for_one_before,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from shmreduce.pool_channel import Channel
    from tests.conftest import Children

COUNT = 2000


@contextlib.contextmanager
def warm_pool(children: Children) -> Iterator[Pool]:
    """A pool that has had short tasks, so that it sends tasks ahead; its workers have flags.

    If its tasks wait for each other for ever, it is ended, and the test fails.
    """
    flags = shmreduce.zeros(COUNT, np.int8)
    with Pool(2, keep, (flags,), context=shmreduce.get_context(children.method)) as pool:
        pool.map(square, range(COUNT), chunksize=1)
        yield pool
        pool.close()
        pool.join()


@pytest.mark.parametrize("distance", [2, 5, 50])
@pytest.mark.parametrize("call", ["starmap", "apply_async"])
def test_a_task_may_wait_for_one_that_came_before(
    children: Children, call: str, distance: int
) -> None:
    """Also if some take longer than the pool expected, so that workers give tasks back."""
    arguments = [(number, distance) for number in range(COUNT)]
    with warm_pool(children) as pool:
        if call == "starmap":
            result = pool.starmap_async(wait_for_one_before, arguments, chunksize=1)
            assert result.get(PATIENCE) == [*range(COUNT)]
        else:
            singles = [pool.apply_async(wait_for_one_before, each) for each in arguments]
            assert [single.get(PATIENCE) for single in singles] == [*range(COUNT)]


def test_a_call_may_wait_for_the_next(children: Children) -> None:
    """If there is a worker for that one."""
    with warm_pool(children) as pool:
        results = [
            pool.apply_async(function, (number,))
            for number in range(COUNT)
            for function in (wait_for_kept_flag, set_kept_flag)
        ]
        assert [each.get(PATIENCE) for each in results[::2]] == [*range(COUNT)]


@pytest.mark.parametrize("module", [shmreduce, multiprocessing], ids=lambda each: each.__name__)
def test_a_call_may_wait_for_many_behind_it(
    children: Children, tmp_path: Path, module: Any
) -> None:
    """Another worker does them, although nothing else happens meanwhile."""
    count = 160
    with Pool(2, context=module.get_context(children.method)) as pool:
        with held(pool, 1 + count):
            waiting = pool.apply_async(wait_for_files, (str(tmp_path), count))
            others = [pool.apply_async(touch, (str(tmp_path / str(n)),)) for n in range(count)]
        assert waiting.get(PATIENCE) == count
        for other in others:
            other.get(PATIENCE)
        pool.close()
        pool.join()


# The rules that this follows from, one by one


@pytest.fixture(params=["shmreduce", "multiprocessing"])
def ends(request: pytest.FixtureRequest) -> Iterator[tuple[Channel, Channel]]:
    """The pool's end of a worker's connection, and the worker's."""
    module = {"shmreduce": shmreduce, "multiprocessing": multiprocessing}[request.param]
    ends = make_channels(module.get_context("fork"))
    yield ends
    for end in ends:
        end.close()


class Ready:
    """A receiver whose tasks can begin at any time."""

    def begin(self) -> bool:
        return True


def dispatcher_of(count: int, item: Any = 7) -> Dispatcher:
    """Return a dispatcher that has so many tasks of one call, which were short lately."""
    dispatcher, receiver = Dispatcher(None, WorkerDied, lambda error: error), Ready()
    dispatcher._mean_seconds = 1e-4
    for number in range(count):
        call: Any = (ONCE, square, (item,), {})
        any_receiver: Any = receiver
        dispatcher.submit(
            make_task(any_receiver, number, number, call, retries=0, dumps=pickle.dumps)
        )
    dispatcher.take_submitted()
    return dispatcher


def worker_at(channel: Channel) -> Any:
    """Return what counts of a worker that is idle."""
    return SimpleNamespace(
        channel=channel,
        tasks=collections.deque(),
        lost_answers=[],
        ready=True,
        disconnected=False,
        sent=0,
        answered=0,
        returns=0,
        gives_back=False,
        busy_since=0.0,
        process=SimpleNamespace(pid=None),
        progress=SimpleNamespace(begun=0, position=0),
    )


def numbers(tasks: Any) -> list[int]:
    return [task.number for task in tasks]


@pytest.mark.parametrize("how", ["returned", "killed", "ended"])
def test_what_comes_back_waits_in_its_old_place(how: str, ends: tuple[Channel, Channel]) -> None:
    """Whichever worker's tasks come back first."""
    dispatcher = dispatcher_of(20)
    first, second = worker_at(ends[0]), worker_at(ends[0])
    for worker, had in (first, range(3)), (second, range(3, 7)), (first, range(7, 9)):
        worker.tasks.extend(dispatcher._waiting.popleft() for _ in had)
    for worker in (first, second):
        if how == "returned":
            dispatcher.take_returned(worker, len(worker.tasks), 1)
        elif how == "killed":
            dispatcher.recover(worker, -9)
        else:
            dispatcher.take_back(worker)
        assert not worker.tasks
    assert numbers(dispatcher._waiting) == [*range(20)]


def test_a_busy_worker_is_sent_nothing_older_than_it_has(ends: tuple[Channel, Channel]) -> None:
    """What came back waits for an idle one."""
    dispatcher = dispatcher_of(100)
    worker, other = worker_at(ends[0]), worker_at(ends[0])
    dispatcher.assign([other])
    dispatcher.assign([worker])
    assert (numbers(other.tasks), numbers(worker.tasks)) == ([*range(10)], [*range(10, 20)])
    while len(worker.tasks) > 2:
        worker.tasks.popleft()
    dispatcher.take_returned(other, 10, 1)
    worker.busy_since = time.monotonic()
    dispatcher.assign([worker])
    assert numbers(worker.tasks) == [18, 19]
    worker.tasks.clear()
    dispatcher.assign([worker])
    assert numbers(worker.tasks) == [*range(10)]


def test_a_worker_that_gives_tasks_back_is_sent_none_before_it_has_none(
    ends: tuple[Channel, Channel],
) -> None:
    """What it still has comes back, and would be older than what it was sent."""
    dispatcher = dispatcher_of(100)
    worker, other = worker_at(ends[0]), worker_at(ends[0])
    dispatcher.assign([worker])
    dispatcher.take_returned(worker, 8, 1)
    # Other workers do what came back.
    dispatcher.assign([other])
    assert numbers(other.tasks) == [*range(8), 10, 11]
    worker.busy_since = time.monotonic()
    dispatcher.assign([worker])
    assert numbers(worker.tasks) == [8, 9]
    dispatcher.take_returned(worker, 2, 1)
    dispatcher.assign([worker])
    assert numbers(worker.tasks) == [8, 9, *range(12, 20)]


def test_a_worker_is_never_sent_more_than_its_connection_takes(
    ends: tuple[Channel, Channel],
) -> None:
    """Otherwise the pool's thread would wait for a worker that may wait for another."""
    dispatcher = dispatcher_of(200, np.zeros(15 << 10, np.uint8).tobytes())
    dispatcher._mean_seconds = 1e-6
    worker = worker_at(ends[0])
    for _ in range(16):
        worker.busy_since = time.monotonic()
        within(dispatcher.assign, [worker])
    assert len(worker.tasks) == 2


def test_what_was_under_way_while_tasks_went_back_goes_back_too(
    ends: tuple[Channel, Channel],
) -> None:
    """The worker begins with nothing that was sent before the pool knew of it."""
    pools, workers = ends
    pools.send_ahead([b"one", b"two"], 0)
    pools.send_ahead([b"three"], 1)
    pools.send_ahead([b"four", b"five"], 2)
    received: collections.deque[Any] = collections.deque()
    assert pool_worker._receive(workers, received, 2)
    assert [*received] == [b"four", b"five"]
    told = [pools.receive(), pools.receive()]
    assert [each() if each else None for each in told] == [(RETURNED, (2, 2)), (RETURNED, (1, 2))]


def test_the_pool_says_what_it_knows(ends: tuple[Channel, Channel]) -> None:
    """How often the worker gave tasks back; a worker that is idle needs no such number."""
    dispatcher = dispatcher_of(100)
    worker = worker_at(ends[0])
    dispatcher.assign([worker])
    assert [ends[1].receive_tasks()[1] for _ in range(2)] == [None, 0]
    dispatcher.take_returned(worker, 10, 7)
    assert worker.sent == 0
    dispatcher.assign([worker])
    assert [ends[1].receive_tasks()[1] for _ in range(2)] == [None, 7]
