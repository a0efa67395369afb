"""Large blocks lie on huge pages where the kernel has any."""

from __future__ import annotations

import ctypes
import errno
import itertools
import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from shmreduce.memory import mapping, reservation
from shmreduce.memory.layout import BY_VALUE, SHARED
from shmreduce.memory.mapping import HUGE_PAGE
from tests.memory.own_heaps import close, make_heap

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from shmreduce.memory.heap import Heap
    from shmreduce.memory.owned_segment import OwnedSegment

pytestmark = pytest.mark.usefixtures("strategy")

MIB = 1 << 20
COLLAPSE = 25

Call = tuple[int, int]


@pytest.fixture(params=[BY_VALUE, SHARED], ids=["by value", "shared"])
def heap(request: pytest.FixtureRequest) -> Iterator[Heap]:
    """A heap of its own; what it gave out is given back."""
    made = make_heap(request.param)
    yield made
    for segment in made.segments:
        for block in list(segment.out):
            segment.records.pop(block, None)
            made.give_back(segment, block)
    close(made)


@pytest.fixture
def ask_kernel(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], list[Call]]:
    """Let the kernel answer to every wish for huge pages with an error number, 0 for none."""

    def answer(number: int) -> list[Call]:
        asked: list[Call] = []
        real = mapping._madvise

        def madvise(address: int, size: int, advice: int) -> int:
            if advice != COLLAPSE:
                return int(real(address, size, advice))
            asked.append((address, size))
            ctypes.set_errno(number)
            return -1 if number else 0

        monkeypatch.setattr(mapping, "_collapses", True)
        monkeypatch.setattr(mapping, "_AT_HAND", 3600.0)
        monkeypatch.setattr(mapping, "_madvise", madvise)
        # Nothing takes any time, however busy the machine is.
        monkeypatch.setattr(reservation, "time", SimpleNamespace(monotonic=lambda: 0.0))
        return asked

    return answer


def pages_of(segment: OwnedSegment) -> int:
    """Return how many bytes the file has pages for."""
    return os.fstat(segment.fd).st_blocks * 512


def use_again(heap: Heap, segment: OwnedSegment, block: int) -> None:
    """Free a block and take it once more."""
    del segment.records[block]
    assert heap.give_back(segment, block)
    assert heap.allocate(segment.capacities[block]) == (segment, block)


def test_large_blocks_begin_where_a_huge_page_can(heap: Heap) -> None:
    """In the file and in memory; blocks do not overlap, whatever lies between them."""
    blocks = [
        heap.allocate(nbytes)
        for nbytes in (100, HUGE_PAGE - 1, 100, HUGE_PAGE, 9 * MIB, 5000, 3 * MIB, 33 * MIB)
    ]
    spans = sorted(
        (segment.token, segment.offsets[block], segment.capacities[block])
        for segment, block in blocks
    )
    for (token, start, size), (following, beyond, _) in itertools.pairwise(spans):
        assert token != following or start + size <= beyond
    assert all(start % HUGE_PAGE == 0 for _, start, size in spans if size >= HUGE_PAGE)
    assert all(segment.layout.data_offset % HUGE_PAGE == 0 for segment, _ in blocks)


def test_the_kernel_is_asked_for_whole_huge_pages_of_the_block_alone(
    heap: Heap, ask_kernel: Callable[[int], list[Call]]
) -> None:
    """A block of four and a half huge pages: for four, each of which has a page by then."""
    asked = ask_kernel(0)
    segment, block = heap.allocate(9 * MIB)
    use_again(heap, segment, block)
    address = segment.data.address + segment.offsets[block] - segment.data.offset
    if address % HUGE_PAGE:
        pytest.skip("this kernel does not align mappings: Linux 6.7 does")
    assert asked == [(address + each * HUGE_PAGE, HUGE_PAGE) for each in range(4)]


