"""The allocator: sizes, warm reuse, cooling, merging, budget."""

from __future__ import annotations

import gc
import itertools
import signal
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import shmreduce
from shmreduce.memory import runtime
from shmreduce.memory.heap import HeapBusyError
from shmreduce.memory.layout import BY_VALUE, SHARED
from shmreduce.memory.mapping import PAGE_SIZE
from shmreduce.memory.size_classes import size_class
from tests.memory.own_heaps import close, make_heap
from tests.memory.waiting import eventually

if TYPE_CHECKING:
    from shmreduce.memory.owned_segment import OwnedSegment


@given(st.integers(0, 1 << 40), st.booleans())
def test_a_size_class_holds_the_size_and_wastes_little(nbytes: int, whole: bool) -> None:
    """A block is at least as large as asked for and at most an eighth, or one
    smallest unit, larger.
    """
    size = size_class(nbytes, whole_pages=whole)
    unit = PAGE_SIZE if whole else 64
    assert size >= max(nbytes, 1)
    assert size % unit == 0
    assert size - nbytes <= max(unit, nbytes / 8)
    assert size_class(size, whole_pages=whole) == size


def test_a_freed_block_is_the_next_of_its_size() -> None:
    """A block that was given back is handed out again at once, at the same place."""
    heap = make_heap()
    first = heap.allocate(100_000)
    del first[0].records[first[1]]
    assert heap.give_back(*first)
    assert heap.allocate(100_000) == first
    del first[0].records[first[1]]
    heap.give_back(*first)
    close(heap)


def test_small_blocks_are_carved_many_at_a_time() -> None:
    """A thousand small blocks take one segment and little more than their bytes."""
    heap = make_heap()
    blocks = [heap.allocate(100) for _ in range(1000)]
    assert len({segment for segment, _ in blocks}) == 1
    spans = sorted(
        (segment.offsets[block], segment.capacities[block]) for segment, block in blocks
    )
    assert all(a + size <= b for (a, size), (b, _) in itertools.pairwise(spans))
    assert heap.warm_bytes < 256 << 10
    for segment, block in blocks:
        del segment.records[block]
        heap.give_back(segment, block)
    close(heap)


def test_a_block_with_a_view_or_a_lease_is_not_freed() -> None:
    """``give_back`` refuses a block while somebody here or elsewhere has it."""
    heap = make_heap(BY_VALUE)
    segment, block = heap.allocate(5000)
    assert not heap.give_back(segment, block)
    slot = segment.start_message(block, 77)
    del segment.records[block]
    assert not heap.give_back(segment, block)
    assert segment.consume(block, segment.generations[block], slot, 77)
    assert heap.collect() == 1
    assert not heap.give_back(segment, block)
    close(heap)


def test_cooling_gives_pages_back_and_merges_neighbours() -> None:
    """After cooling, blocks of other sizes fit where small ones were, without growth."""
    heap = make_heap()
    blocks = [heap.allocate(50_000) for _ in range(60)]
    segments = set(heap.segments)
    for segment, block in blocks[:-1]:
        del segment.records[block]
        heap.give_back(segment, block)
    before = heap.reserved_bytes
    with heap.exclusive():
        assert heap.cool(0) > 2_000_000
    assert heap.reserved_bytes < before - 2_000_000
    large = heap.allocate(1_500_000)
    assert set(heap.segments) == segments
    for segment, block in (large, blocks[-1]):
        del segment.records[block]
        heap.give_back(segment, block)
    close(heap)


def test_cooling_spares_pages_that_a_neighbour_lives_on() -> None:
    """Bytes of a living small block survive the cooling of everything around it."""
    heap = make_heap()
    blocks = [heap.allocate(100) for _ in range(400)]
    survivor_segment, survivor = blocks[123]
    view = memoryview(survivor_segment.data.pages)
    start = survivor_segment.offsets[survivor] - survivor_segment.data.offset
    view[start : start + 100] = b"x" * 100
    for segment, block in blocks:
        if block != survivor:
            del segment.records[block]
            heap.give_back(segment, block)
    with heap.exclusive():
        heap.cool(0)
    assert view[start : start + 100] == b"x" * 100
    view.release()
    del survivor_segment.records[survivor]
    heap.give_back(survivor_segment, survivor)
    close(heap)


