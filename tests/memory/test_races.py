"""Interleavings of threads, forced at the one instant where they would do harm."""

from __future__ import annotations

import errno
import gc
import multiprocessing
import os
import sys
import threading
import time
import warnings
from collections import deque
from multiprocessing import Pipe
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import pytest

import shmreduce
from shmreduce import AttachError, LeaseTimeoutError, Message
from shmreduce.memory import inspection, lease_slots, locks, message, one_buffer, runtime
from shmreduce.memory.blocks import LiveBlocks
from shmreduce.memory.family import _LOCK_BUDGET, Family
from shmreduce.memory.inspection import process_state
from shmreduce.memory.layout import BY_VALUE, CHUNK_SLOTS, LOCK_CHUNK, SHARED
from shmreduce.memory.ledger import Fork, ForkLedger
from shmreduce.memory.mailbox import Mailbox
from shmreduce.memory.mapping import Mapping
from shmreduce.memory.message import can_travel
from shmreduce.memory.segment import Segment
from shmreduce.testing.processes import OtherProcess
from shmreduce_numpy.blocks import find_block_of
from tests.memory.waiting import PATIENCE, eventually, in_forked_child, wait_for_exit

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    from shmreduce.memory.owned_segment import OwnedSegment
    from shmreduce.memory.record import Record

pytestmark = pytest.mark.usefixtures("installed")

LENGTH = 300_000
UNUSUAL = 7 << 40
"""Bytes of a block that nobody has."""


class Interrupted(dict[Any, Any]):
    """A dict that lets something else happen right after an item was taken out."""

    def __init__(self, items: dict[Any, Any], happens: Callable[[], None]) -> None:
        super().__init__(items)
        self._happens: Callable[[], None] | None = happens

    def __delitem__(self, key: Any) -> None:
        super().__delitem__(key)
        happens, self._happens = self._happens, None
        if happens is not None:
            happens()


def own_segment_of(array: Any) -> OwnedSegment:
    """Return the segment of an array that is born here."""
    block = find_block_of(array)
    assert block is not None
    segment: OwnedSegment = block._record.segment  # type: ignore[assignment]
    return segment


def test_a_block_that_two_threads_find_unused_is_freed_once() -> None:
    """A thread that is late to free a block does not free its next life, even if the
    block was freed and taken again in between.
    """

    def stays_taken() -> bool:
        array = shmreduce.full(LENGTH, 1, np.uint8)
        segment = own_segment_of(array)
        heap = runtime.current().heap(SHARED)
        taken: list[Any] = []

        def others_are_faster() -> None:
            heap.reap()
            taken.append(shmreduce.full(LENGTH, 2, np.uint8))

        segment.records = Interrupted(segment.records, others_are_faster)
        address = array.__array_interface__["data"][0]
        del array
        segment.records = dict(segment.records)
        assert taken[0].__array_interface__["data"][0] == address
        assert own_segment_of(taken[0]) is segment
        more = [shmreduce.full(LENGTH, 3, np.uint8) for _ in range(5)]
        return bool((taken[0] == 2).all() and (more[-1] == 3).all())

    # A child begins with an empty heap. Here other tests may have left blocks.
    assert wait_for_exit(in_forked_child(stays_taken)) == 0


def test_a_segment_may_be_closed_under_a_thread_that_frees_its_last_block() -> None:
    """A thread that is late to free a block touches no descriptor of the segment, which
    another thread has found empty and closed in between.
    """

    def is_closed() -> bool:
        heap = runtime.current().heap(SHARED)
        array = shmreduce.full(LENGTH, 1, np.uint8)
        segment = own_segment_of(array)

        def others_are_faster() -> None:
            heap.reap()
            with heap.exclusive():
                heap.cool(0)

        segment.records = Interrupted(segment.records, others_are_faster)
        del array
        return segment.fd == -1

    # See above; an interrupt may have lost some for good.
    assert wait_for_exit(in_forked_child(is_closed)) == 0


