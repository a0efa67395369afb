"""A reader looks for what comes soon, and sleeps for what does not."""

from __future__ import annotations

import signal
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

import shmreduce
from shmreduce import connection, short_waits
from shmreduce.settings import get_settings, set_settings
from tests.channels.channels import PATIENCE, within

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shmreduce.receive_buffer import ReceiveBuffer

_DO_NOT_WAIT = connection._DO_NOT_WAIT


class Looked:
    """The socket of a connection, which counts how it is asked for messages.

    Parameters
    ----------
    real : PacketSocket
        The socket.
    found : {"at once", "by looking", "by waiting"}
        When there seems to be a message.
    """

    def __init__(self, real: Any, found: str) -> None:
        self._real = real
        self._found = found
        self.looks = self.sleeps = 0

    def read(
        self, buffer: ReceiveBuffer, flags: int, patience: float = 0.0, spare: float = 0.0
    ) -> Any:
        if not flags & _DO_NOT_WAIT:
            self.sleeps += 1
        else:
            # Once, and once more with patience.
            self.looks += not patience
            if self._found == "by waiting" or (self._found == "by looking" and not patience):
                raise BlockingIOError
        return self._real.read(buffer, flags, patience, spare)

    def close(self) -> None:
        self._real.close()


@pytest.fixture
def settings() -> Iterator[None]:
    """The settings are put back."""
    before = get_settings()
    yield
    set_settings(before)


@pytest.fixture(autouse=True)
def crowded(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether readers seem to lack processors: they do not, whoever else runs here."""
    answers = [False]
    monkeypatch.setattr(short_waits, "is_crowded", lambda: answers[-1])
    return answers


def receive(reader: Any, writer: Any, found: str, count: int = 1) -> Looked:
    """Receive messages, which are found in this way; return how the socket was asked."""
    looked = Looked(reader._socket, found)
    reader._socket = looked
    try:
        for number in range(count):
            writer.send(number)
            assert reader.recv() == number
    finally:
        reader._socket = looked._real
    return looked


def test_what_is_there_is_found_without_sleep(ends: tuple[Any, Any]) -> None:
    """One look for each message."""
    looked = receive(*ends, "at once", count=20)
    assert (looked.looks, looked.sleeps) == (20, 0)


def test_who_looks_in_vain_looks_ever_more_rarely(ends: tuple[Any, Any]) -> None:
    """After one, three, seven and so on waits, at most after 255."""
    looked = receive(*ends, "by waiting", count=1000)
    assert looked.sleeps == 1000
    # In vain at waits 1, 3, 7, 15, 31, 63, 127, 255, 511, 767.
    assert looked.looks == 10


def test_who_waited_with_success_looks_again_at_the_next_wait(ends: tuple[Any, Any]) -> None:
    """What was in vain before is forgotten."""
    receive(*ends, "by waiting", count=3)
    looked = receive(*ends, "by looking", count=10)
    assert (looked.looks, looked.sleeps) == (7, 3)
    receive(*ends, "by waiting")
    assert receive(*ends, "by looking").sleeps == 1
    assert receive(*ends, "by looking").sleeps == 0


def test_what_was_there_before_tells_nothing(ends: tuple[Any, Any]) -> None:
    """It is not forgotten how often it was in vain to wait."""
    receive(*ends, "by waiting", count=3)
    assert receive(*ends, "at once", count=10).looks == 7
    receive(*ends, "by waiting")
    assert receive(*ends, "at once", count=8).sleeps == 7


def test_where_processors_lack_nobody_polls(ends: tuple[Any, Any], crowded: list[bool]) -> None:
    """Readers sleep at once, as if they had polled in vain, until processors are free again."""
    crowded.append(True)
    looked = receive(*ends, "by looking", count=1000)
    assert (looked.looks, looked.sleeps) == (0, 1000)
    crowded.append(False)
    looked = receive(*ends, "by looking", count=256)
    assert 1 <= looked.looks <= 256 - looked.sleeps


def test_nobody_looks_whom_the_settings_tell_not_to(ends: tuple[Any, Any], settings: None) -> None:
    """``short_wait=0``."""
    set_settings(get_settings().changed(short_wait=0))
    looked = receive(*ends, "at once", count=5)
    assert (looked.looks, looked.sleeps) == (0, 5)


def test_polling_with_a_timeout_looks_and_polling_without_does_not(
    ends: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """So ``Queue.get(timeout=...)`` finds what comes soon without sleep."""
    reader, writer = ends
    looks: list[float | None] = []

    class Waits(short_waits.ShortWaits):
        def look(self, fd: int, at_most: float | None = None) -> bool:
            assert fd == reader.fileno()
            looks.append(at_most)
            return super().look(fd, at_most)

    monkeypatch.setattr(reader, "_waits", Waits())
    assert not reader.poll()
    assert looks == []
    writer.send("message")
    assert reader.poll(5)
    assert looks == [5]
    assert reader.recv() == "message"


def test_a_long_wait_takes_no_processor(ends: tuple[Any, Any]) -> None:
    """A reader that waits half a second works for a twentieth of it at most."""
    reader, writer = ends
    receive(reader, writer, "at once", count=5)
    timer = threading.Timer(0.5, writer.send, ["late"])
    timer.start()
    before = time.thread_time()
    assert reader.recv() == "late"
    assert time.thread_time() - before < 0.025
    timer.join(PATIENCE)


def test_polling_looks_once_after_installation_too(
    ends: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own look is all: the standard connection's is not added."""
    reader, _ = ends
    looks: list[int] = []
    monkeypatch.setattr(short_waits.ShortWaits, "look", lambda _self, fd, _limit: looks.append(fd))
    with shmreduce.install():
        assert not reader.poll(0.001)
    assert looks == [reader.fileno()]


def test_signals_are_no_messages(ends: tuple[Any, Any], settings: None) -> None:
    """To be interrupted again and again while it looks does not make ``poll`` see a message."""
    reader, _ = ends
    caught: list[None] = []
    set_settings(get_settings().changed(short_wait=0.05))
    before = signal.signal(signal.SIGALRM, lambda *_: caught.append(None))
    try:
        signal.setitimer(signal.ITIMER_REAL, 3e-4, 3e-4)
        while len(caught) < 300:
            assert not reader.poll(0.05)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_the_end_comes_to_who_looks(ends: tuple[Any, Any]) -> None:
    """EOFError, as to who sleeps."""
    reader, writer = ends
    writer.close()
    with pytest.raises(EOFError):
        reader.recv()


def _answer(reader: Any, writer: Any) -> None:
    while (message := reader.recv()) is not None:
        writer.send(message)


def test_threads_that_look_do_not_keep_each_other_from_working(
    shmreduce_no_leaks: None,
) -> None:
    """Two threads of one process that wait for each other get on."""
    first, second = shmreduce.Pipe(), shmreduce.Pipe()
    thread = threading.Thread(target=_answer, args=(first[1], second[0]))
    thread.start()

    def talk() -> int:
        for number in range(500):
            first[0].send(number)
            assert second[1].recv() == number
        first[0].send(None)
        return 500

    assert within(talk) == 500
    thread.join(PATIENCE)
    for end in (*first, *second):
        end.close()