def test_who_looked_long_for_the_dead_rests_but_not_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Twenty times as long, so that it takes little of all time; a process that was stopped
    meanwhile has not looked for hours.
    """
    heap = make_heap()
    clock = [time.monotonic()]
    told = SimpleNamespace(monotonic=lambda: clock[0])
    monkeypatch.setattr("shmreduce.memory.heap.time", told)

    def looks_for(seconds: float) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(heap._host, "give_up", lambda: clock.append(clock.pop() + seconds))
            heap.reap()

    def is_due_after(seconds: float) -> bool:
        clock[0] += seconds
        return heap.reap_after(0.001)

    looks_for(0.2)
    assert not is_due_after(3.5)
    assert is_due_after(0.6)
    looks_for(3600)
    assert is_due_after(11)
    close(heap)


def test_the_heap_refuses_to_be_entered_twice_by_one_thread() -> None:
    """Growth during growth in one thread, as from a signal handler, is an error at
    once and not a deadlock.
    """
    heap = make_heap()
    with heap.exclusive(), pytest.raises(HeapBusyError):
        heap.allocate(1 << 20)
    assert heap.segments == []


def others_have_nothing() -> bool:
    """Whether this process alone has reserved memory of its family's budget."""
    family = runtime.current().family
    return sum(reserved for _, reserved in family.members()) == family.reserved


@pytest.mark.usefixtures("shmreduce_no_leaks")
def test_the_budget_is_an_error_that_says_how_much_is_in_use() -> None:
    """Beyond the budget an allocation fails with the figures, takes nothing, and
    succeeds when something was dropped.
    """
    with shmreduce.install(budget=64 << 20, inline_limit=4096):
        eventually(others_have_nothing, "grandchildren of tests before have ended")
        kept = [shmreduce.zeros(16 << 20, np.uint8) for _ in range(2)]
        with pytest.raises(shmreduce.BudgetExceededError) as caught:
            shmreduce.zeros(48 << 20, np.uint8)
        assert caught.value.budget == 64 << 20
        assert caught.value.requested >= 48 << 20
        assert caught.value.in_use >= 32 << 20
        in_use = runtime.current().family.reserved
        with pytest.raises(shmreduce.BudgetExceededError):
            shmreduce.zeros(48 << 20, np.uint8)
        assert runtime.current().family.reserved <= in_use
        del kept
        gc.collect()
        assert len(shmreduce.zeros(48 << 20, np.uint8)) == 48 << 20


def test_what_is_free_of_other_sizes_makes_way_before_the_budget_says_no() -> None:
    """Warm blocks of other sizes are given up for an allocation within the budget."""
    with shmreduce.install(budget=64 << 20, inline_limit=4096):
        eventually(others_have_nothing, "grandchildren of tests before have ended")
        for size in range(1, 24):
            assert len(shmreduce.zeros(size << 20, np.uint8)) == size << 20


