"""What a forked child sees stays as it was, whatever its parent does."""

from __future__ import annotations

import ctypes
import errno
import gc
import mmap
import os
import signal
import subprocess
import sys
import threading
import warnings
from collections import deque
from multiprocessing import Pipe
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pytest

import shmreduce
from shmreduce.memory import heap as heap_module
from shmreduce.memory import locks, mapping, reservation, runtime, visible_records
from shmreduce.memory.attachments import boot_identity
from shmreduce.memory.family import Family
from shmreduce.memory.inspection import process_state
from shmreduce.memory.layout import BY_VALUE, SHARED
from shmreduce.memory.ledger import ForkLedger
from shmreduce.memory.loading import discard_message, import_block
from shmreduce.memory.message import Message
from shmreduce.memory.segment_creation import create_segment
from shmreduce.memory.segment_file import reserve_pages
from shmreduce.memory.visible_records import VisibleRecords
from tests.memory.resending import resent
from tests.memory.waiting import PATIENCE, eventually, in_forked_child, receive, wait_for_exit

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.usefixtures("strategy")

LENGTH = 300_000


def address(array: Any) -> int:
    found: int = array.__array_interface__["data"][0]
    return found


class Child:
    """A forked child that does something each time it is told to."""

    def __init__(self, *steps: Any) -> None:
        self._ours, theirs = Pipe()

        def run() -> bool:
            self._ours.close()
            for step in steps:
                assert receive(theirs) == "go"
                theirs.send(step())
            return True

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            self.pid = in_forked_child(run)
        theirs.close()

    def step(self) -> Any:
        """Let the child do its next step and return what that returns."""
        self._ours.send("go")
        return receive(self._ours)

    def end(self) -> None:
        """Wait for the child's end, which must be a good one."""
        self._ours.close()
        assert wait_for_exit(self.pid) == 0


@pytest.fixture(params=["shared", "received"])
def inherited(request: pytest.FixtureRequest) -> Iterator[list[Any]]:
    """A list with the one reference to an array of ones."""
    array = np.ones(LENGTH, np.uint8)
    held = [shmreduce.share(array) if request.param == "shared" else resent(array)]
    yield held
    held.clear()


def occupy(count: int = 12) -> list[Any]:
    """Return arrays of other bytes that take whatever memory is free for them."""
    array = np.full(LENGTH, 7, np.uint8)
    return [shmreduce.share(array) for _ in range(count)] + [resent(array) for _ in range(count)]


def test_a_child_keeps_the_bytes_of_what_its_parent_dropped(inherited: list[Any]) -> None:
    """The parent drops an array and allocates again: the child's bytes stay; when the
    child has gone the block is used again.
    """
    where = address(inherited[0])
    child = Child(lambda: int(inherited[0].sum()), lambda: int(inherited[0].sum()))
    assert child.step() == LENGTH
    inherited.clear()
    others = occupy()
    assert where not in [address(each) for each in others]
    assert child.step() == LENGTH
    child.end()
    del others
    eventually(lambda: process_state().waiting == 0, "the block is released")


def test_the_block_is_used_again_after_the_childs_end() -> None:
    """A shared block that waited for a forked child is the next one handed out."""
    held = [shmreduce.share(np.ones(LENGTH, np.uint8))]
    where = address(held[0])
    child = Child(lambda: int(held[0].sum()))
    held.clear()
    assert process_state().waiting == 1
    assert child.step() == LENGTH
    child.end()
    eventually(lambda: process_state().waiting == 0, "the block is released")
    assert address(shmreduce.share(np.ones(LENGTH, np.uint8))) == where


def test_a_child_keeps_what_its_parent_was_filling() -> None:
    """A child that is forked while a message is made may have kept a view of it: the
    block waits for the child, also when the parent has no view and the message is read.
    """
    message = shmreduce.Message()
    given = message.allocate(LENGTH)
    assert given is not None
    view, handle = given
    view[:] = bytes([1]) * LENGTH
    held = [np.frombuffer(view, np.uint8)]
    del given, view
    where = address(held[0])
    child = Child(lambda: int(held[0].sum()))
    held.clear()
    message.commit()
    shmreduce.import_block(handle)
    assert process_state().waiting == 1
    assert where not in [address(each) for each in occupy()]
    assert child.step() == LENGTH
    child.end()
    eventually(lambda: process_state().waiting == 0, "the block is released")


