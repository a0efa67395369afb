"""Tasks that wait for each other: which of them a pool must not let stay behind which."""

from __future__ import annotations

import collections
import contextlib
import functools
import multiprocessing
import pickle
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import shmreduce
from shmreduce import WorkerDied
from shmreduce.compiled import PACKETS
from shmreduce.pool import Pool
from shmreduce.pool_dispatch import Dispatcher
from shmreduce.pool_task_ring import TaskRing
from shmreduce.pool_tasks import ONCE, make_task
from shmreduce.pool_worker_progress import ProgressTable
from tests.channels.channels import within
from tests.compiler import needs_module
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
    wait_for_one_behind,
    wait_for_the_next,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.conftest import Children

COUNT = 2000


@contextlib.contextmanager
def warm_pool(children: Children) -> Iterator[Pool]:
    """A pool that has had short tasks, so that workers take some; its workers have flags.

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
    """Also if some take longer than the pool expected, so that it takes tasks back."""
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


@pytest.mark.parametrize("call", ["map", "imap", "imap_unordered", "apply_async"])
def test_a_task_may_wait_for_the_next_of_its_call(children: Children, call: str) -> None:
    """If there is a worker for that one."""
    with warm_pool(children) as pool:
        if call == "map":
            found = pool.map_async(wait_for_the_next, range(COUNT), chunksize=1).get(PATIENCE)
        elif call == "apply_async":
            singles = [pool.apply_async(wait_for_the_next, (n,)) for n in range(COUNT)]
            found = [single.get(PATIENCE) for single in singles]
        else:
            results: Any = getattr(pool, call)(wait_for_the_next, range(COUNT))
            found = [results.next(PATIENCE) for _ in range(COUNT)]
    assert sorted(found) == [*range(COUNT)]


@pytest.mark.parametrize("distance", [10, 200])
def test_a_task_may_wait_for_one_far_behind(children: Children, distance: int) -> None:
    """The other worker does all those between the two."""
    arguments = [(number, distance) for number in range(COUNT)]
    with warm_pool(children) as pool:
        result = pool.starmap_async(wait_for_one_behind, arguments, chunksize=1)
        assert result.get(PATIENCE) == [*range(COUNT)]


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


class Ready:
    """A receiver whose tasks can begin at any time."""

    cancelled = False

    def begin(self) -> bool:
        return True


class Sent:
    """A connection to a worker that keeps what it is sent."""

    def __init__(self) -> None:
        self.tasks: list[bytes] = []

    def send_task(self, task: bytes, _borrower: int) -> None:
        self.tasks.append(task)


class Side:
    """A dispatcher, and what its workers see."""

    def __init__(self, workers: int, tasks: int, item: Any = 7) -> None:
        self.ring = ProgressTable.for_workers(workers).ring
        self.workers = [worker_after(started) for started in range(workers)]
        self.may_publish = True
        self.dispatcher = Dispatcher(
            self.workers,
            None,
            WorkerDied,
            lambda error: error,
            self.ring,
        )
        self.dispatcher._mean_seconds = 1e-4
        self.submit(tasks, item)

    def submit(self, tasks: int, item: Any = 7) -> None:
        receiver: Any = Ready()
        for number in range(tasks):
            call: Any = (ONCE, square, (item,), {})
            self.dispatcher.submit(
                make_task(receiver, number, number, call, retries=0, dumps=pickle.dumps)
            )
        self.dispatcher.take_submitted()

    def assign(self) -> None:
        within(functools.partial(self.dispatcher.assign, may_publish=self.may_publish))

    @property
    def waiting(self) -> list[int]:
        return numbers(self.dispatcher._waiting)

    @property
    def published(self) -> list[int]:
        return numbers(self.dispatcher._published._tasks)

    @property
    def had(self) -> list[list[int]]:
        return [numbers(worker.tasks) for worker in self.workers]


def worker_after(started: int) -> Any:
    """Return what counts of a worker that is idle."""
    return SimpleNamespace(
        channel=Sent(),
        tasks=collections.deque(),
        lost_answers=[],
        ready=True,
        disconnected=False,
        sent=0,
        answered=0,
        busy_since=0.0,
        process=SimpleNamespace(pid=None),
        progress=SimpleNamespace(owner=TaskRing.owner_of(started), begun=0, position=0),
    )


def numbers(tasks: Any) -> list[int]:
    return [task.number for task in tasks]


@pytest.fixture(autouse=True)
def _has_ring(request: pytest.FixtureRequest) -> None:
    """Skip a test of what is in the ring where nothing can be put there."""
    if "ring" in request.node.originalname:
        needs_module(PACKETS)


@pytest.mark.parametrize("how", ["killed", "ended"])
def test_what_comes_back_waits_in_its_old_place(how: str) -> None:
    """Whichever worker's tasks come back first."""
    side = Side(3, 20)
    dispatcher = side.dispatcher
    for worker, had in zip(side.workers, (range(3), range(3, 7), range(7, 9)), strict=True):
        worker.tasks.extend(dispatcher._waiting.popleft() for _ in had)
    for worker in side.workers:
        if how == "killed":
            dispatcher.recover(worker, -9)
        else:
            dispatcher.take_back(worker)
        assert not worker.tasks
    assert side.waiting == [*range(20)]


