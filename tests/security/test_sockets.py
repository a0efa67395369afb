"""The one kind of socket that others can reach asks who they are: that of CUDA arrays.

It has an abstract name, which everybody on the machine can list and connect to.
"""

from __future__ import annotations

import os
import secrets
import socket
import struct
import threading
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shmreduce.testing import OtherProcess
from shmreduce_cuda import descriptors
from shmreduce_cuda.errors import CudaSharingError
from shmreduce_cuda.offers import Offers
from tests.security.test_other_users import become_nobody, only_root

if TYPE_CHECKING:
    from collections.abc import Iterator

TOKEN = secrets.token_bytes(16)
REQUEST = struct.Struct("<16sQ")


@contextmanager
def offering() -> Iterator[tuple[Offers, int]]:
    """Serve, in a thread, one descriptor of a file; yield the offers and the offer's number."""
    offers = Offers()
    made = os.memfd_create("offered", os.MFD_CLOEXEC)
    offer = offers.take("key", lambda: made)
    listener = descriptors.open_listener(TOKEN)
    listener.setblocking(True)
    listener.settimeout(0.05)
    ended = threading.Event()

    def serve() -> None:
        while not ended.is_set():
            descriptors.serve(listener, TOKEN, offers)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield offers, offer.number
    finally:
        ended.set()
        thread.join(30)
        listener.close()
        offers.release(offer)


def ask(request: bytes) -> tuple[bytes, int]:
    """Send a request; return the answer and how many descriptors came with it."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.settimeout(30)
        connection.connect(b"\0shmreduce-cuda-" + TOKEN.hex().encode())
        with suppress(BrokenPipeError):
            connection.send(request)
        try:
            answer, found, _, _ = socket.recv_fds(connection, 16, 4)
        except ConnectionResetError:
            return b"", 0
    for number in found:
        os.close(number)
    return answer, len(found)


def keep_silent() -> None:
    """Connect, say nothing, and stay until the process ends."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect(b"\0shmreduce-cuda-" + TOKEN.hex().encode())
    _kept.append(connection)


def listen() -> None:
    """Pretend to be a process that offers arrays."""
    _kept.append(descriptors.open_listener(TOKEN))


_kept: list[Any] = []


def test_the_same_user_is_served() -> None:
    """What the other tests refuse is there."""
    with offering() as (_, number):
        assert ask(REQUEST.pack(TOKEN, number)) == (b"y", 1)


@only_root
def test_another_user_gets_nothing() -> None:
    """A request that names everything rightly is not answered if another user makes it."""
    with offering() as (_, number), OtherProcess("fork") as other:
        other.ask(become_nobody)
        assert other.ask(ask, REQUEST.pack(TOKEN, number)) == (b"", 0)


@only_root
def test_another_user_who_keeps_silent_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for what another user may say: with no end to the wait others are served."""
    monkeypatch.setattr(descriptors, "_SERVER_PATIENCE", None)
    with OtherProcess("fork") as other, offering() as (_, number):
        other.ask(become_nobody)
        other.ask(keep_silent)
        assert ask(REQUEST.pack(TOKEN, number)) == (b"y", 1)


@only_root
def test_another_users_offers_are_refused() -> None:
    """Who listens at the name of a sender, but is another user, is not believed."""
    with OtherProcess("fork") as other:
        other.ask(become_nobody)
        other.ask(listen)
        with pytest.raises(CudaSharingError, match="another user"):
            descriptors.fetch_descriptor(TOKEN, os.getpid(), 1)


@settings(
    max_examples=int(os.environ.get("SHMREDUCE_FUZZ_EXAMPLES", "40")),
    deadline=None,
    derandomize="SHMREDUCE_FUZZ_EXAMPLES" not in os.environ,
    database=None,
    suppress_health_check=list(HealthCheck),
)
@given(
    requests=st.lists(
        st.one_of(
            st.binary(min_size=1, max_size=60),
            st.builds(
                REQUEST.pack,
                st.sampled_from([TOKEN, bytes(16)]),
                st.sampled_from([0, 2, 2**63, 2**64 - 1]),
            ),
        ),
        max_size=3,
    )
)
def test_any_request_is_answered_or_dropped(requests: list[bytes]) -> None:
    """Whatever is asked gets no descriptor, and the next right request is served."""
    with offering() as (_, number):
        for request in requests:
            assert ask(request)[1] == 0
        assert ask(REQUEST.pack(TOKEN, number)) == (b"y", 1)