def test_small_blocks_are_left_alone(heap: Heap, ask_kernel: Callable[[int], list[Call]]) -> None:
    """Nobody asks for a huge page that would reach beyond the block."""
    asked = ask_kernel(0)
    # Anything nearer is rounded up to one.
    for nbytes in (100, 5000, MIB, HUGE_PAGE - (256 << 10)):
        heap.allocate(nbytes)
    assert asked == []


@pytest.mark.parametrize(
    ("number", "times"),
    [(0, 8), (errno.EINVAL, 1), (errno.ENOMEM, 2), (errno.EAGAIN, 2)],
    ids=lambda value: errno.errorcode.get(value, str(value)),
)
def test_a_block_has_its_pages_whatever_the_kernel_says(
    heap: Heap, ask_kernel: Callable[[int], list[Call]], number: int, times: int
) -> None:
    """No more and no fewer than it has bytes. Who does not know the wish is asked once."""
    heap.allocate(100)
    asked = ask_kernel(number)
    for _ in range(2):
        before = {segment: pages_of(segment) for segment in heap.segments}
        segment, block = heap.allocate(9 * MIB)
        tables = segment.layout.slot_words if segment not in before else 0
        grown = pages_of(segment) - before.get(segment, 0)
        # Pages of the tables come as they are written.
        assert 0 <= grown - segment.capacities[block] - tables <= 64 << 10
        use_again(heap, segment, block)
        assert pages_of(segment) - before.get(segment, 0) == grown
    if asked:
        assert len(asked) == times