def test_the_ring_has_what_no_worker_is_idle_for() -> None:
    """And no worker that is not busy, which would never take it."""
    side = Side(2, 10)
    side.workers[0].ready = False
    side.workers[1].ready = False
    side.assign()
    assert not side.published
    side.workers[1].ready = True
    side.assign()
    assert (side.had, side.published, side.waiting) == ([[], [0]], [*range(1, 10)], [])


def test_what_workers_take_from_the_ring_is_theirs() -> None:
    """In the order in which they took it."""
    side = Side(2, 10)
    side.assign()
    for owner in (2, 2, 1, 2):
        assert side.ring.claim(owner)
    side.dispatcher.note_claims()
    assert (side.had, side.published) == ([[0, 4], [1, 2, 3, 5]], [*range(6, 10)])


def test_an_idle_worker_is_sent_the_oldest_task_of_the_ring() -> None:
    """That no other has taken, though the pool did not know of that yet."""
    side = Side(2, 10)
    side.assign()
    assert side.ring.claim(1)
    side.workers[1].tasks.clear()
    side.assign()
    assert (side.had, side.published) == ([[0, 2], [3]], [*range(4, 10)])
    assert len(side.workers[1].channel.tasks) == 2
    assert side.ring.claim(1)
    side.workers[1].tasks.clear()
    # Now also without a look at the ring before.
    assert side.dispatcher._send_next(side.workers[1])
    assert (side.had, side.published) == ([[0, 2, 4], [5]], [*range(6, 10)])


def test_what_comes_back_is_before_the_ring() -> None:
    """Younger tasks that no worker has taken yet are taken out of the ring."""
    side = Side(2, 10)
    side.assign()
    assert side.ring.claim(1)
    side.dispatcher.note_claims()
    dead = side.workers.pop(0)
    side.dispatcher.recover(dead, -9)
    assert (side.waiting, side.published) == ([0, 2], [*range(3, 10)])
    side.assign()
    assert (side.had, side.published, side.waiting) == ([[1]], [0, *range(2, 10)], [])


def test_the_ring_is_emptied_when_it_may_not_be_used() -> None:
    """What a worker has taken stays with it."""
    side = Side(1, 5)
    side.assign()
    assert side.ring.claim(1)
    side.may_publish = False
    side.assign()
    assert (side.had, side.published, side.waiting) == ([[0, 1]], [], [2, 3, 4])
    assert side.ring.claim(1) is None
    side.may_publish = True
    side.assign()
    assert (side.published, side.waiting) == ([2, 3, 4], [])


def test_the_ring_holds_as_many_as_it_has_places_for() -> None:
    """A place is used again only when the pool has seen who took the task that was there."""
    side = Side(1, 1000)
    side.assign()
    places = side.ring.places
    assert (len(side.published), side.published[0]) == (places, 1)
    assert [side.ring.claim(1) for _ in range(3)].count(None) == 0
    side.dispatcher._publish()
    assert len(side.published) == places
    side.assign()
    assert (len(side.published), side.had) == (places, [[0, 1, 2, 3]])
    assert side.published[0] == 4


def test_the_ring_goes_on_without_a_worker_that_was_killed_in_a_claim() -> None:
    """The place of the task that it had not copied is free again."""
    side = Side(2, 1000)
    side.assign()
    ring = side.ring
    first = side.published[0]
    ring._words[ring._place(1)] |= side.workers[0].progress.owner
    side.dispatcher.note_claims()
    dead = side.workers.pop(0)
    assert first in numbers(dead.tasks)
    side.dispatcher.recover(dead, -9)
    # Once around.
    for _ in range(2):
        side.assign()
        assert len(side.published) == ring.places
        while ring.claim(2):
            pass


def test_a_task_behind_a_large_one_waits_with_it_before_the_ring() -> None:
    """Tasks begin in their order, and large ones are sent to idle workers."""
    side = Side(1, 2)
    side.submit(1, bytes(33_000))
    side.submit(2)
    side.assign()
    assert (side.had, side.published, side.waiting) == ([[0]], [1], [2, 3, 4])
    side.workers[0].tasks.clear()
    side.assign()
    assert (side.had, side.published, side.waiting) == ([[1]], [], [2, 3, 4])
    side.workers[0].tasks.clear()
    side.assign()
    assert (side.had, side.published, side.waiting) == ([[2]], [3, 4], [])
