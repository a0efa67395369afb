"""Ctrl-C at any instant leaves no lock taken, and nothing half done that does harm."""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import signal
import subprocess
import sys
import threading
import traceback
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pytest

import shmreduce
from shmreduce import unpickling
from shmreduce.compiled import BLOCKS
from shmreduce.memory import locks, mapping, runtime
from shmreduce.memory.block_locks import BlockLocks
from shmreduce.memory.blocks import LiveBlocks
from shmreduce.memory.family import _LOCK_BUDGET, Family
from shmreduce.memory.heap import Heap
from shmreduce.memory.layout import BY_VALUE, LOCK_BLOCK
from shmreduce.memory.lease_slots import MESSAGE
from shmreduce.memory.ledger import ForkLedger
from shmreduce.memory.loading import Loading, _handles_in, here, import_block, with_arrived
from shmreduce.memory.segment import Segment
from shmreduce_numpy.blocks import find_block_of
from tests.compiler import needs_module
from tests.interrupter import interrupted_everywhere
from tests.memory.own_heaps import make_heap
from tests.memory.resending import resent
from tests.memory.waiting import in_forked_child, wait_for_exit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from shmreduce.memory.owned_segment import OwnedSegment

ROUNDS = 300
LENGTH = 300_000
_AGAIN = 0.05
"""Seconds until the next interrupt: Python ignores one that strikes in a destructor."""


