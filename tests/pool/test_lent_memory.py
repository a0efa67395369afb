"""The memory of dropped results is lent for the next ones, and never while anybody has it."""

from __future__ import annotations

import functools
import os
import random
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import shmreduce
from shmreduce import WorkerDied
from shmreduce.memory import borrowing, lending
from shmreduce.memory.lease_slots import LeaseSlots
from shmreduce.memory.runtime import current
from tests.conftest import PATIENCE, START_METHODS, registered
from tests.pool.work import end, own_pid

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from shmreduce.memory.segment import Segment
    from shmreduce.pool import Pool

STRATEGIES = ["file_descriptor", "file_system"]
SIZE = lending._SMALLEST
SMALL = 256 << 10
"""Bytes from which the memory is lent in tests by chance."""

pytestmark = pytest.mark.usefixtures("shmreduce_no_leaks")


@pytest.fixture(autouse=True)
def _kept_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow the machine is, what is kept is still there for the next task."""
    monkeypatch.setattr(lending, "_LEAST_SECONDS", PATIENCE)


@pytest.fixture(params=STRATEGIES)
def strategy(request: pytest.FixtureRequest) -> Iterator[str]:
    """The sharing strategy in force."""
    with shmreduce.install(strategy=request.param):
        yield request.param


def made(value: int, nbytes: int = SIZE) -> np.ndarray:
    return np.full(nbytes, value % 251, np.uint8)


def made_by(value: int) -> tuple[int, np.ndarray]:
    return os.getpid(), made(value)


def several(value: int) -> list[np.ndarray]:
    return [made(value + number) for number in range(3)]


def wait_for(paths: tuple[str, str]) -> None:
    """Say which worker has begun, and wait for a file of its name."""
    begun, go_on = (Path(f"{path} {os.getpid()}") for path in paths)
    begun.touch()
    until(go_on.exists)


def until(condition: Callable[[], object]) -> None:
    """Wait until something is so."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, f"not so within {PATIENCE} s"
        time.sleep(0.005)


def bottom_of(array: Any) -> Any:
    """Return the object that the views of an array end at."""
    while isinstance(array, np.ndarray):
        array = array.base
    return array


def place(array: np.ndarray) -> tuple[Segment, int]:
    """Return where an array lies."""
    block = shmreduce.find_block(bottom_of(array))
    assert block is not None
    return block._record.segment, block._record.block


def is_free(where: tuple[Segment, int]) -> bool:
    segment, block = where
    return not segment.heads[block]


def is_full_of(array: np.ndarray, value: int) -> bool:
    return bool((array == value % 251).all())


@pytest.mark.parametrize("method", START_METHODS)
def test_results_lie_where_dropped_ones_did(method: str, strategy: str) -> None:
    """However the tasks are spread, the memory in use is that of the results alive."""
    with shmreduce.get_context(method).Pool(2) as pool:
        places = set()
        for turn in range(6):
            results = pool.map(made, range(turn, turn + 3), chunksize=1)
            assert all(is_full_of(each, turn + number) for number, each in enumerate(results))
            places |= {place(each) for each in results}
            del results
        assert len(places) == 3
    pool.join()


def test_memory_of_one_worker_is_lent_to_another(tmp_path: Path, strategy: str) -> None:
    """A worker fills and gives back what another one has made."""
    with shmreduce.get_context("fork").Pool(2) as pool:
        busy = pool.map_async(wait_for, [(f"{tmp_path}/begun", f"{tmp_path}/on")] * 2, chunksize=1)
        until(lambda: len(list(tmp_path.glob("begun *"))) == 2)
        one, other = (int(path.name.split()[1]) for path in tmp_path.glob("begun *"))
        (tmp_path / f"on {one}").touch()
        pid, result = pool.apply(made_by, (1,))
        assert pid == one
        again = pool.apply_async(wait_for, ((f"{tmp_path}/again", f"{tmp_path}/go"),))
        until((tmp_path / f"again {one}").exists)
        where = place(result)
        del result
        (tmp_path / f"on {other}").touch()
        pid, result = pool.apply(made_by, (2,))
        assert pid == other
        assert place(result) == where
        assert is_full_of(result, 2)
        (tmp_path / f"go {one}").touch()
        busy.get(PATIENCE)
        again.get(PATIENCE)
        del result
    pool.join()


