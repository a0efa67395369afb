"""The executor is that of concurrent.futures, but for what a death costs."""

from __future__ import annotations

import concurrent.futures
import contextlib
import logging
import multiprocessing.pool
import os
import signal
import threading
from concurrent.futures import CancelledError, _base
from concurrent.futures.process import BrokenProcessPool
from logging.handlers import QueueHandler
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from shmreduce import TaskAbandonedError, WorkerDied, get_context, pool_supervisor
from shmreduce.executor import ProcessPoolExecutor, _Promise
from tests.conftest import PATIENCE
from tests.interrupter import interrupted_everywhere
from tests.pool.work import (
    LARGE,
    add,
    broken_initializer,
    end,
    end_at_2_by_sigkill,
    end_once,
    exit_with_7_at_sigterm,
    exits_when_pickled,
    fail,
    filled,
    ignore_sigterm_and_sleep,
    keep,
    kept,
    not_picklable,
    own_pid,
    release_kept_and_sleep,
    square,
    tell_and_sleep,
    total,
    unpicklable_there,
    wait_for_kept,
    wait_for_kept_lock,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.conftest import Children

FORK: Any = multiprocessing.get_context("fork")
SPAWN: Any = multiprocessing.get_context("spawn")


class TakesTwoError(Exception):
    """Cannot be unpickled: its arguments are not those of its class."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} and {second}")


def raise_two() -> None:
    raise TakesTwoError("one", "two")


@pytest.mark.parametrize("context", [FORK, get_context("fork")])
def test_exceptions_that_cannot_be_unpickled_are_told(context: Any) -> None:
    """The error of unpickling says what it was about, and has the task's traceback as cause."""
    with ProcessPoolExecutor(1, context) as executor:
        error = executor.submit(raise_two).exception(PATIENCE)
        assert isinstance(error, TypeError)
        assert "TakesTwoError: one and two" in str(error.__cause__)
        assert "while the exception of a task was unpickled" in error.__notes__[0]
        # Not of the next error, which is about something else.
        other = executor.submit(unpicklable_there, 1).exception(PATIENCE)
        assert other is not None
        assert "TakesTwoError" not in str(other.__cause__)


@pytest.mark.parametrize(("function", "arguments"), [(fail, ("x",)), (raise_two, ())])
def test_the_cause_is_the_standard_librarys(
    function: Callable[..., object], arguments: tuple[object, ...]
) -> None:
    """Its class is that of concurrent.futures, also where the exception cannot be unpickled."""
    with concurrent.futures.ProcessPoolExecutor(1, FORK) as standard:
        wanted = standard.submit(fail, "x").exception(PATIENCE)
    with ProcessPoolExecutor(1, FORK) as executor:
        error = executor.submit(function, *arguments).exception(PATIENCE)
    assert wanted is not None
    assert error is not None
    assert type(error.__cause__) is type(wanted.__cause__)


def test_without_the_standard_librarys_class_the_cause_is_that_of_a_pool(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The class is private to the standard library: the traceback is told without it, too."""
    monkeypatch.delattr("concurrent.futures.process._RemoteTraceback")
    with ProcessPoolExecutor(1, FORK) as executor:
        error = executor.submit(fail, "x").exception(PATIENCE)
        assert error is not None
        assert type(error.__cause__) is multiprocessing.pool.RemoteTraceback  # type: ignore[attr-defined]


def test_results_and_exceptions() -> None:
    """Futures have the value or the exception, with the worker's traceback as its cause."""
    with ProcessPoolExecutor(2, FORK) as executor:
        assert executor.submit(add, 1, y=2).result(PATIENCE) == 3
        error = executor.submit(fail, "x").exception(PATIENCE)
        assert isinstance(error, KeyError)
        assert "raise KeyError(x)" in str(error.__cause__)
        assert isinstance(executor.submit(end, "exit").exception(PATIENCE), SystemExit)
        assert executor.submit(square, lambda: 1).exception(PATIENCE) is not None
        assert executor.submit(not_picklable, 1).exception(PATIENCE) is not None
        error = executor.submit(exits_when_pickled, 1).exception(PATIENCE)
        assert isinstance(error, SystemExit)
        assert executor.submit(square, 4).result(PATIENCE) == 16


def test_map() -> None:
    """Map takes several iterables, chunks, a timeout and a bound on what is taken ahead."""
    taken = []

    def items() -> Iterator[int]:
        for number in range(100):
            taken.append(number)
            yield number

    with ProcessPoolExecutor(2, FORK) as executor:
        expected = [x + 1 for x in range(100)]
        assert list(executor.map(add, range(100), [1] * 100, chunksize=7)) == expected
        results = executor.map(square, items(), buffersize=3)
        assert taken == [0, 1, 2]
        assert [next(results), next(results)] == [0, 1]
        assert len(taken) <= 5
        assert list(results) == [x * x for x in range(2, 100)]
        with pytest.raises(ValueError, match="chunksize"):
            executor.map(square, [1], chunksize=0)
        with pytest.raises(ValueError, match="buffersize"):
            executor.map(square, [1], buffersize=0)


def test_results_that_do_not_come_in_time() -> None:
    """Map raises TimeoutError, and cancels what has not begun."""
    lock = FORK.Lock()
    with ProcessPoolExecutor(1, FORK, keep, (lock,)) as executor, lock:
        waiting = executor.submit(wait_for_kept_lock)
        results = executor.map(square, range(3), timeout=0.01)
        with pytest.raises(TimeoutError):
            list(results)
        assert not waiting.done()


def test_a_death_costs_one_future(children: Children) -> None:
    """The future of a killed worker has WorkerDied, a BrokenProcessPool; all others go on."""
    with ProcessPoolExecutor(2, children.context) as executor:
        futures = [executor.submit(end_at_2_by_sigkill, x) for x in range(6)]
        error = futures.pop(2).exception(PATIENCE)
        assert isinstance(error, WorkerDied)
        assert isinstance(error, BrokenProcessPool)
        assert error.signal_name == "SIGKILL"
        assert [each.result(PATIENCE) for each in futures] == [0, 1, 3, 4, 5]
        arrays = list(executor.map(filled, range(4)))
        assert [total(each) for each in arrays] == [x * LARGE / 8 for x in range(4)]


def test_another_try(tmp_path: Path) -> None:
    """With retries the next worker gets the arguments as they were."""
    with ProcessPoolExecutor(1, FORK, retries=1) as executor:
        array = np.ones(4)
        assert executor.submit(end_once, str(tmp_path / "a"), array).result(PATIENCE) == 4


def test_workers_that_cannot_be_started() -> None:
    """Futures, and submit(), fail with BrokenProcessPool, the initializer's error its cause."""
    with ProcessPoolExecutor(1, FORK, broken_initializer) as executor:
        error = executor.submit(square, 1).exception(PATIENCE)
        assert isinstance(error, BrokenProcessPool)
        assert isinstance(error.__cause__, ValueError)
        with pytest.raises(BrokenProcessPool):
            executor.submit(square, 1)
        assert executor._broken


def log_to_and_fail(queue: Any) -> None:
    logger = logging.getLogger("concurrent.futures")
    logger.addHandler(QueueHandler(queue))
    logger.propagate = False
    raise ValueError("no")


def test_an_initializer_that_fails_is_logged() -> None:
    """As by concurrent.futures; without a handler that is standard error."""
    queue = FORK.Queue()
    with ProcessPoolExecutor(1, FORK, log_to_and_fail, (queue,)) as executor:
        assert executor.submit(square, 1).exception(PATIENCE) is not None
    assert "ValueError: no" in queue.get(timeout=PATIENCE).getMessage()
    queue.close()


def test_shutting_down() -> None:
    """Shutdown waits for what was submitted, or cancels what has not begun; then no more."""
    executor = ProcessPoolExecutor(1, FORK)
    futures = [executor.submit(square, x) for x in range(5)]
    executor.shutdown()
    assert [each.result(0) for each in futures] == [0, 1, 4, 9, 16]
    with pytest.raises(RuntimeError, match="after shutdown"):
        executor.submit(square, 1)
    begun = FORK.Semaphore(0)
    executor = ProcessPoolExecutor(1, FORK, keep, (begun,))
    running = executor.submit(release_kept_and_sleep)
    waiting = [executor.submit(square, x) for x in range(3)]
    assert begun.acquire(timeout=PATIENCE)
    pid = next(iter(executor._processes))
    assert pid is not None
    executor.shutdown(wait=False, cancel_futures=True)
    os.kill(pid, signal.SIGKILL)
    assert isinstance(running.exception(PATIENCE), WorkerDied)
    for each in waiting:
        with pytest.raises(CancelledError):
            each.result(PATIENCE)
    executor.shutdown()


def test_a_dropped_executor_finishes() -> None:
    """What was submitted is done when nobody holds the executor any more; no thread is left."""
    executor = ProcessPoolExecutor(1, FORK)
    thread = executor._supervisor.thread
    future = executor.submit(square, 3)
    del executor
    assert future.result(PATIENCE) == 9
    thread.join(PATIENCE)
    assert thread not in threading.enumerate()


def test_workers_are_started_when_needed() -> None:
    """With start methods other than fork an idle worker is used before another is started."""
    with ProcessPoolExecutor(4, SPAWN) as executor:
        pids = {executor.submit(own_pid).result(PATIENCE) for _ in range(4)}
        assert len(pids) == 1
        assert list(executor._processes) == list(pids)


def test_the_initializer_is_called_first() -> None:
    """initializer(*initargs) is called in each worker."""
    with ProcessPoolExecutor(1, FORK, keep, ("given",)) as executor:
        assert executor.submit(kept, None).result(PATIENCE) == "given"


def test_workers_leave_after_so_many_tasks() -> None:
    """max_tasks_per_child replaces workers; not with fork, and spawn is its default."""
    with ProcessPoolExecutor(1, SPAWN, max_tasks_per_child=2) as executor:
        pids = [executor.submit(own_pid).result(PATIENCE) for _ in range(4)]
        assert pids[0] == pids[1] != pids[2] == pids[3]
    with pytest.raises(ValueError, match="fork"):
        ProcessPoolExecutor(1, FORK, max_tasks_per_child=2)
    with ProcessPoolExecutor(1, max_tasks_per_child=2) as executor:
        assert executor._mp_context.get_start_method() == "spawn"


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"max_workers": 0}, ValueError),
        ({"initializer": 1}, TypeError),
        ({"max_tasks_per_child": 0}, ValueError),
        ({"max_tasks_per_child": 1.5}, TypeError),
        ({"retries": -1}, ValueError),
    ],
)
def test_what_the_constructor_rejects(arguments: dict[str, Any], error: type[Exception]) -> None:
    """Numbers that cannot be, and an initializer that is none."""
    with pytest.raises(error):
        ProcessPoolExecutor(**arguments)


