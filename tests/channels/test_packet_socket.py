"""A packet and the descriptors beside it, by the socket module and by the compiled one."""

from __future__ import annotations

import array
import errno
import fcntl
import itertools
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from shmreduce import packet_socket
from shmreduce.compiled import PACKETS
from shmreduce.packet_socket import MOST_DESCRIPTORS, PlainPacketSocket, QuickPacketSocket
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


def test_a_packet_that_is_too_long_is_an_error(ends: tuple[Socket, Socket]) -> None:
    """It is never taken for a shorter one; its descriptors are not lost, and the next comes."""
    here, there = ends
    buffer = ReceiveBuffer(SIZE)
    with open_files(2) as files:
        here.write(bytes(SIZE + 1), files, 0)
        here.write(b"next", (), 0)
        with pytest.raises(OSError, match="too long") as caught:
            there.read(buffer, 0)
    assert caught.value.errno == errno.EMSGSIZE
    assert sizes_of(buffer) == [0, 1]
    assert there.read(buffer, 0) == len(b"next")


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


def look_in_vain(reader: Socket, patience: float, spare: float = 0.0) -> float:
    """Poll for a packet that does not come; return for how many seconds."""
    began = time.perf_counter()
    with pytest.raises(BlockingIOError):
        reader.read(ReceiveBuffer(SIZE), DO_NOT_WAIT, patience, spare)
    return time.perf_counter() - began


def look_long_in_vain(reader: Socket, at_least: float, patience: float, spare: float) -> float:
    """The same, again if something else ran on this processor, which ends polling early."""
    deadline = time.monotonic() + PATIENCE
    while (took := look_in_vain(reader, patience, spare)) < at_least:
        assert time.monotonic() < deadline
    return took


def look_until_found(reader: Socket, buffer: ReceiveBuffer, spare: float = 0.0) -> int:
    """Poll for a packet until it comes; return its size. Poll again as above."""
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            return reader.read(buffer, DO_NOT_WAIT, PATIENCE, spare)
        except BlockingIOError:
            assert time.monotonic() < deadline


def test_who_has_patience_looks_until_it_is_over(ends: tuple[Socket, Socket]) -> None:
    """And not longer."""
    assert look_long_in_vain(ends[0], 0.05, 0.05, 0.0) < PATIENCE


@pytest.mark.parametrize("spare", [0.0, PATIENCE])
def test_who_has_patience_finds_what_another_thread_writes(
    spare: float, ends: tuple[Socket, Socket]
) -> None:
    """The thread gets on while this one looks."""
    here, there = ends
    buffer = ReceiveBuffer(SIZE)
    thread = threading.Thread(target=here.write, args=(b"contents", (), 0))
    thread.start()
    size = look_until_found(there, buffer, spare)
    assert bytes(buffer[:size]) == b"contents"
    thread.join(PATIENCE)


@pytest.fixture
def here_alone() -> Iterator[int]:
    """The number of the only processor that this process may use."""
    usable = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(usable)})
    yield min(usable)
    os.sched_setaffinity(0, usable)


@contextmanager
def busy(processor: int, count: int) -> Iterator[None]:
    """So many processes that never sleep on one processor."""
    spin = (
        f"import os, sys; os.sched_setaffinity(0, {{{processor}}}); sys.stdout.write('x')\n"
        "sys.stdout.flush()\nwhile True: pass"
    )
    with ExitStack() as stack:
        for _ in range(count):
            process = stack.enter_context(
                subprocess.Popen([sys.executable, "-c", spin], stdout=subprocess.PIPE)
            )
            stack.callback(process.kill)
            assert process.stdout is not None
            assert process.stdout.read(1) == b"x"
        yield


def test_who_looks_leaves_its_processor_to_who_waits_for_it(
    ends: tuple[Socket, Socket], here_alone: int
) -> None:
    """Long before its patience is over."""
    with busy(here_alone, 1):
        assert look_in_vain(ends[0], 2 * PATIENCE) < PATIENCE


def test_who_has_time_to_spare_looks_while_there_are_free_processors(
    ends: tuple[Socket, Socket], here_alone: int
) -> None:
    """It ends long before that time is over, but not before its patience is."""
    others = set(range(os.cpu_count() or 1)) - {here_alone}
    if not others:
        pytest.skip("there is only one processor")
    with busy(max(others), 1):
        assert look_long_in_vain(ends[0], 0.05, 0.05, 2 * PATIENCE) < PATIENCE


def test_time_to_spare_comes_to_its_end(
    ends: tuple[Socket, Socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where nobody needs a processor, as the socket in Python is told here."""
    monkeypatch.setattr(packet_socket, "all_taken", lambda: False)
    monkeypatch.setattr(packet_socket, "lets_others_run", lambda: False)
    took = look_in_vain(ends[0], 0.01, 0.05)
    assert took < PATIENCE
    if not isinstance(ends[0], QuickPacketSocket):
        assert took >= 0.06


@pytest.mark.parametrize("ends", ["plain"], indirect=True)
def test_it_is_checked_ever_more_rarely_whether_others_need_the_processor(
    ends: tuple[Socket, Socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After 50, 150 and 350 us, and then every 200 us; as the socket in Python shows."""
    clock = itertools.count(0.0, 1e-5)
    now: list[float] = []

    def perf_counter() -> float:
        now.append(next(clock))
        return now[-1]

    checks: list[int] = []
    processors: list[int] = []
    monkeypatch.setattr(packet_socket, "time", SimpleNamespace(perf_counter=perf_counter))

    def lets_others_run() -> bool:
        checks.append(round(now[-1] * 1e6))
        return False

    def all_taken() -> bool:
        processors.append(round(now[-1] * 1e6))
        return False

    monkeypatch.setattr(packet_socket, "lets_others_run", lets_others_run)
    monkeypatch.setattr(packet_socket, "all_taken", all_taken)
    look_in_vain(ends[0], 3e-4, 7e-4)
    assert checks == pytest.approx([50, 150, 350, 550, 750, 950], abs=50)
    assert processors == checks[2:]


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
        if patience:
            look_until_found(ends[0], ReceiveBuffer(SIZE))
        ends[0].read(ReceiveBuffer(SIZE), 0)
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
