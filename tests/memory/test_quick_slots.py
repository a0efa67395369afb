"""What keeps the short way of lease transitions from being gone where it must not."""

from __future__ import annotations

import mmap
import os
from contextlib import contextmanager
from threading import get_ident
from typing import TYPE_CHECKING, Any

import pytest

import shmreduce
from shmreduce.compiled import SLOTS
from shmreduce.memory import locks, quick_slots
from shmreduce.memory.layout import LOCK_BLOCK
from shmreduce.memory.lease_slots import MESSAGE
from tests.compiler import changed_module, needs_module

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from shmreduce.memory.segment import Segment

pytestmark = pytest.mark.usefixtures("compiled", "installed")

NONCE = 12345
COUNTS = {"add": 5, "claim_alone": 6, "claim_shared": 6, "consume": 6, "release": 4}
"""Transitions, and how many numbers they take."""
TRANSITIONS = tuple(COUNTS)


@pytest.fixture
def compiled() -> None:
    needs_module(SLOTS)


class Place:
    """A message of a shared block of this process."""

    def __init__(self) -> None:
        self._blocks = [shmreduce.allocate(24)]
        record = self._blocks[0]._record
        self.segment: Segment = record.segment
        self.block, self.generation = record.block, record.generation
        self.slot = self.segment.add_message(self.block, self.generation, NONCE)

    def close(self) -> None:
        """End the message, and the block."""
        self.segment.consume(self.block, self.generation, self.slot, NONCE)
        self._blocks.clear()

    def try_quickly(self, name: str, **others: int) -> bool:
        """Try a transition the short way; with these numbers it is made unless it must not be."""
        # Tests before may have used up those that are listed.
        free = self.segment._take_slot()
        self.segment._give_slot(free)
        numbers = {
            "fd": self.segment.lock_fd,
            "block": self.block,
            "slot": free if name == "add" else self.slot,
            # To be released, a message passes for a hold.
            "word": MESSAGE | NONCE,
            "generation": self.generation,
            "holder": self.segment.importer,
            **others,
        }
        taken = list(numbers.values())[: COUNTS[name]]
        done: bool = getattr(self.segment._quick, name)(*taken)
        return done

    @property
    def is_locked(self) -> bool:
        """Whether anybody has the block locked."""
        with reopened(self.segment) as other:
            return locks.first_locked(other, LOCK_BLOCK + self.block) is not None

    @property
    def is_as_it_was(self) -> bool:
        """Whether there is the message, and nothing else."""
        return self.segment.leases(self.block) == [MESSAGE | NONCE]


@contextmanager
def reopened(segment: Segment) -> Iterator[int]:
    """A descriptor that has locks of its own, as that of another process."""
    other = locks.reopen(segment.fd)
    try:
        yield other
    finally:
        os.close(other)


@contextmanager
def locked_by_a_thread(place: Place) -> Iterator[None]:
    mark = (get_ident(),)
    place.segment.lock_block(place.block, mark)
    try:
        yield
    finally:
        place.segment.unlock_block(place.block, mark)


@pytest.fixture
def place() -> Iterator[Place]:
    found = Place()
    yield found
    found.close()


@pytest.mark.parametrize("name", TRANSITIONS)
def test_otherwise_it_is_made(name: str, place: Place) -> None:
    """With the numbers of these tests it is made, and the block is locked no more."""
    assert place.try_quickly(name)
    assert not place.is_locked
    assert not place.is_as_it_was
    while place.segment.heads[place.block]:
        place.segment._unlink(place.block, place.segment.heads[place.block] - 1)


@pytest.mark.parametrize("name", TRANSITIONS)
def test_nothing_is_done_while_a_thread_has_a_block_locked(name: str, place: Place) -> None:
    """Its lock would end with this one's, as both belong to one description."""
    with locked_by_a_thread(place):
        assert not place.try_quickly(name)
        assert place.is_locked
    assert place.is_as_it_was


@pytest.mark.parametrize("name", TRANSITIONS)
def test_nothing_is_done_while_another_process_has_the_block_locked(
    name: str, place: Place
) -> None:
    """Nor is its lock given up."""
    with reopened(place.segment) as other:
        assert locks.try_lock(other, LOCK_BLOCK + place.block)
        assert not place.try_quickly(name)
        assert place.is_locked
    assert place.is_as_it_was
    assert not place.is_locked


WRONG: list[dict[str, int]] = [
    {"generation": 1 << 40},
    {"word": MESSAGE | 777},
    {"block": 1 << 31},
    {"block": 1 << 80},
    {"block": -1},
    {"slot": 1 << 31},
    {"slot": -1},
    {"fd": -1},
    {"fd": 1 << 30},
    {"fd": (1 << 32) + 1},
]
NOT_ASKED = {("add", "word"), ("release", "generation")}
"""What a transition does not compare: it writes the one, and does not get the other."""


@pytest.mark.parametrize(
    ("name", "others"),
    [
        pytest.param(name, others, id=f"{name} {others}")
        for name in TRANSITIONS
        for others in WRONG
        if (name, *others) not in NOT_ASKED
    ],
)
def test_numbers_of_anything_else_do_nothing(
    name: str, others: dict[str, int], place: Place
) -> None:
    """Of another life or message, of no block or slot, of no descriptor: the long way says what
    is wrong.
    """
    assert not place.try_quickly(name, **others)
    assert place.is_as_it_was
    assert not place.is_locked