ENDS = ("terminate_workers", "kill_workers")


@pytest.mark.parametrize("end_workers", ENDS)
@pytest.mark.parametrize("own", [True, False])
@pytest.mark.usefixtures("shmreduce_no_leaks")
def test_workers_can_be_ended(children: Children, end_workers: str, own: bool) -> None:
    """What was begun fails, a BrokenProcessPool, and is not tried again, what was not is
    cancelled; the workers are gone, and what they had of shared memory is given back.
    """
    context: Any = get_context(children.method) if own else children.context
    begun, others_begun = context.Event(), context.Event()
    array = np.ones(LARGE)
    with ProcessPoolExecutor(1, context, keep, ((begun, others_begun),), retries=3) as executor:
        running = executor.submit(tell_and_sleep, array)
        assert begun.wait(PATIENCE)
        futures = [executor.submit(total, array) for _ in range(20)]
        [process] = executor._processes.values()
        getattr(executor, end_workers)()
        with pytest.raises(RuntimeError, match="after shutdown"):
            executor.submit(square, 2)
    error = running.exception(PATIENCE)
    assert isinstance(error, BrokenProcessPool)
    assert isinstance(error, TaskAbandonedError)
    assert not process.is_alive()
    assert not others_begun.is_set()
    assert futures[-1].cancelled()
    for future in futures:
        assert future.cancelled() or future.exception(PATIENCE) is error
    # Once more does nothing.
    getattr(executor, end_workers)()


