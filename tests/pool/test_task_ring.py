"""The ring of tasks: each is claimed by one process, in order, whoever is killed."""

from __future__ import annotations

import itertools
import random
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import shmreduce
from shmreduce.compiled import PACKETS
from shmreduce.pool_task_ring import _ROOM, PublishedTasks, TaskRing
from shmreduce.pool_worker_progress import ProgressTable
from tests.channels.channels import eventually
from tests.compiler import changed_module, needs_module
from tests.conftest import PATIENCE

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import Children

CLAIMERS = 3
TASKS = 20_000
_HEAD = slice(0, 8)


@pytest.fixture(autouse=True)
def _compiled() -> None:
    needs_module(PACKETS)


@pytest.fixture
def ring() -> TaskRing:
    """A ring in memory of this process."""
    return TaskRing(memoryview(bytearray(TaskRing.size_for(1))))


def fill(ring: TaskRing, first: int = 1) -> int:
    """Put tasks into a ring until one finds no place; return its number."""
    number = first
    while ring.publish(number, b"%d" % number):
        number += 1
    return number


def test_tasks_are_claimed_in_their_order(ring: TaskRing) -> None:
    """Many times around, and the last claim finds none."""
    number = 1
    for _ in range(5):
        following = fill(ring, number)
        assert following - number == ring.places
        assert [ring.claim(1) for _ in range(number, following)] == [
            b"%d" % each for each in range(number, following)
        ]
        assert ring.claim(1) is None
        number = following


def test_a_place_is_used_again_when_its_task_was_copied(ring: TaskRing) -> None:
    """By a worker, or because the pool has claimed it, or because its worker has died."""
    following = fill(ring)
    assert ring.claim(1) == b"1"
    assert fill(ring, following) == following + 1
    assert ring.withdraw(2)
    assert not ring.withdraw(2)
    assert fill(ring, following + 1) == following + 2
    # As if a worker had been killed in the middle of a claim.
    place = ring._place(3)
    ring._words[place] |= 5
    assert fill(ring, following + 2) == following + 2
    ring.forget(4)
    assert fill(ring, following + 2) == following + 2
    ring.forget(5)
    assert fill(ring, following + 2) == following + 3


def test_what_the_pool_has_claimed_no_worker_gets(ring: TaskRing) -> None:
    """Whether it is older or younger than the others."""
    fill(ring)
    for number in (1, 2, 5, ring.places):
        assert ring.withdraw(number)
    claimed = iter(lambda: ring.claim(1), None)
    left = {*range(1, ring.places + 1)} - {1, 2, 5, ring.places}
    assert [int(task) for task in claimed if task is not None] == sorted(left)


def test_a_late_note_of_what_is_the_oldest_does_no_harm(ring: TaskRing) -> None:
    """A worker that was stopped in the middle of a claim writes it when all has moved on."""
    number = 1
    for _ in range(7):
        number = fill(ring, number)
        while ring.claim(1):
            pass
    following = fill(ring, number)
    for late in (0, 1, ring.places, number - 5):
        ring._memory[_HEAD] = late.to_bytes(8, "little")
        assert ring.claim(1) == b"%d" % number
        number += 1
    ring._memory[_HEAD] = bytes(8)
    assert [*iter(lambda: ring.claim(1), None)] == [b"%d" % n for n in range(number, following)]


def test_a_task_that_is_too_large_is_refused(ring: TaskRing) -> None:
    """The largest arrives as it is."""
    largest = next(size for size in itertools.count(1000) if not ring.publish(1, bytes(size + 1)))
    # Smaller ones were published over each other, which no pool does.
    ring._words[ring._place(1)] = 0
    task = random.Random(1).randbytes(largest)
    assert ring.publish(1, task)
    assert ring.claim(1) == task


def test_a_ring_that_somebody_has_written_to_is_not_left(ring: TaskRing) -> None:
    """Nothing outside of it is read, and the search ends."""
    chooser = random.Random(7)
    for _ in range(300):
        ring._memory[:] = chooser.randbytes(len(ring._memory))
        assert ring.claim(1) is None
        ring.withdraw(chooser.getrandbits(40))
        ring.publish(chooser.getrandbits(40), b"task")
    ring._memory[:] = bytes(len(ring._memory))
    assert ring.publish(1, b"task")
    # Its size.
    ring._words[2] = 1 << 60
    assert ring.claim(1) is None


def claim_in_circles() -> bytes | None:
    """Claim from a ring whose places send the search on to another."""
    ring = TaskRing(memoryview(bytearray(TaskRing.size_for(1))))
    for number in range(1, ring.places + 1):
        ring._words[ring._place(number)] = number << 20 | 1
    ring._words[ring._place(1)] = (ring.places + 2) << 20 | 1
    return ring.claim(1)


