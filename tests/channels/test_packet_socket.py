"""A packet and the descriptors beside it, by the socket module and by the compiled one."""

from __future__ import annotations

import array
import errno
import fcntl
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from shmreduce import packet_socket
from shmreduce.compiled import PACKETS
from shmreduce.packet_socket import MOST_DESCRIPTORS, PlainPacketSocket, QuickPacketSocket
from shmreduce.processors import usable_processors
from shmreduce.receive_buffer import ReceiveBuffer
from tests.channels.channels import PATIENCE
from tests.compiler import needs_module
from tests.faults.injection import no_descriptors

if TYPE_CHECKING:
    from collections.abc import Iterator

    Socket = PlainPacketSocket

KINDS = {"plain": PlainPacketSocket, "compiled": QuickPacketSocket}
DO_NOT_WAIT = int(socket.MSG_DONTWAIT)
SIZE = 100


@pytest.fixture(params=KINDS)
def ends(request: pytest.FixtureRequest) -> Iterator[tuple[Any, Any]]:
    """Two ends of each kind."""
    if request.param == "compiled":
        needs_module(PACKETS)
    pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    family = socket.AF_UNIX, socket.SOCK_SEQPACKET, 0
    kind = KINDS[request.param]
    here, there = (kind(*family, end.detach()) for end in pair)
    yield here, there
    here.close()
    there.close()


@contextmanager
def open_files(count: int) -> Iterator[list[int]]:
    """Descriptors of so many files, whose sizes are 0, 1 and so on."""
    found: list[int] = []
    try:
        for size in range(count):
            found.append(os.memfd_create("test"))
            os.ftruncate(found[-1], size)
        yield found
    finally:
        for each in found:
            os.close(each)


def sizes_of(buffer: ReceiveBuffer) -> list[int]:
    """Return the sizes of received files, which are closed."""
    sizes = [os.fstat(each).st_size for each in buffer.descriptors]
    buffer.close_descriptors()
    return sizes


@pytest.mark.parametrize("count", [0, 1, 2, MOST_DESCRIPTORS])
def test_a_packet_comes_whole_with_its_descriptors_in_order(
    count: int, ends: tuple[Socket, Socket]
) -> None:
    """They are other numbers of the same files, closed on exec; the sender keeps its own."""
    here, there = ends
    buffer = ReceiveBuffer(SIZE)
    with open_files(count) as files:
        here.write(b"contents", files, 0)
        size = there.read(buffer, 0)
        assert (size, bytes(buffer[:size])) == (8, b"contents")
        received = buffer.descriptors
        assert all(fcntl.fcntl(each, fcntl.F_GETFD) & fcntl.FD_CLOEXEC for each in received)
        assert not set(received) & set(files)
        assert sizes_of(buffer) == list(range(count))


def test_too_many_descriptors_are_refused(ends: tuple[Socket, Socket]) -> None:
    """Nothing is written, and as sendmsg(2) says it is an invalid argument."""
    here, there = ends
    with pytest.raises(OSError, match="Invalid argument") as caught:
        here.write(b"contents", [0] * (MOST_DESCRIPTORS + 1), 0)
    assert caught.value.errno == errno.EINVAL
    with pytest.raises(BlockingIOError):
        there.read(ReceiveBuffer(SIZE), DO_NOT_WAIT)


def test_a_descriptor_that_is_closed_is_refused(ends: tuple[Socket, Socket]) -> None:
    """Nothing is written."""
    here, there = ends
    with open_files(1) as files:
        closed = os.dup(files[0])
        os.close(closed)
        with pytest.raises(OSError, match="Bad file descriptor"):
            here.write(b"contents", [files[0], closed], 0)
    with pytest.raises(BlockingIOError):
        there.read(ReceiveBuffer(SIZE), DO_NOT_WAIT)


@pytest.mark.parametrize("descriptors", [3, [None], ["1"], [1 << 80], [(1 << 32) + 1]])
def test_what_are_no_descriptors_is_refused(descriptors: Any, ends: tuple[Socket, Socket]) -> None:
    """With an error of the language, and nothing is written."""
    here, there = ends
    with pytest.raises((TypeError, OverflowError)):
        here.write(b"contents", descriptors, 0)
    with pytest.raises(BlockingIOError):
        there.read(ReceiveBuffer(SIZE), DO_NOT_WAIT)


def test_where_none_is_free_a_packet_comes_without(ends: tuple[Socket, Socket]) -> None:
    """The bytes are there (MSG_CTRUNC)."""
    here, there = ends
    buffer = ReceiveBuffer(SIZE)
    with open_files(2) as files:
        here.write(b"contents", files, 0)
        with no_descriptors():
            size = there.read(buffer, 0)
        assert bytes(buffer[:size]) == b"contents"
        assert buffer.descriptors == []


def test_what_is_no_descriptor_beside_a_packet_is_passed_over(
    ends: tuple[Socket, Socket],
) -> None:
    """Credentials, say, which a socket may be asked for."""
    here, there = ends
    there.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
    buffer = ReceiveBuffer(SIZE)
    with open_files(1) as files:
        here.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))])
        assert there.read(buffer, 0) == 1
        assert sizes_of(buffer) == [0]


