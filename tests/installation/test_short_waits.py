"""Readers of the standard channels look for what comes soon, while shmreduce is installed."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

import shmreduce
from shmreduce import short_waits
from shmreduce.compiled import PACKETS
from tests.channels.channels import PATIENCE, within
from tests.compiler import needs_module

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType

_IN_VAIN, _AT_ONCE, _CAME = range(3)


class Looks:
    """The compiled module, which counts how it is asked for input, and can be told what to say.

    Parameters
    ----------
    real : module
        What is asked.
    """

    def __init__(self, real: ModuleType) -> None:
        self._real = real
        self.limits: list[tuple[float, float]] = []
        self.found: list[int] = []
        self.answer: int | None = None
        """What is said instead of what is found."""

    def await_input(self, fd: int, patience: float, spare: float) -> int:
        self.limits.append((patience, spare))
        found: int = (
            self._real.await_input(fd, patience, spare) if self.answer is None else self.answer
        )
        self.found.append(found)
        return found


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> Looks:
    """How readers look from now on."""
    made = Looks(needs_module(PACKETS))
    monkeypatch.setattr(short_waits, "_module", made)
    # Whoever else runs here.
    monkeypatch.setattr(short_waits, "is_crowded", lambda: False)
    return made


@pytest.fixture
def ends() -> Iterator[tuple[Any, Any]]:
    """A one-way pipe of the standard library, while shmreduce is installed."""
    with shmreduce.install():
        reader, writer = multiprocessing.Pipe(duplex=False)
        yield reader, writer
        reader.close()
        writer.close()


def pass_through(ends: tuple[Any, Any], count: int) -> None:
    """Send and receive messages, one after the other."""
    reader, writer = ends
    for number in range(count):
        writer.send(number)
        assert reader.recv() == number


def look_until_found(looks: Looks, reader: Any) -> int:
    """Poll until there is a message, again if another thread ran, which ends polling early."""
    deadline = time.monotonic() + PATIENCE
    while (found := looks._real.await_input(reader.fileno(), PATIENCE, 0.0)) == _IN_VAIN:
        assert time.monotonic() < deadline
    return int(found)


def test_what_is_there_is_found_at_once(ends: tuple[Any, Any], looks: Looks) -> None:
    """One look for each message, whatever its size."""
    reader, writer = ends
    for message in (b"", b"x" * 10, b"x" * 20_000):
        writer.send_bytes(message)
        assert reader.recv_bytes() == message
    assert looks.found == [_AT_ONCE] * 3


def test_who_looks_in_vain_looks_ever_more_rarely(ends: tuple[Any, Any], looks: Looks) -> None:
    """As in the channels of shmreduce: after one, three, seven and so on waits."""
    looks.answer = _IN_VAIN
    pass_through(ends, 1000)
    assert len(looks.found) == 10


def test_who_waited_with_success_looks_again_at_the_next_wait(
    ends: tuple[Any, Any], looks: Looks
) -> None:
    """What was in vain before is forgotten."""
    looks.answer = _IN_VAIN
    pass_through(ends, 3)
    looks.answer = _CAME
    pass_through(ends, 4)
    looks.answer = _IN_VAIN
    pass_through(ends, 2)
    # At waits 1 and 3; then, after three without, at wait 7; at wait 8, and 10 is the next.
    assert looks.found == [_IN_VAIN, _IN_VAIN, _CAME, _IN_VAIN]


def test_polling_looks_as_receiving_does(ends: tuple[Any, Any], looks: Looks) -> None:
    """``poll(timeout)``, by which queues with a timeout wait; without one it does not wait."""
    reader, writer = ends
    assert not reader.poll()
    assert not reader.poll(0)
    assert looks.limits == []
    writer.send("message")
    assert reader.poll(5)
    assert reader.poll(None)
    assert reader.recv() == "message"
    assert looks.found == [_AT_ONCE] * 3
    looks.answer = _IN_VAIN
    assert not reader.poll(0.0001)
    patience, spare = looks.limits[-1]
    assert patience + spare == pytest.approx(0.0001)


def test_the_look_is_part_of_the_timeout() -> None:
    """Who polls sleeps for what is left of it, and for ever where it has none."""
    needs_module(PACKETS)
    reader, writer = multiprocessing.Pipe(duplex=False)
    waits, asked = short_waits.ShortWaits(), list[Any]()

    def poll(timeout: float | None) -> bool:
        asked.append(timeout)
        return False

    for timeout in (0.5, None, -1.0):
        assert not short_waits.poll_after_look(waits, reader.fileno(), timeout, poll)
    assert asked[1:] == [None, -1.0]
    assert asked[0] < 0.5
    reader.close()
    writer.close()


def test_settings_say_how_long(looks: Looks) -> None:
    """0.3 ms at any rate, the rest of ``short_wait`` as long as processors are free."""
    with shmreduce.install(short_wait=0.01):
        ends = multiprocessing.Pipe(duplex=False)
        pass_through(ends, 1)
        ((patience, spare),) = looks.limits
        assert (patience, round(patience + spare, 9)) == (0.0003, 0.01)
        with shmreduce.install(short_wait=0):
            pass_through(ends, 5)
        assert len(looks.limits) == 1
        for end in ends:
            end.close()


def test_the_main_thread_alone_looks(ends: tuple[Any, Any], looks: Looks) -> None:
    """One that receives for others does not take a processor from them."""
    within(pass_through, ends, 3)
    assert looks.found == []


def test_nobody_looks_after_uninstall(ends: tuple[Any, Any], looks: Looks) -> None:
    """Not even by way of somebody's wrapper around what was installed."""
    reader, writer = ends
    installed = type(reader)._recv_bytes
    shmreduce.uninstall()
    assert type(reader)._recv_bytes is not installed
    writer.send_bytes(b"message")
    assert installed(reader).getvalue() == b"message"
    assert looks.found == []