def test_a_grandchild_pins_as_its_parent_does() -> None:
    """The block waits also for a grandchild whose parent has gone."""
    held = [shmreduce.share(np.ones(LENGTH, np.uint8))]
    ours, theirs = Pipe()

    def leave_a_grandchild() -> bool:
        def look() -> bool:
            assert receive(theirs) == "go"
            theirs.send(int(held[0].sum()))
            return True

        in_forked_child(look)
        return True

    assert wait_for_exit(in_forked_child(leave_a_grandchild)) == 0
    theirs.close()
    held.clear()
    others = occupy()
    assert process_state().waiting == 1
    ours.send("go")
    assert receive(ours) == LENGTH
    del others
    eventually(lambda: process_state().waiting == 0, "the grandchild has gone")
    ours.close()


def test_a_killed_child_pins_nothing() -> None:
    """A block that waited for a forked child is released when the child is killed."""
    held = [shmreduce.share(np.ones(LENGTH, np.uint8))]
    child = Child(lambda: None)
    held.clear()
    assert process_state().waiting == 1
    os.kill(child.pid, signal.SIGKILL)
    assert wait_for_exit(child.pid) == -signal.SIGKILL
    assert process_state().waiting == 0
    child._ours.close()


def test_an_executed_program_pins_nothing() -> None:
    """A subprocess that runs another program does not keep blocks waiting."""
    held = [shmreduce.share(np.ones(LENGTH, np.uint8))]
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as program:
        held.clear()
        assert process_state().waiting == 0
        program.communicate(b"\n", timeout=PATIENCE)


def test_a_child_that_executes_a_program_pins_nothing_from_then_on() -> None:
    """``os.fork`` and ``os.execv``: the block is free once the program runs."""
    held = [shmreduce.share(np.ones(LENGTH, np.uint8))]
    reader, writer = os.pipe()
    os.set_inheritable(reader, True)
    pid = os.fork()
    if pid == 0:
        os.close(writer)
        code = f"import os; os.read({reader}, 1)"
        os.execv(sys.executable, [sys.executable, "-c", code])
    os.close(reader)
    held.clear()
    eventually(lambda: process_state().waiting == 0, "the program runs")
    os.close(writer)
    assert wait_for_exit(pid) == 0


def test_received_arrays_are_apart_after_a_fork() -> None:
    """What parent or child write to an array received by value the other does not see."""
    array = resent(np.arange(LENGTH, dtype=np.int32))

    def write_in_child() -> int:
        array[10] = -10
        return int(array[20])

    child = Child(write_in_child, lambda: [int(array[10]), int(array[20])])
    array[20] = -20
    assert child.step() == 20
    assert (int(array[10]), int(array[20])) == (10, -20)
    assert child.step() == [-10, 20]
    child.end()


def test_shared_arrays_stay_shared_over_a_fork() -> None:
    """What parent or child write to a shared array the other sees."""
    array = shmreduce.share(np.arange(LENGTH, dtype=np.int32))

    def write_in_child() -> int:
        array[10] = -10
        return int(array[20])

    child = Child(write_in_child)
    array[20] = -20
    assert child.step() == -20
    assert int(array[10]) == -10
    child.end()


def test_a_child_sends_what_it_inherited(inherited: list[Any]) -> None:
    """A forked child sends an inherited array; it arrives whole though parent and
    child have dropped theirs before it is read.
    """
    reader, writer = Pipe(duplex=False)

    def send() -> bool:
        writer.send(inherited[0])
        inherited.clear()
        return True

    child = Child(send, lambda: True)
    assert child.step()
    inherited.clear()
    others = occupy()
    loaded = receive(reader)
    # Not before: os._exit() hands no messages over.
    assert child.step()
    child.end()
    assert loaded.sum() == LENGTH
    del loaded, others
    reader.close()
    writer.close()