@pytest.mark.parametrize(
    ("end_workers", "code"), list(zip(ENDS, [7, -signal.SIGKILL], strict=True))
)
def test_how_workers_are_ended(end_workers: str, code: int) -> None:
    """By a signal that they can answer with cleaning up, or by the other one."""
    begun = FORK.Event()
    with ProcessPoolExecutor(1, FORK, keep, (begun,)) as executor:
        executor.submit(exit_with_7_at_sigterm)
        assert begun.wait(PATIENCE)
        [process] = executor._processes.values()
        getattr(executor, end_workers)()
    assert process.exitcode == code


def test_workers_that_ignore_sigterm_are_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """After their time, or at once by kill_workers() while the thread waits for that."""
    begun, asked_to_end = FORK.Event(), FORK.Event()
    monkeypatch.setattr(pool_supervisor, "_GRACE", 0.01)
    with ProcessPoolExecutor(1, FORK, keep, ((begun, asked_to_end),)) as executor:
        executor.submit(ignore_sigterm_and_sleep)
        assert begun.wait(PATIENCE)
        [process] = executor._processes.values()
        executor.terminate_workers()
    assert process.exitcode == -signal.SIGKILL
    begun.clear()
    asked_to_end.clear()
    monkeypatch.setattr(pool_supervisor, "_GRACE", 10 * PATIENCE)
    with ProcessPoolExecutor(1, FORK, keep, ((begun, asked_to_end),)) as executor:
        executor.submit(ignore_sigterm_and_sleep)
        assert begun.wait(PATIENCE)
        [process] = executor._processes.values()
        executor.terminate_workers()
        assert asked_to_end.wait(PATIENCE)
        executor.kill_workers()
    assert process.exitcode == -signal.SIGKILL


