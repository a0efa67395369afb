"""What a type checker knows of objects that go through channels and pools.

``mypy --strict`` reads this file as any other: a type that it infers otherwise is
an error there. The tests say that what is typed so can be run, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, assert_type

import pytest

import shmreduce
from shmreduce.connection import Connection
from shmreduce.context import ForkContext
from shmreduce.pool import ApplyResult, AsyncResult, IMapIterator, MapResult
from shmreduce.queues import JoinableQueue, Queue, SimpleQueue

if TYPE_CHECKING:
    import multiprocessing.connection
    import multiprocessing.queues

FORK = shmreduce.get_context("fork")


def test_contexts_and_pipes_have_types() -> None:
    """Those of shmreduce, which are subclasses of the standard ones."""
    assert_type(FORK, ForkContext)
    here, there = assert_type(FORK.Pipe(), tuple[Connection, Connection])
    ends: list[multiprocessing.connection.Connection] = [here, there]
    for end in ends:
        end.close()


def as_text(number: int) -> str:
    return str(number)


def test_a_queue_has_the_type_of_its_objects() -> None:
    """As that of the standard library, of which it is a subclass."""
    simple: SimpleQueue[int] = FORK.SimpleQueue()
    queue: Queue[int] = FORK.Queue()
    joinable: JoinableQueue[int] = FORK.JoinableQueue()
    standard: list[multiprocessing.queues.Queue[int]] = [queue, joinable]
    simple.put(1)
    assert assert_type(simple.get(), int) == 1
    for each in standard:
        each.put(2)
    assert assert_type(queue.get(), int) == assert_type(joinable.get(), int) == 2
    for other in (simple, queue, joinable):
        other.close()


def test_calls_of_a_pool_have_the_type_of_the_function() -> None:
    """Their results, however they are asked for, and what callbacks are given."""
    got: list[str] = []
    with FORK.Pool(1) as pool:
        assert assert_type(pool.apply(as_text, (1,)), str) == "1"
        assert assert_type(pool.map(as_text, [1]), list[str]) == ["1"]
        assert assert_type(pool.starmap(as_text, [(1,)]), list[str]) == ["1"]
        result = pool.apply_async(as_text, (1,), callback=got.append)
        assert assert_type(result, ApplyResult[str]).get() == "1"
        results = pool.map_async(as_text, [2], callback=got.extend)
        assert assert_type(results, MapResult[str]).get() == ["2"]
        for iterator in (pool.imap(as_text, [1]), pool.imap_unordered(as_text, [1])):
            assert assert_type(iterator, IMapIterator[str]).next(timeout=60) == "1"
    assert got == ["1", "2"]


def test_futures_have_the_type_of_the_function() -> None:
    """And a call that the function does not take is seen before it is made."""
    with shmreduce.ProcessPoolExecutor(1, FORK) as executor:
        future = executor.submit(as_text, 1)
        assert assert_type(future, Future[str]).result() == "1"
        assert assert_type(executor.map(as_text, [1]), Iterator[str]).__next__() == "1"
        wrong = executor.submit(as_text, "too", "many")  # type: ignore[call-arg, arg-type]
        with pytest.raises(TypeError):
            wrong.result()


@pytest.mark.parametrize(
    "cls", [SimpleQueue, Queue, JoinableQueue, ApplyResult, AsyncResult, MapResult, IMapIterator]
)
def test_they_can_be_subscribed(cls: Any) -> None:
    """In annotations that are evaluated, under every version."""
    assert cls[int].__origin__ is cls
