"""SimpleQueue, Queue and JoinableQueue: their interface, many users, users that die."""

from __future__ import annotations

import errno
import io
import multiprocessing
import os
import pickle
import queue as standard_queue
import select
import signal
import sys
import threading
import time
from collections import Counter
from multiprocessing import resource_sharer
from multiprocessing.pool import Pool as StandardPool
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pytest

import shmreduce
from shmreduce.memory import quick_blocks
from shmreduce.packet_socket import PacketSocket
from shmreduce.queues import Queue, SimpleQueue
from tests.channels.channels import PATIENCE, context_of, within

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.conftest import Children

KINDS = ("SimpleQueue", "Queue", "JoinableQueue")


@pytest.fixture(params=KINDS)
def queue(request: pytest.FixtureRequest, shmreduce_no_leaks: None) -> Iterator[Any]:
    """A queue of each kind, in this process."""
    made = getattr(shmreduce, request.param)()
    yield made
    close(made)


@pytest.fixture
def bounded(shmreduce_no_leaks: None) -> Iterator[Any]:
    """A Queue for two objects."""
    made = shmreduce.Queue(2)
    yield made
    close(made)


def close(queue: Any) -> None:
    """Close a queue of any kind, used or not, and see to it that its thread has gone."""
    queue.close()
    if hasattr(queue, "join_thread"):
        queue.join_thread()
    queue._reader.close()
    queue._writer.close()


# What a queue carries


def test_objects_come_out_in_order(queue: Any) -> None:
    """In the order in which they were put in, whatever their size."""
    sizes = [0, 1, 1000, 40_000, 300_000, 5, 1 << 20, 2]
    for size in sizes:
        queue.put(np.full(size, size % 251, np.uint8))
    for size in sizes:
        array = within(queue.get)
        assert array.size == size
        assert (array == size % 251).all()
    assert queue.empty()


def test_array_is_what_it_was_when_put(queue: Any) -> None:
    """A change after ``put`` is not seen by the receiver, also where a thread writes."""
    arrays = [np.zeros(size) for size in (10, 100_000)]
    held = [queue.put([number, array]) for number in range(10) for array in arrays]
    for array in arrays:
        array[:] = 1
    assert not any(within(queue.get)[1].any() for _ in held)


def test_more_than_the_pipe_holds() -> None:
    """A Queue takes any number of objects while nobody reads; the snapshot holds for all."""
    queue = shmreduce.Queue()
    array = np.zeros(10)
    for number in range(20_000):
        array[0] = number
        queue.put(array)
    assert within(lambda: [queue.get()[0] for _ in range(20_000)]) == list(range(20_000))
    close(queue)


def test_shared_array_stays_shared(queue: Any) -> None:
    """What was written after ``put`` to a shared array is seen."""
    array = shmreduce.zeros(1000)
    queue.put(array)
    array[3] = 5
    assert within(queue.get)[3] == 5


# The interface of multiprocessing.Queue


def test_full_and_empty(bounded: Any) -> None:
    """Both are raised at once, or after the time that was given."""
    for block, timeout in ((False, None), (True, 0.01), (True, 0), (True, -1)):
        with pytest.raises(standard_queue.Empty):
            bounded.get(block, timeout)
    bounded.put(1)
    bounded.put(2, timeout=1)
    assert bounded.full()
    assert bounded.qsize() == 2
    for block, timeout in ((False, None), (True, 0.01), (True, 0)):
        with pytest.raises(standard_queue.Full):
            bounded.put(3, block, timeout)
    assert [bounded.get_nowait(), bounded.get(timeout=PATIENCE)] == [1, 2]
    assert bounded.empty()
    assert bounded.qsize() == 0


def test_timeout_is_kept_when_others_are_faster() -> None:
    """``get`` with a timeout ends in time although other readers take what comes."""
    queue = shmreduce.Queue()
    stop = threading.Event()

    def steal() -> None:
        while not stop.is_set():
            try:
                queue.get(timeout=0.01)
            except standard_queue.Empty:
                queue.put("bait")

    thieves = [threading.Thread(target=steal) for _ in range(2)]
    for thief in thieves:
        thief.start()
    for _ in range(5):
        began = time.monotonic()
        try:
            within(queue.get, True, 0.05)
        except standard_queue.Empty:
            assert time.monotonic() - began >= 0.05
    stop.set()
    for thief in thieves:
        thief.join(PATIENCE)
    close(queue)


