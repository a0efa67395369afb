"""What a signal handler raises is for whoever called, not for those who deal with errors there."""

from __future__ import annotations

import contextlib
import functools
import gc
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import threading
import time
from queue import Empty
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
import pytest

import shmreduce
from shmreduce import connection, discovery, packets, process_registry, queues
from shmreduce.connection import Connection
from shmreduce.memory import headroom, locks
from shmreduce.packet_socket import PacketSocket, PlainPacketSocket
from shmreduce.packets import Arrival, CallArrival
from shmreduce.pool_backpressure import Backpressure
from shmreduce.pool_results import ApplyResult, IMapIterator
from shmreduce.pool_tasks import Task
from shmreduce.receive_buffer import ReceiveBuffer
from tests.channels.channels import PATIENCE, eventually, within
from tests.interrupter import interrupted_everywhere
from tests.memory.waiting import in_forked_child, wait_for_exit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

FORK: Any = shmreduce.get_context("fork")
SIZE = 1 << 17


@pytest.fixture(params=["function", "method", "object", "partial"])
def alarm(request: pytest.FixtureRequest) -> Iterator[None]:
    """SIGALRM is handled by raising TimeoutError, as by those who wait for some time only."""

    class Handler:
        def give_up(self, _number: int, _frame: object) -> None:
            raise TimeoutError("it takes too long")

        __call__ = give_up

    def give_up(_number: int, _frame: object) -> None:
        raise TimeoutError("it takes too long")

    handlers: dict[str, Any] = {
        "function": give_up,
        "method": Handler().give_up,
        "object": Handler(),
        "partial": functools.partial(Handler.give_up, Handler()),
    }
    before = signal.signal(signal.SIGALRM, handlers[request.param])
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


class Slow:
    """The alarm comes while it is pickled."""

    def __reduce__(self) -> Any:
        signal.raise_signal(signal.SIGALRM)
        return Slow, ()


class Broken:
    """Raises the same when it is pickled, by itself."""

    def __reduce__(self) -> Any:
        raise TimeoutError("of its own")


