"""Threads that do something for the first time, all at once."""

from __future__ import annotations

import contextlib
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

from shmreduce_cuda import CudaSharingError, events, keeper, locks, runtime
from shmreduce_cuda.descriptors import open_listener
from shmreduce_cuda.offers import Offers

if TYPE_CHECKING:
    from collections.abc import Callable

THREADS = 2


def at_once(call: Callable[[], Any]) -> list[Any]:
    """Return what each thread's call returns."""
    with ThreadPoolExecutor(THREADS) as pool:
        calls = [pool.submit(call) for _ in range(THREADS)]
        return [each.result(30) for each in calls]


def test_threads_that_begin_at_once_have_one_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second state would have another token: what one thread sends, the process would
    not know as its own, and nobody would look after it at its end.
    """
    both = threading.Barrier(THREADS)

    class Slow(runtime.Runtime):
        def __init__(self) -> None:
            super().__init__()
            both.wait(30)

    monkeypatch.setattr(runtime, "_current", None)
    monkeypatch.setattr(runtime, "_finish_at_exit", lambda _: None)
    monkeypatch.setattr(runtime, "Runtime", Slow)
    first, second = at_once(runtime.current)
    assert first is second is runtime.current()


def test_threads_that_listen_at_once_have_one_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    """The name of the socket can be bound once: the second thread uses the first's."""
    beside: list[threading.Thread] = []

    def open_slowly(token: bytes) -> Any:
        if not beside:
            # Another thread comes here meanwhile, unless it is kept from it.
            beside.append(threading.Thread(target=state.keeper.listen))
            beside[0].start()
            beside[0].join(0.5)
        return open_listener(token)

    monkeypatch.setattr(keeper, "open_listener", open_slowly)
    state = runtime.Runtime()
    try:
        state.keeper.listen()
        beside[0].join(30)
        assert state.keeper.listener is not None
    finally:
        state.keeper.forget()


def test_what_comes_during_a_look_is_seen() -> None:
    """The thread says that it rests before it looks: who has something for it after the look,
    and before it sleeps, wakes it.
    """
    looks: list[int] = []
    again = threading.Event()

    def check() -> bool:
        looks.append(len(looks))
        if len(looks) == 1:
            # As another thread would, at this moment.
            assert thread.attend()
        else:
            again.set()
        return False

    thread = keeper.Keeper(bytes(16), Offers(), check)
    thread.look_after()
    try:
        assert again.wait(30)
    finally:
        assert thread.stop()
        thread.forget()


def test_a_fork_while_the_thread_is_being_started() -> None:
    """A signal handler may fork at that moment: the code that it has interrupted starts the
    thread, and what comes after a fork does not wait for it.
    """
    thread = keeper.Keeper(bytes(16), Offers(), lambda: False)
    thread.look_after()
    thread.before_fork()
    with ThreadPoolExecutor(1) as pool:
        with thread._starting:
            # In a thread, so that the test ends if it does wait.
            pool.submit(thread.after_fork_in_parent).result(10)
            assert not thread.attend()
        thread.look_after()
    assert thread.stop()
    thread.forget()


def test_a_socket_that_is_opened_while_it_is_being_opened(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As by a signal handler that sends an array of a pool: it is told so."""
    thread = keeper.Keeper(bytes(16), Offers(), lambda: False)

    def interrupt(_: bytes) -> Any:
        thread.listen()

    monkeypatch.setattr(keeper, "open_listener", interrupt)
    with pytest.raises(CudaSharingError, match="signal handler"):
        thread.listen()


class WithoutEvents:
    """A driver that cannot share events. What stream 1 does takes until it is done."""

    def __init__(self) -> None:
        self.waited_for = threading.Event()
        self.done = threading.Event()

    def attempt(self, *_: object) -> int:
        return 801

    def call(self, name: str, stream: int) -> None:
        assert name == "cuStreamSynchronize"
        if stream == 1:
            self.waited_for.set()
            assert self.done.wait(30)


def test_who_shares_an_array_of_one_stream_does_not_wait_for_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where events cannot be shared, each thread waits for its own stream only."""
    driver = WithoutEvents()
    monkeypatch.setattr(events, "current_context", lambda _: contextlib.nullcontext(driver))
    own = events.Events()
    with ThreadPoolExecutor(2) as pool:
        slow = pool.submit(own.record, 0, 1)
        try:
            assert driver.waited_for.wait(30)
            assert pool.submit(own.record, 0, 2).result(10) is None
        finally:
            driver.done.set()
        assert slow.result(30) is None


def make_descriptor() -> int:
    return os.memfd_create("offered", os.MFD_CLOEXEC)


def test_an_offer_that_is_taken_while_one_is_made_here() -> None:
    """As by a signal handler that sends an array in the middle of sending: it is told so
    instead of waiting for the code that it has interrupted.
    """
    offers = Offers()
    with pytest.raises(CudaSharingError, match="signal handler"):
        offers.take("a", lambda: offers.take("b", make_descriptor).descriptor)
    assert not len(offers)
    offers.release(offers.take("a", make_descriptor))
    assert not len(offers)


def test_other_memory_with_the_key_of_an_offer_that_was_given_up_has_its_own() -> None:
    """Also if another thread made an offer at that time, and the old one is still there."""
    offers = Offers()
    old = offers.take("key", lambda: os.memfd_create("old"))
    with offers._lock:
        giving_up = threading.Thread(target=offers.release, args=(old,))
        giving_up.start()
        giving_up.join(30)
    assert offers._released
    new = offers.take("key", lambda: os.memfd_create("new"))
    assert new is not old
    offers.release(new)


def test_an_offer_that_is_released_while_one_is_made_here() -> None:
    """Whoever makes one closes what was released meanwhile."""
    offers = Offers()
    other = offers.take("b", make_descriptor)

    def release_and_make() -> int:
        offers.release(other)
        return make_descriptor()

    offer = offers.take("a", release_and_make)
    assert len(offers) == 1
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(other.descriptor)
    offers.release(offer)


def test_another_thread_that_has_the_lock_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """But not for ever."""
    lock = locks.InterruptibleLock("testing")
    inside, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            inside.set()
            leave.wait(30)

    with ThreadPoolExecutor(1) as pool:
        holding = pool.submit(hold)
        assert inside.wait(30)
        monkeypatch.setattr(locks, "_PATIENCE", 0.05)
        with pytest.raises(CudaSharingError, match="was testing already, for"), lock:
            pass
        leave.set()
        monkeypatch.undo()
        with lock:
            pass
        holding.result(30)