def test_a_child_receives_what_its_parent_sent_before_the_fork() -> None:
    """A message sent before the fork can be read by the child instead of the parent."""
    reader, writer = Pipe(duplex=False)
    writer.send(np.ones(LENGTH, np.uint8))
    child = Child(lambda: int(receive(reader).sum()))
    assert child.step() == LENGTH
    child.end()
    reader.close()
    writer.close()


def test_memory_made_by_a_child_is_its_own() -> None:
    """Parent and child that allocate at the same time do not get the same memory."""
    warm = shmreduce.share(np.ones(LENGTH, np.uint8))
    del warm
    process_state()
    kept: list[Any] = []

    def make() -> int:
        kept.append(shmreduce.share(np.full(LENGTH, 3, np.uint8)))
        return int(kept[0].sum())

    child = Child(make, lambda: int(kept[0].sum()))
    assert child.step() == 3 * LENGTH
    mine = [shmreduce.share(np.full(LENGTH, 5, np.uint8)) for _ in range(3)]
    assert child.step() == 3 * LENGTH
    assert [int(each.sum()) for each in mine] == [5 * LENGTH] * 3
    child.end()


def test_a_fork_beside_threads_that_send() -> None:
    """While threads send and receive, forked children find intact arrays and can
    send and receive themselves.
    """
    stop = threading.Event()
    errors: list[str] = []
    published: list[Any] = []

    def work(value: int) -> None:
        while not stop.is_set():
            array = resent(np.full(20_000, value, np.uint8))
            published.append((array, value))
            if (array != value).any():
                errors.append(f"thread {value}")
            del published[:-6]

    threads = [threading.Thread(target=work, args=(value,)) for value in (1, 2, 3)]
    for thread in threads:
        thread.start()

    def look() -> bool:
        seen = list(published)
        for _ in range(30):
            if any((array != value).any() for array, value in seen):
                return False
        return bool((resent(np.full(20_000, 9, np.uint8)) == 9).all())

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        for _ in range(25):
            pids = [in_forked_child(look) for _ in range(2)]
            assert [wait_for_exit(pid) for pid in pids] == [0, 0]
    stop.set()
    for thread in threads:
        thread.join(PATIENCE)
    published.clear()
    assert errors == []


