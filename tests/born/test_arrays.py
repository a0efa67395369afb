"""Arrays that NumPy makes in shared memory are arrays like any other."""

from __future__ import annotations

import numpy as np
import pytest

import shmreduce
from shmreduce.born.heap import get_heap
from shmreduce.born.library import load
from shmreduce.memory.mapping import HUGE_PAGE
from shmreduce.memory.size_classes import size_class
from tests.born.allocator import LARGE, address_of, counters, entry_of, filled, is_born

pytestmark = pytest.mark.usefixtures("allocator")


def test_large_arrays_are_born_inside_the_block_alone() -> None:
    """Inside, what NumPy allocates from the threshold on is ours; outside, and below it, not."""
    before = np.ones(LARGE)
    with shmreduce.shared_allocations():
        large, small = np.ones(LARGE), np.ones(100)
        derived = large + large
    after = np.ones(LARGE)
    assert [is_born(each) for each in (before, small, after)] == [False] * 3
    assert is_born(large)
    assert is_born(derived)


def test_the_threshold_is_the_inline_limit_but_a_block_of_pages_at_least() -> None:
    """``inline_limit`` says what is large; 64 KiB is the least."""
    for limit, born in ((1 << 20, False), (200_000, True), (0, True)):
        with shmreduce.install(inline_limit=limit), shmreduce.shared_allocations():
            assert is_born(np.empty(300_000, np.uint8)) == born
            assert not is_born(np.empty(60_000, np.uint8))


def test_arrays_outlive_their_block() -> None:
    """An array is whole when the block has ended, and freeing it then is right."""
    with shmreduce.shared_allocations():
        array = filled(7)
    with shmreduce.shared_allocations():
        others = [filled(number) for number in range(20)]
    assert (array == 7).all()
    assert [int(other[-1]) for other in others] == list(range(20))


def test_a_block_that_was_given_back_is_used_for_the_next_array_of_its_size() -> None:
    """Freed here, and seen by nobody else: used again at once, without Python's doing."""
    with shmreduce.shared_allocations():
        first = filled(1)
        address = address_of(first)
        del first
        second = filled(2)
        assert address_of(second) == address
        third = filled(3)
        assert address_of(third) != address
        assert (second == 2).all()


def test_zeros_are_zeros_in_used_memory() -> None:
    """calloc() of a block that was written to gives zeros."""
    with shmreduce.shared_allocations():
        for size in (LARGE, LARGE + 1, 3 * LARGE):
            dirty = filled(255, size)
            address = address_of(dirty)
            del dirty
            clean = np.zeros(size, np.uint8)
            assert address_of(clean) == address
            assert not clean.any()


@pytest.mark.parametrize("large", [LARGE - 1, LARGE + 5000, 5 * LARGE, 100])
def test_resizing_keeps_the_contents(large: int) -> None:
    """realloc() keeps what fits, in place or not, into the allocator's memory and out of it."""
    with shmreduce.shared_allocations():
        array = np.arange(LARGE // 8)
        assert is_born(array)
        kept = min(large, array.size)
        array.resize(large, refcheck=False)
        assert (array[:kept] == np.arange(kept)).all()
        assert not array[kept:].any()
    small = np.arange(10)
    with shmreduce.shared_allocations():
        small.resize(LARGE, refcheck=False)
        assert (small[:10] == np.arange(10)).all()


def test_growing_arrays_from_iterators_and_files_work() -> None:
    """NumPy reallocates while it does not know the length."""
    with shmreduce.shared_allocations():
        array = np.fromiter(iter(range(200_000)), np.int64)
    assert (array == np.arange(200_000)).all()


def test_sizes_are_rounded_as_the_heap_rounds_them() -> None:
    """The library's size classes are those of the heap, which gives the blocks."""
    function = load().size_class
    for power in range(12, 40):
        for size in (2**power - 1, 2**power, 2**power + 1, 2**power * 9 // 7):
            assert function(size) == size_class(size, whole_pages=True)


def test_what_is_carved_is_booked() -> None:
    """Memory that arrays were born in counts for the budget of the family."""
    with shmreduce.install():
        heap = get_heap()
        with shmreduce.shared_allocations():
            before = heap.reserved_bytes
            arrays = [filled(number, 7 << 20) for number in range(5)]
            with shmreduce.shared_allocations():
                assert heap.reserved_bytes - before >= sum(each.nbytes for each in arrays)
        assert heap._host.family.reserved >= heap.block_bytes


def test_idle_memory_is_given_back_when_the_block_has_ended() -> None:
    """Cooling takes idle blocks from the allocator, and arrays that live stay whole."""
    with shmreduce.install():
        with shmreduce.shared_allocations():
            arrays = [filled(number) for number in range(30)]
            kept = arrays[::10]
            del arrays
        heap = get_heap()
        assert counters().idle_bytes
        with heap.exclusive():
            assert heap.cool(0)
        assert not counters().idle_bytes
        assert [int(array[0]) for array in kept] == [0, 10, 20]
        assert all((array == array[0]).all() for array in kept)
        with shmreduce.shared_allocations():
            again = [np.zeros(LARGE, np.uint8) for _ in range(60)]
            assert not any(array.any() for array in again)
            assert [int(array[0]) for array in kept] == [0, 10, 20]


def test_each_strategy_makes_the_memory_that_is_in_force() -> None:
    """Another strategy means other segments; arrays of the first stay."""
    arrays = []
    for number, strategy in enumerate(("file_descriptor", "file_system", "file_descriptor")):
        with shmreduce.install(strategy=strategy), shmreduce.shared_allocations():
            array = filled(number)
            entry = entry_of(array)
            assert entry is not None
            assert get_heap()._ranges[entry.range].strategy.name == strategy
            arrays.append(array)
    assert [int(array[0]) for array in arrays] == [0, 1, 2]


def test_large_arrays_begin_where_a_huge_page_can() -> None:
    """Whatever sizes came before; arrays do not overlap, and hold what was written to them."""
    sizes = [150_000, HUGE_PAGE, 3 * HUGE_PAGE + 5000, 200_000, HUGE_PAGE + 1, 9 << 20]
    with shmreduce.shared_allocations():
        # Until the library knows what is asked for, it may have no room for it.
        for size in sizes:
            np.empty(size, np.uint8)
        arrays = [np.full(size, number, np.uint8) for number, size in enumerate(sizes)]
    for number, (array, size) in enumerate(zip(arrays, sizes, strict=True)):
        assert is_born(array)
        assert (array == number).all()
        if size >= HUGE_PAGE:
            assert address_of(array) % HUGE_PAGE == 0