def test_the_end_of_the_other_side_is_an_empty_packet(ends: tuple[Socket, Socket]) -> None:
    """As recv(2) tells it; who writes is told EPIPE."""
    here, there = ends
    here.close()
    buffer = ReceiveBuffer(SIZE)
    assert there.read(buffer, 0) == 0
    assert buffer.descriptors == []
    with pytest.raises(BrokenPipeError):
        there.write(b"x", (), int(socket.MSG_NOSIGNAL))


@pytest.mark.parametrize("call", ["read", "write"])
def test_a_closed_socket_is_told_of(call: str, ends: tuple[Socket, Socket]) -> None:
    """EBADF, whatever has its number now."""
    here, _ = ends
    here.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        if call == "read":
            here.read(ReceiveBuffer(SIZE), 0)
        else:
            here.write(b"x", (), 0)


def test_who_must_not_wait_is_told_so(ends: tuple[Socket, Socket]) -> None:
    """BlockingIOError, at once."""
    with pytest.raises(BlockingIOError):
        ends[0].read(ReceiveBuffer(SIZE), DO_NOT_WAIT)


def test_who_has_patience_looks_until_it_is_over(ends: tuple[Socket, Socket]) -> None:
    """And not longer, and gives up the interpreter meanwhile."""
    began = time.perf_counter()
    with pytest.raises(BlockingIOError):
        ends[0].read(ReceiveBuffer(SIZE), DO_NOT_WAIT, 0.05)
    assert 0.05 <= time.perf_counter() - began < PATIENCE


@pytest.mark.parametrize("spare", [0.0, PATIENCE])
def test_who_has_patience_finds_what_another_thread_writes(
    spare: float, ends: tuple[Socket, Socket]
) -> None:
    """The thread gets on while this one looks."""
    here, there = ends
    buffer = ReceiveBuffer(SIZE)
    thread = threading.Thread(target=here.write, args=(b"contents", (), 0))
    thread.start()
    size = there.read(buffer, DO_NOT_WAIT, PATIENCE, spare)
    assert bytes(buffer[:size]) == b"contents"
    thread.join(PATIENCE)


@pytest.fixture
def every_processor_taken() -> Iterator[None]:
    """One process more than there are processors runs, and never sleeps."""
    spin = "import sys; sys.stdout.write('x'); sys.stdout.flush()\nwhile True: pass"
    with ExitStack() as stack:
        for _ in range(usable_processors() + 1):
            process = stack.enter_context(
                subprocess.Popen([sys.executable, "-c", spin], stdout=subprocess.PIPE)
            )
            stack.callback(process.kill)
            assert process.stdout is not None
            assert process.stdout.read(1) == b"x"
        yield


def test_who_has_time_to_spare_leaves_the_processor_to_others(
    ends: tuple[Socket, Socket], every_processor_taken: None
) -> None:
    """Long before it is over, but not before its patience is."""
    began = time.perf_counter()
    with pytest.raises(BlockingIOError):
        ends[0].read(ReceiveBuffer(SIZE), DO_NOT_WAIT, 0.05, 2 * PATIENCE)
    assert 0.05 <= time.perf_counter() - began < PATIENCE


def test_time_to_spare_comes_to_its_end(
    ends: tuple[Socket, Socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where processors are free all the time, as the socket in Python is told here."""
    monkeypatch.setattr(packet_socket, "all_taken", lambda: False)
    began = time.perf_counter()
    with pytest.raises(BlockingIOError):
        ends[0].read(ReceiveBuffer(SIZE), DO_NOT_WAIT, 0.01, 0.05)
    assert 0.01 <= time.perf_counter() - began < PATIENCE
    if not isinstance(ends[0], QuickPacketSocket):
        assert time.perf_counter() - began >= 0.06


class HandlerError(Exception):
    """Raised by a signal handler."""


@contextmanager
def alarm_after(seconds: float, handler: Any) -> Iterator[None]:
    before = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("patience", [0.0, PATIENCE])
def test_a_handler_that_raises_ends_a_wait(patience: float, ends: tuple[Socket, Socket]) -> None:
    """Whether it sleeps or looks."""

    def handle(_number: int, _frame: Any) -> None:
        raise HandlerError

    began = time.perf_counter()
    with alarm_after(0.05, handle), pytest.raises(HandlerError):
        ends[0].read(ReceiveBuffer(SIZE), DO_NOT_WAIT if patience else 0, patience)
    assert time.perf_counter() - began < PATIENCE


def test_a_handler_that_returns_does_not(ends: tuple[Socket, Socket]) -> None:
    """The call goes on, as PEP 475 has it."""
    here, there = ends
    buffer = ReceiveBuffer(SIZE)

    def handle(_number: int, _frame: Any) -> None:
        here.write(b"contents", (), 0)

    with alarm_after(0.05, handle):
        size = there.read(buffer, 0)
    assert bytes(buffer[:size]) == b"contents"


def test_a_handler_that_makes_room_lets_a_write_go_on(ends: tuple[Socket, Socket]) -> None:
    """The same of a pipe that is full."""
    here, there = ends
    buffer = ReceiveBuffer(SIZE)
    count = 0
    with pytest.raises(BlockingIOError):
        while True:
            here.write(b"%d" % count, (), DO_NOT_WAIT)
            count += 1

    def handle(_number: int, _frame: Any) -> None:
        for _ in range(count):
            there.read(buffer, 0)

    with alarm_after(0.05, handle):
        here.write(b"last", (), 0)
    assert there.read(buffer, 0) == 4