def test_threads_that_fork_at_once() -> None:
    """Forks of several threads at once each keep what their child sees."""
    children: list[int] = []
    held: list[Any] = []
    gate = threading.Barrier(4)
    reader, writer = os.pipe()

    def look() -> bool:
        os.close(writer)
        os.read(reader, 1)
        return all((array == 1).all() for array in held)

    def fork() -> None:
        for _ in range(5):
            gate.wait(PATIENCE)
            held.append(shmreduce.share(np.ones(LENGTH, np.uint8)))
            children.append(in_forked_child(look))

    threads = [threading.Thread(target=fork) for _ in range(4)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
    os.close(reader)
    held.clear()
    others = occupy(30)
    os.close(writer)
    assert [wait_for_exit(pid) for pid in children] == [0] * 20
    del others
    gc.collect()
    eventually(lambda: process_state().waiting == 0, "all children have gone")


def test_a_signal_handler_that_forks() -> None:
    """A handler that forks while arrays are sent disturbs neither parent nor child."""
    exits: list[int] = []

    def look() -> bool:
        return bool((resent(np.full(20_000, 5, np.uint8)) == 5).all())

    def fork(_number: int, _frame: object) -> None:
        pid = in_forked_child(look)
        exits.append(pid)

    before = signal.signal(signal.SIGALRM, fork)
    try:
        turns = 0
        armed = -1
        while len(exits) < 20 and turns < 200_000:
            turns += 1
            if armed < len(exits):
                # Once for each fork: with a period, handlers that take longer
                # than it would interrupt each other without end.
                armed = len(exits)
                signal.setitimer(signal.ITIMER_REAL, 0.003)
            assert (resent(np.full(20_000, turns % 250, np.uint8)) == turns % 250).all()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert len(exits) >= 20
    assert [wait_for_exit(pid) for pid in exits] == [0] * len(exits)


def test_a_fork_without_descriptors_left_never_reuses(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the fork cannot be noted for want of descriptors, what lived then stays put."""
    ledger = runtime.current().live.ledger
    held = [shmreduce.share(np.ones(LENGTH, np.uint8))]
    # A process of its own, since what it pins stays pinned.
    child = Child(lambda: _pin_without_descriptors(held))
    held.clear()
    assert child.step() == [1, 1]
    child.end()
    assert ledger is runtime.current().live.ledger
    eventually(lambda: process_state().waiting == 0, "the child has gone")


def _pin_without_descriptors(held: list[Any]) -> list[int]:
    import resource

    mine = [shmreduce.share(held[0])]
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
    pid = in_forked_child(lambda: True)
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    mine.clear()
    first = process_state().waiting
    assert wait_for_exit(pid) == 0
    return [first, process_state().waiting]


@pytest.mark.parametrize("step", ["ledger.announce", "idle_return.before_fork"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, TimeoutError])
def test_what_is_raised_in_a_fork_hook_does_not_leave_the_fork_unguarded(
    inherited: list[Any], monkeypatch: pytest.MonkeyPatch, error: type[BaseException], step: str
) -> None:
    """By Ctrl-C, or by a handler that gives up after some time: Python prints it and forks
    all the same; the hook has done its work.
    """
    state = runtime.current()
    owner: Any = state.live.ledger if step == "ledger.announce" else state.idle_return
    name = step.rpartition(".")[2]
    does = getattr(owner, name)
    left = [error()]

    def interrupted(*arguments: Any) -> None:
        if left:
            raise left.pop()
        does(*arguments)

    ignored: list[Any] = []
    monkeypatch.setattr(owner, name, interrupted)
    monkeypatch.setattr(sys, "unraisablehook", lambda args: ignored.append(args.exc_type))
    where = address(inherited[0])
    child = Child(lambda: int(inherited[0].sum()))
    assert ignored == [error]
    inherited.clear()
    assert where not in [address(each) for each in occupy()]
    assert child.step() == LENGTH
    child.end()
    eventually(lambda: process_state().waiting == 0, "the block is released")


_GIVES_UP = """
import ctypes, functools, os, signal, sys

def give_up(number, frame):
    raise TimeoutError

signal.signal(signal.SIGALRM, give_up)
left = [True]
# Not Python code, so that the handler runs in whatever Python code comes next.
strike = functools.partial(ctypes.pythonapi.PyErr_SetInterruptEx, signal.SIGALRM)
# Of these hooks the last that was registered comes first.
if sys.argv[1] == "after":
    os.register_at_fork(before=strike)
import numpy, shmreduce
from shmreduce.memory import runtime
if sys.argv[1] == "before":
    os.register_at_fork(before=strike)
lost = []
sys.unraisablehook = lambda args: lost.append(args.exc_type)
array = shmreduce.full(300_000, 1, numpy.uint8)
reader, writer = os.pipe()
child = os.fork()
if not child:
    os.read(reader, 1)
    os._exit(0 if (array == 1).all() else 1)
del array
others = [shmreduce.full(300_000, 2, numpy.uint8) for _ in range(3)]
os.write(writer, b"!")
assert os.waitpid(child, 0)[1] == 0, "the child sees other bytes"
ledger, live = runtime.current().live.ledger, runtime.current().live
live.settle()
assert lost == [TimeoutError], lost
assert (ledger.pending, live.unsettled) == ({}, 0), "nothing is used again"
"""


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_signal_that_comes_during_a_fork_does_not_keep_its_hooks_from_their_work(
    when: str,
) -> None:
    """Its handler raises in the first of the hooks, in which it is printed: the child's
    bytes stay, and the block is used again when the child has gone.
    """
    # CPython 3.12 and later warn of a fork with threads, as NumPy may have some.
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", _GIVES_UP, when]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert (done.returncode, done.stderr) == (0, "")


_MAKES_AT_THE_FORK = """
import os

made = []
# This hook comes after those of shmreduce, which is imported later.
os.register_at_fork(before=lambda: made.append(shmreduce.full(300_000, 1, numpy.uint8)))
import numpy, shmreduce
shmreduce.zeros(300_000, numpy.uint8)
reader, writer = os.pipe()
child = os.fork()
if not child:
    os.read(reader, 1)
    os._exit(0 if (made[0] == 1).all() else 1)
made.clear()
others = [shmreduce.full(300_000, 2, numpy.uint8) for _ in range(3)]
os.write(writer, b"!")
assert os.waitpid(child, 0)[1] == 0, "the child sees other bytes"
"""


def test_what_is_made_just_before_a_fork_that_needs_no_guard_is_the_childs_as_well() -> None:
    """When the fork was prepared there was nothing that a child could see."""
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", _MAKES_AT_THE_FORK]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_arrays_that_lived_through_the_same_fork_are_one_question(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However many are dropped while the child lives, each message asks for them once."""
    kept = [shmreduce.zeros(100, np.uint8) for _ in range(300)]
    child = Child(lambda: 0)
    kept.clear()
    assert process_state().waiting == 300
    asked: list[int] = []
    first_locked = locks.first_locked

    def count(fd: int, start: int, *more: Any) -> Any:
        asked.append(start)
        return first_locked(fd, start, *more)

    with monkeypatch.context() as patch:
        patch.setattr(locks, "first_locked", count)
        runtime.current().live.settle()
    assert len(asked) == 1
    assert child.step() == 0
    child.end()
    eventually(lambda: process_state().waiting == 0, "the blocks are released")


def test_a_record_that_comes_while_its_group_is_dropped_is_released_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Neither lost nor released twice, though nobody waits."""
    records = VisibleRecords(ForkLedger())
    released: list[Any] = []

    class Interrupted(deque[Any]):
        def append(self, record: Any) -> None:
            if "once" not in released:
                released.append("once")
                # The group that this one goes into is empty and listed: another thread drops it.
                records.release_unseen(released.append)
            super().append(record)

    monkeypatch.setattr(visible_records, "deque", Interrupted)
    record: Any = SimpleNamespace(birth=0, death=0)
    records.add(record)
    assert (released, len(records)) == (["once"], 1)
    records.release_unseen(released.append)
    assert (released, len(records)) == (["once", record], 0)


def test_a_record_that_comes_before_its_empty_group_is_dropped_is_released_too() -> None:
    """Its adder could not see that the group was about to go."""
    records = VisibleRecords(ForkLedger())
    first, late = (SimpleNamespace(birth=0, death=0, name=name) for name in ("first", "late"))

    class Overtaken(dict[Any, Any]):
        def pop(self, *arguments: Any) -> Any:
            if late not in released:
                records.add(cast("Any", late))
            return super().pop(*arguments)

    released: list[Any] = []
    records.groups = Overtaken()
    records.add(cast("Any", first))
    records.release_unseen(released.append)
    assert (released, len(records)) == ([first, late], 0)


def test_a_group_that_took_the_place_of_an_empty_one_is_not_lost_with_it() -> None:
    """While one thread releases the last record, another drops the group, a third adds one."""
    records = VisibleRecords(ForkLedger())
    first, late = (SimpleNamespace(birth=0, death=0, name=name) for name in ("first", "late"))
    released: list[Any] = []

    def release(record: Any) -> None:
        released.append(record)
        if record is first:
            records.release_unseen(released.append)
            records.add(cast("Any", late))

    records.add(cast("Any", first))
    records.release_unseen(release)
    assert (released, len(records)) == ([first, late], 0)


def test_an_exception_in_a_release_leaves_the_other_records() -> None:
    """They are released by the next call, in whichever group they are."""
    records = VisibleRecords(ForkLedger())
    three = [SimpleNamespace(birth=0, death=0, name=name) for name in "abc"]
    released: list[Any] = []

    class Overtaken(dict[Any, Any]):
        def pop(self, *arguments: Any) -> Any:
            if three[1] not in released:
                for late in three[1:]:
                    records.add(cast("Any", late))
            return super().pop(*arguments)

    def release(record: Any) -> None:
        released.append(record)
        if record is three[1]:
            raise KeyboardInterrupt

    records.groups = Overtaken()
    records.add(cast("Any", three[0]))
    with pytest.raises(KeyboardInterrupt):
        records.release_unseen(release)
    records.release_unseen(release)
    assert (released, len(records)) == (three, 0)


def test_a_destructor_that_forks_in_the_thread_for_idle_memory_waits_for_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Least of all for that thread: its child is guarded as any."""
    begun: list[None] = []
    exits: list[int] = []
    ignored: list[Any] = []
    idle = runtime.current().idle_return
    look_after = idle._look_after

    def fork(*arguments: Any) -> None:
        # As a destructor that the collector calls there.
        if not begun:
            begun.append(None)
            # After the fork there is another such thread.
            exits.append(in_forked_child(lambda: True))
        look_after(*arguments)

    monkeypatch.setattr(sys, "unraisablehook", lambda args: ignored.append(args.exc_value))
    monkeypatch.setattr(idle, "_look_after", fork)
    forks = runtime.current().live.ledger.forks
    with warnings.catch_warnings(), shmreduce.install(idle_keep=0, idle_seconds=0.01):
        warnings.simplefilter("ignore", DeprecationWarning)
        array = shmreduce.share(np.ones(LENGTH, np.uint8))
        eventually(lambda: exits, "the fork")
        assert wait_for_exit(exits[0]) == 0
    del array
    assert ignored == []
    assert runtime.current().live.ledger.forks == forks + 1


def test_ctrl_c_while_the_last_view_dies_does_not_free_what_a_child_sees(
    inherited: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python prints what a weak reference's callback raises: the block waits for the child."""
    live = runtime.current().live

    class Interrupted(dict[int, Any]):
        struck = False

        def get(self, key: int, default: Any = None) -> Any:
            if not self.struck:
                self.struck = True
                raise KeyboardInterrupt
            return super().get(key, default)

    where = address(inherited[0])
    child = Child(lambda: int(inherited[0].sum()))
    ignored: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda args: ignored.append(args.exc_type))
    roots = live._roots
    monkeypatch.setattr(live, "_roots", Interrupted(roots))
    inherited.clear()
    assert ignored == [KeyboardInterrupt]
    # The interrupt came before the root was struck off the list.
    roots.clear()
    roots.update(live._roots)
    monkeypatch.setattr(live, "_roots", roots)
    live.settle()
    assert where not in [address(each) for each in occupy()]
    assert child.step() == LENGTH
    child.end()
    eventually(lambda: process_state().waiting == 0, "the block is released")


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_fork_that_cannot_keep_arrays_apart_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without room for private pages a received array is shared with the child: the
    parent is warned of how many there are, and what the child inherits says so, too.
    """
    received = [resent(np.ones(LENGTH, np.uint8)) for _ in range(3)]
    shared = shmreduce.share(np.ones(LENGTH, np.uint8))
    map_pages = mapping._mmap

    def no_room(address: int, size: int, protection: int, flags: int, *rest: int) -> Any:
        if flags & mmap.MAP_PRIVATE:
            ctypes.set_errno(errno.ENOMEM)
            return ctypes.c_void_p(-1).value
        return map_pages(address, size, protection, flags, *rest)

    live = runtime.current().live
    with monkeypatch.context() as patch:
        patch.setattr(mapping, "_mmap", no_room)
        with pytest.warns(shmreduce.ShmreduceWarning, match="3 arrays .*max_map_count"):
            pid = in_forked_child(lambda: live.exposed == 3)
        assert wait_for_exit(pid) == 0
    # Now there is room: this child has its own.
    assert wait_for_exit(in_forked_child(lambda: live.exposed == 0)) == 0
    assert all(each.all() for each in (*received, shared))


class Forking:
    """Forks when it is pickled, and both processes go on."""

    def __init__(self, then: Any) -> None:
        self.pid = -1
        self._then = then

    def __reduce__(self) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            self.pid = os.fork()
        if not self.pid:
            self._then()
        return int, ()


@pytest.mark.parametrize("kind", ["value", "shared", "received"])
def test_a_child_that_is_forked_while_a_message_is_made_makes_its_own(kind: str) -> None:
    """It does not write to what its parent's reader gets, nor end its parent's leases."""
    first, second = (np.full(LENGTH, number, np.uint8) for number in (1, 2))
    if kind == "shared":
        first, second = shmreduce.share(first), shmreduce.share(second)
    elif kind == "received":
        first, second = resent(first), resent(second)
    later = resent(second) if kind == "value" else second

    def change() -> None:
        if kind == "value":
            second[:] = 66

    forking = Forking(change)
    data = None
    try:
        data = ForkingPickler.dumps([first, forking, second])
    finally:
        if not forking.pid:
            if data is not None and kind == "shared":
                # Nobody is going to read it.
                discard_message(data)
            os._exit(0 if data is not None else 1)
    assert wait_for_exit(forking.pid) == 0
    received = ForkingPickler.loads(data)
    assert [set(each.tolist()) for each in (received[0], received[2])] == [{1}, {2}]
    assert set(later.tolist()) == {2}
    for number in range(3):
        resent(np.full(LENGTH, 10 + number, np.uint8))
    assert [set(each.tolist()) for each in (received[0], received[2])] == [{1}, {2}]


def test_a_child_never_goes_on_with_its_parents_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever comes into the hook that gives it one of its own."""
    parents = runtime.current()

    def failing(*_: Any) -> Any:
        raise MemoryError

    def look() -> bool:
        monkeypatch.undo()
        return runtime.current() is not parents and not parents.live.current

    monkeypatch.setattr(ForkLedger, "after_fork_in_child", failing)
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)
    pid = in_forked_child(look)
    monkeypatch.undo()
    assert wait_for_exit(pid) == 0


def test_a_child_knows_the_host_without_a_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has been told by its parent; who begins without one is told so."""
    boot = runtime.current().boot

    def no_descriptor(*_: Any, **__: Any) -> Any:
        raise OSError(errno.EMFILE, "none free")

    with monkeypatch.context() as patch:
        patch.setattr("builtins.open", no_descriptor)
        with pytest.raises(shmreduce.SegmentError) as caught:
            boot_identity()
        pid = in_forked_child(lambda: runtime.current().boot == boot)
    assert caught.value.errno == errno.EMFILE
    assert wait_for_exit(pid) == 0


def test_a_child_that_goes_on_filling_a_block_writes_to_memory_of_its_own() -> None:
    """Where a fork comes while a message is filled, the message has what its parent writes."""
    message = Message()
    given = message.allocate(LENGTH)
    assert given is not None
    view, handle = given

    def child() -> bool:
        view[:] = b"c" * LENGTH
        return bytes(view) == b"c" * LENGTH

    view[:] = b"p" * LENGTH
    assert wait_for_exit(in_forked_child(child)) == 0
    view.release()
    message.commit()
    assert bytes(import_block(handle).buffer) == b"p" * LENGTH


@pytest.mark.parametrize("kind", [BY_VALUE, SHARED])
def test_a_child_that_goes_on_taking_a_block_leaves_its_parents_tables_alone(
    kind: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a fork comes while a block is taken, the parent has its block, though the child
    gives it up.
    """
    heap = runtime.current().heap(kind)
    reserve, children = Family.reserve, list[int]()

    def forking(*arguments: Any) -> None:
        if not children:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)
                children.append(os.fork())
            if not children[0]:
                raise KeyboardInterrupt
            assert wait_for_exit(children[0]) == 0
        reserve(*arguments)

    monkeypatch.setattr(Family, "reserve", forking)
    # More than any block that is at hand.
    size = max([*heap.warm, LENGTH]) + LENGTH
    try:
        segment, block = heap.allocate(size)
    except KeyboardInterrupt:
        os._exit(0)
    assert len(children) == 1
    assert segment.capacities[block] >= size
    del segment.records[block]
    assert heap.give_back(segment, block)