def make_non_blocking(queue: Any) -> None:
    os.set_blocking(queue._reader.fileno(), False)


def test_get_that_cannot_wait_does_not_say_that_it_has(children: Children) -> None:
    """Another process may make the socket a non-blocking one, which is an error, not Empty."""
    queue = context_of(children).Queue()
    children.join(children.start(make_non_blocking, queue))
    with pytest.raises(BlockingIOError):
        within(queue.get)
    with pytest.raises(standard_queue.Empty):
        queue.get(block=False)
    with pytest.raises(standard_queue.Empty):
        queue.get(timeout=0.01)
    queue.put(5)
    assert queue.get(timeout=PATIENCE) == 5
    close(queue)


def test_closed_queue_refuses() -> None:
    """``put`` and ``get`` are ValueError after ``close``; the pipe is closed if it was used."""
    queue = shmreduce.Queue()
    queue.put(1)
    close(queue)
    with pytest.raises(ValueError, match="is closed"):
        queue.put(1)
    with pytest.raises(ValueError, match="is closed"):
        queue.get()
    with pytest.raises(OSError, match="is closed"):
        queue.empty()


CALLS = {
    "empty": (),
    "full": (),
    "qsize": (),
    "get": (),
    "get_nowait": (),
    "put": (1,),
    "put_nowait": (1,),
    "close": (),
    "join_thread": (),
    "cancel_join_thread": (),
}
"""The methods of queues and arguments with which they do not wait if the queue is closed."""


def answers(queue: Any) -> list[str]:
    """Return what each method of a queue returns or raises."""
    told = []
    for name, arguments in CALLS.items():
        if hasattr(queue, name):
            try:
                answer = repr(getattr(queue, name)(*arguments))
            except Exception as error:
                answer = f"{type(error).__name__}: {error}".replace(repr(queue), "it")
            told.append(f"{name}: {answer}")
    return told