def test_memory_of_a_worker_that_has_left() -> None:
    """It is not lent: as long as it is open, all of its owner's memory is there."""
    with shmreduce.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        owner, result = pool.apply(made_by, (1,))
        segment, block = where = place(result)
        segment.pins[where] = None
        until(lambda: not segment.owner_alive())
        del result
        until(lambda: not segment.heads[block])
        segment.unpin(where)
        current().attachments.close_ownerless(segment)
        borrower, result = pool.apply(made_by, (2,))
        assert borrower != owner
        assert place(result) != where
    pool.join()
    assert is_full_of(result, 2)


def test_several_arrays_of_an_answer() -> None:
    """As many blocks are lent as an answer has brought."""
    with shmreduce.get_context("fork").Pool(1) as pool:
        before = {place(each) for each in pool.apply(several, (1,))}
        results = pool.apply(several, (2,))
        assert {place(each) for each in results} == before
        assert all(is_full_of(each, 2 + number) for number, each in enumerate(results))
        del results
    pool.join()


def test_what_is_not_needed_goes_back() -> None:
    """A task that returns something else ends the loan."""
    with shmreduce.get_context("fork").Pool(1) as pool:
        where = place(pool.apply(made, (1,)))
        assert not is_free(where)
        assert pool.apply(own_pid)
        assert is_free(where)
    pool.join()


def test_what_is_not_wanted_goes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without another task it is its owner's again after a while."""
    monkeypatch.setattr(lending, "_LEAST_SECONDS", 0.05)
    with shmreduce.install(idle_seconds=0), shmreduce.get_context("fork").Pool(1) as pool:
        where = place(pool.apply(made, (1,)))
        until(lambda: is_free(where))
    pool.join()


def test_it_waits_as_long_as_idle_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its owner would keep it for as long, but only for itself."""
    monkeypatch.setattr(lending, "_LEAST_SECONDS", 0.0)
    look_after, pauses = lending.Lender.look_after, []

    def note(self: lending.Lender) -> float | None:
        pauses.append(look_after(self))
        return pauses[-1]

    monkeypatch.setattr(lending.Lender, "look_after", note)
    context = shmreduce.get_context("fork")
    with shmreduce.install(idle_seconds=3 * PATIENCE), context.Pool(1) as pool:
        where = place(pool.apply(made, (1,)))
        until(lambda: any(pauses))
        assert max(filter(None, pauses)) > 2 * PATIENCE
        assert is_kept(where)
    pool.join()


def test_what_is_dropped_after_the_pool_goes_back() -> None:
    """Nobody keeps anything for a pool that has ended."""
    with shmreduce.get_context("fork").Pool(1) as pool:
        early, late = pool.map(made, [1, 2], chunksize=1)
        where = place(early), place(late)
        del early
        until(lambda: is_kept(where[0]))
    pool.join()
    assert is_free(where[0])
    del late
    assert is_free(where[1])


def is_kept(where: tuple[Segment, int]) -> bool:
    """Whether nobody has a view of a block here, and it is held all the same."""
    return where not in current().live.places() and not is_free(where)


def test_a_view_that_is_left() -> None:
    """A slice keeps the whole."""
    with shmreduce.get_context("fork").Pool(1) as pool:
        result = pool.apply(made, (1,))
        view, where = result[100:200], place(result)
        del result
        assert place(pool.apply(made, (2,))) != where
        assert is_full_of(view, 1)
    pool.join()


def test_a_message_that_is_unread() -> None:
    """An array that was sent on is whoever's who reads the message."""
    queue = shmreduce.get_context("fork").SimpleQueue()
    with shmreduce.get_context("fork").Pool(1) as pool:
        result = pool.apply(made, (1,))
        where = place(result)
        queue.put(result)
        del result
        assert place(pool.apply(made, (2,))) != where
        assert is_full_of(queue.get(), 1)
    pool.join()
    queue.close()


