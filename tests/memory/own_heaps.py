"""Heaps that a test makes for itself."""

from __future__ import annotations

from shmreduce.memory import runtime
from shmreduce.memory.heap import Heap
from shmreduce.memory.layout import SHARED
from shmreduce.strategies import current_strategy

_made: list[Heap] = []


def make_heap(kind: int = SHARED) -> Heap:
    """Return a heap of its own, whose segments die with it."""
    heap = Heap(kind, current_strategy(), runtime.current())
    _made.append(heap)
    return heap


def close(heap: Heap) -> None:
    """Give all segments of a heap back; nothing of them may be in use."""
    heap.collect()
    with heap.exclusive():
        heap.cool(0)
    assert heap.segments == []


def forget_heaps() -> None:
    """Let nothing of them count for the budget of the family any more."""
    for heap in _made:
        runtime.current().family.lower(sum(segment.reserved for segment in heap.segments))
    _made.clear()