class Waiting:
    """Forks when it is told to; the child goes on when its parent has done what it wants."""

    def __init__(self) -> None:
        self.pid = -1
        self._read, self._write = os.pipe()

    def fork(self) -> bool:
        """Return in both processes, in the child later, once; tell whether this is the child."""
        if self.pid < 0:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)
                self.pid = os.fork()
            if not self.pid:
                os.read(self._read, 1)
        return self.pid == 0

    def let_child_end(self) -> None:
        """Let it go on, and wait for its end."""
        os.write(self._write, b"x")
        for end in (self._read, self._write):
            os.close(end)
        assert wait_for_exit(self.pid) == 0


def too_much_booked() -> int:
    """How much more the family counts for this process than its segments have; 0 unless
    something was interrupted.
    """
    state = runtime.current()
    booked = [segment.reserved for heap in state.heaps for segment in heap.segments]
    return state.family.reserved - sum(booked)


@pytest.mark.parametrize("where", ["contents", "pages", "segment"])
def test_a_child_that_goes_on_making_a_block_leaves_its_parents_message_alone(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a signal handler forks before the contents are asked for, or after they were written
    and raises, or where the segment is made: what the child does then stays in the child.
    """
    heap = runtime.current().heap(BY_VALUE)
    heap.collect()
    with heap.exclusive():
        heap.cool(0)
    # More than any segment has room for.
    size = max([segment.header.size for segment in heap.segments], default=1 << 20) * 2
    before = too_much_booked()
    waiting = Waiting()
    create, reserve = create_segment, reserve_pages

    def forking_create(*arguments: Any) -> Any:
        made = create(*arguments)
        waiting.fork()
        return made

    def forking_reserve(*arguments: Any) -> None:
        if waiting.fork():
            raise KeyboardInterrupt
        reserve(*arguments)

    if where == "segment":
        monkeypatch.setattr(heap_module, "create_segment", forking_create)
    elif where == "pages":
        monkeypatch.setattr(reservation, "reserve_pages", forking_reserve)

    def contents() -> bytes:
        if where == "contents":
            waiting.fork()
        return of_this_process()

    def of_this_process() -> bytes:
        return (b"p" if waiting.pid else b"c") * size

    message = Message()
    try:
        given = message.allocate(size, contents)
        # Not yet written if the kernel had huge pages at hand.
        if given is not None and given[0] is not None:
            given[0][:] = of_this_process()
    finally:
        if not waiting.pid:
            os._exit(0)
    assert given is not None
    message.commit()
    waiting.let_child_end()
    assert too_much_booked() == before
    assert bytes(import_block(given[1]).buffer) == b"p" * size


def ledger_is_listed() -> bool:
    """Fork with an array alive, drop it and all segments; return whether the ledger is listed."""
    kept = shmreduce.ones(LENGTH)
    assert wait_for_exit(in_forked_child(lambda: True)) == 0
    del kept
    for heap in runtime.current().heaps:
        heap.reap()
        heap.collect()
        with heap.exclusive():
            heap.cool(0)
    state = process_state()
    (descriptor,) = runtime.current().live.ledger.descriptors()
    return not state.segments and state.descriptors == {descriptor}


def test_the_ledgers_descriptor_is_listed_without_any_segment() -> None:
    """Else it would look like a leak: it stays open once a fork has needed it."""
    # In a process of its own, in which nothing else has segments.
    assert wait_for_exit(in_forked_child(ledger_is_listed)) == 0


FIRST_BLOCK = """
import os, sys, threading

forks, made, forked = (threading.Event() for _ in range(3))

def let_make():
    forks.set()
    assert made.wait(30)

# Hooks before a fork run in the reverse order: this one after those of shmreduce.
os.register_at_fork(before=let_make)
from shmreduce import allocate
from shmreduce.memory import runtime
from shmreduce.strategies import current_strategy

current_strategy()
if sys.argv[1] == "without":
    class Empty(dict):
        def __len__(self):
            return 0

    runtime.forking = Empty()
blocks = []

def make(value):
    blocks.append(allocate(1 << 20))
    blocks[-1].buffer[:] = bytes([value]) * (1 << 20)

def make_first():
    assert forks.wait(30)
    make(1)
    made.set()
    assert forked.wait(30)
    blocks.clear()
    for _ in range(4):
        make(2)

maker = threading.Thread(target=make_first)
maker.start()
reader, writer = os.pipe()
pid = os.fork()
if pid == 0:
    os.close(writer)
    os.read(reader, 1)
    os._exit(bytes(blocks[0].buffer) != b"\\1" * (1 << 20))
forked.set()
maker.join()
os.close(writer)
sys.exit(os.waitpid(pid, 0)[1] != 0)
"""


@pytest.mark.parametrize("guard", ["guarded", "without"])
def test_the_first_block_that_another_thread_makes_during_a_fork(guard: str) -> None:
    """The fork was not prepared, since there was no memory yet; what it sees is not reused."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FIRST_BLOCK, guard], timeout=PATIENCE, check=False
    )
    assert done.returncode == (0 if guard == "guarded" else 1)
