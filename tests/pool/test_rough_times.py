"""Pools when the kernel has no room, users' code raises anything, and Ctrl-C comes anywhere."""

from __future__ import annotations

import concurrent.futures
import errno
import gc
import itertools
import multiprocessing
import os
import pickle
import queue
import resource
import selectors
import signal
import sys
import threading
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

import shmreduce
from shmreduce import (
    OutOfSharedMemoryError,
    SegmentError,
    TaskAbandonedError,
    pool_supervisor,
    pool_worker_start,
)
from shmreduce.connection import Connection
from shmreduce.executor import ProcessPoolExecutor
from shmreduce.pool import Pool
from shmreduce.pool_backpressure import Backpressure
from shmreduce.pool_results import ApplyResult, MapResult
from shmreduce.pool_supervisor import Supervisor
from shmreduce.pool_worker_start import WorkerStarter
from tests.channels.channels import eventually, within
from tests.conftest import PATIENCE, descendants
from tests.open_files import open_files

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.usefixtures("nothing_left")

FORK: Any = shmreduce.get_context("fork")


@pytest.fixture
def nothing_left() -> Iterator[None]:
    """Neither threads nor processes are left."""
    before = set(threading.enumerate()), {each.pid for each in descendants()}
    yield
    assert {each.name for each in set(threading.enumerate()) - before[0]} <= {
        "shmreduce-idle",
        "tqdm_monitor",
    }
    assert {each.pid for each in descendants()} <= before[1]


def once(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, error: BaseException) -> None:
    """Have a function raise once, and work from then on."""
    works = getattr(owner, name)

    def fails(*_: Any, **__: Any) -> None:
        monkeypatch.setattr(owner, name, works)
        raise error

    monkeypatch.setattr(owner, name, fails)