def test_who_ended_the_workers_is_told_and_not_that_they_died(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where the thread sees their end before it hears of who did it."""
    begun, asked_to_end = FORK.Event(), FORK.Event()
    with ProcessPoolExecutor(1, FORK, keep, ((begun, asked_to_end),)) as executor:
        running = executor.submit(ignore_sigterm_and_sleep)
        assert begun.wait(PATIENCE)
        supervisor, waits = executor._supervisor, threading.Event()
        [worker] = supervisor.workers
        select = supervisor._selector.select

        def select_when_it_has_ended(timeout: float | None) -> Any:
            waits.set()
            select(timeout)
            wait([worker.sentinel], PATIENCE)
            return select(0)

        monkeypatch.setattr(supervisor._selector, "select", select_when_it_has_ended)
        supervisor.wake()
        assert waits.wait(PATIENCE)
        monkeypatch.setattr(supervisor, "wake", lambda: None)
        executor.kill_workers()
        assert isinstance(running.exception(PATIENCE), TaskAbandonedError)


@pytest.mark.parametrize("end_workers", ENDS)
def test_workers_can_be_ended_by_a_callback_and_where_there_are_none(end_workers: str) -> None:
    """In the pool's own thread too, where nothing may wait for it; and before the first task."""
    executor = ProcessPoolExecutor(1, FORK)
    getattr(executor, end_workers)()
    with pytest.raises(RuntimeError, match="after shutdown"):
        executor.submit(square, 2)
    event = FORK.Event()
    with ProcessPoolExecutor(1, FORK, keep, (event,)) as executor:
        first = executor.submit(wait_for_kept)
        first.add_done_callback(lambda _: getattr(executor, end_workers)())
        second = executor.submit(wait_for_kept)
        event.set()
        assert first.result(PATIENCE)
        assert second.cancelled() or second.done()


def test_a_forked_child_ends_no_workers_of_its_parent() -> None:
    """Of its copy of the executor; the parent's goes on."""
    with ProcessPoolExecutor(1, FORK) as executor:
        pid = executor.submit(own_pid).result(PATIENCE)
        child = FORK.Process(target=executor.kill_workers)
        child.start()
        child.join(PATIENCE)
        assert child.exitcode == 0
        assert executor.submit(own_pid).result(PATIENCE) == pid


class CountingExecutor(ProcessPoolExecutor):
    """Counts the calls that are submitted."""

    count = 0

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Any:
        self.count += 1
        return super().submit(fn, *args, **kwargs)


def test_map_submits_its_calls_as_a_derived_class_says() -> None:
    """One for each chunk, as in the standard library."""
    with CountingExecutor(1, FORK) as executor:
        assert list(executor.map(square, range(5), chunksize=2)) == [0, 1, 4, 9, 16]
        assert executor.count == 3


def test_ctrl_c_in_a_thread_that_waits_leaves_the_future_to_the_pool() -> None:
    """At no instant does it keep the lock of the future, for which the pool's thread waits."""
    future = _Promise(set()).future

    def look() -> None:
        # RuntimeError where the interrupt comes when Condition.wait() has just released the lock.
        with contextlib.suppress(TimeoutError, RuntimeError):
            future.result(0)

    free: list[bool] = []

    def ask() -> None:
        if future._condition.acquire(blocking=False):
            free.append(True)
            future._condition.release()

    number = 0
    for number in interrupted_everywhere(look, threading.__file__, _base.__file__):
        other = threading.Thread(target=ask)
        other.start()
        other.join(PATIENCE)
        assert len(free) == number
    assert number > 5


def test_an_initializer_that_always_fails_is_told_after_as_many_workers_as_there_are() -> None:
    """With spawn there is one at first, however many there may be: not that many are tried."""
    with ProcessPoolExecutor(30, get_context("spawn"), initializer=os._exit, initargs=(3,)) as one:
        future = one.submit(abs, -1)
        assert isinstance(future.exception(PATIENCE), BrokenProcessPool)
        assert one._supervisor._failures < 30