def interrupt_often(action: Callable[[], object]) -> Iterator[None]:
    """Call a function until KeyboardInterrupt is raised in it, and yield; many times."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGVTALRM, interrupt)
    try:
        for number in range(ROUNDS):
            # Processor time, so that the load of the machine makes no difference.
            signal.setitimer(signal.ITIMER_VIRTUAL, 0.001 + 0.00001 * number, _AGAIN)
            # Not pytest.raises: the frames that were interrupted are not to be kept.
            with contextlib.suppress(KeyboardInterrupt):
                while True:
                    action()
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def test_the_family_can_be_locked_after_an_interrupt() -> None:
    """Other threads, and other processes, can reserve memory."""
    family = runtime.current().family
    everything = 1 << 40
    taken: list[str] = []

    def look() -> None:
        if not family._threads.acquire(timeout=0):
            taken.append("the lock of the threads")
            return
        family._threads.release()
        if locks.first_locked(stranger, _LOCK_BUDGET) is not None:
            taken.append("the lock of the processes")

    stranger = locks.reopen(family.fd)
    try:
        for _ in interrupt_often(lambda: family.reserve(0, everything)):
            other = threading.Thread(target=look)
            other.start()
            other.join()
            assert taken == []
    finally:
        os.close(stranger)


def test_a_heap_can_be_locked_after_an_interrupt() -> None:
    """Other threads can make arrays."""
    heap = runtime.current().heap(BY_VALUE)
    taken: list[bool] = []

    def look() -> None:
        if heap._lock.acquire(timeout=0):
            heap._lock.release()
        else:
            taken.append(True)

    def lock() -> None:
        with heap.exclusive():
            pass

    for _ in interrupt_often(lock):
        other = threading.Thread(target=look)
        other.start()
        other.join()
        assert taken == []


def test_a_block_can_be_locked_after_an_interrupt() -> None:
    """Other threads, and other processes, can send and load its arrays."""
    # In a process of its own: messages that are interrupted before they are
    # loaded are left unread.
    code = f"from {__name__} import blocks_taken; print(blocks_taken())"
    finished = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert finished.stdout.strip() == "[]", finished.stderr[-2000:]


def blocks_taken() -> list[Any]:
    """Return the blocks of which a lock was taken after an interrupt."""
    shared = shmreduce.ones(1000)
    found = []

    def send() -> None:
        ForkingPickler.loads(ForkingPickler.dumps(np.ones(100)))
        ForkingPickler.loads(ForkingPickler.dumps(shared))

    with shmreduce.install(inline_limit=0):
        for _ in interrupt_often(send):
            for segment in runtime.current().directory.values():
                stranger = locks.reopen(segment.fd)
                taken = locks.first_locked(stranger, LOCK_BLOCK, LOCK_BLOCK)
                os.close(stranger)
                if taken is not None or segment._busy:
                    found.append((segment.token, taken))
    return found


# At every instant where a handler can run, once each, and with the traceback kept.


def is_taken(lock: Any) -> bool:
    """Return whether another thread finds a lock taken."""
    found: list[bool] = []

    def look() -> None:
        found.append(not lock.acquire(timeout=0))
        if not found[0]:
            lock.release()

    other = threading.Thread(target=look)
    other.start()
    other.join()
    return found[0]


@pytest.mark.parametrize("wait", [True, False])
def test_a_heap_can_be_locked_while_the_traceback_is_kept(wait: bool) -> None:
    """As an interactive session keeps it, and who logs the exception later."""
    heap = runtime.current().heap(BY_VALUE)
    number = 0

    def lock() -> None:
        with heap.exclusive(wait=wait):
            heap.collect()

    for number in interrupted_everywhere(lock, "/memory/heap.py", "/thread_locks.py"):
        assert not is_taken(heap._lock), number
    assert number > 1


def test_the_family_can_be_locked_while_the_traceback_is_kept() -> None:
    """By other threads, and by other processes, of which none is to be waited for."""
    family = Family.found(1 << 40)
    stranger = locks.reopen(family.fd)
    number = 0

    def use() -> None:
        family.reserve(1 << 12, 1 << 40)
        family.reserve(-1 << 12, 1 << 40)
        assert family.look_for(bytes(16)) is None
        family.tidy(lambda *_: True)

    try:
        for number in interrupted_everywhere(
            use, "/memory/family.py", "/memory/mailbox.py", "/memory/locks.py", "/thread_locks.py"
        ):
            assert not is_taken(family._threads), number
            assert set(family._depth.values()) == {0}, number
            for offset in family._depth:
                assert locks.first_locked(stranger, offset) is None, number
    finally:
        os.close(stranger)
        family.leave(with_mailbox=True)
    assert number > 50


def test_what_is_booked_is_what_segments_have_after_an_interrupt() -> None:
    """Else the budget of the family would be smaller, or larger, until the process ends."""
    # In a process of its own: a block that was being carved, or given back, is lost.
    assert wait_for_exit(in_forked_child(all_is_booked)) == 0


def all_is_booked() -> bool:
    """Make and drop blocks, interrupted at each instant; return whether there were some."""
    family, heaps, number = runtime.current().family, [make_heap(BY_VALUE)], 0
    before = family.reserved

    def use() -> None:
        heap = heaps[-1]
        heap.untake(*heap.allocate(LENGTH))
        with heap.exclusive():
            heap.cool(0)

    memory = ("heap", "family", "owned_segment", "segment_creation", "reservation")
    files = [f"/memory/{each}.py" for each in memory]
    for number in interrupted_everywhere(use, *files, "/thread_locks.py"):
        booked = sum(segment.reserved for heap in heaps for segment in heap.segments)
        assert family.reserved - before == booked, number
        heaps.append(make_heap(BY_VALUE))
    return number > 100


def test_a_load_that_was_interrupted_is_over() -> None:
    """What the thread imports later is not claimed by it, so its blocks are given back."""
    plain = pickle.dumps([1, 2, {3}])
    number = 0

    def load() -> None:
        unpickling.loads(plain)
        with_arrived({}, len, plain)

    for number in interrupted_everywhere(load, "/memory/loading.py", "/shmreduce/unpickling.py"):
        assert here.loading is None, number
    assert number > 5


def test_a_load_inside_another_leaves_it_as_it_was() -> None:
    """An object that unpickles another while it is unpickled itself goes on with its own load."""
    outer = here.loading = Loading()
    try:
        for number in interrupted_everywhere(
            lambda: unpickling.loads(b"N."), "/memory/loading.py", "/shmreduce/unpickling.py"
        ):
            assert here.loading is outer, number
    finally:
        here.loading = None


@pytest.mark.parametrize("is_own", [False, True])
def test_the_death_of_a_view_is_never_lost(installed: None, is_own: bool) -> None:
    """Where the step is compiled that an interrupt cannot strike: it calls the others again."""
    needs_module(BLOCKS)
    # In a process of its own: a block that was being given back may be lost for good.
    assert wait_for_exit(in_forked_child(lambda: no_death_is_lost(is_own=is_own))) == 0


def no_death_is_lost(*, is_own: bool) -> bool:
    """Let views die, interrupted at each instant; return whether there were some."""
    live = runtime.current().live
    held: list[Any] = []

    def hold() -> Any:
        if is_own:
            held.append(shmreduce.ones(LENGTH))
        else:
            held.append(resent(np.full(LENGTH, 1.0)))
            # From here on its pages are private, and it ends the long way.
            resent(held[0])
        block = find_block_of(held[0])
        assert block is not None
        return block._record

    record, number = hold(), 0
    for number in interrupted_everywhere(held.clear, "/memory/blocks.py", "/memory/heap.py"):
        assert not live.is_watched(record), number
        live.settle()
        assert not live.unsettled, number
        segment = record.segment
        assert record not in (*segment.records.values(), *segment.holds.values()), number
        record = hold()
    return number > 3


def test_a_block_can_be_locked_whatever_comes_as_its_lock_is_given_up(
    installed: None, long_way: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Handlers that raise each time: no other process, and no other thread, waits for it."""
    shared = shmreduce.ones(LENGTH)
    block = find_block_of(shared)
    assert block is not None
    segment, number = block._record.segment, block._record.block
    strikes: list[int] = []

    def struck(self: Any, block: int, mark: Any) -> None:
        strikes.append(block)
        raise KeyboardInterrupt

    data = ForkingPickler.dumps(shared)
    (handle,) = _handles_in(data)
    with monkeypatch.context() as patch:
        patch.setattr(BlockLocks, "unlock_block", struck)
        with pytest.raises(KeyboardInterrupt):
            segment.consume(number, handle.generation, handle.slot, handle.nonce)
    assert strikes
    assert not segment._busy
    stranger = locks.reopen(segment.fd)
    try:
        assert locks.first_locked(stranger, LOCK_BLOCK + number) is None
    finally:
        os.close(stranger)
    assert not segment.leases(number)