def test_a_message_that_comes_while_its_reader_looks(ends: tuple[Any, Any], looks: Looks) -> None:
    """It is received, and other threads have worked meanwhile."""
    reader, writer = ends
    timer = threading.Timer(0.05, writer.send, ["late"])
    with shmreduce.install(short_wait=PATIENCE):
        # Whoever else runs here: looking is to end with the message alone.
        looks._real.await_input(reader.fileno(), 0.0, 0.0)
        timer.start()
        # At once if polling had ended early.
        assert look_until_found(looks, reader) in (_AT_ONCE, _CAME)
        assert reader.recv() == "late"
    timer.join(PATIENCE)


def test_the_end_comes_to_who_looks(ends: tuple[Any, Any], looks: Looks) -> None:
    """EOFError, as to who sleeps, and an error for what is closed."""
    reader, writer = ends
    writer.close()
    with pytest.raises(EOFError):
        reader.recv()
    assert looks.found == [_AT_ONCE]
    reader.close()
    with pytest.raises(OSError, match="closed"):
        reader.recv()


class StruckError(Exception):
    """What a signal handler raises."""


def test_a_signal_reaches_who_looks(ends: tuple[Any, Any], looks: Looks) -> None:
    """Its handler raises out of the look, and nothing of what comes later is lost."""
    reader, writer = ends

    def strike(*_: object) -> None:
        raise StruckError

    before = signal.signal(signal.SIGUSR1, strike)
    timer = threading.Timer(0.05, os.kill, [os.getpid(), signal.SIGUSR1])
    try:
        timer.start()
        with pytest.raises(StruckError):
            look_until_found(looks, reader)
    finally:
        timer.join(PATIENCE)
        signal.signal(signal.SIGUSR1, before)
    writer.send("after")
    assert reader.recv() == "after"


def test_a_long_wait_takes_no_processor(ends: tuple[Any, Any]) -> None:
    """A reader that waits half a second works for a twentieth of it at most."""
    reader, writer = ends
    timer = threading.Timer(0.5, writer.send, ["late"])
    timer.start()
    before = time.thread_time()
    assert reader.recv() == "late"
    assert time.thread_time() - before < 0.025
    timer.join(PATIENCE)


def _answer(reader: Any, writer: Any) -> None:
    while (message := reader.get()) is not None:
        writer.put(message)


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_processes_that_look_for_each_other_get_on(method: str, shmreduce_no_leaks: None) -> None:
    """A child that was started while shmreduce was installed looks, too."""
    context: Any = multiprocessing.get_context(method)
    with shmreduce.install():
        there, back = context.SimpleQueue(), context.SimpleQueue()
        child = context.Process(target=_answer, args=(there, back))
        child.start()
        for number in range(500):
            there.put(number)
            assert back.get() == number
        there.put(None)
        child.join(PATIENCE)
        assert child.exitcode == 0
        there.close()
        back.close()
