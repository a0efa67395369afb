"""Results of pools are moved, and are by value."""

from __future__ import annotations

import multiprocessing
from multiprocessing.pool import MaybeEncodingError  # type: ignore[attr-defined]
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import shmreduce
from shmreduce import pool as pool_module
from shmreduce.born import allocations, library, moving
from shmreduce.memory.one_buffer import GivenBuffer
from shmreduce.moving import Moves
from tests.born.allocator import filled, is_born, needs_allocator

if TYPE_CHECKING:
    from pathlib import Path

METHODS = ("fork", "forkserver", "spawn")
STRATEGIES = ("file_descriptor", "file_system")

kept: list[Any] = []


def make(number: int) -> Any:
    array = filled(number)
    return {"array": array, "born": is_born(array), "small": np.full(3, number)}


def keep(number: int) -> Any:
    array = filled(number)
    kept.append(array)
    for each in kept:
        each[:] = number
    return array


def echo(array: Any) -> Any:
    return array


def fail(number: int) -> Any:
    array = filled(number)
    raise ValueError(f"{array[0]} is wrong")


def unpicklable(number: int) -> Any:
    return filled(number), lambda: None


@pytest.fixture(
    params=[(method, strategy) for method in METHODS for strategy in STRATEGIES], ids="-".join
)
def pool(request: pytest.FixtureRequest) -> Any:
    """A pool of two workers whose results are moved."""
    needs_allocator()
    method, strategy = request.param
    with (
        shmreduce.install(strategy=strategy),
        shmreduce.get_context(method).Pool(2, shared_allocations=True) as made,
    ):
        yield made
        made.close()
        made.join()


def test_results_are_moved_by_value(pool: Any) -> None:
    """Results lie in the workers' segments for born arrays, are whole and writable; what a
    worker keeps and writes to does not show; exceptions and what cannot be pickled are told of
    as ever; and arguments go out and back.
    """
    for _ in range(3):
        results = pool.map(make, range(8), chunksize=2)
        assert all(result["born"] for result in results)
        assert [int(result["array"][-1]) for result in results] == list(range(8))
        assert all((each["array"] == each["array"][0]).all() for each in results)
        for result in results:
            result["array"][:] = 100
        assert all((result["array"] == 100).all() for result in results)
        del results
    assert [int(array[0]) for array in pool.map(keep, range(6), chunksize=1)] == list(range(6))
    with pytest.raises(ValueError, match="3 is wrong"):
        pool.apply(fail, (3,))
    with pytest.raises(MaybeEncodingError):
        pool.apply(unpicklable, (1,))
    array = filled(9)
    echoed = pool.apply(echo, (array,))
    echoed[:] = 1
    assert (array == 9).all()


def segments_of(results: list[Any]) -> set[tuple[str, int]]:
    """Return segment and block of each received array."""
    found = set()
    for result in results:
        bottom = result
        while isinstance(bottom, np.ndarray):
            bottom = bottom.base
        block = shmreduce.find_block(bottom)
        assert block is not None
        found.add((block._record.segment.token.hex(), block._record.block))
    return found


def make_plain(number: int) -> Any:
    return filled(number)


def make_kept(number: int) -> Any:
    kept.append(filled(number))
    return kept[-1]


def where(_: int) -> set[str]:
    """Return the segments of the worker's arrays."""
    return {segment.token.hex() for heap in set(_heaps()) for segment in heap.segments}


def _heaps() -> list[Any]:
    from shmreduce.born import heap

    return list(heap._heaps.values())


@pytest.mark.usefixtures("allocator")
def test_what_is_moved_is_where_it_was_born_and_what_is_kept_is_not() -> None:
    """A result that the worker keeps lies in another segment than one that it does not keep."""
    with shmreduce.get_context("fork").Pool(1, shared_allocations=True) as pool:
        plain = pool.map(make_plain, range(3), chunksize=1)
        held = pool.map(make_kept, range(3), chunksize=1)
        born_in = pool.apply(where, (0,))
        assert {token for token, _ in segments_of(plain)} <= born_in
        assert not {token for token, _ in segments_of(held)} & born_in
        assert [int(array[0]) for array in [*plain, *held]] == [0, 1, 2] * 2


def lack_memory(number: int) -> Any:
    """Return an array of which this worker will find, once pickled, that it cannot go on."""
    # One of an array that is a message by itself, the other of one in a pickle.
    classes: list[Any] = [GivenBuffer, Moves]
    originals = [each.settle for each in classes]

    def settle(*_: Any) -> Any:
        for each, original in zip(classes, originals, strict=True):
            each.settle = original
        raise MemoryError

    for each in classes:
        each.settle = settle
    return filled(number)


@pytest.mark.usefixtures("allocator")
@pytest.mark.parametrize("context", [shmreduce, multiprocessing])
def test_a_result_that_fails_when_it_was_given_up_is_told_of(context: Any) -> None:
    """The worker has no result any more then; it says what happened, and lives on."""
    with (
        shmreduce.install(),
        pool_module.Pool(1, context=context.get_context("fork"), shared_allocations=True) as pool,
    ):
        with pytest.raises(MemoryError):
            pool.apply_async(lack_memory, (1,)).get(30)
        assert pool.apply_async(make_plain, (2,)).get(30)[0] == 2


@pytest.mark.usefixtures("allocator")
def test_memory_of_moved_results_is_used_again() -> None:
    """A caller that drops its results makes the worker use the same blocks all the time."""
    with shmreduce.get_context("fork").Pool(1, shared_allocations=True) as pool:
        seen = set()
        for number in range(30):
            (result,) = pool.map(make_plain, [number])
            assert (result == number).all()
            seen |= segments_of([result])
            del result
        assert len(seen) <= 3


@pytest.mark.usefixtures("allocator")
def test_executors_and_contexts_of_multiprocessing_move_too() -> None:
    """``ProcessPoolExecutor`` has the parameter, and so has a pool over a standard context."""
    import multiprocessing

    context = shmreduce.get_context("fork")
    with shmreduce.ProcessPoolExecutor(1, context, shared_allocations=True) as executor:
        assert all(each["born"] for each in executor.map(make, range(3)))
    from shmreduce.pool import Pool

    with (
        shmreduce.install(),
        Pool(1, context=multiprocessing.get_context("fork"), shared_allocations=True) as pool,
    ):
        plain = pool.map(make_plain, range(3), chunksize=1)
        held = pool.map(make_kept, range(3), chunksize=1)
        born_in = pool.apply(where, (0,))
        assert {token for token, _ in segments_of(plain)} <= born_in
        assert not {token for token, _ in segments_of(held)} & born_in
        assert [int(array[0]) for array in [*plain, *held]] == [0, 1, 2] * 2


def test_without_the_allocator_a_pool_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Pool and executor raise at once, before a worker is started; without the parameter
    nothing is different.
    """
    monkeypatch.setattr(library, "_library", None)
    monkeypatch.setattr(moving, "started", False)
    monkeypatch.setattr(library, "LIBRARY", str(tmp_path / "allocator.so"))
    for kind in (shmreduce.get_context("fork").Pool, shmreduce.ProcessPoolExecutor):
        with pytest.raises(shmreduce.AllocatorUnavailableError, match="build-helper"):
            kind(1, shared_allocations=True)
    with shmreduce.get_context("fork").Pool(1) as pool:
        assert (pool.apply(make_plain, (3,)) == 3).all()
    assert not len(allocations._open)