def test_the_search_for_a_task_ends(children: Children) -> None:
    """In a child, since nothing can interrupt it."""
    assert children.call(claim_in_circles) is None


def test_a_claimer_that_was_taken_for_dead_blocks_no_place(tmp_path: Path) -> None:
    """Its place has been freed, and used again, before it notes that it has copied its task."""
    needs_module(PACKETS)
    meanwhile = "            place->copied = number + ring.count;\n"
    copy = "            memcpy(PyBytes_AsString(task), place->bytes, (size_t)size);\n"
    module = changed_module(PACKETS, tmp_path, (copy, meanwhile + copy))
    ring = TaskRing(memoryview(bytearray(TaskRing.size_for(1))))
    assert ring.publish(1, b"first")
    assert module.claim_task(ring._memory, _ROOM, 1) == b"first"
    assert ring._words[ring._place(1) + 1] == 1 + ring.places


def test_memory_that_is_no_ring_is_refused() -> None:
    """It is too small, or not aligned."""
    module = needs_module(PACKETS)
    for memory, room in (bytearray(40), 2048), (bytearray(4096), 24), (bytearray(4096), 2047):
        with pytest.raises(ValueError, match="no room for a task"):
            module.claim_task(memory, room, 1)
    for owner in 0, 1 << 20:
        with pytest.raises(ValueError, match="no such owner"):
            module.claim_task(bytearray(4096), 2048, owner)
    with pytest.raises(ValueError, match="not aligned"):
        module.claim_task(memoryview(bytearray(4097))[1:], 2048, 1)


def claim_for_ever(table: ProgressTable, owner: int, seen: Any, over: Any) -> None:
    """Claim tasks as a worker does, and note which."""
    seen[owner, 0] = 1
    while not over[0]:
        task = table.ring.claim(owner)
        if task is not None:
            seen[owner, int.from_bytes(task, "little")] += 1


def test_each_task_is_claimed_once_though_claimers_are_killed(children: Children) -> None:
    """And the pool knows by whom: by a worker that it was given to, or by the pool itself."""
    chooser = random.Random(3)
    table = ProgressTable.for_workers(CLAIMERS)
    seen = shmreduce.zeros((CLAIMERS + 21, TASKS + 1), np.uint8)
    over = shmreduce.zeros(1, np.uint8)
    given: dict[int, int] = {}

    def give(owner: int, task: Any) -> None:
        given[task.number] = owner

    published = PublishedTasks(table.ring)
    owners = itertools.count(1)

    def start() -> tuple[int, Any]:
        owner = next(owners)
        return owner, children.start(claim_for_ever, table, owner, seen, over)

    workers = [start() for _ in range(CLAIMERS)]
    eventually(seen[1 : CLAIMERS + 1, 0].all)
    withdrawn: list[int] = []
    number = 1
    end = time.monotonic() + PATIENCE
    # Starting a process by another method takes as long as most of the tasks.
    kills = 20 if children.method == "fork" else 3
    while number <= TASKS and time.monotonic() < end:
        task: Any = SimpleNamespace(number=number, data=number.to_bytes(2, "little"))
        number += published.publish(task)
        choice = chooser.random()
        if choice < 0.3:
            published.note_claims(give)
        elif choice < 0.35 and (own := published.withdraw(give)):
            withdrawn.append(own.number)
        elif choice < 0.351:
            withdrawn += [each.number for each in published.withdraw_all(give)]
        elif number > TASKS - kills * (TASKS // (kills + 1)) and kills:
            kills -= 1
            owner, worker = workers.pop(chooser.randrange(CLAIMERS))
            worker.kill()
            children.join(worker)
            published.note_claims(give)
            published.forget(owner)
            workers.append(start())
    assert not kills
    withdrawn += [each.number for each in published.withdraw_all(give)]
    over[0] = 1
    children.join()
    assert sorted([*given, *withdrawn]) == [*range(1, TASKS + 1)]
    found = [*zip(*np.nonzero(seen[:, 1:]), strict=True)]
    assert all(given.get(int(task) + 1) == owner for owner, task in found)
    assert seen.max() == 1
    # The others were killed between a claim and its note.
    assert len(given) - 20 <= len(found) <= len(given)


def test_a_worker_finds_what_was_published_before_it_looked(children: Children) -> None:
    """However often both do that at the same time."""
    table = ProgressTable.for_workers(1)
    seen = shmreduce.zeros((2, 1001), np.uint8)
    over = shmreduce.zeros(1, np.uint8)
    children.start(claim_for_ever, table, 1, seen, over)
    for number in range(1, 1001):
        assert table.ring.publish(number, number.to_bytes(2, "little"))
        eventually(seen[1, number : number + 1].all)
    over[0] = 1
    children.join()