def test_a_forked_child_that_looks_at_it() -> None:
    """What a child has seen is not written to while it lives."""
    read, write = os.pipe()
    back, answer = os.pipe()
    with shmreduce.get_context("fork").Pool(1) as pool:
        result = pool.apply(made, (1,))
        where = place(result)
        pid = os.fork()
        if not pid:
            os.read(read, 1)
            os.write(answer, b"y" if is_full_of(result, 1) else b"n")
            os._exit(0)
        del result
        assert place(pool.apply(made, (2,))) != where
        os.write(write, b"x")
        assert os.read(back, 1) == b"y"
        os.waitpid(pid, 0)
    pool.join()
    for fd in (read, write, back, answer):
        os.close(fd)


@pytest.mark.parametrize("stopped", [False, True], ids=["read", "unread"])
def test_a_borrower_that_dies(stopped: bool) -> None:
    """What was lent to it is free, whether it had come so far as to read of it or not."""
    with shmreduce.get_context("fork").Pool(1) as pool:
        pid, result = pool.apply(made_by, (1,))
        where = place(result)
        mark = object()
        where[0].pins[mark] = None
        del result
        if stopped:
            os.kill(pid, signal.SIGSTOP)
            answer = pool.apply_async(own_pid)
            until(lambda: where[0].messages(where[1]))
            os.kill(pid, signal.SIGKILL)
            # It had not begun: another one does it.
            assert answer.get(PATIENCE) != pid
        else:
            with pytest.raises(WorkerDied):
                pool.apply(end, ("SIGKILL",))
        where[0].drop_dead_holders(where[1])
        until(lambda: is_free(where))
        where[0].unpin(mark)
        current().attachments.close_ownerless(where[0])
        assert is_full_of(pool.apply(made, (3,)), 3)
    pool.join()


def test_memory_is_short() -> None:
    """A worker gives up what it was lent before it is refused memory of its own."""
    in_use = sum(reserved for _, reserved in current().family.members())
    with (
        shmreduce.install(budget=in_use + 8 * SIZE),
        shmreduce.get_context("fork").Pool(1) as pool,
    ):
        for value in range(3):
            where = place(pool.apply(made, (value, 2 * SIZE)))
            until(functools.partial(is_kept, where))
            assert is_full_of(pool.apply(made, (value, 7 * SIZE)), value)
    pool.join()


def test_nothing_is_kept_where_memory_is_short() -> None:
    """There must be twice as much as is kept for those who cannot use it."""
    context = shmreduce.get_context("fork")
    # What tests before this one have left must not go back in between: there would be room.
    with shmreduce.install(idle_seconds=10 * PATIENCE):
        in_use = sum(reserved for _, reserved in current().family.members())
        with shmreduce.install(budget=in_use + 2 * SIZE), context.Pool(1) as pool:
            where = place(pool.apply(made, (1,)))
            assert is_free(where)
        pool.join()


class Forked:
    """An array of which half is copied when its sender forks."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array


class ForkedReducer(shmreduce.Reducer):
    types = (Forked,)

    def reduce(self, obj: Forked, message: shmreduce.Message) -> Any:
        given = message.allocate(obj.array.nbytes)
        assert given is not None
        view, handle = given
        half = obj.array.nbytes // 2
        view[:half] = obj.array[:half].data
        pid = os.fork()
        if not pid:
            # What the child goes on with is its own.
            view[:] = bytes(view.nbytes)
            os._exit(0)
        os.waitpid(pid, 0)
        view[half:] = obj.array[half:].data
        return rebuilt, (handle,)


def rebuilt(handle: bytes) -> np.ndarray:
    return np.frombuffer(shmreduce.import_block(handle).buffer, np.uint8)


def made_and_forked(value: int) -> Forked:
    return Forked(made(value))


def forked_twice() -> bool:
    """Whether the second result lies where the first did, and is whole."""
    with (
        registered(ForkedReducer()),
        shmreduce.get_context("fork").Pool(1) as pool,
    ):
        where = place(pool.apply(made, (1,)))
        result: Any = pool.apply(made_and_forked, (2,))
        assert place(result) == where
        whole = is_full_of(result, 2)
        del result
    pool.join()
    return whole


def test_a_fork_while_it_is_filled() -> None:
    """The rest of the bytes is written by another way: the pages are private by then."""
    assert forked_twice()


def test_without_the_other_way_they_are_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above would notice."""
    monkeypatch.setattr(borrowing.Borrowed, "_write", lambda _: None)
    assert not forked_twice()


