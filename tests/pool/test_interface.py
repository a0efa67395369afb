"""The interface is that of multiprocessing.pool.Pool."""

from __future__ import annotations

import gc
import inspect
import io
import multiprocessing.pool
import pickle
import sys
import threading
import warnings
from typing import TYPE_CHECKING, Any

import pytest

from shmreduce.errors import ConfigurationError
from shmreduce.executor import ProcessPoolExecutor
from shmreduce.pool import AsyncResult, Pool
from tests.pool.work import (
    Unpicklable,
    add,
    fail,
    invert,
    keep,
    kept,
    not_picklable,
    own_pid,
    square,
    unpicklable_there,
    wait_for_kept,
    wait_for_kept_at_0,
    wait_for_kept_lock,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PATIENCE = 30.0
FORK: Any = multiprocessing.get_context("fork")
STANDARD: Any = multiprocessing.pool
PUBLIC = sorted(name for name in vars(STANDARD.Pool) if not name.startswith("_"))


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool(2, context=FORK) as pool:
        yield pool
    pool.join()


@pytest.mark.parametrize("name", PUBLIC)
def test_every_method_takes_what_the_standard_one_takes(name: str) -> None:
    """Methods have the parameters of the standard Pool's, in order; more are keyword-only."""
    theirs = list(inspect.signature(getattr(STANDARD.Pool, name)).parameters)
    ours = list(inspect.signature(getattr(Pool, name)).parameters.values())
    assert [each.name for each in ours[: len(theirs)]] == theirs
    assert all(each.kind is inspect.Parameter.KEYWORD_ONLY for each in ours[len(theirs) :])


def test_results_are_those_of_the_function(pool: Pool) -> None:
    """apply, map, starmap, imap and imap_unordered return what the functions return."""
    assert pool.apply(add, (1,), {"y": 2}) == 3
    assert pool.map(square, range(10)) == [x * x for x in range(10)]
    assert pool.map(square, iter(range(10)), chunksize=3) == [x * x for x in range(10)]
    assert pool.starmap(add, [(1, 2), (3, 4)]) == [3, 7]
    assert list(pool.imap(square, range(10))) == [x * x for x in range(10)]
    assert list(pool.imap(square, range(10), chunksize=4)) == [x * x for x in range(10)]
    assert sorted(pool.imap_unordered(square, range(10), 3)) == [x * x for x in range(10)]
    assert pool.map(square, []) == []
    assert list(pool.imap(square, [])) == []


def test_asynchronous_results(pool: Pool) -> None:
    """An AsyncResult becomes ready, knows success, and calls the callback that fits."""
    calls: list[Any] = []
    good = pool.map_async(square, [1, 2], callback=calls.append, error_callback=fail)
    good.wait(PATIENCE)
    # Of no public name, but what programs ask that show how far a map is.
    assert good._number_left == 0
    assert isinstance(good, AsyncResult)
    assert good.ready()
    assert good.successful()
    assert good.get(PATIENCE) == [1, 4]
    bad = pool.apply_async(fail, ("x",), callback=fail, error_callback=calls.append)
    bad.wait(PATIENCE)
    assert not bad.successful()
    with pytest.raises(KeyError):
        bad.get(PATIENCE)
    assert calls[0] == [1, 4]
    assert isinstance(calls[1], KeyError)
    assert pool.starmap_async(add, [(1, 2)]).get(PATIENCE) == [3]


def test_a_result_that_is_not_there_in_time() -> None:
    """get() and next() raise multiprocessing.TimeoutError, successful() ValueError."""
    lock = FORK.Lock()
    with Pool(1, initializer=keep, initargs=(lock,), context=FORK) as pool:
        with lock:
            result = pool.apply_async(wait_for_kept_lock)
            results: Any = pool.imap(square, [3])
            with pytest.raises(multiprocessing.TimeoutError):
                result.get(0.01)
            with pytest.raises(multiprocessing.TimeoutError):
                results.next(0.01)
            with pytest.raises(ValueError, match="not ready"):
                result.successful()
        assert results.next(PATIENCE) == 9
        result.get(PATIENCE)
    pool.join()


@pytest.mark.parametrize("progress", [False, True])
def test_results_in_chunks_come_one_by_one(progress: bool) -> None:
    """Their iterator has a timeout, too, and has ended behind an error, as the standard one."""
    with Pool(1, context=FORK) as pool:
        for iterate in (pool.imap, pool.imap_unordered):
            results = iterate(square, range(5), chunksize=2, progress=progress)
            assert [results.next(PATIENCE) for _ in range(5)] == [0, 1, 4, 9, 16]
            with pytest.raises(StopIteration):
                results.next(PATIENCE)
            results = iterate(invert, [1, 2, 0, 4, 5], chunksize=2, progress=progress)
            assert [results.next(PATIENCE) for _ in range(2)] == [1, 0.5]
            with pytest.raises(ZeroDivisionError):
                next(results)
            assert list(results) == []
    lock = FORK.Lock()
    with Pool(1, keep, (lock,), context=FORK) as pool:
        with lock:
            pool.apply_async(wait_for_kept_lock)
            results = pool.imap(square, [3, 4], 2, progress=progress)
            with pytest.raises(multiprocessing.TimeoutError):
                results.next(0.01)
        assert [results.next(PATIENCE), results.next(PATIENCE)] == [9, 16]


def test_an_exception_has_the_traceback_of_the_worker(pool: Pool) -> None:
    """The cause of a raised exception is the text of the worker's traceback."""
    with pytest.raises(KeyError) as caught:
        pool.apply(fail, ("x",))
    assert type(caught.value.__cause__) is STANDARD.RemoteTraceback
    assert "raise KeyError(x)" in str(caught.value.__cause__)


def test_what_cannot_be_pickled_fails_its_task_alone(pool: Pool) -> None:
    """What cannot be pickled, or unpickled, either way, fails its task; others go on."""
    with pytest.raises((AttributeError, pickle.PicklingError)):
        pool.apply(square, (lambda: 1,))
    with pytest.raises(STANDARD.MaybeEncodingError):
        pool.apply(not_picklable, (1,))
    with pytest.raises(KeyError, match="on arrival"):
        pool.apply(unpicklable_there, (1,))
    with pytest.raises(KeyError, match="on arrival"):
        pool.apply(square, (Unpicklable(),))
    assert pool.map(square, range(5)) == [0, 1, 4, 9, 16]


class Breaking:
    """Says that it has 10 items and raises at the fourth."""

    def __len__(self) -> int:
        return 10

    def __iter__(self) -> Iterator[int]:
        yield from range(3)
        raise LookupError("iterable")


class UnspeakableError(Exception):
    """Neither pickled nor shown."""

    def __reduce__(self) -> Any:
        raise LookupError("cannot be pickled")

    __repr__ = __str__ = __reduce__


def give_unspeakable(raises: bool) -> Any:
    if raises:
        raise UnspeakableError
    return UnspeakableError()


@pytest.mark.parametrize("raises", [True, False])
def test_what_can_neither_be_pickled_nor_shown_fails_its_task_alone(
    pool: Pool, raises: bool
) -> None:
    """The pickler's own error is told: no worker ends for it."""
    with pytest.raises(LookupError, match="cannot be pickled"):
        pool.apply(give_unspeakable, (raises,))
    assert pool.apply(abs, (-1,)) == 1


def test_an_iterable_that_raises(pool: Pool) -> None:
    """Its exception comes where its item would have come, without a remote cause."""
    for chunksize in (1, 2, 20):
        with pytest.raises(LookupError) as caught:
            pool.map(square, Breaking(), chunksize)
        assert caught.value.__cause__ is None
    results = pool.imap(square, Breaking())
    assert [next(results) for _ in range(3)] == [0, 1, 4]
    with pytest.raises(LookupError):
        next(results)
    assert list(results) == []


def wait_and_breaking(connection: Any) -> Iterator[Any]:
    """Yield what a task waits for, and raise; the task ends only after that."""
    yield connection
    yield connection
    raise LookupError("iterable")


def receive(connection: Any) -> Any:
    return connection.recv()


@pytest.mark.parametrize("chunksize", [1, 2])
def test_what_an_iterable_raises_comes_behind_the_results(chunksize: int) -> None:
    """Also from imap_unordered: no result of an item before is lost, even if it comes later."""
    here, there = FORK.Pipe()
    with Pool(1, context=FORK) as pool:
        results: Any = pool.imap_unordered(receive, wait_and_breaking(there), chunksize)
        with pytest.raises(multiprocessing.TimeoutError):
            results.next(0.2)
        here.send(1)
        here.send(2)
        assert [results.next(PATIENCE) for _ in range(2)] == [1, 2]
        with pytest.raises(LookupError, match="iterable"):
            results.next(PATIENCE)
        assert list(results) == []


class Short:
    """Has fewer items than its length says, as a progress bar with a guessed total."""

    def __len__(self) -> int:
        return 10

    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


@pytest.mark.parametrize("chunksize", [None, 1, 2, 20])
def test_an_iterable_that_is_shorter_than_it_says(pool: Pool, chunksize: int | None) -> None:
    """The list has the results that there are, and none of items that never came."""
    assert pool.map(square, Short(), chunksize) == [0, 1, 4]
    assert pool.map_async(square, Short(), chunksize).get(PATIENCE) == [0, 1, 4]


class Unsized:
    """Has a length that cannot be told."""

    def __len__(self) -> int:
        raise TypeError("nobody knows")

    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


@pytest.mark.parametrize("progress", [False, True])
@pytest.mark.parametrize("items", [range(1 << 70), Unsized()], ids=["huge", "unsized"])
def test_imap_of_what_has_no_length(items: Any, progress: bool) -> None:
    """An iterable whose length is too large for an integer of C, or an error, is read as ever."""
    with Pool(2, context=FORK) as pool:
        results = pool.imap(square, items, progress=progress)
        assert [next(results) for _ in range(3)] == [0, 1, 4]
        del results
    pool.join()


def test_long_iterables_side_by_side() -> None:
    """Iterables of imap are read not far ahead of the workers, several at once."""
    taken = []

    def items() -> Iterator[bytes]:
        for number in range(10_000):
            taken.append(number)
            yield bytes(1 << 20)

    with Pool(1, context=FORK) as pool:
        both = zip(pool.imap(len, items()), pool.imap(len, items()), strict=False)
        assert [next(both) for _ in range(3)] == [(1 << 20, 1 << 20)] * 3
        assert len(taken) < 1000
    pool.join()


def by_map(pool: Pool, count: int) -> None:
    pool.map_async(square, range(count), chunksize=1).get(PATIENCE)


def by_imap(pool: Pool, count: int) -> None:
    results: Any = pool.imap(square, range(count))
    for _ in range(count):
        results.next(PATIENCE)


def by_apply(pool: Pool, count: int) -> None:
    for each in [pool.apply_async(square, (number,)) for number in range(count)]:
        each.get(PATIENCE)


@pytest.mark.parametrize("do_others", [by_map, by_imap, by_apply])
def test_a_call_that_waits_for_others(
    do_others: Callable[[Pool, int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A task that goes on until the others are done does not keep them from their worker."""
    # All tasks count as short, so that workers take them by themselves.
    monkeypatch.setattr("shmreduce.pool_dispatch._SHORT_TASK", 3600.0)
    done = FORK.Event()
    with Pool(2, keep, (done,), context=FORK) as pool:
        waiting = pool.apply_async(wait_for_kept)
        do_others(pool, 200)
        done.set()
        assert waiting.get(PATIENCE)
    pool.join()


def test_an_item_that_takes_long_keeps_no_others() -> None:
    """Nor has an item that has taken long already, though the others of its list are short."""

    def items() -> Iterator[int]:
        yield 0
        # Longer than what counts as short.
        threading.Event().wait(0.05)
        yield from range(1, 3000)

    done = FORK.Event()
    with Pool(2, keep, (done,), context=FORK) as pool:
        results: Any = pool.imap_unordered(wait_for_kept_at_0, items())
        assert {results.next(PATIENCE) for _ in range(2999)} == set(range(1, 3000))
        done.set()
        assert results.next(PATIENCE) == 0
    pool.join()


def test_a_callback_that_raises_is_reported_and_harms_nobody() -> None:
    """Its exception reaches threading.excepthook; the result is there and the pool goes on."""
    reported: list[Any] = []
    before = threading.excepthook
    threading.excepthook = lambda args: reported.append(args.exc_value)
    try:
        with Pool(1, context=FORK) as pool:
            assert pool.apply_async(square, (2,), callback=fail).get(PATIENCE) == 4
            assert pool.apply(square, (3,)) == 9
        pool.join()
    finally:
        threading.excepthook = before
    assert [type(each) for each in reported] == [KeyError]


def test_a_callback_that_cannot_be_reported_harms_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where standard error is closed: the result is there and the pool goes on."""
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stderr", closed)
    monkeypatch.setattr(threading, "excepthook", threading.__excepthook__)
    with Pool(1, context=FORK) as pool:
        assert pool.apply_async(square, (2,), callback=fail).get(PATIENCE) == 4
        assert pool.apply(square, (3,)) == 9
    pool.join()


@pytest.mark.parametrize(
    "arguments",
    [
        {"processes": 0},
        {"processes": -1},
        {"maxtasksperchild": 0},
        {"maxtasksperchild": 0.5},
    ],
)
def test_what_the_constructor_rejects(arguments: dict[str, Any]) -> None:
    """Numbers of workers and tasks that cannot be, with the standard library's error."""
    with pytest.raises(ValueError) as caught:
        Pool(**arguments)
    assert type(caught.value) is ValueError


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("retries", -1),
        ("retries", 0.5),
        ("retries", "1"),
        ("shared_allocations", "no"),
        ("shared_allocations", None),
    ],
)
def test_what_the_constructor_rejects_of_our_own(setting: str, value: Any) -> None:
    """It is a ConfigurationError that names the parameter and its value."""
    for make in (Pool, ProcessPoolExecutor):
        with pytest.raises(ConfigurationError, match=f"{setting}=.*: give ") as caught:
            make(1, **{setting: value})
        assert caught.value.fields == {"setting": setting, "value": value}


def test_what_methods_reject_of_our_own() -> None:
    """It is a ConfigurationError, nothing is begun, and the pool goes on."""
    call: Any
    anything: Any
    with Pool(1, context=FORK) as pool:
        for call in (pool.map, pool.starmap, pool.imap, pool.imap_unordered):
            for setting, anything in (("retries", -1), ("progress", 1), ("progress", None)):
                with pytest.raises(ConfigurationError) as caught:
                    call(square, range(3), **{setting: anything})
                assert caught.value.fields == {"setting": setting, "value": anything}
        for call in (pool.apply, pool.apply_async):
            with pytest.raises(ConfigurationError, match="retries=-1: give how often"):
                call(square, (3,), retries=-1)
        assert pool.apply(square, (3,)) == 9
    pool.join()


def test_an_initializer_that_cannot_be_called() -> None:
    """It is a TypeError."""
    with pytest.raises(TypeError):
        Pool(1, initializer=1)  # type: ignore[arg-type]


def test_an_argument_that_there_is_not() -> None:
    """It is a TypeError, and the destructor says nothing."""
    arguments: dict[str, Any] = {"proceses": 1}
    with pytest.raises(TypeError, match="proceses"):
        Pool(**arguments)
    # Python would ignore what it raises, with a warning that fails the test.
    gc.collect()


def test_workers_are_replaced_after_so_many_tasks() -> None:
    """maxtasksperchild: no worker does more tasks than that, and all tasks are done."""
    with Pool(2, maxtasksperchild=3, context=FORK) as pool:
        pids = pool.map(own_pid, range(20), chunksize=1)
        pool.close()
        pool.join()
    assert max(pids.count(pid) for pid in pids) <= 3
    assert len(set(pids)) >= 7


def test_the_initializer_is_called_in_each_worker() -> None:
    """initializer(*initargs) is called before a worker's first task."""
    with Pool(2, keep, ("given",), context=FORK) as pool:
        assert set(pool.map(kept, range(10))) == {"given"}
        assert "state=RUN pool_size=2" in repr(pool)
    pool.join()


ENDS = [["close"], ["close", "join"], ["terminate"], ["close", "terminate"]]


@pytest.mark.parametrize("end", ENDS)
def test_repr_is_that_of_the_standard_pool(end: list[str]) -> None:
    """repr() shows the state and the number of workers, also when they have left."""
    shown = []
    for make in (Pool, STANDARD.Pool):
        pool = make(2, context=FORK)
        shown.append([repr(pool)])
        for name in end:
            getattr(pool, name)()
            shown[-1].append(repr(pool))
        pool.join()
        shown[-1].append(repr(pool))
    ours, theirs = shown
    assert ours == [each.replace("multiprocessing.pool.", "shmreduce.pool.") for each in theirs]


def test_a_closed_pool_finishes_and_takes_no_more() -> None:
    """close() lets everything be done; later calls, and join() before close(), are errors."""
    pool = Pool(2, context=FORK)
    with pytest.raises(ValueError, match="still running"):
        pool.join()
    results = [pool.apply_async(square, (x,)) for x in range(20)]
    later = pool.imap(square, range(20))
    pool.close()
    pool.join()
    assert [each.get(0) for each in results] == list(later) == [x * x for x in range(20)]
    for call in (pool.map, pool.imap, pool.map_async, pool.apply):
        with pytest.raises(ValueError, match="not running"):
            call(square, [1])
    with pytest.raises(ValueError, match="not running"):
        pool.__enter__()
    with pytest.raises(NotImplementedError):
        pickle.dumps(pool)


def test_a_pool_that_was_forgotten_warns_and_ends() -> None:
    """Dropping a running pool is a ResourceWarning; its workers end."""
    pool = Pool(1, context=FORK)
    worker = pool._pool[0]
    with pytest.warns(ResourceWarning, match="unclosed running multiprocessing pool"):
        del pool
    worker.join(PATIENCE)
    assert worker.exitcode is not None


def test_a_dropped_pool_stays_for_its_results() -> None:
    """As long as somebody waits for a result the pool is not collected."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        assert list(Pool(1, context=FORK).imap(square, range(5))) == [0, 1, 4, 9, 16]
        assert Pool(1, context=FORK).apply_async(square, (5,)).get(PATIENCE) == 25


class NotingPool(Pool):
    """Overrides a method with the parameters of the standard library."""

    noted: Any = ()

    def apply_async(  # type: ignore[override]
        self,
        func: Any,
        args: Any = (),
        kwds: Any = {},  # noqa: B006
        callback: Any = None,
        error_callback: Any = None,
    ) -> Any:
        self.noted = (func, args, dict(**kwds))
        return super().apply_async(func, args, kwds, callback, error_callback)


def test_apply_calls_what_a_derived_class_has_instead_of_apply_async() -> None:
    """With the arguments that the standard library's passes."""
    with NotingPool(1, context=FORK) as pool:
        assert pool.apply(square, (3,)) == 9
        assert pool.noted == (square, (3,), {})
    pool.join()


def test_arguments_of_no_initializer_are_not_looked_at() -> None:
    """A caller may pass on None, which it got as its own default."""
    nothing: Any = None
    with Pool(1, None, nothing, context=FORK) as pool:
        assert pool.apply(square, (3,)) == 9
    pool.join()
    with ProcessPoolExecutor(1, FORK, None, nothing) as executor:
        assert executor.submit(square, 3).result(PATIENCE) == 9


def test_an_iterator_tells_how_many_results_have_arrived(pool: Pool) -> None:
    """As ``_index``, which programs that show the progress read."""
    results: Any = pool.imap_unordered(square, range(5))
    assert sorted(results) == [0, 1, 4, 9, 16]
    assert results._index == results._length == 5
