"""The code's transitions are the model's: the same writes, in the same order, the same outcome.

For every transition from every state of some worlds the tables of a real segment
are set to those of the state, the real method is called, and what it writes is
compared with what the model writes. A process that is killed after any of its
writes therefore leaves what the model says that it leaves.
"""

from __future__ import annotations

import os
import secrets
import time
from collections import deque
from threading import get_ident
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from shmreduce.contracts import SegmentFile
from shmreduce.errors import AlreadyLoadedError, StaleHandleError
from shmreduce.memory import locks
from shmreduce.memory.heap import Heap
from shmreduce.memory.layout import (
    BY_VALUE,
    CHUNK_SLOTS,
    LOCK_CHUNK,
    LOCK_IMPORTER,
    SHARED,
    Layout,
    SegmentHeader,
)
from shmreduce.memory.lease_slots import MESSAGE
from shmreduce.memory.mapping import PAGE_SIZE
from shmreduce.memory.owned_segment import OwnedSegment
from shmreduce.memory.quick_slots import LongWay
from shmreduce.memory.segment import Segment
from shmreduce.strategies import find_strategy
from tests.model.world import OWN, Doing, Scope, State, World

if TYPE_CHECKING:
    from collections.abc import Iterator

Write = tuple[str, int, int]

WORLDS = {
    "by value": Scope(shared=False, allocations=2, messages=2, births=2, processes=2, slots=3),
    "by value, three processes": Scope(shared=False, allocations=2, messages=1, slots=3),
    "by value, lent": Scope(
        shared=False, blocks=1, allocations=2, messages=3, slots=3, started=2, lends=True
    ),
    "shared": Scope(shared=True, processes=2, allocations=2, messages=1, births=2, slots=3),
    "shared, three processes": Scope(shared=True, allocations=2, messages=1, slots=2, started=3),
}
BLOCKS, SLOTS = 8, CHUNK_SLOTS
HOLDER = 1 << 63
TABLES = {
    "generations": "generations",
    "heads": "heads",
    "hints": "hints",
    "words": "words",
    "next": "_next",
    "previous": "_previous",
}


class Expected(NamedTuple):
    """A transition as the model does it."""

    doing: Doing
    tables: tuple[tuple[int, ...], ...]
    born: int
    has_record: bool
    taken: tuple[int, ...]
    alive: frozenset[int]
    writes: tuple[Write, ...]
    result: Any


class Recorded:
    """A table of a segment that takes note of what is written to it."""

    def __init__(self, name: str, words: memoryview, log: list[Write]) -> None:
        self.name, self.words, self.log = name, words, log

    def __getitem__(self, index: Any) -> Any:
        return self.words[index]

    def __setitem__(self, index: int, value: int) -> None:
        self.log.append((self.name, index, value))
        self.words[index] = value


class Host:
    """What :class:`Heap` asks of its process when it reaps."""

    def give_up(self) -> None:
        """Leave the messages alone."""