class Allocations(RuleBasedStateMachine):
    """Blocks come and go, with and without messages; no two living ones overlap."""

    def __init__(self) -> None:
        super().__init__()
        self.heap = make_heap()
        self.living: dict[tuple[OwnedSegment, int], tuple[int, bytes]] = {}
        self.messages: list[tuple[OwnedSegment, int, int, int]] = []
        self.stamp = 0

    @initialize(kind=st.sampled_from([BY_VALUE, SHARED]))
    def choose(self, kind: int) -> None:
        self.heap = make_heap(kind)

    def bytes_of(self, segment: OwnedSegment, block: int) -> Any:
        start = segment.offsets[block] - segment.data.offset
        return memoryview(segment.data.pages)[start : start + segment.capacities[block]]

    @rule(nbytes=st.one_of(st.integers(0, 3000), st.integers(3000, 2_000_000)))
    def allocate(self, nbytes: int) -> None:
        found = self.heap.allocate(nbytes)
        assert found not in self.living
        assert found[0].capacities[found[1]] >= nbytes
        self.stamp += 1
        mark = self.stamp.to_bytes(4, "little") * 4
        area = self.bytes_of(*found)
        area[:16] = area[-16:] = mark
        area.release()
        self.living[found] = (nbytes, mark)

    @precondition(lambda self: self.living)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        segment, block = data.draw(st.sampled_from(list(self.living)))
        del self.living[segment, block]
        del segment.records[block]
        is_leased = any(each[:2] == (segment, block) for each in self.messages)
        assert self.heap.give_back(segment, block) != is_leased

    @precondition(lambda self: self.living)
    @rule(data=st.data())
    def send(self, data: st.DataObject) -> None:
        segment, block = data.draw(st.sampled_from(list(self.living)))
        self.stamp += 1
        slot = segment.add_message(block, segment.generations[block], self.stamp)
        self.messages.append((segment, block, slot, self.stamp))

    @precondition(lambda self: self.messages)
    @rule(data=st.data())
    def read(self, data: st.DataObject) -> None:
        message = data.draw(st.sampled_from(self.messages))
        self.messages.remove(message)
        segment, block, slot, nonce = message
        generation = segment.generations[block]
        assert segment.consume(block, generation, slot, nonce)
        assert not segment.consume(block, generation, slot, nonce)

    @rule(keep=st.integers(0, 1 << 20))
    def cool(self, keep: int) -> None:
        self.heap.collect()
        with self.heap.exclusive():
            self.heap.cool(keep)
        assert self.heap.warm_bytes <= keep

    @invariant()
    def living_blocks_keep_their_bytes(self) -> None:
        for (segment, block), (_, mark) in self.living.items():
            area = self.bytes_of(segment, block)
            assert area[:16] == mark
            assert area[-16:] == mark
            area.release()

    @invariant()
    def nothing_overlaps(self) -> None:
        for segment in self.heap.segments:
            runs = [*segment.cold]
            runs += [
                (segment.offsets[block], segment.capacities[block])
                for block in range(segment.unused)
                if segment.capacities[block]
            ]
            runs.sort()
            for (start, size), (following, _) in itertools.pairwise(runs):
                assert start + size <= following
            assert sum(size for _, size in runs) <= segment.header.size

    def teardown(self) -> None:
        for segment, block in self.living:
            del segment.records[block]
            self.heap.give_back(segment, block)
        for segment, block, slot, nonce in self.messages:
            segment.consume(block, segment.generations[block], slot, nonce)
        close(self.heap)


TestAllocations = Allocations.TestCase
TestAllocations.settings = settings(
    max_examples=25,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)


# A file of the kernel's that was just being opened is closed by its destructor.
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_heap_can_be_used_after_ctrl_c_anywhere_in_it() -> None:
    """An interrupt in the middle of an allocation leaves no lock behind."""
    heap = make_heap()
    # One segment, large enough for what gets lost, and kept by a block.
    heap._next_segment = 1 << 30
    kept, number = heap.allocate(1 << 20)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    def allocate_until_interrupted() -> None:
        for length in itertools.cycle(range(300 << 10, 600 << 10, 50 << 10)):
            segment, block = heap.allocate(length)
            del segment.records[block]
            heap.give_back(segment, block)
            with heap.exclusive():
                # Otherwise the next one would find a warm block.
                heap.cool(0)

    before = signal.signal(signal.SIGVTALRM, interrupt)
    try:
        for number_of_round in range(60):
            # Processor time, so that the load of the machine makes no difference. Again
            # after a while: Python ignores one that strikes in a destructor.
            signal.setitimer(signal.ITIMER_VIRTUAL, 0.001 + 0.0001 * number_of_round, 0.05)
            with pytest.raises(KeyboardInterrupt):
                allocate_until_interrupted()
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            segment, block = heap.allocate(700 << 10)
            del segment.records[block]
            heap.give_back(segment, block)
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
    del kept.records[number]
    heap.give_back(kept, number)
