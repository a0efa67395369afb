"""Connections to other hosts get ordinary pickles."""

from __future__ import annotations

import os
import pickle
import socket
import threading
from multiprocessing import Pipe
from multiprocessing.connection import Client, Connection, Listener
from typing import TYPE_CHECKING, Any

import pytest

import shmreduce
from shmreduce import Reducer
from shmreduce import forking as forking_module
from shmreduce.remote import crosses_hosts, shared_memory_allowed

if TYPE_CHECKING:
    from collections.abc import Iterator

AUTHENTICATION = b"for this test only"


class Signal:
    """A type whose reducer tells whether shared memory was allowed."""

    allowed: bool | None = None


def rebuild(allowed: bool) -> Signal:
    """Make a signal that says what its sender was allowed."""
    signal = Signal()
    signal.allowed = allowed
    return signal


class SignalReducer(Reducer):
    types = (Signal,)

    def reduce(self, obj: Any, message: Any) -> Any:
        return rebuild, (shared_memory_allowed() and message.allocate(8) is not None,)


@pytest.fixture(autouse=True)
def _installed() -> Iterator[None]:
    reducer = SignalReducer()
    shmreduce.register_reducer(reducer)
    with shmreduce.install(inline_limit=0):
        yield
    shmreduce.unregister_reducer(reducer)


def connect(family: str) -> tuple[Connection, Connection]:
    """Return both ends of a connection of an address family."""
    if family == "pipe":
        there, here = Pipe(duplex=False)
        return here, there
    if family == "socketpair":
        here, there = Pipe()
        return here, there
    with Listener(family=family, authkey=AUTHENTICATION) as listener:
        accepted: list[Connection] = []
        thread = threading.Thread(target=lambda: accepted.append(listener.accept()))
        thread.start()
        here = Client(listener.address, authkey=AUTHENTICATION)
        thread.join(30)
    return here, accepted[0]


@pytest.mark.parametrize(
    ("family", "is_remote"),
    [("AF_INET", True), ("AF_UNIX", False), ("pipe", False), ("socketpair", False)],
)
def test_shared_memory_stays_on_this_host(family: str, is_remote: bool) -> None:
    """Over TCP no shared memory is used; over pipes and Unix sockets it is."""
    here, there = connect(family)
    with here, there:
        assert crosses_hosts(here) is is_remote
        for _ in range(2):
            here.send([Signal()])
            assert there.recv()[0].allowed is not is_remote
        assert shared_memory_allowed()


@pytest.mark.parametrize("family", ["AF_INET", "AF_UNIX", "socketpair"])
def test_asking_changes_no_flags(family: str) -> None:
    """A socket waits for its messages as before, though new sockets have a timeout."""
    here, there = connect(family)
    socket.setdefaulttimeout(30)
    try:
        here.send(1)
        there.send(2)
    finally:
        socket.setdefaulttimeout(None)
    for end in (here, there):
        with end:
            assert os.get_blocking(end.fileno())


def test_failed_send_over_tcp_ends_the_restriction() -> None:
    """After an error during a remote send, local sends use shared memory again."""
    here, there = connect("AF_INET")
    with here, there, pytest.raises((AttributeError, pickle.PicklingError)):
        here.send(lambda: None)
    assert shared_memory_allowed()


def test_unsendable_message_is_discarded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A message whose receiver is gone gives back what it holds."""
    discarded: list[bytes] = []
    monkeypatch.setattr(
        forking_module, "discard_message", lambda data: discarded.append(bytes(data))
    )
    shmreduce.uninstall()
    with shmreduce.install():
        here, there = connect("pipe")
        there.close()
        with here, pytest.raises(BrokenPipeError):
            here.send(Signal())
    assert len(discarded) == 1


def test_closed_and_read_only_connections_raise_as_before() -> None:
    """The errors of ``Connection.send`` are those of the standard library."""
    writer, reader = connect("pipe")
    with reader, pytest.raises(OSError, match="read-only"):
        reader.send(Signal())
    writer.close()
    with pytest.raises(OSError, match="closed"):
        writer.send(Signal())


def test_messages_are_the_same_on_the_wire() -> None:
    """An installed sender and a plain receiver understand each other, large messages too."""
    here, there = connect("socketpair")
    text = "x" * 100_000
    with here, there:
        sender = threading.Thread(target=here.send, args=(text,))
        sender.start()
        data = there.recv_bytes()
        sender.join(30)
    assert pickle.loads(data) == text


def test_asking_keeps_the_descriptor() -> None:
    """Finding out a connection's address family closes nothing."""
    here, there = connect("AF_INET")
    with here, there:
        fd = here.fileno()
        crosses_hosts(here)
        del here.__dict__["_shmreduce_crosses_hosts"]
        crosses_hosts(here)
        os.fstat(fd)
        here.send(1)
        assert there.recv() == 1