# What has to happen at one instant only, forced there.


@pytest.mark.parametrize("through", ["pickle", "packet"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_message_about_what_is_here_ends_after_an_interrupt(
    installed: None, monkeypatch: pytest.MonkeyPatch, when: str, through: str
) -> None:
    """Ctrl-C as the load ends: a message that nobody will load again keeps no memory."""
    shared = shmreduce.ones(LENGTH)
    data = bytes(ForkingPickler.dumps(shared))
    (handle,) = _handles_in(data)
    segment = runtime.current().directory[handle.token]
    close = Loading.close

    def interrupted(self: Loading) -> None:
        monkeypatch.undo()
        if when == "after":
            close(self)
        raise KeyboardInterrupt

    assert segment.words[handle.slot] == MESSAGE | handle.nonce
    monkeypatch.setattr(Loading, "close", interrupted)
    with pytest.raises(KeyboardInterrupt):
        if through == "pickle":
            unpickling.loads(data)
        else:
            with_arrived({}, import_block, handle.pack())
    assert here.loading is None
    assert segment.words[handle.slot] != MESSAGE | handle.nonce
    assert (shared == 1).all()


def descriptors() -> int:
    """Return how many descriptors are open."""
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.parametrize("when", ["before", "after"])
def test_pages_are_what_they_are_said_to_be_after_an_interrupt(
    installed: None, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """Ctrl-C while a received array is made private: what comes later in its block shows,
    the array can be sent on, and a fork keeps it apart without any warning.
    """
    received = resent(np.full(LENGTH, 1.0))
    cover = mapping.Mapping.cover

    def interrupted(self: Any, *arguments: Any, **options: Any) -> None:
        monkeypatch.undo()
        if when == "after":
            cover(self, *arguments, **options)
        raise KeyboardInterrupt

    monkeypatch.setattr(mapping.Mapping, "cover", interrupted)
    with pytest.raises(KeyboardInterrupt):
        resent(received)
    received[:] = 2
    arrays = [received, resent(received)]
    received[:] = 3
    del received

    def look() -> bool:
        return [set(each.tolist()) for each in arrays] == [{3.0}, {2.0}]

    assert look()
    assert wait_for_exit(in_forked_child(look)) == 0
    arrays.clear()
    for number in range(4):
        assert (resent(np.full(LENGTH, float(number))) == number).all()


def test_a_hold_is_ended_once_after_an_interrupt(
    installed: None, long_way: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C when an array has just been received, and the traceback is kept: with that
    goes the hold, and no other that has come into its place.
    """
    expose = LiveBlocks.expose
    data = ForkingPickler.dumps(np.full(LENGTH, 1.0))

    def interrupted(self: LiveBlocks, record: Any, **options: Any) -> None:
        monkeypatch.undo()
        kept = expose(self, record, **options)
        raise KeyboardInterrupt(kept)

    monkeypatch.setattr(LiveBlocks, "expose", interrupted)
    with pytest.raises(KeyboardInterrupt) as caught:
        ForkingPickler.loads(data)
    (block,) = caught.value.args
    segment, slot = block._record.segment, block._record.slot
    assert segment.holds[slot] is block._record
    assert segment.words[slot] == segment.importer
    del block
    caught.value.args = ()
    del caught
    gc.collect()
    assert slot not in segment.holds
    assert segment.words[slot] == 0


def test_a_hold_is_ended_once_wherever_the_interrupt_comes(
    installed: None, long_way: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Either by the load, or by the death of a root that the traceback has kept: by then the
    slot may be another hold's.
    """
    held: dict[tuple[bytes, int], bool] = {}
    claim, release = Segment.claim, Segment.try_release
    twice: list[int] = []

    def note_claim(self: Segment, *arguments: Any, **options: Any) -> tuple[int, bool]:
        slot, alone = claim(self, *arguments, **options)
        held[self.token, slot] = True
        return slot, alone

    def note_release(self: Segment, block: int, slot: int) -> bool | None:
        if not held.get((self.token, slot)):
            twice.append(slot)
        released = release(self, block, slot)
        held[self.token, slot] = not released
        return released

    monkeypatch.setattr(Segment, "claim", note_claim)
    monkeypatch.setattr(Segment, "try_release", note_release)
    messages = [bytes(ForkingPickler.dumps(np.full(9000, 1.0))) for _ in range(ROUNDS)]
    # What was loaded dies later: an interrupt in a destructor ends there.
    kept: list[Any] = []

    def load() -> None:
        try:
            kept.append(ForkingPickler.loads(messages.pop()))
        except KeyboardInterrupt as error:
            # The root dies before the reference to it.
            traceback.clear_frames(error.__traceback__)
            raise

    assert sum(1 for _ in interrupted_everywhere(load, "memory/blocks.py")) > 5
    kept += map(ForkingPickler.loads, messages)
    kept.clear()
    assert twice == []


def test_a_block_that_was_filled_is_given_back_once(
    installed: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C when a message is taken back, which is then done again: a block that
    another message has been given meanwhile stays that one's.
    """
    message = shmreduce.Message()
    given = message.allocate(LENGTH)
    assert given is not None
    (lease,) = message.leases()
    filling = lease.filling
    assert filling is not None
    del given
    give_back = Heap.give_back

    def interrupted(self: Heap, segment: Any, block: int) -> None:
        monkeypatch.undo()
        give_back(self, segment, block)
        raise KeyboardInterrupt

    monkeypatch.setattr(Heap, "give_back", interrupted)
    with pytest.raises(KeyboardInterrupt):
        message.rollback()
    heap = runtime.current().heap(BY_VALUE)
    assert heap.allocate(LENGTH) == (lease.segment, lease.block)
    filling.end()
    other = heap.allocate(LENGTH)
    assert other != (lease.segment, lease.block)
    for segment, block in (other, (lease.segment, lease.block)):
        del segment.records[block]
        heap.give_back(cast("OwnedSegment", segment), block)


def test_an_interrupted_fork_hook_is_done_again(
    installed: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C at its end: no fork is left that never comes, so blocks are used again."""
    arrays = [resent(np.full(LENGTH, 1.0))]
    live = runtime.current().live
    ledger = live.ledger
    before_fork = ForkLedger.before_fork

    def interrupted(self: ForkLedger, fork: Any, **options: Any) -> None:
        monkeypatch.setattr(ForkLedger, "before_fork", before_fork)
        before_fork(self, fork, **options)
        raise KeyboardInterrupt

    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)
    monkeypatch.setattr(ForkLedger, "before_fork", interrupted)
    count, forks = descriptors(), ledger.forks
    assert wait_for_exit(in_forked_child(lambda: bool((arrays[0] == 1).all()))) == 0
    assert ledger.pending == {}
    assert ledger.forks == forks + 1
    # The ledger's own file may be new.
    assert descriptors() <= count + 1
    arrays.clear()
    assert live.unsettled == 0


def test_a_fork_hook_that_fails_leaves_the_fork_counted(
    installed: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python forks all the same: what the child sees is never used again."""
    # In a process of its own, since what it pins stays pinned.
    assert wait_for_exit(in_forked_child(lambda: fork_without_hook(monkeypatch))) == 0


def fork_without_hook(monkeypatch: pytest.MonkeyPatch) -> bool:
    """Fork while the hook fails; return whether what was alive then is kept for good."""
    array = resent(np.full(LENGTH, 1.0))
    live = runtime.current().live
    birth, forks = live.ledger.birth, live.ledger.forks

    def failing(*_: Any, **__: Any) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(sys, "unraisablehook", lambda _: None)
        patch.setattr(live, "before_fork", failing)
        assert wait_for_exit(in_forked_child(lambda: True)) == 0
    assert live.ledger.pending == {}
    assert live.ledger.forks == forks + 1
    assert live.ledger.visible(birth, live.ledger.forks)
    assert not live.ledger.visible(live.ledger.forks, live.ledger.forks)
    del array
    return live.unsettled == 1
