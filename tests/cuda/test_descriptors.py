"""Descriptors are handed over, however many ask for them."""

from __future__ import annotations

import os
import secrets
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from shmreduce_cuda import CudaSharingError, descriptors
from shmreduce_cuda.descriptors import fetch_descriptor, open_listener, serve
from shmreduce_cuda.offers import Offers

if TYPE_CHECKING:
    from collections.abc import Iterator

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
    offer = offers.take("key", lambda: [os.memfd_create("offered")])
    waiting = fill_queue()
    done = threading.Event()

    def answer() -> None:
        while not done.is_set():
            serve(listener, TOKEN, offers)

    with ThreadPoolExecutor(2) as pool:
        fetched = pool.submit(fetch_descriptor, TOKEN, os.getpid(), offer.number, 0)
        for one in waiting:
            one.close()
        answering = pool.submit(answer)
        try:
            os.close(fetched.result(30))
        finally:
            done.set()
        answering.result(30)
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
            fetch_descriptor(TOKEN, os.getpid(), 1, 0)
    finally:
        for one in waiting:
            one.close()
