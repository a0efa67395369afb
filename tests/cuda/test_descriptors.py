"""Descriptors are handed over, however many ask for them."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import secrets
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from shmreduce_cuda import CudaSharingError, descriptors, keeper
from shmreduce_cuda.descriptors import fetch_descriptor, open_listener, serve
from shmreduce_cuda.offers import Offers
from tests.cuda import actors as act

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.cuda.conftest import Pair

TOKEN = secrets.token_bytes(16)


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    """A socket at which nobody answers until the test does."""
    with open_listener(TOKEN) as found:
        yield found


def fill_queue() -> list[socket.socket]:
    """Connect until no more may wait to be answered."""
    waiting = []
    while True:
        one = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        one.setblocking(False)
        waiting.append(one)
        try:
            one.connect(descriptors._name(TOKEN))
        except BlockingIOError:
            return waiting


def test_more_receivers_than_may_wait(listener: socket.socket) -> None:
    """Who finds the queue of the sender full waits until there is room."""
    offers = Offers()
    offer = offers.take("key", lambda: os.memfd_create("offered"))
    waiting = fill_queue()
    done = threading.Event()

    def answer() -> None:
        while not done.is_set():
            serve(listener, TOKEN, offers)

    with ThreadPoolExecutor(2) as pool:
        fetched = pool.submit(fetch_descriptor, TOKEN, os.getpid(), offer.number)
        for one in waiting:
            one.close()
        answering = pool.submit(answer)
        try:
            os.close(fetched.result(30))
        finally:
            done.set()
        answering.result(30)
    offers.release(offer)


def inheritable_descriptors() -> list[str]:
    """Return what a program would inherit that this process starts."""
    found = []
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if int(link.name) > 2 and os.get_inheritable(int(link.name)):
                found.append(str(link.readlink()))
    return sorted(found)


@pytest.mark.parametrize("kind", ["pool", "virtual"])
def test_programs_that_are_started_inherit_no_memory(pair: Pair, kind: str) -> None:
    """A descriptor that somebody has by chance would keep the memory of the device."""
    before = pair.sender.ask(inheritable_descriptors)
    pair.sender.ask(act.make, "x", np.arange(1000.0), kind)
    pair.sender.ask(act.share, "s", "x")
    assert pair.sender.ask(inheritable_descriptors) == before
    assert pair.sender.ask(act.stats).offers == 1
    pair.sender.ask(act.drop, "s")


PIECES = 3


def test_arrays_with_pieces_in_common_share_their_descriptors(pair: Pair) -> None:
    """A piece takes one descriptor of the sender, whatever arrays it is a part of."""
    values = np.arange(600_000.0)
    pair.sender.ask(act.make, "x", values, "virtual", 0, PIECES)
    before = pair.sender.ask(act.census)[0]
    parts = {"low": slice(0, 400_000), "high": slice(200_000, None), "all": slice(None)}
    for name, part in parts.items():
        pair.sender.ask(act.cut, name, "x", part)
        pair.sender.ask(act.send, name)
    pair.receiver.ask(act.receive, *parts)
    for name, part in parts.items():
        assert np.array_equal(pair.receiver.ask(act.values, name), values[part])
    assert pair.sender.ask(act.stats).offers == PIECES
    # And the socket at which they are asked for.
    assert pair.sender.ask(act.census)[0] - before <= PIECES + 1
    pair.receiver.ask(act.drop, "all", "low")
    pair.sender.ask(act.collect)
    assert np.array_equal(pair.receiver.ask(act.values, "high"), values[parts["high"]])


def send_with_descriptors_left(left: int) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(link.name) for link in Path("/proc/self/fd").iterdir())
    filling = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 8, limits[1]))
    try:
        with contextlib.suppress(OSError):
            while True:
                filling.append(os.dup(0))
        for _ in range(left):
            os.close(filling.pop())
        act.send("x")
    finally:
        for each in filling:
            os.close(each)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.parametrize("left", [0, PIECES])
def test_a_sender_without_descriptors_left(pair: Pair, left: int) -> None:
    """The error names the limit, and nothing is kept of the pieces that had one."""
    pair.sender.ask(act.make, "warm", np.arange(10.0), "virtual")
    pair.sender.ask(act.send, "warm")
    pair.receiver.ask(act.receive, "warm")
    pair.sender.ask(act.make, "x", np.arange(600_000.0), "virtual", 0, PIECES)
    offers = pair.sender.ask(act.stats).offers
    with pytest.raises(CudaSharingError, match="RLIMIT_NOFILE"):
        pair.sender.ask(send_with_descriptors_left, left)
    assert pair.sender.ask(act.stats).offers == offers
    pair.sender.ask(act.send, "x")
    pair.receiver.ask(act.receive, "x")


def test_a_receiver_without_descriptors_left(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is told so, and not that the sender had none."""
    offers = Offers()
    offer = offers.take("key", lambda: os.memfd_create("offered"))
    listener.setblocking(True)
    sender = threading.Thread(target=serve, args=(listener, TOKEN, offers))
    receive = socket.recv_fds

    def receive_with_none_left(*arguments: Any) -> Any:
        sender.join(30)
        with no_descriptors():
            return receive(*arguments)

    monkeypatch.setattr(socket, "recv_fds", receive_with_none_left)
    sender.start()
    with pytest.raises(CudaSharingError, match="ulimit"):
        fetch_descriptor(TOKEN, os.getpid(), offer.number)
    offers.release(offer)