@pytest.mark.usefixtures("alarm", "shmreduce_no_leaks")
def test_an_alarm_while_a_queue_pickles_is_raised_by_put(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """And is no error of the object, which would be dropped in silence."""
    queue = shmreduce.Queue(1)
    with pytest.raises(TimeoutError, match="too long"):
        queue.put(Slow())
    assert capfd.readouterr().err == ""
    # Its place in the queue is free.
    queue.put("next", timeout=PATIENCE)
    assert within(queue.get) == "next"
    queue.put(Broken())
    queue.close()
    queue.join_thread()
    assert "of its own" in capfd.readouterr().err


@pytest.mark.usefixtures("alarm", "shmreduce_no_leaks")
def test_an_alarm_while_a_queue_writes_does_not_put_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was written is there once, and the alarm is raised."""
    queue = shmreduce.Queue()
    write = Connection._write

    def struck(self: Connection, packet: Any, flags: int) -> None:
        monkeypatch.undo()
        write(self, packet, flags)
        signal.raise_signal(signal.SIGALRM)

    monkeypatch.setattr(Connection, "_write", struck)
    with pytest.raises(TimeoutError):
        queue.put(1)
    queue.put(2)
    assert [within(queue.get), within(queue.get)] == [1, 2]
    queue.close()
    queue.join_thread()


@pytest.mark.usefixtures("alarm", "shmreduce_no_leaks")
@pytest.mark.parametrize("kind", ["own", "standard"])
def test_an_alarm_while_an_array_is_written_takes_nothing_back(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The array was sent: it is there for its receiver."""
    with shmreduce.install():
        here, there = (shmreduce if kind == "own" else multiprocessing).Pipe()
        place: Any = Connection if kind == "own" else multiprocessing.connection.Connection
        name = "_write" if kind == "own" else "_send"
        write = getattr(place, name)

        def struck(*arguments: Any) -> None:
            monkeypatch.undo()
            write(*arguments)
            signal.raise_signal(signal.SIGALRM)

        monkeypatch.setattr(place, name, struck)
        with pytest.raises(TimeoutError):
            here.send(np.ones(SIZE))
        assert within(there.recv).sum() == SIZE
        here.close()
        there.close()


@pytest.mark.usefixtures("shmreduce_no_leaks")
def test_ctrl_c_while_its_thread_starts_leaves_a_queue_one_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The one that the next put starts: two would send in any order."""
    queue = shmreduce.Queue()
    start = threading.Thread.start

    def struck(thread: threading.Thread) -> None:
        monkeypatch.undo()
        monkeypatch.setattr(shmreduce.queues.Queue, "_sent_at_once", lambda *_: False)
        start(thread)
        raise KeyboardInterrupt

    monkeypatch.setattr(shmreduce.queues.Queue, "_sent_at_once", lambda *_: False)
    monkeypatch.setattr(threading.Thread, "start", struck)
    with pytest.raises(KeyboardInterrupt):
        queue.put(1)
    for number in (2, 3):
        queue.put(number)
    assert [within(queue.get), within(queue.get)] == [2, 3]
    eventually(
        lambda: [each.name for each in threading.enumerate()].count("QueueFeederThread") == 1
    )
    queue.close()
    queue.join_thread()


@pytest.mark.usefixtures("shmreduce_no_leaks")
def test_ctrl_c_before_a_joinable_queue_counts_leaves_nothing_of_it() -> None:
    """Neither the array's memory nor its place in the queue is taken."""
    queue = shmreduce.JoinableQueue(1)
    condition = queue._cond

    class Struck:
        def __enter__(self) -> None:
            queue._cond = condition
            raise KeyboardInterrupt

        def __exit__(self, *_: object) -> None:
            pass

    queue._cond = Struck()
    with pytest.raises(KeyboardInterrupt):
        queue.put(np.ones(SIZE))
    queue.put("next", timeout=PATIENCE)
    assert within(queue.get) == "next"
    queue.task_done()
    within(queue.join)
    queue.close()
    queue.join_thread()


def sleep_for_ever(_: Any) -> None:
    signal.pause()


@pytest.mark.usefixtures("alarm")
@pytest.mark.parametrize("when", ["pickling", "waiting"])
def test_map_does_not_wait_on_after_an_alarm(when: str) -> None:
    """Not for the tasks that workers have begun: one may hang, and the alarm is for that."""
    with FORK.Pool(1) as pool:
        items: list[Any] = [np.zeros(1 << 20, np.uint8)] * 40
        if when == "pickling":
            items[1] = Slow()
        else:
            # By then it waits for room in what is sent ahead.
            signal.setitimer(signal.ITIMER_REAL, 0.3)
        with pytest.raises(TimeoutError, match="too long"):
            pool.map(sleep_for_ever, items, chunksize=1)


@pytest.mark.usefixtures("alarm")
def test_an_alarm_while_a_call_is_pickled_is_for_the_caller() -> None:
    """Not for the one call that it came into, whose result may never be asked for."""
    with FORK.Pool(1) as pool:
        with pytest.raises(TimeoutError, match="too long"):
            pool.apply_async(abs, (Slow(),))
        with pytest.raises(TimeoutError, match="of its own"):
            pool.apply_async(abs, (Broken(),)).get(PATIENCE)
    with shmreduce.ProcessPoolExecutor(1, FORK) as executor:
        with pytest.raises(TimeoutError, match="too long"):
            executor.submit(id, Slow())
        with pytest.raises(TimeoutError, match="of its own"):
            executor.submit(id, Broken()).result(PATIENCE)


@pytest.mark.usefixtures("alarm")
@pytest.mark.parametrize("what", ["posix_fallocate", "memfd_create", "open"])
def test_an_alarm_while_memory_is_made_is_not_a_lack_of_memory(
    monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Which would be answered by another try."""
    # In a process that has made no memory yet.
    assert wait_for_exit(in_forked_child(lambda: is_struck(monkeypatch, what))) == 0


def is_struck(monkeypatch: pytest.MonkeyPatch, what: str) -> bool:
    """Return whether making memory raises what the alarm does that comes into a system call."""
    owner: Any = headroom if what == "open" else os

    def struck(*_: Any, **__: Any) -> None:
        monkeypatch.undo()
        signal.raise_signal(signal.SIGALRM)

    with shmreduce.install(strategy="file_descriptor"):
        monkeypatch.setattr(owner, what, struck, raising=False)
        with pytest.raises(TimeoutError, match="too long"):
            shmreduce.empty(100_000, np.uint8)
        return bool((shmreduce.full(100_000, 5, np.uint8) == 5).all())


@pytest.mark.usefixtures("alarm")
def test_an_alarm_while_a_descriptor_is_looked_at_does_not_count_it_as_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Who finds one closed goes without what is behind it."""

    def struck(*_: Any) -> None:
        signal.raise_signal(signal.SIGALRM)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fstat", struck)
        with pytest.raises(TimeoutError, match="too long"):
            locks.identity_of(0)
    assert locks.identity_of(1 << 20) is None


@pytest.mark.usefixtures("alarm")
def test_an_alarm_while_plugins_are_loaded_breaks_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are loaded by the next who needs them."""
    plugins = process_registry.get_plugins()
    register = discovery.Plugins._register

    def struck(self: Any, plugin: Any) -> None:
        monkeypatch.setattr(discovery.Plugins, "_register", register)
        signal.raise_signal(signal.SIGALRM)

    monkeypatch.setattr(discovery.Plugins, "_register", struck)
    monkeypatch.setattr(plugins, "_registered", None)
    monkeypatch.setattr(plugins, "settled_with", None)
    with pytest.raises(TimeoutError, match="too long"):
        process_registry.get_plugins()
    assert {each.status for each in process_registry.plugin_report()} == {"loaded"}


def struck_where_conditions_are_entered(action: Callable[[], object]) -> None:
    """Do something; Ctrl-C comes when a Condition has taken its lock and is about to say so."""
    entered = threading.Condition.__enter__.__code__

    def trace(frame: Any, event: str, _argument: object) -> Any:
        if frame.f_code is not entered:
            return None
        if event == "return":
            sys.settrace(None)
            raise KeyboardInterrupt
        return trace

    interrupted_by(trace, action)


def interrupted_by(trace: Callable[..., Any], action: Callable[[], object]) -> bool:
    """Do something under a trace function that raises Ctrl-C. Return whether it did."""
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        action()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


def in_time(action: Callable[[], object]) -> None:
    """Do something in another thread, which must come to an end."""
    thread = threading.Thread(target=action, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    assert not thread.is_alive(), "a lock stayed taken"


def test_a_queue_can_be_used_after_ctrl_c_in_put() -> None:
    """Its lock does not stay taken."""
    queue = shmreduce.Queue()
    struck_where_conditions_are_entered(lambda: queue.put(1))
    in_time(lambda: queue.put(2))
    in_time(queue.close)
    queue.join_thread()


def struck_at_line(action: Callable[[], object], codes: set[Any], number: int) -> bool:
    """Do something; Ctrl-C comes before the n-th line of some functions. Return whether it did.

    A line counts once. A `with` is come to again at its end, where no signal
    handler runs: nothing is called between the block and its `__exit__`.
    """
    seen = set()

    def trace(frame: Any, event: str, _argument: object) -> Any:
        if frame.f_code not in codes:
            return None
        if event == "line":
            seen.add((frame.f_code, frame.f_lineno))
            if len(seen) > number:
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace

    return interrupted_by(trace, action)


def takes_another(queue: Any) -> None:
    """Put an object through a bounded queue, whose place must be free, and close it."""
    queue.put(1, timeout=PATIENCE)
    assert queue.get(timeout=PATIENCE) == 1
    if hasattr(queue, "task_done"):
        queue.task_done()
    queue.close()
    queue.join_thread()


@pytest.mark.parametrize("goes_at_once", [True, False])
@pytest.mark.parametrize("name", ["Queue", "JoinableQueue"])
def test_ctrl_c_in_put_takes_no_place_for_ever(
    name: str, goes_at_once: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was not put has no place in a bounded queue, and ``join()`` does not wait for it."""
    codes = {queues.Queue._add.__code__, queues.Queue._sent_at_once.__code__}
    if not goes_at_once:
        # As if the pipe were full: the queue's thread sends it.
        monkeypatch.setattr(queues.Queue, "_sent_at_once", lambda *_: False)
    number = 0
    deadline = time.monotonic() + PATIENCE
    while True:
        queue = getattr(FORK, name)(1)
        struck = struck_at_line(functools.partial(queue.put, np.ones(SIZE)), codes, number)
        # What Ctrl-C came too late for is there, or will be.
        while queue._sem.get_value() == 0:
            assert time.monotonic() < deadline, "the place stays taken"
            with contextlib.suppress(Empty):
                queue.get(timeout=0.01)
                if name == "JoinableQueue":
                    queue.task_done()
        takes_another(queue)
        if name == "JoinableQueue":
            in_time(queue.join)
        if not struck:
            break
        number += 1
    assert number > 6


@pytest.mark.usefixtures("shmreduce_no_leaks")
@pytest.mark.parametrize("name", ["Queue", "JoinableQueue"])
def test_ctrl_c_in_put_counts_what_was_put_and_nothing_else(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever it comes once the object is pickled: before that, it comes between two calls, as
    in the standard library.
    """
    queue: Any = None
    packed: list[bool] = []
    pack = queues.Queue._pack

    def noted(self: Any, held: list[Any]) -> Any:
        item = pack(self, held)
        packed.append(True)
        return item

    def put() -> None:
        nonlocal queue
        packed.clear()
        queue = getattr(FORK, name)(1)
        queue.put(np.ones(SIZE))

    monkeypatch.setattr(queues.Queue, "_pack", noted)
    judged = 0
    for when in interrupted_everywhere(put, queues.__file__):
        if queue is None or not packed:
            continue
        judged += 1
        count = 0
        while queue._reader.poll(0):
            count += len(queue.get(timeout=PATIENCE)) // SIZE
        assert queue._sem.get_value() == 1, when
        if name == "JoinableQueue":
            assert queue._unfinished_tasks.get_value() == count, when
        queue.close()
        queue.join_thread()
    assert judged > 2
    # The last put was not struck.
    assert len(queue.get(timeout=PATIENCE)) == SIZE
    queue.close()
    queue.join_thread()


@pytest.mark.usefixtures("shmreduce_no_leaks")
def test_who_waits_for_what_ctrl_c_takes_back_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """``join()`` may begin to wait as soon as the item is counted."""
    queue: Any = FORK.JoinableQueue(1)
    waits = threading.Thread(target=queue.join, daemon=True)

    def joined_and_struck(_: Any) -> None:
        # As if the lock had been given back already, on the way out of put().
        queue._cond.release()
        waits.start()
        eventually(lambda: queue._cond._sleeping_count.get_value() == 1)
        queue._cond.acquire()
        raise KeyboardInterrupt

    monkeypatch.setattr(queue, "_add", joined_and_struck)
    with pytest.raises(KeyboardInterrupt):
        queue.put(np.ones(SIZE))
    waits.join(PATIENCE)
    assert not waits.is_alive()
    queue.close()
    queue.join_thread()


@pytest.mark.parametrize("timeout", [None, PATIENCE])
@pytest.mark.parametrize("name", ["Queue", "JoinableQueue"])
def test_ctrl_c_in_get_takes_no_place_for_ever(name: str, timeout: float | None) -> None:
    """What was taken out has no place in a bounded queue, though nobody was given it."""
    codes = {
        each.__code__
        for each in (
            Connection.receive,
            Connection._read,
            packets.open_packet,
            queues.Queue._receive_within,
        )
    }
    number = 0
    while True:
        queue = getattr(FORK, name)(1)
        queue.put(np.ones(SIZE))
        assert queue._reader.poll(PATIENCE)
        struck = struck_at_line(functools.partial(queue.get, timeout=timeout), codes, number)
        if queue._reader.poll(0):
            # Ctrl-C came before it was taken out.
            assert queue.get(timeout=PATIENCE)[0] == 1
        takes_another(queue)
        if not struck:
            break
        number += 1
    assert number > 6


def test_a_pool_goes_on_after_ctrl_c_in_those_who_wait_for_it() -> None:
    """The pool's own thread gets the locks of those who feed it, and of results."""
    backpressure = Backpressure(1)
    results: IMapIterator[int] = IMapIterator(None)
    results.expect(1)
    number, struck = 0, True
    while struck:
        fresh, task = Backpressure(1), Task(results, 0, None, [b"pickle"], 0, handles=False)
        acquire = functools.partial(fresh.acquire, task)
        struck = struck_at_line(acquire, {Backpressure.acquire.__code__}, number)
        task.leave_queue()
        assert fresh._used <= 0
        number += 1
    assert number > 4
    task = Task(results, 0, None, [b"pickle"], 0, handles=False)
    struck_where_conditions_are_entered(lambda: backpressure.acquire(task))
    in_time(task.leave_queue)
    results.answer(0, True, 5)
    struck_where_conditions_are_entered(results.next)
    in_time(lambda: results.expect(1))
    result: ApplyResult[int] = ApplyResult(None)
    struck_where_conditions_are_entered(lambda: result.wait(0.01))
    in_time(lambda: result.answer(0, True, 5))
    assert result.get(0) == 5


def struck_at_step(action: Callable[[], object], codes: set[Any], number: int) -> bool:
    """Do something; Ctrl-C comes before the n-th instruction of some functions.

    Return whether it did.
    """
    steps = 0

    def trace(frame: Any, event: str, _argument: object) -> Any:
        nonlocal steps
        if frame.f_code not in codes:
            return None
        frame.f_trace_opcodes = True
        if event == "call" and sys.version_info[:2] == (3, 12):
            # It asks frames for that only when it is told to trace.
            sys.settrace(trace)
        if event == "opcode":
            steps += 1
            if steps > number:
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace

    return interrupted_by(trace, action)


def leaves_none_open(call: str) -> bool:
    """Return whether no descriptor stays open wherever Ctrl-C comes in a call that receives."""
    functions: list[Any] = [
        *(getattr(Connection, name) for name in ("recv", "recv_bytes", "receive")),
        *(getattr(Connection, name) for name in ("_contents", "_read", "_watch")),
        connection.give_buffer,
        packets.open_packet,
        *(
            getattr(kind, name)
            for kind in (Arrival, CallArrival)
            for name in ("__init__", "load", "contents")
        ),
        CallArrival._call,
        ReceiveBuffer.close_descriptors,
        queues.Queue.get,
    ]
    if PacketSocket is not PlainPacketSocket:
        # The socket module says what came in an object of its own: lost there, it is open.
        functions.append(PacketSocket.read)
    codes = {each.__code__ for each in functions}
    # Connections that earlier tests have left in cycles would be closed in the middle.
    gc.collect()
    queue = FORK.Queue()
    receive = queue.get if call == "get" else getattr(queue._reader, call)
    queue.put(np.ones(SIZE))
    receive()
    number = 0
    struck = True
    while struck:
        queue.put(np.ones(SIZE))
        before = psutil.Process().num_fds()
        struck = struck_at_step(receive, codes, number)
        after = psutil.Process().num_fds()
        if after != before:
            raise AssertionError(f"{after} descriptors, not {before}, after instruction {number}")
        while queue._reader.poll(0):
            receive()
        number += 1
    return number > 50


@pytest.mark.parametrize("call", ["recv", "recv_bytes", "get"])
def test_ctrl_c_while_a_message_is_received_leaves_no_descriptor_open(call: str) -> None:
    """Those that came with it are closed, also if nobody was told of them."""
    # What was lost with Ctrl-C keeps its memory as long as its process lives.
    assert wait_for_exit(in_forked_child(lambda: leaves_none_open(call))) == 0