class Chance:
    """A pool whose results are held, dropped, sent on and looked at by forked children."""

    def __init__(self, seed: int, pool: Pool, queue: Any) -> None:
        self.random = random.Random(seed)
        self.pool = pool
        self.queue = queue
        self.held: list[tuple[int, np.ndarray]] = []
        self.sent: list[int] = []
        self.value = 0
        self.places: set[tuple[Segment, int]] = set()
        self.reused = 0
        self.changed = False
        """Whether an array that was sent on was another when it was read."""

    def go(self, steps: int) -> bool:
        """Return whether all arrays were whole all the time."""
        for _ in range(steps):
            step = self.random.choice([self.make, self.make, self.drop, self.drop, self.send])
            step()
            if not self.whole():
                break
        while self.sent:
            self.read()
        return self.whole()

    def make(self) -> None:
        count = self.random.randint(1, 4)
        values = range(self.value, self.value + count)
        self.value += count
        sizes = [self.random.choice([SMALL, SMALL, 3 * SMALL]) for _ in values]
        results = self.pool.starmap(made, zip(values, sizes, strict=True), chunksize=1)
        self.reused += len(self.places.intersection(map(place, results)))
        self.places.update(map(place, results))
        self.held += zip(values, results, strict=True)

    def drop(self) -> None:
        self.random.shuffle(self.held)
        del self.held[: self.random.randint(0, 4)]

    def send(self) -> None:
        if len(self.sent) < 4 and self.held:
            self.sent.append(self.held[0][0])
            if self.random.random() < 0.5:
                # Moved.
                self.queue.put(self.held.pop(0)[1])
            else:
                self.queue.put(self.held[0][1])
        else:
            self.read()

    def read(self) -> None:
        if self.sent:
            self.changed |= not is_full_of(self.queue.get(), self.sent.pop(0))

    def whole(self) -> bool:
        return not self.changed and all(is_full_of(array, value) for value, array in self.held)


def by_chance(seed: int, steps: int) -> tuple[bool, int]:
    """Return whether all arrays were whole, and how many lay where others had lain."""
    context = shmreduce.get_context("fork")
    queue = context.SimpleQueue()
    with context.Pool(2) as pool:
        chance = Chance(seed, pool, queue)
        whole = chance.go(steps)
        chance.held.clear()
    pool.join()
    queue.close()
    return whole, chance.reused


@pytest.fixture
def _lent_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lending, "_SMALLEST", SMALL)


@pytest.mark.usefixtures("_lent_early", "strategy")
@pytest.mark.parametrize("seed", range(3))
def test_by_chance(seed: int) -> None:
    """Whatever is held, dropped and sent on, no array changes, and memory is used again."""
    whole, reused = by_chance(seed, 150)
    assert whole
    assert reused > 20


@pytest.mark.usefixtures("_lent_early")
def test_without_the_look_at_others_arrays_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above would notice if blocks were lent that are on their way to others."""
    monkeypatch.setattr(LeaseSlots, "is_alone", lambda *_: True)
    assert not all(by_chance(seed, 150)[0] for seed in range(3))


@pytest.mark.usefixtures("_lent_early")
def test_without_the_look_at_views_arrays_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above would notice if blocks were lent of which somebody has a view."""

    def keep_at_once(self: lending.Lender, blocks: Any) -> None:
        for block in blocks:
            record = block._record
            if lending._is_worth_it(record):
                record.keep = self
                record.live._release(record)

    monkeypatch.setattr(lending.Lender, "watch", keep_at_once)
    assert not all(by_chance(seed, 150)[0] for seed in range(3))
