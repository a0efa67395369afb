"""What a worker says, or leaves unsaid, when something comes in between."""

from __future__ import annotations

import dataclasses
import gc
import multiprocessing
import os
import signal
from multiprocessing.pool import MaybeEncodingError  # type: ignore[attr-defined]
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import pytest

import shmreduce
from shmreduce import ProcessPoolExecutor, presized_pickle
from shmreduce.errors import SegmentError
from shmreduce.memory.message import Message
from shmreduce.pool import Pool
from shmreduce.pool_channel import Channel
from tests.channels.channels import eventually
from tests.conftest import PATIENCE
from tests.pool.work import own_pid, square

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.conftest import Children


@pytest.fixture(params=["shmreduce", "multiprocessing"])
def context(request: pytest.FixtureRequest, children: Children) -> Any:
    """A context whose connections are ours, and one of the standard library's."""
    if request.param == "shmreduce":
        return shmreduce.get_context(children.method)
    return children.context


def pids_of(pool: Pool) -> list[int | None]:
    return [worker.process.pid for worker in pool._supervisor.workers]


def raise_later() -> int:
    """Have a signal come when the worker waits for its next task; its handler raises."""

    def give_up(*_: Any) -> NoReturn:
        raise RuntimeError("too long")

    signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    return os.getpid()


def test_a_handler_that_raises_while_a_worker_waits_ends_that_worker_alone(context: Any) -> None:
    """As in the standard library; what it was not asked is nobody's answer."""
    with Pool(1, context=context) as pool:
        pid = pool.apply(raise_later)
        eventually(lambda: pid not in pids_of(pool))
        assert pool.map(square, range(5)) == [0, 1, 4, 9, 16]
        assert pool.apply(own_pid) != pid


def answer_twice() -> str:
    channels = [each for each in gc.get_objects() if isinstance(each, Channel)]
    # A forked worker has closed the ends of its parent.
    (channel,) = (each for each in channels if not each._connection.closed)
    channel.send_packed(channel.pack_last([(True, "once")]))
    return "twice"


def test_a_worker_that_answers_what_it_was_not_asked_is_replaced(context: Any) -> None:
    """What its next answer would belong to nobody knows."""
    with Pool(1, context=context) as pool:
        pid = pool.apply(own_pid)
        assert pool.apply(answer_twice) == "once"
        eventually(lambda: pid not in pids_of(pool))
        assert pool.map(square, range(5)) == [0, 1, 4, 9, 16]
        assert pool.apply(own_pid) != pid


@dataclasses.dataclass(frozen=True)
class FrozenError(Exception):
    code: int


class UnpicklableError(Exception):
    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.function = lambda: text


class ReducesBadly:
    def __reduce__(self) -> NoReturn:
        raise UnpicklableError("from within")


def raise_frozen(path: str) -> NoReturn:
    with Path(path).open("a") as file:
        file.write(".")
    raise FrozenError(3)


def raise_unpicklable() -> NoReturn:
    raise UnpicklableError("the reason")


def return_badly() -> Any:
    return ReducesBadly()


def calls(method: str, initializer: Callable[[], object] | None = None) -> list[Any]:
    """Return ``submit`` of a pool and of an executor, and what ends them."""
    context = shmreduce.get_context(method)
    pool = context.Pool(1, initializer)
    executor = ProcessPoolExecutor(1, mp_context=context, initializer=initializer)
    return [
        (lambda *call: pool.apply_async(call[0], call[1:]).get(PATIENCE), pool.terminate),
        (lambda *call: executor.submit(*call).result(PATIENCE), executor.shutdown),
    ]


def test_an_exception_that_refuses_attributes_is_an_answer(
    children: Children, tmp_path: Path
) -> None:
    """It is not taken for the death of a worker, and its task not tried again."""
    for number, (submit, end) in enumerate(calls(children.method)):
        path = tmp_path / str(number)
        # Python itself cannot unpickle it: it sets attributes.
        with pytest.raises(dataclasses.FrozenInstanceError) as caught:
            submit(raise_frozen, str(path))
        assert "FrozenError" in str(caught.value.__cause__)
        assert path.read_text() == "."
        end()


@pytest.mark.parametrize("function", [raise_unpicklable, return_badly])
def test_an_exception_that_cannot_be_pickled_is_told_in_words(
    children: Children, function: Callable[[], Any]
) -> None:
    """That of a task, or of what was to be pickled."""
    for submit, end in calls(children.method):
        # Or the pickler's own, in an executor.
        with pytest.raises(Exception, match=r"UnpicklableError|ReducesBadly"):
            submit(function)
        # The worker goes on.
        assert submit(square, 3) == 9
        end()


def test_an_initializer_that_fails_in_words_is_told_at_once(children: Children) -> None:
    """As one whose exception can be pickled."""
    pool = shmreduce.get_context(children.method).Pool(1, raise_unpicklable)
    with pytest.raises(MaybeEncodingError, match="UnpicklableError") as caught:
        pool.apply_async(square, (1,)).get(PATIENCE)
    assert "raise_unpicklable" in str(caught.value.__cause__)
    pool.terminate()


def test_a_message_that_needs_no_memory_does_not_want_any(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is made after a large one of its kind is expected to be as large."""

    def allocate(*_: Any, **__: Any) -> NoReturn:
        raise SegmentError("no descriptor", operation="open", errno=24, segment=None)

    reader, writer = shmreduce.Pipe(duplex=False)
    small = ("small", {1})
    monkeypatch.setattr(presized_pickle, "_sizes", {presized_pickle._kind_of(small): 1 << 22})
    monkeypatch.setattr(Message, "allocate", allocate)
    writer.send(small)
    assert reader.recv() == small
    reader.close()
    writer.close()


@pytest.mark.parametrize("how", ["ignored", "handled", "blocked", "default"])
@pytest.mark.parametrize("used", [True, False])
def test_idle_workers_leave_a_terminated_pool_whatever_becomes_of_sigterm(
    how: str, used: bool
) -> None:
    """Forked ones ignore, handle or block it as their parent does."""
    before = signal.getsignal(signal.SIGTERM)
    if how in ("ignored", "handled"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN if how == "ignored" else lambda *_: None)
    elif how == "blocked":
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        with Pool(2, context=multiprocessing.get_context("fork")) as pool:
            if used:
                pool.map(square, range(10))
            processes = [worker.process for worker in pool._supervisor.workers]
    finally:
        signal.signal(signal.SIGTERM, before)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    assert [process.exitcode for process in processes] == [0, 0]


def test_a_number_of_workers_is_whole() -> None:
    """As in the standard library."""
    with pytest.raises(TypeError, match="'float' object cannot be interpreted as an integer"):
        shmreduce.Pool(1.5)  # type: ignore[arg-type]