@contextlib.contextmanager
def no_descriptors() -> Iterator[None]:
    """Let this process open nothing."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Not less, since poll(2) takes no more entries than there may be files.
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_a_sender_that_cannot_accept_a_request_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not try again at once, for as long as it lacks descriptors, and then answers."""
    served: list[bool] = []

    def count(*arguments: Any) -> bool:
        served.append(serve(*arguments))
        return served[-1]

    monkeypatch.setattr(keeper, "serve", count)
    offers = Offers()
    offer = offers.take("key", lambda: os.memfd_create("offered"))
    thread = keeper.Keeper(TOKEN, offers, lambda: False)
    thread.look_after()
    thread.listen()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
        client.settimeout(30)
        with no_descriptors():
            client.connect(descriptors._name(TOKEN))
            time.sleep(0.5)
            tries = len(served)
        assert 1 <= tries <= 0.5 / keeper._DEAF + 2
        assert not any(served)
        client.send(descriptors._REQUEST.pack(TOKEN, offer.number))
        answer, found, *_ = socket.recv_fds(client, 1, 1)
        assert answer == b"y"
        os.close(found[0])
    assert thread.stop()
    thread.forget()
    offers.release(offer)


def test_a_sender_that_cannot_duplicate_a_descriptor(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The receiver is told so, and not that the memory is not offered any more."""
    offers = Offers()
    offer = offers.take("key", lambda: os.memfd_create("offered"))

    def fail(_: int) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    listener.setblocking(True)
    with monkeypatch.context() as patch, ThreadPoolExecutor(1) as pool:
        patch.setattr(os, "dup", fail)
        serving = pool.submit(serve, listener, TOKEN, offers)
        with pytest.raises(CudaSharingError, match="its limit"):
            fetch_descriptor(TOKEN, os.getpid(), offer.number)
        assert serving.result(30)
    offers.release(offer)


def test_a_sender_that_never_has_room(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wait is bounded, and the error says who did not answer."""
    assert listener.fileno() >= 0
    monkeypatch.setattr(descriptors, "_PATIENCE", 0.1)
    waiting = fill_queue()
    try:
        with pytest.raises(CudaSharingError, match="did not hand over"):
            fetch_descriptor(TOKEN, os.getpid(), 1)
    finally:
        for one in waiting:
            one.close()