@pytest.mark.parametrize("items", [0, 1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_closed_queue_answers_as_the_standard_one(kind: str, items: int) -> None:
    """After close() each method returns or raises the same, for a used queue or a new one."""
    told = []
    for module in (shmreduce, multiprocessing):
        queue = getattr(module, kind)()
        for number in range(items):
            queue.put(number)
        if items:
            queue.get()
        queue.close()
        if hasattr(queue, "join_thread"):
            # The thread of the standard queue closes the pipe, perhaps later than ``close``.
            queue.join_thread()
        told.append(answers(queue))
        queue._reader.close()
        queue._writer.close()
    assert told[0] == told[1]


def test_simple_queue_can_be_closed_while_someone_else_uses_it() -> None:
    """The other end of the pipe tells the end of file."""
    queue: Any = shmreduce.SimpleQueue()
    queue.put(1)
    assert not queue.empty()
    queue._writer.close()
    assert within(queue.get) == 1
    with pytest.raises(EOFError):
        within(queue.get)
    queue.close()


def test_unpicklable_object_is_dropped(capsys: pytest.CaptureFixture[str]) -> None:
    """It is told of on standard error, gives its place back and stops nothing."""
    queue = shmreduce.Queue(1)
    queue.put(lambda: 1)
    queue.put(np.ones(100_000), timeout=PATIENCE)
    assert within(queue.get).sum() == 100_000
    close(queue)
    assert "lambda" in capsys.readouterr().err


def test_what_is_behind_an_unpicklable_object_comes_where_nobody_can_be_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As where standard error is closed."""
    closed = io.StringIO()
    closed.close()
    queue = shmreduce.Queue(1)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", closed)
        queue.put(lambda: 1)
        queue.put(2, timeout=PATIENCE)
        assert queue.get(timeout=PATIENCE) == 2
    close(queue)


def _refuse(*_: Any) -> None:
    raise shmreduce.OutOfSharedMemoryError("no room")


def test_no_room_is_told_to_who_puts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without shared memory ``put`` raises, and the place is free again."""
    queue = shmreduce.Queue(1)
    with monkeypatch.context() as patch:
        patch.setattr(shmreduce.Message, "allocate", _refuse)
        # Nor a block that earlier tests left: the compiled module takes one without asking it.
        patch.setattr(quick_blocks, "take_block", lambda *_: None)
        for _ in range(2):
            with pytest.raises(shmreduce.OutOfSharedMemoryError):
                queue.put(np.ones(1 << 20))
    queue.put(1, timeout=PATIENCE)
    assert within(queue.get) == 1
    close(queue)


@pytest.mark.parametrize("length", [10, 300_000])
def test_what_was_put_waits_for_memory_of_the_kernel(
    length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An object is not lost because the kernel has no memory for it when it is sent."""
    queue = shmreduce.Queue()
    refusals = iter([errno.ENOBUFS] * 4)

    def refuse_at_first(socket: Any, *arguments: Any) -> None:
        for number in refusals:
            raise OSError(number, os.strerror(number))
        real(socket, *arguments)

    real = PacketSocket.write
    monkeypatch.setattr(PacketSocket, "write", refuse_at_first)
    queue.put(np.ones(length, np.uint8))
    assert queue.get(timeout=PATIENCE).sum() == length
    assert next(refusals, None) is None
    queue.close()
    queue.join_thread()


def test_join_waits_for_what_is_done() -> None:
    """``join`` returns once ``task_done`` was called for each object, not more often."""
    queue = shmreduce.JoinableQueue()
    for number in range(5):
        queue.put(number)
    joiner = threading.Thread(target=queue.join, daemon=True)
    joiner.start()
    for _ in range(5):
        assert joiner.is_alive()
        queue.get()
        queue.task_done()
    joiner.join(PATIENCE)
    assert not joiner.is_alive()
    with pytest.raises(ValueError, match="too many times"):
        queue.task_done()
    close(queue)


def test_only_children_get_a_queue(queue: Any) -> None:
    """Pickled for anything but a child that is being started, it is RuntimeError."""
    ours, theirs = shmreduce.Pipe()
    with ours, theirs, pytest.raises(RuntimeError, match="inheritance"):
        ours.send(queue)


# Many processes


def produce(queue: Any, number: int, count: int) -> None:
    """Put arrays of many sizes in, each with its mark."""
    for turn in range(count):
        size = (10, 5000, 40_000)[turn % 3]
        queue.put((number, turn, np.full(size, 1000 * number + turn)))


def consume(queue: Any, answers: Any) -> None:
    """Check what comes until the end, and tell what came."""
    seen = []
    while (message := queue.get()) is not None:
        number, turn, array = message
        assert (array == 1000 * number + turn).all()
        seen.append((number, turn))
    answers.put(seen)


@pytest.mark.parametrize("kind", ["SimpleQueue", "Queue"])
def test_many_producers_and_consumers(children: Children, kind: str) -> None:
    """Each message arrives once, whole; none is lost."""
    context_of(children)
    exchange(children, kind, producers=4, consumers=3, count=25)


@pytest.mark.parametrize("children", [("fork", "file_descriptor")], indirect=True)
@pytest.mark.parametrize("kind", ["SimpleQueue", "Queue"])
def test_64_producers_and_8_consumers(children: Children, kind: str) -> None:
    """So many at once lose and repeat nothing either."""
    context_of(children)
    exchange(children, kind, producers=64, consumers=8, count=12)


def exchange(children: Children, kind: str, *, producers: int, consumers: int, count: int) -> None:
    """Have messages sent by so many processes to so many others, and count them."""
    context = children.context
    queue, answers = getattr(context, kind)(), context.SimpleQueue()
    readers = [children.start(consume, queue, answers) for _ in range(consumers)]
    writers = [children.start(produce, queue, number, count) for number in range(producers)]
    children.join(*writers)
    for _ in range(consumers):
        queue.put(None)
    seen = [each for _ in range(consumers) for each in within(answers.get)]
    children.join(*readers)
    expected = {(number, turn) for number in range(producers) for turn in range(count)}
    assert Counter(seen) == Counter(expected)
    close(queue)
    close(answers)


def put_and_die(queue: Any, count: int) -> None:
    """Put arrays in, then be killed."""
    for number in range(count):
        queue.put(np.full(1 << 18, number))
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("kind", ["SimpleQueue", "Queue"])
def test_killed_producer_loses_nothing(children: Children, kind: str) -> None:
    """What it had put in comes out; others can go on putting in."""
    context = context_of(children)
    queue = getattr(context, kind)()
    victim = children.start(put_and_die, queue, 6)
    children.join(victim)
    assert victim.exitcode == -signal.SIGKILL
    assert [int(within(queue.get)[-1]) for _ in range(6)] == list(range(6))
    queue.put(np.ones(1 << 18))
    assert within(queue.get).sum() == 1 << 18
    close(queue)


class Slow:
    """Takes for ever to unpickle: whoever receives it is in the middle of a message."""

    def __init__(self, ready: Any, array: Any) -> None:
        self.ready, self.array = ready, array

    def __reduce__(self) -> tuple[Any, ...]:
        return _be_slow, (self.array, self.ready)


def _be_slow(array: Any, ready: Any) -> None:
    ready.send("in the middle")
    time.sleep(PATIENCE)


def get_one(queue: Any) -> None:
    """Take one message out."""
    queue.get()


@pytest.mark.parametrize("kind", ["SimpleQueue", "Queue"])
def test_killed_reader_blocks_nobody(children: Children, kind: str) -> None:
    """One that is killed in the middle of a large message, or while it waits, holds nothing."""
    context = context_of(children)
    queue = getattr(context, kind)()
    waiting = children.start(get_one, queue)
    here, there = context.Pipe()
    queue.put(Slow(there, np.ones(1 << 20)))
    there.close()
    assert within(here.recv) == "in the middle"
    waiting.kill()
    children.join(waiting)
    idle = children.start(get_one, queue)
    idle.kill()
    children.join(idle)
    queue.put("next")
    assert within(queue.get) == "next"
    here.close()
    resource_sharer.stop(PATIENCE)
    close(queue)


def put_from_threads(queue: Any, count: int) -> None:
    """Send from two threads while a third forks."""
    threads = [threading.Thread(target=produce, args=(queue, each, count)) for each in range(2)]
    for thread in threads:
        thread.start()
    for _ in range(5):
        pid = os.fork()
        if pid == 0:
            os._exit(0)
        os.waitpid(pid, 0)
    for thread in threads:
        thread.join(PATIENCE)


def test_fork_in_a_sender_with_threads(children: Children) -> None:
    """Forks while other threads send lose and repeat nothing."""
    queue = context_of(children).SimpleQueue()
    process = children.start(put_from_threads, queue, 60)
    seen = set()
    for _ in range(120):
        number, turn, array = within(queue.get)
        assert (array == 1000 * number + turn).all()
        seen.add((number, turn))
    assert len(seen) == 120
    children.join(process)
    close(queue)


def put_and_end(queue: Any, count: int) -> None:
    """Put much in and end: the thread has to flush first."""
    for number in range(count):
        queue.put(np.full(100, number))


def test_process_that_ends_flushes_its_queue(children: Children) -> None:
    """Nothing that was put in is lost when the process ends normally."""
    queue = context_of(children).Queue()
    process = children.start(put_and_end, queue, 8000)
    assert within(lambda: [int(queue.get()[0]) for _ in range(8000)]) == list(range(8000))
    children.join(process)
    close(queue)


def put_and_cancel(queue: Any) -> None:
    """Put more in than fits, and do not wait for it."""
    for _ in range(20_000):
        queue.put(bytes(1000))
    queue.cancel_join_thread()


def test_cancelled_thread_is_not_waited_for(children: Children) -> None:
    """After ``cancel_join_thread`` a process ends with messages unsent."""
    queue = context_of(children).Queue()
    process = children.start(put_and_cancel, queue)
    children.join(process)
    assert process.exitcode == 0
    assert within(queue.get) == bytes(1000)
    close(queue)


def test_blocks_are_used_again(queue: Any) -> None:
    """A hundred large arrays through a queue need the memory of a few."""
    from shmreduce.memory.inspection import process_state

    before = process_state().reserved
    for number in range(100):
        queue.put(np.full(1 << 18, number))
        assert within(queue.get)[0] == number
    assert process_state().reserved - before < 64 << 20


class Telling(Queue[Any]):
    """Keeps what could not be sent, and why."""

    told: ClassVar[list[tuple[Exception, Any]]] = []

    @staticmethod
    def _on_queue_feeder_error(error: Exception, obj: Any) -> None:
        Telling.told.append((error, obj))


def test_who_is_told_of_what_cannot_be_pickled_gets_it(shmreduce_no_leaks: None) -> None:
    """With the error, as by the standard library's queue."""
    unpicklable = (1, lambda: None)
    queue = Telling(ctx=shmreduce.get_context())
    queue.put(unpicklable)
    queue.put("next")
    assert within(queue.get) == "next"
    ((error, obj),) = Telling.told
    assert isinstance(error, pickle.PicklingError | AttributeError)
    assert obj is unpicklable
    Telling.told.clear()
    queue.close()
    queue.join_thread()


@pytest.mark.usefixtures("shmreduce_no_leaks")
@pytest.mark.parametrize("kind", ["Queue", "JoinableQueue"])
def test_without_a_thread_nothing_is_put_in(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no thread can be started for what has to wait, ``put`` raises; nothing is held,
    and nothing is counted.
    """

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    queue = getattr(shmreduce, kind)(1)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        # As if the pipe were full.
        patch.setattr(queue, "_sent_at_once", lambda _: False)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="new thread"):
                queue.put(np.ones(100_000))
    queue.put(np.ones(100_000), timeout=PATIENCE)
    assert within(queue.get).sum() == 100_000
    if kind == "JoinableQueue":
        queue.task_done()
        within(queue.join)
    close(queue)


# The locks of the standard library's queues

LOCKS = ("_rlock", "_wlock")


def locks_of(queue: Any) -> list[str]:
    """Return which of the locks have been made."""
    return [name for name in LOCKS if name in vars(queue)]


def use(queue: Any) -> list[str]:
    """Pass something on by a queue, and return which locks there are then."""
    queue.put(within(queue.get))
    return locks_of(queue)


@pytest.mark.parametrize("kind", KINDS)
def test_a_queue_has_no_locks(children: Children, kind: str) -> None:
    """Neither where it was made nor where it was passed on to, used or not."""
    queue = getattr(context_of(children), kind)()
    assert locks_of(queue) == []
    queue.put("hello")
    assert children.call(use, queue) == []
    assert within(queue.get) == "hello"
    assert locks_of(queue) == []
    close(queue)


def test_who_asks_for_a_lock_gets_the_same(queue: Any) -> None:
    """Each of many threads that ask at the same time gets one and the same lock, and a lock
    for reading is not that for writing.
    """
    together = threading.Barrier(8)
    answers: list[Any] = []

    def ask() -> None:
        together.wait(PATIENCE)
        answers.append((queue._rlock, queue._wlock))

    threads = [threading.Thread(target=ask, daemon=True) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert len(answers) == 8
    assert {tuple(map(id, locks)) for locks in answers} == {(id(queue._rlock), id(queue._wlock))}
    assert queue._rlock is not queue._wlock


def free_locks(queue: Any) -> list[str]:
    """Return which of a queue's locks nobody has taken."""
    return [name for name in LOCKS if getattr(queue, name).acquire(timeout=0)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_lock_that_is_made_is_passed_on(children: Children, kind: str) -> None:
    """Who gets the queue later has the lock, and finds it taken where it is taken."""
    queue = getattr(context_of(children), kind)()
    with queue._rlock:
        assert queue._wlock.acquire(timeout=0)
        assert children.call(free_locks, queue) == []
        queue._wlock.release()
        assert children.call(free_locks, queue) == ["_wlock"]
    close(queue)


def ask_for_locks(queue: Any, commands: Any, answers: Any) -> None:
    """Say which locks a queue has, before and after a command comes."""
    answers.send([name for name in LOCKS if hasattr(queue, name)])
    commands.recv()
    try:
        answers.send(str(queue._rlock))
    except AttributeError as error:
        answers.send(str(error))


@pytest.mark.parametrize("kind", KINDS)
def test_nobody_makes_a_second_lock(children: Children, kind: str) -> None:
    """A process that got the queue without a lock has none, also after the maker of the queue
    has made it; the error says what to do.
    """
    context = context_of(children)
    queue = getattr(context, kind)()
    for_child, commands = context.Pipe(duplex=False)
    answers, of_child = context.Pipe(duplex=False)
    children.start(ask_for_locks, queue, for_child, of_child)
    assert within(answers.recv) == []
    with queue._rlock:
        commands.send("the lock is made")
        assert "access it there before the queue is passed on" in within(answers.recv)
    children.join()
    for each in (for_child, commands, answers, of_child):
        each.close()
    close(queue)


class TakingTurns(SimpleQueue[Any]):
    """Whose readers take the lock, as the standard library's do."""

    def get(self) -> Any:
        with self._rlock:
            return super().get()


def test_derived_queues_have_their_locks(children: Children) -> None:
    """From the beginning, so that their methods can take them in every process."""
    queue = TakingTurns(ctx=context_of(children))
    queue.put("hello")
    assert children.call(use, queue) == list(LOCKS)
    assert within(queue.get) == "hello"
    close(queue)


def is_empty(queue: Any) -> bool:
    return bool(queue.empty())


def test_who_has_the_lock_may_poll_and_then_receive(children: Children) -> None:
    """Nobody gets the message in between, although the others take no lock."""
    array = np.arange(1 << 17)
    queue = context_of(children).SimpleQueue()
    queue.put(array)

    def hold() -> None:
        with queue._rlock:
            assert queue._reader.poll()
            assert children.call(is_empty, queue)
            assert queue._reader.poll()
            assert np.array_equal(queue._reader.recv(), array)
            assert not queue._reader.poll()

    within(hold)
    queue.put("for whoever is first")
    assert queue._reader.poll()
    assert not children.call(is_empty, queue)
    assert within(queue.get) == "for whoever is first"
    queue.put("not lost")
    with queue._rlock:
        assert queue._reader.poll(PATIENCE)
    assert within(queue.get) == "not lost"
    close(queue)


@pytest.mark.parametrize("how", ["recv", "recv_bytes", "recv_bytes_into"])
def test_who_has_the_lock_may_receive_in_any_way(how: str) -> None:
    """What poll() has taken out comes by each; ``empty()`` knows of it."""
    queue = shmreduce.get_context("fork").SimpleQueue()
    queue.put("message")
    reader, room = queue._reader, bytearray(100)

    def hold() -> Any:
        with queue._rlock:
            assert reader.poll()
            assert not queue.empty()
            if how == "recv":
                return reader.recv()
            if how == "recv_bytes":
                return pickle.loads(reader.recv_bytes())
            return pickle.loads(room[: reader.recv_bytes_into(room)])

    assert within(hold) == "message"
    assert queue.empty()
    close(queue)


def test_another_thread_does_not_get_what_the_holder_has_polled() -> None:
    """It gets the next message."""
    queue = shmreduce.get_context("fork").SimpleQueue()
    found: list[Any] = []
    queue.put("the holder's")

    def hold() -> Any:
        with queue._rlock:
            assert queue._reader.poll()
            thread = threading.Thread(target=lambda: found.append(queue.get()), daemon=True)
            thread.start()
            queue.put("the other's")
            thread.join(PATIENCE)
            return queue.get()

    assert within(hold) == "the holder's"
    assert found == ["the other's"]
    close(queue)


def test_looking_for_a_message_takes_none_out(children: Children) -> None:
    """Whoever is first gets it, also if the holder of the lock has called ``empty()``."""
    queue = context_of(children).SimpleQueue()
    with queue._rlock:
        assert queue.empty()
        queue.put("message")
        assert not queue.empty()
    assert children.call(take, queue) == "message"
    close(queue)


def take(queue: Any) -> Any:
    return queue.get() if queue._reader.poll(PATIENCE) else None


def test_a_queue_that_is_closed_keeps_no_message(shmreduce_no_leaks: None) -> None:
    """Not even one that was taken out."""
    queue = shmreduce.get_context("fork").SimpleQueue()
    queue.put(np.arange(1 << 17))
    with queue._rlock:
        assert queue._reader.poll()
    queue.close()
    assert not vars(queue._reader)["_taken"]
    with pytest.raises(OSError, match="closed"):
        queue.get()


def test_threads_that_look_and_receive_at_once_get_on() -> None:
    """Each message comes once."""
    queue = shmreduce.get_context("fork").SimpleQueue()
    interval = sys.getswitchinterval()
    reader: Any = queue._reader
    found, ends = list[int](), threading.Event()
    lock = queue._rlock

    def look() -> None:
        while not ends.is_set():
            queue.empty()
            if (data := reader._taken_out()) is not None:
                found.append(pickle.loads(data))

    others = [threading.Thread(target=look) for _ in range(2)]
    sys.setswitchinterval(1e-6)
    try:
        for each in others:
            each.start()
        for number in range(2000):
            queue.put(number)
            with lock:
                assert reader.poll(PATIENCE)
            # The lock is free: any of the threads may have it now.
            if (data := reader._taken_out()) is not None:
                found.append(pickle.loads(data))
    finally:
        ends.set()
        for each in others:
            each.join(PATIENCE)
        sys.setswitchinterval(interval)
    assert sorted(found) == [*range(2000)]
    close(queue)


def exit_1_unless_empty(queue: Any) -> None:
    reader = queue._reader
    sys.exit(int(reader.poll() or bool(reader._taken_out())))


def test_a_message_that_was_taken_out_stays_with_its_process(shmreduce_no_leaks: None) -> None:
    """A child that is forked then does not get it, too."""
    array = np.arange(1 << 17)
    context: Any = shmreduce.get_context("fork")
    queue = context.SimpleQueue()
    queue.put(array)
    with queue._rlock:
        assert queue._reader.poll()
    child = context.Process(target=exit_1_unless_empty, args=(queue,))
    child.start()
    child.join(PATIENCE)
    assert child.exitcode == 0
    assert np.array_equal(within(queue.get), array)
    close(queue)


def poll_and_receive(queue: Any) -> Any:
    with queue._rlock:
        found = queue._reader.poll(PATIENCE)
        left_for_others = bool(select.select([queue._reader], [], [], 0)[0])
        return found, left_for_others, queue.get()


def test_a_process_that_gets_the_lock_may_poll_and_then_receive(children: Children) -> None:
    """As the one that made it."""
    queue = context_of(children).SimpleQueue()
    assert queue._rlock is not None
    queue.put("message")
    assert children.call(poll_and_receive, queue) == (True, False, "message")
    close(queue)


def test_who_waits_with_the_lock_waits_on_if_others_are_quicker(
    children: Children, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until the time is over, or a message is left."""
    queue = context_of(children).SimpleQueue()
    kind = type(queue._reader)
    with queue._rlock:
        receive = kind.receive
        others: list[Any] = []

        def late(reader: Any, buffer: Any, *, wait: bool) -> Any:
            if len(others) < 2:
                others.append(None)
                # As somebody else would.
                assert receive(reader, buffer, wait=True).load() == "message"
                queue.put("another" if len(others) == 2 else "message")
                return None
            return receive(reader, buffer, wait=wait)

        monkeypatch.setattr(kind, "receive", late)
        queue.put("message")
        assert queue._reader.poll(PATIENCE)
        assert queue.get() == "another"
    assert len(others) == 2
    close(queue)


def test_a_lock_is_there_only_when_the_reader_knows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also for another thread that asks at the same time."""
    queue = shmreduce.get_context("fork").SimpleQueue()
    note_lock = queue._note_lock
    found: list[Any] = []

    def ask() -> None:
        with queue._rlock:
            found.append(queue._reader.poll(0) and vars(queue._reader)["_taken"])

    def note(name: str, lock: Any) -> None:
        if not found:
            found.append(None)
            within(ask)
        note_lock(name, lock)

    queue.put("message")
    monkeypatch.setattr(queue, "_note_lock", note)
    lock = queue._rlock
    assert lock is queue._rlock
    assert [len(taken) for taken in found[1:]] == [1]
    assert queue.get() == "message"
    close(queue)


def test_the_standard_pool_takes_a_lock(children: Children) -> None:
    """When it is terminated: one with a context of shmreduce gets the lock it asks for."""
    pool = StandardPool(1, context=context_of(children))
    assert pool.apply_async(abs, (-3,)).get(PATIENCE) == 3
    within(pool.terminate)
    within(pool.join)