class Bench:
    """A real segment whose tables are set and whose writes are recorded."""

    def __init__(self, *, shared: bool) -> None:
        self.shared = shared
        strategy = find_strategy("file_descriptor")
        size = Layout.plan(BLOCKS, SLOTS).data_offset + PAGE_SIZE
        token = secrets.token_bytes(16)
        kind = SHARED if shared else BY_VALUE
        file = strategy.create(size, token.hex())
        header = SegmentHeader(
            kind, token, bytes(16), bytes(16), os.getpid(), 0, size, BLOCKS, SLOTS, strategy.name
        )
        os.pwrite(file.fd, header.pack(), 0)
        self.owner = OwnedSegment(file, header, strategy)
        again = SegmentFile(locks.reopen(file.fd), None)
        self.importer = Segment(again, header, strategy, owner=False)
        self.log: list[Write] = []
        self.raw = {name: getattr(self.owner, field) for name, field in TABLES.items()}
        self.alive: frozenset[int] = frozenset()
        for segment in (self.owner, self.importer):
            patched: Any = segment
            for name, field in TABLES.items():
                setattr(patched, field, Recorded(name, getattr(segment, field), self.log))
            patched.holder_alive = self.alive.__contains__
            patched._quick = LongWay()
        host: Any = Host()
        self.heap = Heap(kind, strategy, host)
        self.heap.segments.append(self.owner)

    def close(self) -> None:
        self.importer.close()
        self.owner.close()

    def run(self, expected: Expected) -> tuple[tuple[Write, ...], Any]:
        """Return what the real code writes and returns where the model does ``expected``."""
        for (name, raw), values in zip(self.raw.items(), expected.tables, strict=True):
            for index, value in enumerate(values):
                raw[index] = to_word(value) if name == "words" else value
        name = expected.doing.name
        is_makers = name in ("collect", "reap") or (
            name == "end" and expected.doing.arguments[0].slot == OWN
        )
        segment: Any = self.owner if is_makers else self.importer
        segment.importer = to_word(-expected.born)
        alive = {to_word(-born) for born in expected.alive}
        segment.holder_alive = alive.__contains__
        # The last is taken first.
        segment._free_slots = list(expected.taken[::-1])
        self.log.clear()
        result = self._call(segment, expected)
        return tuple(self.log), result

    def _call(self, segment: Any, expected: Expected) -> Any:
        name, arguments = expected.doing.name, expected.doing.arguments
        if name in ("collect", "reap"):
            return self._look_after(name, arguments[0], has_record=expected.has_record)
        if name in ("lend", "let go and lend", "give back lent"):
            return self._lend(segment, arguments[0], arguments[-1], name)
        if name in ("post", "forward", "pass on"):
            view, nonce = arguments
            if name == "post":
                return segment.start_message(view.block, nonce)
            return self._add(segment, view, nonce)
        if name == "let go":
            view, _ = arguments
            return segment.try_release(view.block, view.slot)
        if name == "end":
            (view,) = arguments
            if view.slot == OWN:
                self._is_out(view.block, has_record=expected.has_record)
                return self.owner.try_free(view.block)
            return segment.try_release(view.block, view.slot)
        (handle,) = arguments
        if name == "discard":
            segment.consume(*handle[:4])
            return None
        return self._load(segment, handle, undo=name == "load and undo")

    @staticmethod
    def _add(segment: Any, view: Any, nonce: int) -> Any:
        try:
            return segment.add_message(view.block, view.generation, nonce)
        except StaleHandleError:
            return -1

    def _lend(self, segment: Any, view: Any, nonce: int, name: str) -> Any:
        added = -1
        if name == "give back lent" or segment.is_alone(view.block, view.slot):
            added = self._add(segment, view, nonce)
        return added, bool(segment.try_release(view.block, view.slot))

    def _load(self, segment: Any, handle: Any, *, undo: bool) -> Any:
        try:
            slot, alone = segment.claim(*handle[:4], shared=self.shared)
        except (StaleHandleError, AlreadyLoadedError):
            return None if undo else (-1, False)
        if undo:
            segment.unclaim(handle.block, slot, handle.nonce, handle.slot)
            return None
        return slot, alone

    def _is_out(self, block: int, *, has_record: bool) -> None:
        self.owner.out = {block: time.monotonic()}
        self.owner.records = {block: None} if has_record else {}

    def _look_after(self, name: str, block: int, *, has_record: bool) -> bool:
        self._is_out(block, has_record=has_record)
        self.owner.unused = BLOCKS
        self.heap.warm.clear()
        for other in range(BLOCKS):
            if name == "collect" and other != block:
                self.raw["hints"][other] = 0
        if name == "collect":
            self.heap.collect()
        else:
            self.heap.reap()
        return bool(self.heap.warm)


def to_word(word: int) -> int:
    """Return how the code writes what the model writes as ``word``."""
    if word > 0:
        return MESSAGE | word
    return HOLDER | -word if word else 0


def states_of(world: World) -> Iterator[State]:
    """Yield all states."""
    first = world.simplified(world.initial())
    known, waiting = {first}, deque([first])
    while waiting:
        state = waiting.popleft()
        yield state
        for _, changed in world.successors(state):
            after = world.simplified(changed)
            if after not in known:
                known.add(after)
                waiting.append(after)


def transitions_of(world: World) -> Iterator[Expected]:
    """Yield all transitions, those of different states that do not differ themselves once."""
    known = set()
    for state in states_of(world):
        for place, who in enumerate(state.people):
            if not who.alive:
                continue
            for name, arguments in world.choices(state, place):
                begun, doing = world.begin(state, place, name, arguments)
                if doing is None:
                    continue
                expected = as_the_model_does(world, begun, place, doing)
                key = (*expected[:6], world.scope.shared)
                if -1 not in expected.taken and key not in known:
                    known.add(key)
                    yield expected


def as_the_model_does(world: World, state: State, place: int, doing: Doing) -> Expected:
    """Run a transition in the model."""
    memory = list(state.memory)
    taken: list[int] = []
    alive: set[int] = set()
    writes: list[Write] = []
    steps = world.steps(state, place, doing)
    result = None
    try:
        request = next(steps)
        while True:
            kind, table, index, value = request
            answer = world.answer(state, memory, place, request)
            if kind == "take":
                taken.append(answer)
            elif kind == "alive" and answer:
                alive.add(-value)
            elif kind == "write":
                value = to_word(value) if table == "words" else value
                writes.append((table, index, value))
            request = steps.send(answer)
    except StopIteration as end:
        result = end.value
    block = doing.arguments[0] if isinstance(doing.arguments[0], int) else doing.arguments[0].block
    return Expected(
        doing,
        tuple(world.table(state, name) for name in TABLES),
        state.people[place].born,
        world.has_record(state, block),
        tuple(taken),
        frozenset(alive),
        tuple(writes),
        result,
    )


