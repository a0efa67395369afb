"""A worker that is killed fails its own task, at once, and nobody waits for ever."""

from __future__ import annotations

import functools
import multiprocessing
import os
import pickle
import signal
import time
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import shmreduce
from shmreduce import TaskAbandonedError, WorkerDied
from shmreduce.compiled import PACKETS
from shmreduce.pool import Pool
from shmreduce.pool_results import ApplyResult, MapResult
from tests.channels.channels import eventually
from tests.compiler import needs_module
from tests.conftest import PATIENCE
from tests.pool.holding import held
from tests.pool.work import (
    LARGE,
    broken_initializer,
    end,
    end_at,
    end_at_2_by_sigkill,
    end_once,
    filled,
    keep,
    own_pid,
    perform,
    release_kept_and_sleep,
    square,
    touch_and_sleep,
    wait_for_files,
)

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import Children

FORK: Any = multiprocessing.get_context("fork")

WAYS = [
    ("SIGKILL", -signal.SIGKILL, "SIGKILL"),
    ("SIGSEGV", -signal.SIGSEGV, "SIGSEGV"),
    ("_exit", 4, None),
    ("exit", 3, None),
    ("SIGINT", 130, None),
]


@pytest.mark.parametrize(("how", "exitcode", "name"), WAYS)
def test_the_error_says_who_died_how_and_at_what(
    how: str, exitcode: int, name: str | None
) -> None:
    """WorkerDied has pid, exit code, signal and the item's index, and survives pickling."""
    with Pool(2, context=FORK) as pool:
        with pytest.raises(WorkerDied) as caught:
            pool.map(functools.partial(end_at, at=5, how=how), range(8), chunksize=4)
        error = pickle.loads(pickle.dumps(caught.value))
        assert error.index == 5
        assert error.exitcode == exitcode
        assert error.signal_name == name
        assert error.signal == (None if name is None else getattr(signal, name))
        assert error.task_index == error.index
        assert error.pid not in {worker.pid for worker in pool._pool}
        assert str(error.pid) in str(error)
        assert pool.map(square, range(5)) == [0, 1, 4, 9, 16]
    pool.join()


def test_it_is_reported_while_the_others_are_busy() -> None:
    """The exception comes at the death of the worker, not when the other one has done its task."""
    begun = FORK.Semaphore(0)
    with Pool(2, keep, (begun,), context=FORK) as pool:
        pid = pool.apply(own_pid)
        results = [pool.apply_async(release_kept_and_sleep) for _ in range(2)]
        assert begun.acquire(timeout=PATIENCE)
        assert begun.acquire(timeout=PATIENCE)
        start = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        while not any(each.ready() for each in results):
            results[0].wait(0.001)
            assert time.monotonic() - start < PATIENCE
        (failed,) = [each for each in results if each.ready()]
        with pytest.raises(WorkerDied) as caught:
            failed.get(0)
        assert caught.value.pid == pid
        assert caught.value.index is None
    pool.join()


def test_only_its_own_task_fails(children: Children) -> None:
    """Of many tasks the one that kills its worker fails; the others are done, in order."""
    with Pool(2, context=children.context) as pool:
        results: Any = pool.imap(end_at_2_by_sigkill, range(40))
        values = []
        for index in range(40):
            if index == 2:
                with pytest.raises(WorkerDied):
                    results.next(PATIENCE)
            else:
                values.append(results.next(PATIENCE))
        assert values == [x for x in range(40) if x != 2]
        pool.close()
        pool.join()


def test_a_task_that_had_not_begun_goes_to_another_worker() -> None:
    """An idle worker that is killed costs no task, however many times."""
    with Pool(1, context=FORK) as pool:
        for _ in range(5):
            # Between these two the pool may or may not have seen it.
            os.kill(pool.apply(own_pid), signal.SIGKILL)
            assert pool.map(square, range(3), chunksize=1) == [0, 1, 4]
    pool.join()


