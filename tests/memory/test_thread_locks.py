"""A lock that ``with`` takes is given back whenever a signal handler raises."""

from __future__ import annotations

import contextlib
import dis
import signal
import threading
from typing import TYPE_CHECKING, Any

import pytest

from shmreduce.thread_locks import _AtOnce, _InterruptSafe, interrupt_safe, taken_at_once

if TYPE_CHECKING:
    from collections.abc import Callable

ROUNDS = 200
SECONDS = 0.0002
"""Of processor time before a strike."""
AGAIN = 0.05
"""Seconds until the next: Python ignores one that strikes in a destructor."""


class Struck(BaseException):
    """Raised by the handler."""


def strike(*_: object) -> None:
    raise Struck


def take_and_give_back(lock: Any) -> None:
    while True:
        with lock:
            pass


def at_once(lock: Any) -> contextlib.AbstractContextManager[Any]:
    return taken_at_once(lock, BlockingIOError)


@pytest.mark.parametrize("make", [threading.Lock, threading.RLock])
@pytest.mark.parametrize("safe", [interrupt_safe, _InterruptSafe, at_once])
def test_it_is_never_left_taken(
    make: Callable[[], Any], safe: Callable[[Any], contextlib.AbstractContextManager[Any]]
) -> None:
    """Two hundred strikes at a thread that does nothing but take it and give it back."""
    taken: list[int] = []

    def look(lock: Any, number: int) -> None:
        if not lock.acquire(timeout=0):
            taken.append(number)

    before = signal.signal(signal.SIGVTALRM, strike)
    try:
        for number in range(ROUNDS):
            lock = make()
            with contextlib.suppress(Struck):
                signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS, AGAIN)
                take_and_give_back(safe(lock))
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            # Another thread, since a lock that is reentrant is free for the one that has it.
            other = threading.Thread(target=look, args=(lock, number))
            other.start()
            other.join()
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
    assert taken == []


def test_it_is_a_lock() -> None:
    """It excludes other threads for the time of the block, and is given back after an error."""
    lock = threading.Lock()
    safe = _InterruptSafe(lock)
    with safe as taken:
        assert taken
        assert not lock.acquire(blocking=False)
    with pytest.raises(ValueError, match="in the block"), safe:
        raise ValueError("in the block")
    assert not lock.locked()


@pytest.mark.parametrize("make", [threading.Lock, threading.RLock])
def test_it_is_taken_at_once_or_not_at_all(make: Callable[[], Any]) -> None:
    """Who finds it taken is refused, and it stays the other's."""
    lock = make()
    safe = at_once(lock)
    refused: list[bool] = []

    def try_it() -> None:
        try:
            with safe:
                refused.append(False)
        except BlockingIOError:
            refused.append(True)

    def try_it_elsewhere() -> None:
        other = threading.Thread(target=try_it)
        other.start()
        other.join()

    with safe as taken:
        assert taken
        try_it_elsewhere()
        # In the same thread only where it is not reentrant.
        try_it()
        try_it_elsewhere()
    try_it_elsewhere()
    assert refused == [True, make is threading.Lock, True, False]


def test_a_strike_while_it_waits_takes_nothing() -> None:
    """Who is struck while somebody else has the lock does not get it."""
    lock = threading.Lock()
    lock.acquire()
    before = signal.signal(signal.SIGALRM, strike)
    try:
        with pytest.raises(Struck):
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            with _InterruptSafe(lock):
                pytest.fail("two have the lock")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert lock.locked()
    lock.release()


@pytest.mark.parametrize("safe", [_InterruptSafe, _AtOnce])
def test_nothing_is_called_once_it_has_the_lock(safe: type[_InterruptSafe]) -> None:
    """The way in is no call, after which the interpreter would look for signals, but that of
    what is raised without the lock.
    """
    names = [each.opname for each in dis.get_instructions(safe.__enter__)]
    after = names[names.index("UNPACK_SEQUENCE") :]
    if "RAISE_VARARGS" in after:
        skipped = next(place for place, name in enumerate(after) if "_IF_" in name)
        after[skipped : after.index("RAISE_VARARGS")] = []
    assert not any(name.startswith("CALL") for name in after)
