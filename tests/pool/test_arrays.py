"""Arrays in pools: independent, of the right moment, and given back."""

from __future__ import annotations

import pickle
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any

import numpy as np

import shmreduce
from shmreduce.executor import ProcessPoolExecutor
from shmreduce.pool import Pool
from tests.conftest import PATIENCE
from tests.pool.work import LARGE, doubled_in_place, filled, first_of, set_first, total

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.conftest import Children

COUNT = LARGE // 8


def test_results_are_independent(children: Children) -> None:
    """Results of one worker are arrays of their own, which stay after the pool is gone."""
    with Pool(2, context=children.context) as pool:
        arrays = pool.map(filled, range(8), chunksize=1)
        assert [array[0] for array in arrays] == list(range(8))
        arrays[0][:] = 9
        arrays += pool.map(filled, range(8))
        assert [array[-1] for array in arrays] == [9, *range(1, 8), *range(8)]
    pool.join()
    arrays[3] += 1
    assert [total(array) / COUNT for array in arrays] == [9, 1, 2, 4, *range(4, 8), *range(8)]


def test_the_snapshot_is_taken_before_the_call_returns(children: Children) -> None:
    """What is written to an argument after apply_async, map_async or submit is not seen."""
    buffer = np.zeros(COUNT)
    with Pool(1, context=children.context) as pool:
        results = []
        for value in range(4):
            buffer[:] = value
            results.append(pool.apply_async(first_of, (buffer,)))
        assert [each.get(PATIENCE) for each in results] == [0, 1, 2, 3]
        buffer[:] = 5
        mapped = pool.map_async(first_of, [buffer] * 3, chunksize=1)
        buffer[:] = 6
        assert mapped.get(PATIENCE) == [5] * 3
    pool.join()
    with ProcessPoolExecutor(1, children.context) as executor:
        future = executor.submit(first_of, buffer)
        buffer[:] = 7
        assert future.result(PATIENCE) == 6


def test_a_generator_may_use_its_buffer_again(children: Children) -> None:
    """An item of imap is pickled before the next is taken."""

    def items() -> Iterator[Any]:
        buffer = np.zeros(COUNT)
        for value in range(6):
            buffer[:] = value
            yield buffer

    with Pool(2, context=children.context) as pool:
        assert list(pool.imap(first_of, items())) == [0, 1, 2, 3, 4, 5]
        assert sorted(pool.imap_unordered(first_of, items())) == [0, 1, 2, 3, 4, 5]
    pool.join()


def test_an_argument_that_is_returned(children: Children) -> None:
    """A worker may change its argument and return it; the caller's stays."""
    array = np.ones(COUNT)
    with Pool(1, context=children.context) as pool:
        for _ in range(3):
            doubled = pool.apply(doubled_in_place, (array,))
            again = pool.apply(doubled_in_place, (doubled,))
            assert (array[0], doubled[0], again[0]) == (1, 2, 4)
    pool.join()


def test_shared_arrays_are_shared(children: Children) -> None:
    """What a worker writes to a shared array is seen by the caller; a returned one is the same."""
    array = shmreduce.zeros(COUNT)
    with Pool(2, context=children.context) as pool:
        pool.map(set_first, [array])
        assert array[0] == 7
        returned = pool.apply(doubled_in_place, (array,))
        assert shmreduce.is_shared(returned)
        returned[1] = 3
        assert (array[0], array[1]) == (14, 3)
        del returned
    pool.join()


def test_a_worker_drops_the_arrays_of_a_task_at_once(children: Children) -> None:
    """While a worker waits for its next task it holds no array of the last one, cycles or not."""
    array = np.ones(COUNT)
    with Pool(1, context=children.context) as pool:
        assert pool.apply(_in_a_cycle, (array,)) == COUNT
        # What the worker holds now is what it held before this task came.
        assert pool.apply(_held_arrays) == 0
    pool.join()


def _in_a_cycle(array: Any) -> float:
    cycle: list[Any] = [array]
    cycle.append(cycle)
    return total(array)


def _held_arrays() -> int:
    from shmreduce.memory.inspection import process_state

    return process_state().arrays


def total_in(message: bytes) -> float:
    return float(pickle.loads(message).sum())


def second_of(_first: Any, second: Any) -> Any:
    return second


def test_a_pickle_among_the_arguments_is_the_users(children: Children) -> None:
    """Tries that are not needed are given back without what a pickle in them refers to."""
    with shmreduce.install(), Pool(1, context=children.context, retries=2) as pool:
        message = bytes(ForkingPickler.dumps(np.ones(COUNT)))
        assert pool.apply(total_in, (message,)) == COUNT
        message = bytes(ForkingPickler.dumps(np.ones(COUNT)))
        argument = np.ones(COUNT)
        assert pool.apply(second_of, (argument, message)) == message
        assert pickle.loads(message).sum() == COUNT
    pool.join()