def test_what_is_not_at_hand_is_waited_for_in_later_uses(
    heap: Heap, ask_kernel: Callable[[int], list[Call]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One at the next use, and from then on at every eighth; of a block that nobody uses again,
    a shared one, at once. Where the kernel, or the host of a virtual machine, has to find each,
    nobody waits for all of them.
    """
    asked = ask_kernel(0)
    monkeypatch.setattr(mapping, "_AT_HAND", -1.0)
    segment, block = heap.allocate(5 * HUGE_PAGE)
    address = segment.data.address + segment.offsets[block] - segment.data.offset
    if address % HUGE_PAGE:
        pytest.skip("this kernel does not align mappings: Linux 6.7 does")
    assert pages_of(segment) >= segment.capacities[block]
    numbers = [len(asked)]
    for _ in range(9):
        use_again(heap, segment, block)
        numbers.append(len(asked))
    at_once = heap.kind == SHARED
    assert numbers == [at_once] + 8 * [at_once + 1] + [at_once + 2]
    # Those that are at hand come together, and then no more.
    monkeypatch.setattr(mapping, "_AT_HAND", 3600.0)
    for _ in range(20):
        use_again(heap, segment, block)
    assert asked == [(address + each * HUGE_PAGE, HUGE_PAGE) for each in range(5)]


def test_waiting_takes_an_eighth_of_copying_at_most(
    heap: Heap, ask_kernel: Callable[[int], list[Call]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a huge page takes 6 ms, 10 MiB are copied 74 times before the next one is waited for."""
    asked = ask_kernel(0)
    monkeypatch.setattr(mapping, "_AT_HAND", -1.0)
    # A clock that only the kernel's work moves.
    clock = SimpleNamespace(monotonic=lambda: 6e-3 * len(asked))
    monkeypatch.setattr(reservation, "time", clock)
    segment, block = heap.allocate(5 * HUGE_PAGE)
    if block not in segment.small:
        pytest.skip("this kernel does not align mappings: Linux 6.7 does")
    at_once = len(asked)
    numbers = []
    for _ in range(149):
        use_again(heap, segment, block)
        numbers.append(len(asked) - at_once)
    assert numbers == 74 * [1] + 74 * [2] + [3]


def test_a_block_whose_pages_are_changed_keeps_its_bytes(
    heap: Heap, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever has the segment mapped sees the same bytes before and after, and the same memory."""
    monkeypatch.setattr(mapping, "_collapses", True)
    monkeypatch.setattr(mapping, "_AT_HAND", -1.0)
    segment, block = heap.allocate(4 * HUGE_PAGE)
    reader = mapping.Mapping(segment.fd, segment.offsets[block], segment.capacities[block])
    place = segment.offsets[block] - segment.data.offset
    with memoryview(segment.data.pages) as view, memoryview(reader.pages) as read:
        view[place : place + 4 * HUGE_PAGE] = bytes(range(256)) * (4 * HUGE_PAGE // 256)
        assert read[-1] == 255
        monkeypatch.setattr(mapping, "_AT_HAND", 3600.0)
        use_again(heap, segment, block)
        assert bytes(read) == bytes(range(256)) * (4 * HUGE_PAGE // 256)
        view[place] = 7
        assert read[0] == 7


def test_a_block_is_not_lost_if_its_next_use_is_interrupted(
    heap: Heap, ask_kernel: Callable[[int], list[Call]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C while the kernel looks for huge pages: the block is the next one's."""
    ask_kernel(0)
    monkeypatch.setattr(mapping, "_AT_HAND", -1.0)
    segment, block = heap.allocate(4 * HUGE_PAGE)
    if block not in segment.small:
        pytest.skip("this kernel does not align mappings: Linux 6.7 does")

    def interrupt(*_: object, **__: object) -> int:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(mapping.Mapping, "make_huge", interrupt)
        del segment.records[block]
        assert heap.give_back(segment, block)
        with pytest.raises(KeyboardInterrupt):
            heap.allocate(segment.capacities[block])
    assert heap.allocate(segment.capacities[block]) == (segment, block)


def test_what_was_huge_is_given_back_whole(heap: Heap) -> None:
    """Cooling a block leaves no page of it, nor takes one of its neighbour's."""
    (segment, block), (other, neighbour) = heap.allocate(9 * MIB), heap.allocate(9 * MIB)
    place = other.offsets[neighbour] - other.data.offset
    # As an array's view would, it ends before the heap does.
    with memoryview(other.data.pages) as view:
        view[place : place + 9 * MIB] = bytes([7]) * (9 * MIB)
    del segment.records[block]
    assert heap.give_back(segment, block)
    before = pages_of(segment)
    with heap.exclusive():
        assert heap.cool(0) >= 9 * MIB
    if segment in heap.segments:
        assert before - pages_of(segment) >= 9 * MIB
    with memoryview(other.data.pages) as view:
        assert bytes(view[place : place + 9 * MIB]) == bytes([7]) * (9 * MIB)


def huge_bytes_at(address: int) -> int:
    """Return how much of the mapping around an address is mapped by huge pages (proc(5))."""
    text = Path("/proc/self/smaps").read_text()
    for part in re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", text):
        first, last = (int(word, 16) for word in part.split(maxsplit=1)[0].split("-"))
        if first <= address < last:
            found = re.findall(r"^(?:ShmemPmdMapped|FilePmdMapped): +(\d+) kB", part, re.MULTILINE)
            return sum(map(int, found)) << 10
    return 0


def test_huge_pages_are_there_where_the_kernel_gives_them(
    heap: Heap, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If it says so, they are mapped."""
    answers: list[int] = []
    real: Any = mapping._madvise

    def madvise(address: int, size: int, advice: int) -> int:
        answer = int(real(address, size, advice))
        if advice == COLLAPSE:
            answers.append(answer)
        return answer

    monkeypatch.setattr(mapping, "_collapses", True)
    monkeypatch.setattr(mapping, "_AT_HAND", 3600.0)
    monkeypatch.setattr(mapping, "_madvise", madvise)
    segment, block = heap.allocate(8 * MIB)
    use_again(heap, segment, block)
    if answers != 4 * [0]:
        pytest.skip("the kernel gives no huge pages for shared memory here, or has none left")
    address = segment.data.address + segment.offsets[block] - segment.data.offset
    assert huge_bytes_at(address) >= 8 * MIB
