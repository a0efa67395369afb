"""Pools of the standard library go on where a message of theirs cannot be loaded."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import resource
from contextlib import contextmanager
from multiprocessing.pool import MaybeEncodingError  # type: ignore[attr-defined]
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import shmreduce
from shmreduce import AttachError, BudgetExceededError, StaleHandleError
from shmreduce.memory.inspection import process_state
from tests.conftest import PATIENCE, Children
from tests.memory.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator

LENGTH = 100_000
BUDGET = 8 << 20
LIMITS = resource.getrlimit(resource.RLIMIT_NOFILE)


def forbid_descriptors(_: object = None) -> None:
    """Let this process open nothing more."""
    free = os.dup(0)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, LIMITS[1]))


def allow_descriptors(_: object = None) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, LIMITS)


@contextmanager
def no_descriptors() -> Iterator[None]:
    forbid_descriptors()
    try:
        yield
    finally:
        allow_descriptors()


def make(value: float) -> Any:
    return np.full(LENGTH, value)


def total(array: Any) -> float:
    return float(array.sum())


def load_twice(array: Any) -> str:
    """Read the same message twice from a pipe of the task's own."""
    here, there = multiprocessing.Pipe()
    message = ForkingPickler.dumps(array)
    here.send_bytes(message)
    there.recv()
    here.send_bytes(message)
    try:
        there.recv()
    except StaleHandleError:
        return "raised"
    return "loaded"


def lack_descriptors_for_a_result(context: Any) -> None:
    """In a process of its own: one that has segments open closes some for a new one."""
    with context.Pool(1) as pool:
        pool.map(abs, [1])
        with no_descriptors(), pytest.raises(AttachError) as caught:
            pool.map_async(make, [2.0]).get(PATIENCE)
        _, _, (succeeded, (array,)) = pickle.loads(caught.value.message_bytes or b"")
        assert succeeded
        assert total(array) == 2 * LENGTH
        assert total(pool.apply_async(make, (3.0,)).get(PATIENCE)) == 3 * LENGTH
        pool.close()
        pool.join()


def test_a_result_that_cannot_be_loaded_fails_its_task(children: Children) -> None:
    """The caller gets the error and can load the result later; the pool goes on."""
    children.call(lack_descriptors_for_a_result, children.context)


def lack_descriptors_for_a_task(context: Any) -> None:
    """In a process of its own: what the task was to bring stays for ``message_timeout``."""
    with context.Pool(1) as pool:
        worker = pool.apply(os.getpid)
        pool.apply_async(forbid_descriptors).get(PATIENCE)
        with pytest.raises(AttachError):
            pool.apply_async(total, (make(1.0),)).get(PATIENCE)
        pool.apply_async(allow_descriptors).get(PATIENCE)
        assert pool.apply_async(total, (make(2.0),)).get(PATIENCE) == 2 * LENGTH
        assert pool.apply(os.getpid) == worker
        pool.close()
        pool.join()
    assert process_state().unread == 1
    with shmreduce.install(message_timeout=0.001):
        eventually(lambda: process_state().unread == 0, "what the task was to bring is given up")


def test_a_task_that_cannot_be_loaded_fails(children: Children) -> None:
    """The caller gets the error of the worker, which does the next tasks."""
    children.call(lack_descriptors_for_a_task, children.context)


def test_what_a_task_receives_by_itself_is_its_own_affair(children: Children) -> None:
    """Where the pool is not the reader the error is raised, as anywhere."""
    with children.context.Pool(1) as pool:
        assert pool.apply_async(load_twice, (make(1.0),)).get(PATIENCE) == "raised"
        pool.close()
        pool.join()


def exceed_the_budget(value: float) -> Any:
    return np.full(BUDGET // 4, value)


def test_a_result_that_cannot_be_sent_fails_its_task_with_the_error(children: Children) -> None:
    """The caller gets the error with its fields, not its repr in another; the pool goes on."""
    with shmreduce.install(budget=BUDGET), children.context.Pool(1) as pool:
        worker = pool.apply(os.getpid)
        for result in (
            pool.apply_async(exceed_the_budget, (1.0,)),
            pool.map_async(exceed_the_budget, [1.0]),
        ):
            with pytest.raises(BudgetExceededError) as caught:
                result.get(PATIENCE)
            assert caught.value.budget == BUDGET < caught.value.requested
        assert pool.apply(os.getpid) == worker
        pool.close()
        pool.join()


def return_what_cannot_be_sent(_: object) -> Any:
    return lambda: None


def test_another_reason_for_a_result_not_to_be_sent_is_told_as_ever(children: Children) -> None:
    """What is not shmreduce's to tell comes as the standard library's error."""
    with children.context.Pool(1) as pool:
        with pytest.raises(MaybeEncodingError, match=r"PicklingError|AttributeError"):
            pool.apply_async(return_what_cannot_be_sent, (1,)).get(PATIENCE)
        pool.close()
        pool.join()