@pytest.mark.parametrize("table", ["_next", "_previous", "heads"])
@pytest.mark.parametrize("name", ["consume", "release"])
def test_a_chain_that_is_damaged_is_left_to_the_long_way(
    name: str, table: str, place: Place
) -> None:
    """Nothing is written where a link leads beyond the tables, or to somewhere else."""
    links = getattr(place.segment, table)
    index = place.block if table == "heads" else place.slot
    before = links[index]
    # A slot that is in no chain does for one that comes before.
    elsewhere = place.segment._free_slots[0] + 1
    for damaged in (0xFFFFFFFF, place.segment.layout.slots + 1, elsewhere):
        if (table, damaged) == ("_next", elsewhere):
            continue
        links[index] = damaged
        tables = bytes(place.segment.tables.pages)
        assert not place.try_quickly(name)
        assert bytes(place.segment.tables.pages) == tables
    links[index] = before
    assert place.is_as_it_was
    assert not place.is_locked


@pytest.mark.parametrize("name", TRANSITIONS)
def test_other_arguments_are_an_error(name: str, place: Place) -> None:
    """Too few of them, and what is no number."""
    method = getattr(place.segment._quick, name)
    count = COUNTS[name]
    with pytest.raises(TypeError, match=f"{count} numbers are needed, 2 were given"):
        method(1, 2)
    with pytest.raises(TypeError):
        method(*["1"] * count)
    assert place.is_as_it_was


def test_tables_without_room_are_refused(place: Place) -> None:
    """Whatever the numbers are, nothing beyond the tables is written."""
    module = needs_module(SLOTS)
    usual: dict[str, Any] = {
        "device": 0,
        "inode": 0,
        "first_lock": 0,
        "blocks": 8,
        "slots": 8,
        "generations": 0,
        "heads": 64,
        "hints": 96,
        "words": 104,
        "next": 168,
        "previous": 200,
    }
    pages = mmap.mmap(-1, 232)
    assert module.QuickSlots(pages, {}, **usual)
    for name, value in usual.items():
        if name not in ("device", "inode", "first_lock"):
            for other in (value + 4096, 1 << 62):
                with pytest.raises(ValueError, match="have no room"):
                    module.QuickSlots(pages, {}, **{**usual, name: other})
    with pytest.raises(BufferError):
        module.QuickSlots(bytes(232), {}, **usual)


@pytest.mark.parametrize("name", TRANSITIONS)
def test_the_lock_of_another_file_is_none(place: Place, name: str) -> None:
    """Of a file that has the descriptor's number by now, after a daemon has closed them all."""
    another = os.memfd_create("another")
    assert not place.try_quickly(name, fd=another)
    os.close(another)
    assert place.is_as_it_was


def test_the_long_way_does_not_take_another_files_lock_for_the_segments(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says what happened to the descriptor."""
    another = os.memfd_create("another")
    with monkeypatch.context() as patch:
        patch.setattr(place.segment, "lock_fd", another)
        with pytest.raises(shmreduce.SegmentError, match="closed by other code"):
            place.segment.try_lock_block(place.block, (get_ident(),))
    os.close(another)
    assert place.is_as_it_was


def test_the_tables_stay_mapped(place: Place) -> None:
    """As long as there is something that writes to them."""
    module = needs_module(SLOTS)
    numbers = dict.fromkeys(("generations", "heads", "hints", "words", "next", "previous"), 0)
    pages = mmap.mmap(-1, 4096)
    made = module.QuickSlots(
        pages, {}, device=0, inode=0, first_lock=0, blocks=8, slots=8, **numbers
    )
    with pytest.raises(BufferError):
        pages.close()
    del made
    pages.close()


def test_without_the_look_at_other_threads_their_locks_would_be_lost(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiled without it, a transition is made in the middle of another's, whose lock ends."""
    module = changed_module(SLOTS, tmp_path, ("PyDict_Size(self->busy) == 0 && ", ""))
    monkeypatch.setattr(quick_slots, "_module", module)
    segment: Any = place.segment
    unguarded = quick_slots.quick_slots(
        segment.tables.pages, segment.layout, segment._busy, segment._identity
    )
    monkeypatch.setattr(segment, "_quick", unguarded)
    with locked_by_a_thread(place):
        assert place.try_quickly("consume")
        assert not place.is_locked


def test_a_first_message_is_linked_without_a_lock(place: Place) -> None:
    """Into a block that has none, as nobody else can name it; into no other, whatever is asked."""
    segment = place.segment
    free, empty = segment._free_slots[-1], segment.layout.blocks - 1
    assert not segment._quick.start(place.block, free, MESSAGE | NONCE)
    for block, slot in ((1 << 31, free), (empty, 1 << 31), (-1, free), (empty, -1)):
        assert not segment._quick.start(block, slot, MESSAGE | NONCE)
    assert place.is_as_it_was
    assert segment.leases(empty) == []
    with locked_by_a_thread(place):
        assert segment._quick.start(empty, free, MESSAGE | 777)
    assert segment.leases(empty) == [MESSAGE | 777]
    segment._unlink(empty, free)
    segment.hints[empty] = 0
    with pytest.raises(TypeError, match="3 numbers are needed"):
        segment._quick.start(1, 2)  # type: ignore[call-arg]