def fail_at(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """Have the kernel be without memory at one of the packets that are written here."""
    write = Connection._write
    left = [count]

    def refusing(self: Connection, packet: Any, flags: int) -> None:
        left[0] -= 1
        if left[0] == 0:
            raise OSError(errno.ENOBUFS, os.strerror(errno.ENOBUFS))
        write(self, packet, flags)

    monkeypatch.setattr(Connection, "_write", refusing)


def test_results_are_those_of_their_calls_when_the_kernel_lacks_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also with short tasks, which workers take by themselves."""
    with Pool(1, context=FORK) as pool:
        pool.map(abs, range(2000), chunksize=1)
        fail_at(monkeypatch, 5)
        results = [pool.apply_async(abs, (-number,)) for number in range(60)]
        assert [each.get(PATIENCE) for each in results] == list(range(60))


class UnloadableError(Exception):
    """Cannot be unpickled: its arguments are not those of its class."""

    def __init__(self, first: object, second: object) -> None:
        super().__init__(first)
        del second


def fail_to_initialize() -> None:
    raise UnloadableError(1, 2)


def test_an_initializers_error_that_cannot_be_unpickled_is_told(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """As the error of unpickling; the worker's own is on standard error."""
    with Pool(1, fail_to_initialize, context=FORK) as pool, pytest.raises(TypeError):
        pool.apply_async(abs, (-1,)).get(PATIENCE)
    assert "UnloadableError: 1" in capfd.readouterr().err


def test_ctrl_c_while_the_thread_starts_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither workers nor the thread."""
    start = threading.Thread.start

    def interrupted(self: threading.Thread) -> None:
        start(self)
        if self.name == "shmreduce-pool":
            raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        Pool(2, context=FORK)


def test_ctrl_c_when_the_workers_are_there_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pool that was never returned is terminated when it is dropped."""
    start = Supervisor.start

    def interrupted(self: Supervisor) -> None:
        start(self)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Supervisor, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            Pool(2, context=FORK)


def test_an_executor_whose_start_was_interrupted_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next call does not start its workers again."""
    start = Supervisor.start

    def interrupted(self: Supervisor) -> None:
        start(self)
        raise KeyboardInterrupt

    with ProcessPoolExecutor(1, mp_context=FORK) as executor:
        with monkeypatch.context() as patch:
            patch.setattr(Supervisor, "start", interrupted)
            with pytest.raises(KeyboardInterrupt):
                executor.submit(abs, -1)
        assert executor.submit(abs, -2).result(PATIENCE) == 2
        assert len(executor._processes) == 1


def test_an_executor_that_cannot_start_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The task is given back, and does not count."""
    with ProcessPoolExecutor(2, mp_context=FORK) as executor:
        once(monkeypatch, Supervisor, "start", OSError(errno.EMFILE, "none free"))
        with pytest.raises(OSError, match="none free"):
            executor.submit(len, bytes(1 << 20))
        assert executor._pending == set()
        assert executor.submit(abs, -2).result(PATIENCE) == 2


def refuse_watch(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Have the kernel refuse to watch a worker's connection (1) or its end (2), once."""
    register = selectors.DefaultSelector.register
    left = [number]

    def refuses(self: Any, file: Any, events: int, data: Any = None) -> Any:
        left[0] -= data is not None
        if data is not None and left[0] == 0:
            raise OSError(errno.ENOSPC, "no watch is left")
        return register(self, file, events, data)

    monkeypatch.setattr(selectors.DefaultSelector, "register", refuses)


@pytest.mark.parametrize("number", [1, 2])
def test_a_worker_that_cannot_be_watched_is_replaced(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It gets no tasks: nobody would see what becomes of them."""
    with Pool(1, context=FORK) as pool:
        first = pool.apply_async(os.getpid).get(PATIENCE)
        refuse_watch(monkeypatch, number)
        os.kill(first, signal.SIGKILL)
        assert pool.apply_async(os.getpid).get(PATIENCE) != first
        eventually(lambda: len(descendants()) == 1)


@pytest.mark.parametrize("number", [1, 2])
def test_a_pool_whose_workers_cannot_be_watched_is_not_made(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error is the kernel's, and those that were started are gone."""
    refuse_watch(monkeypatch, 2 + number)
    with pytest.raises(OSError, match="no watch is left"):
        Pool(2, context=FORK)


@pytest.mark.parametrize("limit", [0, 8])
@pytest.mark.parametrize("make", [FORK.Pool, ProcessPoolExecutor])
def test_where_no_file_may_grow_a_pool_says_what_to_do(
    make: Callable[[int], object], limit: int
) -> None:
    """A limit of file sizes (ulimit -f) that is too low for a pool is an error that names it."""
    before = open_files()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limits[1]))
    try:
        with pytest.raises(SegmentError, match="ulimit -f") as caught:
            make(1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (caught.value.operation, caught.value.errno) == ("resize", errno.EFBIG)
    assert not open_files() - before


def test_terminate_can_be_repeated_after_ctrl_c(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second call ends what the first did not."""
    pool = Pool(2, context=FORK)
    assert pool.apply(abs, (-1,)) == 1
    workers: list[Any] = list(pool._pool)
    once(monkeypatch, Backpressure, "close", KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        pool.terminate()
    pool.terminate()
    assert not any(worker.is_alive() for worker in workers if worker._popen is not None)
    pool.join()


def test_terminate_ends_a_worker_that_is_stopped_and_does_not_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a connection of multiprocessing, too, where the pool's thread waits for room."""
    monkeypatch.setattr(pool_supervisor, "_GRACE", 0.5)
    pool = Pool(1, context=multiprocessing.get_context("fork"))
    pool.apply(abs, (-1,))
    (worker,) = pool._pool
    assert worker.pid is not None
    os.kill(worker.pid, signal.SIGSTOP)
    result = pool.apply_async(len, (bytes(3 << 20),))
    (handle,) = pool._supervisor.workers
    eventually(lambda: handle.sent == 2)
    pool.terminate()
    with pytest.raises((shmreduce.WorkerDied, TaskAbandonedError)):
        result.get(PATIENCE)


def test_ctrl_c_behind_a_submit_harms_no_other_task(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its task is the thread's already: it is cancelled, or done, and the others are done."""
    with ProcessPoolExecutor(1, FORK) as executor:
        executor.submit(abs, -1).result(PATIENCE)
        submit = Supervisor.submit

        def struck(self: Supervisor, task: Any) -> None:
            submit(self, task)
            raise KeyboardInterrupt

        for _ in range(20):
            with monkeypatch.context() as patch:
                patch.setattr(Supervisor, "submit", struck)
                with pytest.raises(KeyboardInterrupt):
                    executor.submit(abs, -1)
            futures = [executor.submit(abs, -number) for number in range(20)]
            assert [each.result(PATIENCE) for each in futures] == list(range(20))
    assert not executor._pending


def test_a_callback_of_a_cancelled_future_may_shut_down() -> None:
    """Nobody waits for a lock that the caller has."""
    executor = ProcessPoolExecutor(1, mp_context=FORK)
    assert executor.submit(abs, -1).result(PATIENCE) == 1
    futures = [executor.submit(abs, -number) for number in range(50)]
    futures[-1].add_done_callback(lambda _: executor.shutdown(wait=False))
    executor.shutdown(cancel_futures=True)
    assert all(each.done() for each in futures)


def test_who_waits_for_a_generator_is_told_that_the_pool_was_terminated() -> None:
    """Though no task is under way that could tell."""
    items: queue.Queue[int | None] = queue.Queue()
    items.put(-1)
    pool = Pool(1, context=FORK)
    results: Any = pool.imap(abs, iter(items.get, None))
    assert next(results) == 1
    pool.terminate()
    with pytest.raises(TaskAbandonedError):
        results.next(PATIENCE)
    items.put(None)
    for thread in threading.enumerate():
        if thread.name == "shmreduce-pool-imap":
            thread.join(PATIENCE)


def test_a_thread_that_cannot_be_had_is_an_error_of_imap(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pool can be closed and joined afterwards."""
    with Pool(1, context=FORK) as pool:
        once(monkeypatch, threading.Thread, "start", RuntimeError("can't start new thread"))
        with pytest.raises(RuntimeError, match="new thread"):
            pool.imap(abs, [1])
        assert list(pool.imap(abs, [-1])) == [1]
        pool.close()
        pool.join()


def test_a_worker_that_cannot_be_replaced_for_lack_of_memory_is_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The pool goes on; another try succeeds."""
    with Pool(2, maxtasksperchild=1, context=FORK) as pool:
        once(monkeypatch, WorkerStarter, "_start", OutOfSharedMemoryError("none free"))
        assert pool.map(abs, range(-6, 0), chunksize=1) == [6, 5, 4, 3, 2, 1]


def leave(*_: object) -> None:
    """Raise what ends a program."""
    sys.exit(3)


class Leaving:
    """Raises SystemExit when it is unpickled."""

    def __reduce__(self) -> Any:
        return leave, ()


def make_leaving(_: int) -> Leaving:
    return Leaving()


def exiting_generator() -> Iterator[int]:
    yield -1
    sys.exit(4)


@pytest.mark.parametrize("where", ["callback", "result", "generator"])
def test_system_exit_in_users_code_ends_no_pool(
    monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """The result comes, or is SystemExit; the next one comes, too."""
    # Told of what a callback raises.
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    with Pool(1, context=FORK) as pool:
        if where == "callback":
            assert pool.apply_async(abs, (-1,), callback=leave).get(PATIENCE) == 1
        elif where == "result":
            with pytest.raises(SystemExit):
                pool.apply_async(make_leaving, (1,)).get(PATIENCE)
        else:
            results: Any = pool.imap(abs, exiting_generator())
            assert results.next(PATIENCE) == 1
            with pytest.raises(SystemExit):
                results.next(PATIENCE)
        assert pool.apply_async(abs, (-2,)).get(PATIENCE) == 2


def test_system_exit_in_a_callback_of_a_future_ends_no_executor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is told of; the other futures get their values."""
    reported: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: reported.append(args.exc_type))
    reader, writer = os.pipe()
    with ProcessPoolExecutor(1, FORK) as executor:
        first = executor.submit(os.read, reader, 1)
        first.add_done_callback(leave)
        second = executor.submit(abs, -2)
        os.write(writer, b"1")
        assert (first.result(PATIENCE), second.result(PATIENCE)) == (b"1", 2)
        assert executor.submit(abs, -3).result(PATIENCE) == 3
    assert reported == [SystemExit]
    os.close(reader)
    os.close(writer)


def test_the_ends_of_one_pools_worker_are_not_anothers(monkeypatch: pytest.MonkeyPatch) -> None:
    """While one pool makes the connection of a worker, no other pool starts one."""
    inside: list[bool] = []
    starting: Any = pool_worker_start
    make_channels: Callable[[Any], Any] = starting.make_channels

    def watched(context: Any) -> Any:
        inside.append(starting._starting.locked())
        return make_channels(context)

    monkeypatch.setattr(starting, "make_channels", watched)
    with Pool(2, context=FORK) as pool:
        assert pool.apply(abs, (-1,)) == 1
    assert inside == [True, True]


def test_what_cannot_be_pickled_is_not_taken_on_when_the_pool_has_ended() -> None:
    """An endless iterable is left alone, as if its items could be sent."""
    taken = itertools.count()

    def refused(_: object) -> None:
        """Has no name by which it could be pickled."""

    with Pool(1, context=FORK) as pool:
        results = pool.imap(refused, (next(taken) for _ in itertools.count()))
        with pytest.raises((AttributeError, pickle.PicklingError)):
            next(results)
    eventually(lambda: all(each.name != "shmreduce-pool-imap" for each in threading.enumerate()))


@dataclass(frozen=True)
class InvalidError(Exception):
    """Refuses attributes, as frozen dataclasses do, and so notes and causes."""

    what: str


class CodedError(Exception):
    """Cannot be unpickled, since its class refuses the text that it gives to Exception."""

    def __init__(self, code: object) -> None:
        if not isinstance(code, int):
            raise InvalidError("code")
        super().__init__(f"code {code}")


def fail_with_a_code() -> None:
    raise CodedError(5)


def test_an_error_of_unpickling_that_refuses_attributes_is_an_answer() -> None:
    """Of that one task: the pool goes on."""
    with Pool(1, context=FORK) as pool:
        with pytest.raises(InvalidError) as caught:
            pool.apply_async(fail_with_a_code).get(PATIENCE)
        assert "fail_with_a_code" in str(caught.value.__cause__)
        assert pool.apply_async(abs, (-1,)).get(PATIENCE) == 1


@pytest.mark.parametrize("kind", ["call", "list", "iterable"])
def test_callbacks_run_in_the_pools_thread_only(kind: str) -> None:
    """Also if nothing could be sent, because of the arguments or of the iterable."""
    names: list[str] = []

    def note(_: object) -> None:
        names.append(threading.current_thread().name)

    class Shorter(list[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(())

    with Pool(1, context=FORK) as pool:
        results: dict[str, Callable[[], Any]] = {
            "call": lambda: pool.apply_async(abs, (lambda: 1,), error_callback=note),
            "list": lambda: pool.map_async(repr, [lambda: 1], error_callback=note),
            "iterable": lambda: pool.map_async(abs, Shorter([1]), callback=note),
        }
        results[kind]().wait(PATIENCE)
        assert names == ["shmreduce-pool"]


def has_turned(pool: Pool) -> None:
    """Wait until a pool's thread has looked for what there is to do, twice."""
    for _ in range(2):
        turned = threading.Event()
        pool._supervisor.do_soon(turned.set)
        assert turned.wait(PATIENCE)


class Closes:
    """Closes the pool while it is pickled, as another thread or a callback may do then."""

    pool: Pool

    def __reduce__(self) -> Any:
        Closes.pool.close()
        has_turned(Closes.pool)
        return int, ("5",)


@pytest.mark.parametrize("kind", ["call", "list"])
def test_a_call_that_was_begun_is_done_though_the_pool_is_closed(kind: str) -> None:
    """Its workers stay until the call is complete, and have done it."""
    with Pool(1, context=FORK) as pool:
        Closes.pool = pool
        if kind == "call":
            assert pool.apply_async(abs, (Closes(),)).get(PATIENCE) == 5
        else:
            assert pool.map_async(repr, [Closes(), 1], 1).get(PATIENCE) == ["5", "1"]
        pool.join()


def test_a_closed_pool_ends_when_the_last_iterable_does() -> None:
    """Although no task comes of it."""
    ends = threading.Event()

    def nothing() -> Iterator[int]:
        assert ends.wait(PATIENCE)
        yield from ()

    with Pool(1, context=FORK) as pool:
        results = pool.imap(abs, nothing())
        pool.close()
        has_turned(pool)
        thread = pool._supervisor.thread.ident or 0
        eventually(lambda: sys._current_frames()[thread].f_code.co_name == "select")
        ends.set()
        assert list(results) == []
        within(pool.join)


def sizes_of_bytes_above() -> list[int]:
    """Return the sizes of large bytes that the callers' frames refer to."""
    found = []
    frame = sys._getframe().f_back
    while frame is not None:
        for each in list(frame.f_locals.values()):
            inside = each if isinstance(each, list) else [each]
            found += [len(one) for one in inside if isinstance(one, bytes) and len(one) > 10_000]
        frame = frame.f_back
    return found


def look_up(_: object) -> list[int]:
    return sizes_of_bytes_above()


def test_a_worker_does_not_keep_the_pickle_of_a_task() -> None:
    """While it does the task, which may take long, and the pickle much memory."""
    with Pool(1, context=FORK) as pool:
        assert pool.apply(look_up, ("x" * 20_000,)) == []


def test_who_waits_is_told_though_a_worker_cannot_be_killed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """For example, it has changed its user. The others are killed."""
    told: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: told.append(args.exc_value))
    error = PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    def refuse() -> None:
        raise error

    with Pool(2, context=FORK) as pool:
        results = [pool.apply_async(signal.pause) for _ in range(3)]
        workers = list(pool._supervisor.workers)
        eventually(lambda: all(worker.tasks for worker in workers))
        process = workers[0].process
        with monkeypatch.context() as patch:
            patch.setattr(pool_supervisor, "_GRACE", 0.1)
            patch.setattr(process, "terminate", refuse)
            patch.setattr(process, "kill", refuse)
            pool.terminate()
        for result in results:
            with pytest.raises(TaskAbandonedError):
                result.get(PATIENCE)
        assert told == [error]
        assert workers[1].process.exitcode is not None
        process.kill()
        process.join(PATIENCE)


def test_what_an_abandoned_list_drops_may_wake_its_pool() -> None:
    """Whose thread then abandons it again, in the same call."""

    class Wakes:
        def __del__(self) -> None:
            result.abandon(TaskAbandonedError("again"))

    result: Any = MapResult(None, 1, 2)
    result._pool, result._value = Wakes(), [Wakes(), None]
    within(lambda: result.abandon(TaskAbandonedError("gone")))
    with pytest.raises(TaskAbandonedError, match="gone"):
        result.get(PATIENCE)


def test_answers_to_an_abandoned_list_are_left_alone() -> None:
    """Its callback is not called, and its error stays."""
    called: list[Any] = []
    result: MapResult[int] = MapResult(None, 1, 3, called.append, called.append)
    result.abandon(TaskAbandonedError("gone"))
    result.answer(0, True, [1])
    result.end_at(1, 1)
    result.fail_rest(ValueError(), 1)
    single: ApplyResult[int] = ApplyResult(None, called.append, called.append)
    single.abandon(TaskAbandonedError("gone"))
    single.answer(0, True, 5)
    for each in (result, single):
        with pytest.raises(TaskAbandonedError, match="gone"):
            each.get(PATIENCE)
    assert called == []


@pytest.mark.parametrize("kind", ["call", "list"])
def test_a_signal_handler_that_joins_the_pool_waits_for_no_call_below_it(kind: str) -> None:
    """The call that it has interrupted cannot go on before; its result is abandoned."""
    joined: list[None] = []

    def stop(*_: Any) -> None:
        pool.close()
        pool.join()
        joined.append(None)

    class Interrupted:
        def __reduce__(self) -> Any:
            signal.raise_signal(signal.SIGALRM)
            return int, ("5",)

    before = signal.signal(signal.SIGALRM, stop)
    try:
        with Pool(1, context=FORK) as pool:
            if kind == "call":
                result: Any = pool.apply_async(repr, (Interrupted(),))
            else:
                result = pool.map_async(repr, [Interrupted()])
            with pytest.raises(TaskAbandonedError):
                result.get(PATIENCE)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert joined == [None]


def test_a_result_that_is_there_is_had_without_a_lock() -> None:
    """In a forked child another thread's lock would never be released."""
    result: ApplyResult[int] = ApplyResult(None)
    result.answer(0, True, 5)
    result._event._lock.acquire()
    assert within(result.get) == 5


def test_a_list_that_is_abandoned_while_an_answer_comes() -> None:
    """The thread that abandons it waits for the other one."""
    abandoning: list[threading.Thread] = []

    class Interrupted(int):
        def __rmul__(self, index: int) -> int:
            thread = threading.Thread(target=result.abandon, args=(TaskAbandonedError("gone"),))
            abandoning.append(thread)
            thread.start()
            # It must not end before this answer has been taken.
            thread.join(0.2)
            return index * int(self)

    result: MapResult[int] = MapResult(None, 1, 1)
    result._chunksize = Interrupted(1)
    result.answer(0, True, [7])
    assert result.get(PATIENCE) == [7]
    abandoning[0].join(PATIENCE)


def test_ctrl_c_leaves_an_executor_without_the_future_of_a_call_that_was_not_made() -> None:
    """It counts for the number of workers that are needed."""

    class Struck:
        def __reduce__(self) -> Any:
            raise KeyboardInterrupt

    with ProcessPoolExecutor(1, FORK) as executor:
        with pytest.raises(KeyboardInterrupt):
            executor.submit(repr, Struck())
        assert executor._pending == set()


_inherited: list[Any] = []


def receive_inherited() -> Any:
    return _inherited[0].recv()


def test_cancelled_futures_are_told_of_although_no_worker_is_idle() -> None:
    """Who waits for them need not wait for the work of others; nor is their memory kept."""
    reader, writer = FORK.Pipe(duplex=False)
    _inherited.append(reader)
    with ProcessPoolExecutor(1, FORK) as executor:
        first = executor.submit(receive_inherited)
        _inherited.clear()
        eventually(first.running)
        others = [executor.submit(abs, -number) for number in range(5)]
        executor.shutdown(wait=False, cancel_futures=True)
        done, _ = concurrent.futures.wait(others, PATIENCE)
        assert done == set(others)
        assert not first.done()
        writer.send("done")
    assert first.result(PATIENCE) == "done"
    reader.close()
    writer.close()


def use_a_pool() -> Any:
    with Pool(1, context=FORK) as pool:
        assert pool.apply_async(abs, (-1,)).get(PATIENCE) == 1
    return weakref.ref(pool._supervisor)


def use_an_executor() -> Any:
    with ProcessPoolExecutor(1, FORK) as executor:
        assert executor.submit(abs, -1).result(PATIENCE) == 1
    return weakref.ref(executor._supervisor)


@pytest.mark.parametrize("use", [use_a_pool, use_an_executor])
def test_an_ended_pool_is_freed_without_the_cycle_collector(use: Callable[[], Any]) -> None:
    """With the descriptor and the memory that it shares with its workers."""
    gc.collect()
    gc.disable()
    try:
        supervisor = use()
        eventually(lambda: supervisor() is None)
    finally:
        gc.enable()