def test_another_try(children: Children, tmp_path: Path) -> None:
    """retries= gives the next worker the arguments as they were, arrays too."""
    array = np.ones(LARGE // 8)
    with Pool(1, context=children.context, retries=1) as pool:
        first = pool.apply_async(end_once, (str(tmp_path / "a"), array))
        array[:] = 5
        assert first.get(PATIENCE) == LARGE // 8
        assert pool.map(square, [2]) == [4]
        second = pool.apply_async(end_once, (str(tmp_path / "b"), array), retries=0)
        with pytest.raises(WorkerDied):
            second.get(PATIENCE)
    pool.join()


def test_the_tries_are_counted() -> None:
    """A task that kills every worker fails after 1 + retries of them; the pool goes on."""
    with Pool(1, context=FORK) as pool:
        before = pool.apply(own_pid)
        with pytest.raises(WorkerDied) as caught:
            pool.apply(end, ("SIGKILL",), retries=2)
        assert caught.value.pid != before
        assert pool.apply(square, (3,)) == 9
    pool.join()


@pytest.mark.parametrize("retries", [0, 1])
def test_an_answer_behind_one_that_is_lost_counts(
    retries: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker is killed with two answers unread, and the memory of the first goes with it:
    that task is tried again if it may be, the second has been done.
    """
    needs_module(PACKETS)
    answers = {}

    def answer(index: int, succeeded: bool, value: Any) -> None:
        answers[index] = succeeded, value
        MapResult.answer(result, index, succeeded, value)
        if index == 0:
            # From now on one at a time: the second worker's answers are not lost.
            monkeypatch.setattr("shmreduce.pool_dispatch._SHORT_TASK", 0.0)
            wait([sentinel], PATIENCE)

    with shmreduce.install(), Pool(1, context=FORK, retries=retries) as pool:
        pid = pool.apply(own_pid)
        sentinel = pool._supervisor.workers[0].sentinel
        # The first goes on until the others are in the ring: a worker that looks there before
        # waits for the pool's thread, which waits in answer().
        calls: list[Any] = [(functools.partial(wait_for_files, str(tmp_path)), 1), (filled, 3)]
        calls += [(own_pid, None), (end, "SIGKILL")]
        calls += [(square, number) for number in range(5)]
        with held(pool, len(calls)):
            result = pool.map_async(perform, calls, chunksize=1)
            result.answer = answer  # type: ignore[method-assign]
            # However long it takes to send them here, the tasks count as short.
            monkeypatch.setattr("shmreduce.pool_dispatch._SHORT_TASK", PATIENCE)
        eventually(lambda: len(pool._supervisor._dispatcher._published._tasks) == len(calls) - 1)
        (tmp_path / "go").touch()
        with pytest.raises(WorkerDied):
            result.get(PATIENCE)
        pool.close()
        pool.join()
    assert answers[2] == (True, [pid])
    assert isinstance(answers[3][1], WorkerDied)
    if retries:
        assert (answers[1][1][0] == 3).all()
    else:
        assert isinstance(answers[1][1], WorkerDied)
    assert [answers[4 + number] for number in range(5)] == [
        (True, [number**2]) for number in range(5)
    ]


def test_arrays_of_the_killed_are_given_back(children: Children) -> None:
    """A worker killed with arrays in hand, and results nobody took, leave nothing behind."""
    array = np.ones(LARGE // 8)
    begun = children.context.Semaphore(0)
    with Pool(1, keep, (begun,), context=children.context) as pool:
        results: list[ApplyResult[Any]] = [pool.apply_async(release_kept_and_sleep)]
        assert begun.acquire(timeout=PATIENCE)
        results += [pool.apply_async(square, (array,)) for _ in range(3)]
        pool._pool[0].kill()
        with pytest.raises(WorkerDied):
            results[0].get(PATIENCE)
        assert [float(each.get(PATIENCE)[0]) for each in results[1:]] == [1.0] * 3
        pool.map_async(filled, range(4), chunksize=1)
    pool.join()


def test_an_initializer_that_fails_is_an_error_and_no_endless_loop(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """When no worker can be started tasks fail with the initializer's exception."""
    with Pool(2, initializer=broken_initializer, context=FORK) as pool:
        with pytest.raises(ValueError, match="no"):
            pool.map(square, range(3))
        with pytest.raises(ValueError, match="no"):
            pool.apply(square, (3,))
        pool.close()
        pool.join()
    assert "ValueError: no" in capfd.readouterr().err


def test_an_initializer_that_kills_is_an_error_too() -> None:
    """When every worker dies at its start tasks fail with WorkerDied without an index."""
    with Pool(1, initializer=end, initargs=("SIGKILL",), context=FORK) as pool:
        with pytest.raises(WorkerDied) as caught:
            pool.map(square, range(3))
        assert caught.value.index is None
        assert "while it was started" in str(caught.value)
    pool.join()


def test_results_of_a_terminated_pool_fail(tmp_path: Path) -> None:
    """Who waits for a result when the pool is terminated gets TaskAbandonedError."""
    with Pool(1, context=FORK) as pool:
        running = pool.apply_async(touch_and_sleep, (str(tmp_path / "a"),))
        waiting: Any = pool.imap(square, range(3))
        asynchronous = pool.map_async(square, range(3))
    for get in (running.get, waiting.next, asynchronous.get):
        with pytest.raises(TaskAbandonedError):
            get(PATIENCE)
    pool.join()
