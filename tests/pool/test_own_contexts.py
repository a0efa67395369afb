"""Pools of the contexts of shmreduce: memory travels with each answer, nothing is installed."""

from __future__ import annotations

import multiprocessing
import random
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import shmreduce
from shmreduce import WorkerDied, connection
from shmreduce.pool import Pool
from tests.conftest import PATIENCE, START_METHODS
from tests.pool.work import LARGE, doubled_in_place, filled, first_of, total

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.usefixtures("shmreduce_no_leaks")


@pytest.mark.parametrize("method", START_METHODS)
def test_an_answer_outlives_its_worker(method: str) -> None:
    """Results of workers that have left are whole, read late or early."""
    with shmreduce.get_context(method).Pool(2, maxtasksperchild=1) as pool:
        results = [pool.apply_async(filled, (value,)) for value in range(6)]
        pool.close()
        pool.join()
    assert [total(each.get(PATIENCE)) for each in results] == [
        value * LARGE / 8 for value in range(6)
    ]


@pytest.mark.parametrize("method", START_METHODS)
def test_arrays_and_large_pickles(method: str) -> None:
    """Arrays, received ones too, and pickles larger than a packet go there and back."""
    array = np.ones(LARGE // 8)
    text = "x" * LARGE
    with shmreduce.get_context(method).Pool(2) as pool:
        assert pool.map(total, [array] * 5, chunksize=2) == [LARGE / 8] * 5
        doubled = pool.apply(doubled_in_place, (array,))
        again = pool.apply(doubled_in_place, (doubled,))
        assert (array[0], doubled[0], again[0]) == (1, 2, 4)
        assert pool.map(str.upper, [text] * 3, chunksize=1) == ["X" * LARGE] * 3
    pool.join()


def test_news_that_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection that is said to have something, and has nothing, changes nothing."""
    receive = connection.Connection.receive
    asked = []

    def nothing_at_first(self: connection.Connection, buffer: Any, *, wait: bool) -> Any:
        asked.append(wait)
        return None if len(asked) % 2 else receive(self, buffer, wait=wait)

    monkeypatch.setattr(connection.Connection, "receive", nothing_at_first)
    with shmreduce.get_context("fork").Pool(1) as pool:
        assert pool.map(total, [np.ones(LARGE // 8)] * 3, chunksize=1) == [LARGE / 8] * 3
    pool.join()
    # The pool's thread never waits for one worker alone.
    assert set(asked) == {False}


def test_the_executor_uses_them_by_default() -> None:
    """Without an installation arrays of the executor travel by shared memory."""
    context = shmreduce.get_context("fork")
    with shmreduce.ProcessPoolExecutor(1, context) as executor:
        result = executor.submit(filled, 3.0).result(PATIENCE)
    while isinstance(result, np.ndarray):
        result = result.base
    assert shmreduce.find_block(result) is not None


def read(count: int) -> Iterator[Any]:
    buffer = np.empty(LARGE // 8)
    for number in range(count):
        buffer[:] = number
        yield buffer


@pytest.mark.parametrize("own", [True, False], ids=["own", "installed"])
def test_kills_at_any_moment(own: bool) -> None:
    """Whenever workers are killed, each result is right or WorkerDied, and nothing is left."""
    chance = random.Random(5)
    context: Any = (shmreduce if own else multiprocessing).get_context("fork")
    done = threading.Event()
    results_seen = threading.Semaphore(3)

    def kill_now_and_then() -> None:
        # At most once for each result: faster than workers can start, a pool
        # rightly gives up.
        while not done.wait(chance.random() * 0.02):
            if results_seen.acquire(timeout=0.02):
                for worker in pool._pool[:1]:
                    worker.kill()

    with shmreduce.install(), Pool(2, context=context) as pool:
        killer = threading.Thread(target=kill_now_and_then)
        killer.start()
        try:
            results: Any = pool.imap(first_of, read(150), retries=1)
            for number in range(150):
                try:
                    got = results.next(PATIENCE)
                except WorkerDied as error:
                    got = error.index
                assert got == number
                results_seen.release()
        finally:
            done.set()
            killer.join(PATIENCE)
        pool.close()
        pool.join()