def test_a_chunk_of_slots_that_has_no_room_is_nobodys(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that needs a slot while another is about to take a chunk, in vain, has one
    from a chunk that no other process can take.
    """
    taken: list[int] = []
    waits = threading.Event()
    keep_trying = locks.keep_trying

    def wait(attempt: Callable[[], bool], patience: float) -> float | None:
        waits.set()
        return keep_trying(attempt, patience)

    def is_its_own() -> bool:
        heap = runtime.current().heap(BY_VALUE)
        segment, block = heap.allocate(LENGTH)
        other = threading.Thread(target=lambda: taken.append(segment._take_slot()))

        def refuse(*_: int) -> NoReturn:
            monkeypatch.undo()
            monkeypatch.setattr(locks, "keep_trying", wait)
            other.start()
            eventually(lambda: waits.is_set() or taken, "the other has a slot, or waits for one")
            raise OSError(errno.ENOSPC, "no room")

        # Else the other takes the next chunk, and needs not wait.
        segment.layout = segment.layout._replace(slots=CHUNK_SLOTS)
        monkeypatch.setattr(lease_slots, "reserve_pages", refuse)
        with pytest.raises(shmreduce.OutOfSharedMemoryError):
            segment._take_slot()
        other.join(PATIENCE)
        fd = locks.reopen(segment.fd)
        locked = locks.first_locked(fd, LOCK_CHUNK + taken[0] // CHUNK_SLOTS)
        os.close(fd)
        heap.untake(segment, block)
        return locked is not None

    # A child begins with an empty heap: nobody has taken a slot there.
    assert wait_for_exit(in_forked_child(is_its_own)) == 0


class TakenOut(dict[Any, Any]):
    """A directory from which a segment is taken out, and something else happens then."""

    happens: Callable[[Any], None] | None = None

    def pop(self, key: Any, *default: Any) -> Any:
        found = super().pop(key, *default)
        happens, self.happens = self.happens, None
        if happens is not None:
            happens(found)
        return found


def test_an_empty_segment_that_two_threads_come_to_is_open_once() -> None:
    """One is about to close it, another looks at it, and a third opens it for a message about
    a block of the past: what that has opened is closed again.
    """

    def is_closed_again() -> bool:
        state = runtime.current()
        attachments, heap = state.attachments, state.heap(SHARED)
        array = shmreduce.full(LENGTH, 1, np.uint8)
        segment = own_segment_of(array)
        data = bytes(ForkingPickler.dumps(array))
        ForkingPickler.loads(data)
        del array

        def others_come(found: Segment) -> None:
            found.pins["a look"] = None
            with pytest.raises(shmreduce.StaleHandleError):
                ForkingPickler.loads(data)

        attachments.directory = TakenOut(attachments.directory)
        attachments.directory.happens = others_come
        before = len(list(Path("/proc/self/fd").iterdir()))
        with heap.exclusive():
            heap.cool(0)
        segment.unpin("a look")
        attachments.close_idle(0)
        assert attachments.directory[segment.token] is segment
        return len(list(Path("/proc/self/fd").iterdir())) == before

    assert wait_for_exit(in_forked_child(is_closed_again)) == 0


def test_tokens_of_forks_in_several_threads_are_not_mixed_up() -> None:
    """A thread that is done forking closes its own token, not that of a thread that is
    about to fork.
    """
    ledger = ForkLedger()
    first = Fork()
    ledger.announce(first)
    ledger.before_fork(first, guarded=True)

    def fork_elsewhere() -> None:
        second = Fork()
        ledger.announce(second)
        ledger.before_fork(second, guarded=True)
        ledger.after_fork_in_parent([])

    thread = threading.Thread(target=fork_elsewhere)
    thread.start()
    thread.join(PATIENCE)
    # The other's token is closed and no child has it; this one's is still open.
    assert not ledger.visible(1, 2)
    assert ledger.visible(0, 1)
    ledger.after_fork_in_parent([])
    assert not ledger.visible(0, 2)
    # Closes its file.
    ledger.after_fork_in_child()


def test_what_is_born_between_the_hook_and_the_fork_counts_as_older() -> None:
    """A block that another thread makes while a fork is being prepared waits for the
    child, and a received array is apart from the child's.
    """
    from multiprocessing.reduction import ForkingPickler

    born: list[Any] = []

    def receive() -> None:
        data = ForkingPickler.dumps(np.ones(LENGTH, np.uint8))
        born.append(ForkingPickler.loads(data))
        born.append(shmreduce.ones(LENGTH, np.uint8))

    live = runtime.current().live
    before_fork = live.before_fork

    def hook(fork: Fork) -> None:
        before_fork(fork)
        # Hooks of others, registered earlier, run now, and threads meanwhile.
        thread = threading.Thread(target=receive)
        thread.start()
        thread.join(PATIENCE)

    live.before_fork = hook  # type: ignore[method-assign]
    other = shmreduce.ones(10, np.uint8)
    reader, writer = os.pipe()

    def look() -> bool:
        os.close(writer)
        os.read(reader, 1)
        return all((array == 1).all() for array in born)

    try:
        pid = in_forked_child(look)
    finally:
        live.before_fork = before_fork  # type: ignore[method-assign]
    os.close(reader)
    born[0][...] = 4
    assert int(born[1][0]) == 1
    born.clear()
    # Also the block by which the message was sent, which was born then.
    assert process_state().waiting >= 2
    others = [shmreduce.full(LENGTH, 3, np.uint8) for _ in range(6)]
    os.close(writer)
    assert wait_for_exit(pid) == 0
    assert process_state().waiting == 0
    del others, other


@pytest.mark.parametrize("what", ["family", "block"])
def test_a_child_does_not_inherit_a_lock_of_the_moment(what: str) -> None:
    """Locks that were held for a moment when a child was forked are not the child's:
    they end with the parent, or when the parent lets go.
    """
    array = shmreduce.ones(LENGTH, np.uint8)
    segment = own_segment_of(array)
    family = runtime.current().family
    reader, writer = os.pipe()

    def wait() -> bool:
        os.close(writer)
        os.read(reader, 1)
        return True

    # A process that ends in the middle of a transition, while a child of it lives.
    def end_in_the_middle() -> bool:
        if what == "family":
            runtime.current().family._locked(_LOCK_BUDGET, fork_and_end)
        mine = runtime.current().attachments.own_view_of(segment, object())
        mine.lock_block(0, (threading.get_ident(),))
        fork_and_end()

    def fork_and_end() -> NoReturn:
        in_forked_child(wait)
        os._exit(0)

    assert wait_for_exit(in_forked_child(end_in_the_middle)) == 0
    if what == "family":
        family.reserve(0, 1 << 40)
    else:
        mark = (threading.get_ident(),)
        # The child may not have come to its hook yet.
        eventually(lambda: segment.try_lock_block(0, mark), "the lock is free")
        segment.unlock_block(0, mark)
    os.close(reader)
    os.close(writer)


@pytest.mark.usefixtures("long_way")
def test_who_comes_into_the_middle_of_a_transition_is_refused_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A signal handler or a destructor does not wait for what it has interrupted, and what
    it has interrupted goes on.
    """
    array = shmreduce.zeros(3)
    link = Segment._link
    waited: list[float] = []

    def link_after_a_handler(segment: Segment, block: int, slot: int, word: int) -> None:
        monkeypatch.setattr(Segment, "_link", link)
        with pytest.raises(LeaseTimeoutError, match="this very thread") as caught:
            ForkingPickler.dumps(array)
        waited.append(caught.value.waited)
        # Its traceback is part of a cycle, with the pickle that is made around it.
        del caught
        link(segment, block, slot, word)

    monkeypatch.setattr(Segment, "_link", link_after_a_handler)
    data = ForkingPickler.dumps(array)
    assert waited == [0]
    assert ForkingPickler.loads(data) is not None
    assert ForkingPickler.loads(ForkingPickler.dumps(array)) is not None


def in_another_thread(function: Callable[[], object]) -> Callable[[], None]:
    """Return what calls a function in another thread, the first time it is called."""
    left = [function]

    def happens() -> None:
        while left:
            thread = threading.Thread(target=left.pop())
            thread.start()
            thread.join(PATIENCE)

    return happens


def test_threads_that_come_first_at_the_same_time_share_one_state(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What one of them has made shared is shared for the other, too."""
    made: list[Any] = []
    happens = in_another_thread(lambda: made.append(runtime.current()))

    class Slow(runtime.Runtime):
        def __init__(self, parent: runtime.Runtime | None = None) -> None:
            super().__init__(parent)
            happens()

    def race() -> bool:
        monkeypatch.setattr(runtime, "_current", [])
        monkeypatch.setattr(runtime, "_latest", None)
        monkeypatch.setattr(runtime, "Runtime", Slow)
        return runtime.current() is made[0]

    assert wait_for_exit(in_forked_child(race)) == 0


@pytest.mark.parametrize("way", ["found", "rejoined"])
def test_a_process_is_a_member_of_its_family_once(
    monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """Also if two of its threads are the first to ask."""
    _ = runtime.current().family

    def race() -> bool:
        state = runtime.current()
        if way == "found":
            state._parent_family = None
        happens = in_another_thread(lambda: state.family)
        make = Family._join

        def slow(family: Family) -> int:
            happens()
            return make(family)

        monkeypatch.setattr(Family, "_join", slow)
        before = len(list(Path("/proc/self/fd").iterdir()))
        members = [pid for pid, _ in state.family.members()]
        opened = len(list(Path("/proc/self/fd").iterdir())) - before
        return members.count(os.getpid()) == 1 and opened == (4 if way == "found" else 2)

    assert wait_for_exit(in_forked_child(race)) == 0


def test_who_looks_for_unread_messages_hides_none_from_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A segment with an unread message counts as in use all the time."""
    array = shmreduce.full(LENGTH, 1, np.uint8)
    segment = own_segment_of(array)
    data = ForkingPickler.dumps(array)
    seen: list[int] = []

    class Words:
        """The slots' words; who reads one sees what another thread would see then."""

        def __getitem__(self, slot: int) -> int:
            seen.append(len(segment.outbox))
            return words[slot]

    words = segment.words
    with monkeypatch.context() as patched:
        patched.setattr(segment, "words", Words())
        assert len(segment.unread()) == 1
    assert seen == [1]
    ForkingPickler.loads(data)
    assert segment.unread() == []


def test_what_there_is_can_be_asked_while_another_thread_takes_blocks() -> None:
    """Whenever that comes."""
    arrays = [shmreduce.ones(LENGTH, np.uint8) for _ in range(3)]

    def take_one(frame: FrameType, event: str, _: object) -> Any:
        if frame.f_code.co_filename != inspection.__file__:
            return None
        if event == "line" and len(arrays) < 30:
            in_another_thread(lambda: arrays.append(shmreduce.ones(LENGTH, np.uint8)))()
        return take_one

    before = sys.gettrace()
    try:
        sys.settrace(take_one)
        state = inspection.process_state()
    finally:
        sys.settrace(before)
    assert 3 <= state.out <= len(arrays)


def dump_value() -> bytes:
    return bytes(ForkingPickler.dumps(np.ones(LENGTH, np.uint8)))


@pytest.mark.usefixtures("long_way")
def test_a_message_that_is_taken_back_late_may_have_ended_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One thread finds that a packet cannot be sent, another that nobody has read it for long,
    and that its segment, of another process, is not in use any more.
    """
    state = runtime.current()
    with OtherProcess("fork") as other:
        block = find_block_of(ForkingPickler.loads(other.ask(dump_value)))
        assert block is not None
        sent = Message()
        assert sent.refer(block, block.nbytes) is not None
        [lease] = sent.leases()
        sent.commit()
        del block
        segment = lease.segment
        request = locks.unlock_request

        def give_up_and_close() -> None:
            segment.give_up(-1.0)
            state.attachments.close_idle(0)

        happens = in_another_thread(give_up_and_close)

        def before_it_is_locked(offset: int) -> bytes:
            happens()
            return request(offset)

        with monkeypatch.context() as patch:
            patch.setattr(locks, "unlock_request", before_it_is_locked)
            lease.undo()
        assert segment.unread() == []
        assert segment.idle
        state.attachments.close_idle(0)
        assert segment.fd == -1


def test_the_first_forks_of_two_threads_are_of_one_ledger(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each child counts for what was alive when it was forked."""
    ledger = ForkLedger()
    forks = [Fork(), Fork()]
    create = os.memfd_create
    left = [1]

    def slow(*arguments: Any) -> int:
        if left:
            left.clear()
            in_another_thread(lambda: ledger.before_fork(forks[1], guarded=True))()
        return create(*arguments)

    for fork in forks:
        ledger.announce(fork)
    monkeypatch.setattr(os, "memfd_create", slow)
    ledger.before_fork(forks[0], guarded=True)
    monkeypatch.undo()
    assert ledger.visible(0, 1)
    assert ledger.visible(1, 2)
    for fork in forks:
        ledger.withdraw(fork)
    assert not ledger.visible(0, 2)
    ledger.after_fork_in_child()


def test_forks_that_nobody_notes_may_become_fewer_while_they_are_looked_at() -> None:
    """The garbage collector may run then, and with it a destructor, which looks at them, too."""
    ledger = ForkLedger()
    # More pairs than CPython keeps the memory of.
    numbers = range(1 << 40, (1 << 40) + 5000)
    now = time.monotonic()
    ledger._unsure = dict.fromkeys(numbers, now)
    last = list(numbers)

    def note_one(phase: str, _: object) -> None:
        if phase == "start":
            ledger._unsure.pop(last.pop(), None)

    before = gc.get_threshold()
    gc.callbacks.append(note_one)
    try:
        gc.set_threshold(1)
        ledger._give_up_waiting()
    finally:
        gc.callbacks.remove(note_one)
        gc.set_threshold(*before)
    assert list(ledger._unsure) == last


def test_memory_is_had_where_no_thread_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that gives idle memory back cannot be started: nothing is lost by that."""
    state = runtime.current()

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    before = state.live.unsettled, len(state.live)
    with shmreduce.install(idle_keep=0), monkeypatch.context() as patch:
        state.idle_return.stop()
        patch.setattr(threading.Thread, "start", refuse)
        arrays = [shmreduce.full(30 << 20, 1, np.uint8) for _ in range(2)]
        assert [each[-1] for each in arrays] == [1, 1]
        arrays.clear()
    assert (state.live.unsettled, len(state.live)) == before
    for heap in state.heaps:
        heap.collect()
    assert sum(len(segment.out) for heap in state.heaps for segment in heap.segments) == 0


def test_who_finds_no_descriptor_free_in_the_mailbox_can_look_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another thread has taken the last one: the array is not lost for that."""
    reader, writer = Pipe(duplex=False)
    data = np.ones(LENGTH, np.uint8)
    sender = multiprocessing.get_context("fork").Process(target=writer.send, args=(data,))
    sender.start()
    sender.join(PATIENCE)
    receive = Mailbox._receive

    def without_descriptor(self: Mailbox, flags: int) -> Any:
        answer = receive(self, flags)
        if answer is None:
            return None
        letter, fd, size = answer
        os.close(fd)
        return letter, -1, size

    with monkeypatch.context() as patch:
        patch.setattr(Mailbox, "_receive", without_descriptor)
        with pytest.raises(AttachError) as caught:
            reader.recv()
    assert caught.value.errno == errno.EMFILE
    assert (ForkingPickler.loads(caught.value.message_bytes or b"") == data).all()
    sender.close()
    reader.close()
    writer.close()


def test_a_block_of_a_new_size_may_be_freed_while_others_are_given_back() -> None:
    """By another thread, or by the collector: the sizes are those of when it began."""
    heap = runtime.current().heap(SHARED)

    class Stack(list[Any]):
        def __len__(self) -> int:
            # As a view that dies just now.
            heap.warm.setdefault(UNUSUAL, [])
            return super().__len__()

    usual = heap.warm.pop(UNUSUAL, None)
    heap.warm[UNUSUAL + 64] = Stack()
    try:
        with heap.exclusive():
            assert heap.cool(1 << 60) == 0
    finally:
        del heap.warm[UNUSUAL + 64]
        assert heap.warm.pop(UNUSUAL) == []
        if usual is not None:
            heap.warm[UNUSUAL] = usual


def test_a_heap_that_this_thread_is_in_is_passed_over_when_others_make_room() -> None:
    """A signal handler that needs memory gets it, or a named error."""
    state = runtime.current()
    shared, other = state.heap(SHARED), state.spare_heap(SHARED)
    with shared.exclusive():
        assert state.cool_others(other) >= 0


def test_who_looks_for_unread_messages_can_be_interrupted_by_who_sends() -> None:
    """While the outbox is gone through, the garbage collector may run, and with it another
    thread, which sends: what is unread is found all the same.
    """
    array = shmreduce.ones(1000)
    segment = own_segment_of(array)
    messages = [bytes(ForkingPickler.dumps(array)) for _ in range(100)]
    unread = set(segment.outbox)
    sent: list[bytes] = []

    def send(phase: str, _: object) -> None:
        if phase == "start" and len(sent) < 10:
            sent.append(b"")
            sent[-1] = bytes(ForkingPickler.dumps(array))

    before = gc.get_threshold()
    gc.callbacks.append(send)
    try:
        gc.set_threshold(1)
        found = segment.unread()
    finally:
        gc.callbacks.remove(send)
        gc.set_threshold(*before)
    assert len(unread) >= len(messages)
    assert unread <= {each.nonce for each in found}
    for data in messages + sent:
        ForkingPickler.loads(data)


def received(value: int) -> Any:
    """Return an array of equal bytes as it arrives by value."""
    return ForkingPickler.loads(ForkingPickler.dumps(np.full(LENGTH, value, np.uint8)))


def address_of(array: Any) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


def assert_what_arrives_there_is_what_was_sent(address: int) -> None:
    """Receive several arrays at an address, and write to each, which is the receiver's right."""
    for value in (2, 3, 4):
        array = received(value)
        assert address_of(array) == address
        assert (array == value).all()
        array[:] = 99
        del array


@pytest.mark.parametrize("when", ["before it is looked at", "when it is", "when it is covered"])
def test_an_array_that_dies_while_a_fork_is_prepared_leaves_no_private_pages(
    monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """Another thread drops the last view when the hook has found the array: what arrives in
    that memory later is what was sent, not what this process has written there before.
    """
    # The hook looks at them in this order.
    arrays = [received(1), received(1)]
    dropped = 1 if when == "before it is looked at" else 0
    address = address_of(arrays[dropped])
    drop = in_another_thread(lambda: arrays.pop(dropped))
    make_private, cover = LiveBlocks.make_private, Mapping.cover

    def look(live: LiveBlocks, record: Record) -> bool | None:
        drop()
        return make_private(live, record)

    def show(mapping: Mapping, *where: int, private: bool) -> None:
        drop()
        cover(mapping, *where, private=private)

    with monkeypatch.context() as patch:
        if when == "when it is covered":
            patch.setattr(Mapping, "cover", show)
        else:
            patch.setattr(LiveBlocks, "make_private", look)
        assert wait_for_exit(in_forked_child(lambda: True)) == 0
    assert len(arrays) == 1
    assert_what_arrives_there_is_what_was_sent(address)


class Clock:
    """The module ``time`` for who waits: each look at the clock takes a second.

    Parameters
    ----------
    looks : int
        At the clock, after which something happens.
    happens : callable
        Is called then.
    """

    def __init__(self, looks: int, happens: Callable[[], object]) -> None:
        self.looks = 0
        self._left = looks
        self._happens = happens

    def monotonic(self) -> float:
        self.looks += 1
        if self.looks == self._left:
            self._happens()
        return float(self.looks)

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_fork_waits_for_a_thread_that_makes_pages_private(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However long that thread is without a processor: the child's array is apart, and nobody
    is warned of one that is not.
    """
    array = received(1)
    block = find_block_of(array)
    assert block is not None
    cover, inside, go_on = Mapping.cover, threading.Event(), threading.Event()

    def cover_slowly(mapping: Mapping, *where: int, private: bool) -> None:
        inside.set()
        assert go_on.wait(PATIENCE)
        cover(mapping, *where, private=private)

    live, record = runtime.current().live, block._record
    thread = threading.Thread(target=live.make_private, args=(record,))

    def let_go() -> None:
        go_on.set()
        thread.join(PATIENCE)

    clock = Clock(5, let_go)
    with monkeypatch.context() as patch:
        patch.setattr(Mapping, "cover", cover_slowly)
        patch.setattr("shmreduce.memory.blocks.time", clock)
        thread.start()
        assert inside.wait(PATIENCE)
        pid = in_forked_child(lambda: live.exposed == 0)
    assert wait_for_exit(pid) == 0
    assert record.private


def test_a_fork_keeps_apart_what_another_thread_gives_back_in_vain(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A thread that undoes a load finds that somebody has the array, and leaves it as it is."""
    array = received(1)
    block = find_block_of(array)
    assert block is not None
    make_private = LiveBlocks.make_private

    def look(live: LiveBlocks, record: Record) -> bool | None:
        monkeypatch.undo()
        record.ended = True
        try:
            return make_private(live, record)
        finally:
            record.ended = False

    inherited = runtime.current().live
    monkeypatch.setattr(LiveBlocks, "make_private", look)
    pid = in_forked_child(lambda: inherited.exposed == 0)
    assert wait_for_exit(pid) == 0
    assert block._record.private


def test_a_fork_does_not_wait_for_what_it_has_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal handler that forks while its own thread makes pages private."""
    array = received(1)
    block = find_block_of(array)
    assert block is not None
    cover, pids = Mapping.cover, list[int]()
    live = runtime.current().live

    def interrupted(mapping: Mapping, *where: int, private: bool) -> None:
        monkeypatch.undo()
        monkeypatch.setattr("shmreduce.memory.blocks.time", clock)
        with pytest.warns(shmreduce.ShmreduceWarning, match="1 arrays"):
            pids.append(in_forked_child(lambda: live.exposed == 1))
        cover(mapping, *where, private=private)

    clock = Clock(2, lambda: pytest.fail("it waits"))
    monkeypatch.setattr(Mapping, "cover", interrupted)
    assert live.make_private(block._record)
    assert wait_for_exit(pids[0]) == 0


def test_a_fork_leaves_alone_what_another_thread_is_giving_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A load that failed turns its array into a message again while a child is forked: the
    pages that the next try finds are the block's.
    """
    block = find_block_of(received(1))
    assert block is not None
    address = block._record.address
    show_file = LiveBlocks._show_file
    statuses: list[int] = []

    def fork() -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            statuses.append(wait_for_exit(in_forked_child(lambda: True)))

    happens = in_another_thread(fork)

    def show_and_fork(live: LiveBlocks, record: Record) -> bool:
        shown = show_file(live, record)
        happens()
        return shown

    with monkeypatch.context() as patch:
        patch.setattr(LiveBlocks, "_show_file", show_and_fork)
        assert runtime.current().live.take_back(block)
    assert statuses == [0]
    record = block._record
    assert record.slot is not None
    del block
    assert record.segment.try_release(record.block, record.slot)
    assert_what_arrives_there_is_what_was_sent(address)


@pytest.mark.parametrize("kind", ["own", "standard"])
@pytest.mark.parametrize("wrapped", [False, True])
def test_what_was_written_before_it_was_sent_arrives_while_another_thread_forks(
    monkeypatch: pytest.MonkeyPatch, kind: str, wrapped: bool
) -> None:
    """The pages of a received array are private already, and the thread that has made them so
    has not noted it yet: what was written since is not in the block, and arrives all the same.
    """
    array = received(1)
    block = find_block_of(array)
    assert block is not None
    record = block._record
    del block
    covered, looked_at = threading.Event(), threading.Event()
    cover = Mapping.cover

    def cover_slowly(mapping: Mapping, *where: int, private: bool) -> None:
        cover(mapping, *where, private=private)
        if threading.current_thread() is forking:
            covered.set()
            looked_at.wait(PATIENCE)

    def look(*arguments: Any) -> bool:
        found = can_travel(*arguments)
        looked_at.set()
        forking.join(PATIENCE)
        return found

    # As the hook of a fork does.
    forking = threading.Thread(target=record.live.make_private, args=(record,))
    context: Any = shmreduce.get_context() if kind == "own" else multiprocessing.get_context()
    reader, writer = context.Pipe(duplex=False)
    with monkeypatch.context() as patch:
        patch.setattr(Mapping, "cover", cover_slowly)
        for module in (message, one_buffer):
            patch.setattr(module, "can_travel", look)
        forking.start()
        assert covered.wait(PATIENCE)
        array[:] = 2
        writer.send([array] if wrapped else array)
    assert record.private
    arrived = reader.recv()
    assert ((arrived[0] if wrapped else arrived) == 2).all()
    reader.close()
    writer.close()


def test_a_hold_that_two_threads_end_is_ended_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A handler that raises may leave it in two queues: the slot is another hold's afterwards."""
    block = find_block_of(received(1))
    assert block is not None
    record = block._record
    live, segment = record.live, record.segment
    show_file, try_release = LiveBlocks._show_file, Segment.try_release
    happens = in_another_thread(lambda: live._end(record))
    released: list[tuple[int, int]] = []

    def show(live: LiveBlocks, record: Record) -> bool:
        happens()
        return show_file(live, record)

    def release(segment: Segment, block: int, slot: int) -> bool | None:
        released.append((block, slot))
        return try_release(segment, block, slot)

    with monkeypatch.context() as patch:
        patch.setattr(LiveBlocks, "_show_file", show)
        patch.setattr(Segment, "try_release", release)
        assert live._end(record)
    assert released == [(record.block, record.slot)]
    assert record.slot not in segment.holds


class Keeps:
    """Takes holds over, and keeps them."""

    def __init__(self, happens: Callable[[], object] = lambda: None) -> None:
        self.holds: deque[Record] = deque()
        self.closed = False
        self._happens = happens

    def on_kept(self) -> None:
        self._happens()


@pytest.mark.parametrize("through", ["taken over", "ended"])
def test_a_hold_that_is_being_handed_over_is_not_ended(
    monkeypatch: pytest.MonkeyPatch, through: str
) -> None:
    """Nor is one handed over that another thread ends at the same time."""
    block = find_block_of(received(1))
    assert block is not None
    record = block._record
    live = record.live
    keeper, other = Keeps(), Keeps()
    is_alone = Segment.is_alone

    def end() -> None:
        if through == "ended":
            assert live._end(record)
        else:
            assert live._hand_over(record, other)

    happens = in_another_thread(end)

    def look(segment: Segment, *where: int) -> bool:
        found = is_alone(segment, *where)
        happens()
        return found

    with monkeypatch.context() as patch:
        patch.setattr(Segment, "is_alone", look)
        assert not live._hand_over(record, keeper)
    assert not keeper.holds
    if through == "taken over":
        live.end_kept(other.holds.pop())
    assert record.slot not in record.segment.holds
    assert not live.unsettled


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_hold_that_was_handed_over_is_its_keepers_whatever_comes_then() -> None:
    """Ctrl-C when the keeper takes note: nobody else ends the hold, too."""

    def struck() -> None:
        raise KeyboardInterrupt

    array = received(1)
    block = find_block_of(array)
    assert block is not None
    record, keeper = block._record, Keeps(struck)
    record.keep = keeper
    del array, block
    assert list(keeper.holds) == [record]
    assert not record.live.unsettled
    record.live.settle()
    assert record.segment.is_alone(record.block, record.slot or 0)
    record.live.end_kept(keeper.holds.pop())
    assert record.slot not in record.segment.holds