@pytest.fixture(params=WORLDS)
def world(request: pytest.FixtureRequest) -> World:
    return World(WORLDS[request.param])


@pytest.fixture
def bench(world: World) -> Iterator[Bench]:
    made = Bench(shared=world.scope.shared)
    yield made
    made.close()


def test_the_code_does_what_the_model_does(world: World, bench: Bench) -> None:
    """Each transition from each state makes the same writes in the same order, and ends alike."""
    done = set()
    for expected in transitions_of(world):
        writes, result = bench.run(expected)
        assert (writes, result) == (expected.writes, expected.result), expected
        done.add(expected.doing.name)
    assert done >= {"end", "collect", "reap", "load", "load and undo", "discard"}
    assert done & {"post", "forward"}


def clear_before_unlinking(segment: Any, block: int, slot: int) -> None:
    segment.words[slot] = 0
    _unlink(segment, block, slot)


def consume_without_claiming(
    segment: Any, block: int, generation: int, slot: int, nonce: int
) -> None:
    mark = (get_ident(),)
    segment.lock_block(block, mark)
    if segment.generations[block] == generation and segment.words[slot] == MESSAGE | nonce:
        segment._unlink(block, slot)
    segment.unlock_block(block, mark)


def keep_the_dead(segment: Any, block: int) -> None:
    """Drop nobody."""


_unlink: Any = Segment._unlink


@pytest.mark.parametrize("world", ["shared"], indirect=True)
@pytest.mark.parametrize(
    ("method", "other"),
    [
        ("_unlink", clear_before_unlinking),
        ("consume", consume_without_claiming),
        ("_drop_dead", keep_the_dead),
    ],
)
def test_code_that_does_otherwise_is_noticed(
    world: World, bench: Bench, method: str, other: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A write too early, too few or none at all is a difference from the model."""
    monkeypatch.setattr(Segment, method, other)
    assert any(
        bench.run(expected) != (expected.writes, expected.result)
        for expected in transitions_of(world)
    )


@pytest.mark.parametrize("world", ["shared"], indirect=True)
def test_a_busy_block_is_neither_freed_nor_released_but_looked_at_again(bench: Bench) -> None:
    """While somebody else has a block locked, freeing it leaves a hint, releasing asks again."""
    bench._is_out(0, has_record=False)
    mark = (get_ident(),)
    bench.importer.lock_block(0, mark)
    assert not bench.owner.try_free(0)
    assert bench.log == [("hints", 0, 1)]
    bench.importer.unlock_block(0, mark)
    bench.owner.lock_block(0, mark)
    assert not bench.importer.try_release(0, 0)
    bench.owner.unlock_block(0, mark)
    assert bench.log == [("hints", 0, 1)]
    assert bench.owner.try_free(0)


@pytest.mark.parametrize("world", ["shared"], indirect=True)
def test_a_load_without_the_message_leaves_the_messages_slot_alone(bench: Bench) -> None:
    """A shared block that is loaded again is held by another slot than the handle names, so
    that undoing the load brings no message back.
    """
    segment: Any = bench.importer
    segment._free_slots = [3, 0]
    slot, _ = segment.claim(0, 0, 0, 7, shared=True)
    assert slot == 3
    assert segment._free_slots == [0]
    segment.unclaim(0, slot, 7, 0)
    assert not bench.owner.leases(0)


@pytest.mark.parametrize("world", ["shared"], indirect=True)
def test_slots_are_taken_from_chunks_of_ones_own(bench: Bench) -> None:
    """While one process has the only chunk of slots, another gets none."""
    assert bench.owner._take_slot() >= 0
    bench.importer._free_slots.clear()
    assert not locks.try_lock(bench.importer.fd, LOCK_CHUNK)


def test_a_holder_lives_as_long_as_its_byte_is_locked_in_its_epoch(bench: Bench) -> None:
    """The word of a process that has closed the segment, or of an earlier user of its place,
    counts no more.
    """
    for segment in (bench.owner, bench.importer):
        del vars(segment)["holder_alive"]
    word = bench.importer.importer
    assert bench.owner.holder_alive(word)
    assert not bench.owner.holder_alive(word - 1)
    # What the kernel does at its end.
    locks.unlock(bench.importer.fd, LOCK_IMPORTER + 1)
    assert not bench.owner.holder_alive(word)
    again = Segment(
        SegmentFile(locks.reopen(bench.owner.fd), None),
        bench.owner.header,
        bench.owner.strategy,
        owner=False,
    )
    assert again.importer == word + 1
    assert bench.owner.holder_alive(again.importer)
    assert not bench.owner.holder_alive(word)
    again.close()
