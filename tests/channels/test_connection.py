"""One pipe: its interface, its sizes, its ends."""

from __future__ import annotations

import contextlib
import errno
import importlib
import multiprocessing
import os
import pickle
import selectors
import signal
import socket
import threading
from multiprocessing import resource_sharer
from multiprocessing.connection import wait
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import shmreduce
from shmreduce import packets
from shmreduce.connection import Connection, Pipe
from shmreduce.memory import runtime
from shmreduce.memory.handle import Handle
from shmreduce.memory.layout import BY_VALUE
from shmreduce.packets import pack_last
from tests.channels.channels import PATIENCE, context_of, eventually, within
from tests.open_files import OpenFile, open_files

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tests.conftest import Children

SIZES = sorted(
    {
        size + more
        for size in (0, 1, packets.INLINE_BODY, 128 << 10, packets.LARGEST_PACKET, 1 << 20)
        for more in (-40, -1, 0, 1)
        if size + more >= 0
    }
)


@pytest.fixture
def pipe(shmreduce_no_leaks: None) -> Iterator[tuple[Any, Any]]:
    """Both ends of a pipe, in this process."""
    here, there = shmreduce.Pipe()
    yield here, there
    here.close()
    there.close()


def _refuse(*_: Any) -> None:
    raise shmreduce.OutOfSharedMemoryError("no room")


@pytest.fixture(params=["error", "nothing"])
def no_room(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """No block can be had; by an error, or because pickling is to be used instead."""
    way = _refuse if request.param == "error" else lambda *_: None
    monkeypatch.setattr(shmreduce.Message, "allocate", way)


# Sizes


@pytest.mark.parametrize("size", SIZES)
def test_objects_and_bytes_of_any_size_arrive(pipe: tuple[Any, Any], size: int) -> None:
    """Sizes around each threshold arrive whole, pickled and as bytes."""
    here, there = pipe
    data = os.urandom(size)
    here.send(data)
    assert there.recv() == data
    here.send_bytes(data)
    received = there.recv_bytes()
    assert received == data
    assert type(received) is bytes
    here.send(np.frombuffer(data, "u1"))
    assert there.recv().tobytes() == data


class Level(int):
    """Is pickled by its class, unlike the numbers that it is one of."""


@pytest.mark.parametrize(
    "value",
    [
        {"a": 1, "b": [1, 2.5, None], "c": ("x", b"y", {"d": True})},
        [[[[[["deep"]]]]]],
        list(range(1000)),
        {number: str(number) for number in range(1000)},
        {(1, 2): 3},
        {"level": Level(3)},
        {1, 2, 3},
        [],
        {},
    ],
)
def test_plain_objects_arrive_with_their_types(pipe: tuple[Any, Any], value: Any) -> None:
    """Containers of the language, small or large, deep or flat, arrive as they are."""
    here, there = pipe
    here.send(value)
    received = there.recv()
    assert received == value
    assert repr(received) == repr(value)
    assert type(received) is type(value)


def test_arrays_in_plain_objects_share_memory(pipe: tuple[Any, Any]) -> None:
    """An array in a small dictionary travels by shared memory as any other."""
    here, there = pipe
    here.send({"name": "x", "items": [1, (np.zeros(100_000), 2)]})
    bottom = there.recv()["items"][1][0]
    while isinstance(bottom, np.ndarray):
        bottom = bottom.base
    assert shmreduce.find_block(bottom) is not None


def test_objects_and_bytes_are_the_same_messages(pipe: tuple[Any, Any]) -> None:
    """What is sent as an object can be received as its pickle, and the other way round."""
    here, there = pipe
    for value in ([1, 2], "x" * 100_000):
        here.send(value)
        assert pickle.loads(there.recv_bytes()) == value
        here.send_bytes(ForkingPickler.dumps(value))
        assert there.recv() == value


def test_pickle_taken_as_bytes_has_its_memory_opened(pipe: tuple[Any, Any]) -> None:
    """An array can be unpickled from the bytes of its message."""
    here, there = pipe
    here.send(np.arange(100_000))
    assert pickle.loads(there.recv_bytes())[-1] == 99_999


def test_bytes_keep_what_they_refer_to(children: Children) -> None:
    """Bytes can be unpickled when their sender is long dead; dropped, they keep nothing open."""
    attachments = runtime.current().attachments
    # Those of arrays that something has here, whatever it is.
    before = set(attachments.directory)
    context = context_of(children)
    here, there = context.Pipe()
    process = context.Process(target=produce_and_vanish, args=(there, 2, "killed"))
    process.start()
    there.close()
    first, second = here.recv_bytes(), here.recv_bytes()
    process.join(PATIENCE)
    directory = attachments.directory
    (held,) = [each for each in directory.values() if each.token not in before]
    # As happens whenever one more segment is opened.
    attachments.close_idle(0)
    assert pickle.loads(first)[0] == 0
    assert type(pickle.loads(pickle.dumps(second))) is bytes
    del first
    assert held.token in directory
    del second
    assert held.token not in directory
    here.close()


def test_array_is_what_it_was_when_sent(pipe: tuple[Any, Any]) -> None:
    """A change after ``send`` is not seen by the receiver, nor one there by the sender."""
    here, there = pipe
    array = np.zeros(100_000)
    here.send(array)
    array += 1
    received = there.recv()
    assert not received.any()
    received += 2
    assert (array == 1).all()


def test_shared_array_stays_shared(pipe: tuple[Any, Any]) -> None:
    """A shared array is the same memory at both ends."""
    here, there = pipe
    array = shmreduce.zeros(1000)
    here.send(array)
    there.recv()[5] = 7
    assert array[5] == 7


@pytest.mark.usefixtures("no_room")
def test_large_message_without_room_is_refused(pipe: tuple[Any, Any]) -> None:
    """What does not fit a packet and gets no block is a named error, and nothing is sent."""
    here, there = pipe
    for send, message in ((here.send_bytes, bytes(1 << 20)), (here.send, "x" * (1 << 20))):
        with pytest.raises(shmreduce.OutOfSharedMemoryError):
            send(message)
    assert not there.poll()


@pytest.mark.usefixtures("no_room")
def test_middle_message_without_room_goes_in_the_packet(pipe: tuple[Any, Any]) -> None:
    """What fits a packet is sent in it when there is no block for it."""
    here, there = pipe
    for size in (packets.INLINE_BODY + 1, packets.LARGEST_PACKET - 5000):
        here.send_bytes(bytes(size))
        assert there.recv_bytes() == bytes(size)


@pytest.mark.usefixtures("no_room")
def test_packet_that_the_socket_does_not_take_is_an_error(pipe: tuple[Any, Any]) -> None:
    """Where the buffer of the socket is smaller than a packet: EMSGSIZE, and the pipe goes on."""
    here, there = pipe
    here._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16 << 10)
    with pytest.raises(OSError, match="too long") as caught:
        here.send_bytes(bytes(100_000))
    assert caught.value.errno == errno.EMSGSIZE
    here.send("short")
    assert there.recv() == "short"


def test_a_packet_that_is_larger_than_the_whole_buffer_of_the_socket_goes_by_a_block(
    pipe: tuple[Any, Any],
) -> None:
    """As where the system's net.core.wmem_max is small; with it go the arrays it refers to."""
    here, there = pipe
    here._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16 << 10)
    shared = shmreduce.ones(3)
    here.send([bytes(100_000), shared])
    contents, array = there.recv()
    assert contents == bytes(100_000)
    assert np.shares_memory(array, shared)
    here.send_bytes(bytes(140_000))
    assert there.recv_bytes() == bytes(140_000)


def test_messages_of_middle_size_have_room_in_a_pipe_that_nobody_reads(
    pipe: tuple[Any, Any],
) -> None:
    """The first go as they are; when the pipe is full of them the others go by a block,
    and so do arrays that refer to blocks.
    """
    here, there = pipe
    here._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 256 << 10)
    shared = shmreduce.ones(3)
    sent = [[number, bytes([number]) * (100 << 10), shared] for number in range(40)]
    for message in sent:
        here.send(message)
    for number, contents, array in sent:
        received = there.recv()
        assert received[:2] == [number, contents]
        assert np.shares_memory(received[2], array)


def test_a_message_is_taken_back_where_the_pipe_is_closed_meanwhile(
    pipe: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By another thread, while it is found out how much is unread."""
    here, _there = pipe

    def closed() -> bool:
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))

    monkeypatch.setattr(here, "_fills_up", closed)
    before = blocks_out()
    with pytest.raises(OSError, match="Bad file descriptor"):
        here.send([np.zeros(1 << 18), bytes(40 << 10)])
    assert blocks_out() <= before


def test_a_reader_who_is_late_by_one_message_costs_no_block(pipe: tuple[Any, Any]) -> None:
    """Packets go as they are until what is unread takes a quarter of the pipe."""
    here, there = pipe
    before = blocks_out()
    for number in range(2):
        here.send(bytes([number]) * (40 << 10))
    assert blocks_out() <= before
    room = here._socket.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
    for number in range(2, room // (4 * (40 << 10)) + 3):
        here.send(bytes([number % 256]) * (40 << 10))
    assert blocks_out() > before
    for number in range(room // (4 * (40 << 10)) + 3):
        assert there.recv() == bytes([number % 256]) * (40 << 10)
    assert blocks_out() <= before


# The interface of multiprocessing.connection.Connection


def test_it_is_a_connection(pipe: tuple[Any, Any]) -> None:
    """It is an instance of the standard class, has a descriptor and says its directions."""
    here, _ = pipe
    assert isinstance(here, multiprocessing.connection.Connection)
    assert os.fstat(here.fileno())
    assert (here.readable, here.writable, here.closed) == (True, True, False)
    here.close()
    assert here.closed


def test_a_negative_handle_is_refused_as_by_the_standard_class() -> None:
    """With the same error."""
    for kind in (Connection, multiprocessing.connection.Connection):
        with pytest.raises(ValueError, match="invalid handle"):
            kind(-1)


@pytest.fixture
def default_timeout() -> Iterator[None]:
    """New socket objects have a timeout, for which they make their descriptors non-blocking."""
    socket.setdefaulttimeout(PATIENCE)
    yield
    socket.setdefaulttimeout(None)


@pytest.mark.usefixtures("default_timeout", "shmreduce_no_leaks")
def test_ends_wait_whatever_new_sockets_do() -> None:
    """And what is refused stays as it is."""
    here, there = shmreduce.Pipe()
    for end in (here, there, Connection(os.dup(there.fileno()))):
        assert os.get_blocking(end.fileno())
        end.close()
    one, other = socket.socketpair()
    with one, other:
        one.setblocking(True)
        with pytest.raises(shmreduce.ConfigurationError, match="SEQPACKET"):
            Connection(one.fileno())
        assert os.get_blocking(one.fileno())


@pytest.mark.usefixtures("default_timeout")
def test_an_end_that_is_made_again_never_stops_waiting(
    pipe: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not for a moment: other threads and processes may be waiting by the same description."""
    mended: list[int] = []
    monkeypatch.setattr(os, "set_blocking", lambda fd, _: mended.append(fd))
    with Connection(os.dup(pipe[0].fileno())):
        assert mended == []


@pytest.mark.parametrize("make", [socket.socketpair, os.pipe])
def test_what_has_no_packets_is_refused(make: Any) -> None:
    """A stream is no connection of ours, and stays its owner's."""
    ends = [end if isinstance(end, int) else end.detach() for end in make()]
    try:
        for end in ends:
            with pytest.raises(shmreduce.ConfigurationError, match="SEQPACKET") as caught:
                Connection(end)
            del caught
    finally:
        for end in ends:
            os.close(end)


def test_one_way_ends_refuse_the_other_way() -> None:
    """As the standard ends do, with OSError."""
    reader, writer = shmreduce.Pipe(duplex=False)
    with reader, writer:
        for send in (reader.send, reader.send_bytes):
            with pytest.raises(OSError, match="read-only"):
                send(b"x")
        for receive in (writer.recv, writer.recv_bytes, writer.poll):
            with pytest.raises(OSError, match="write-only"):
                receive()


def test_closed_ends_refuse_everything(pipe: tuple[Any, Any]) -> None:
    """With OSError."""
    here, _ = pipe
    here.close()
    for call in (here.recv, here.recv_bytes, here.poll, here.fileno, lambda: here.send(1)):
        with pytest.raises(OSError, match="closed"):
            call()


@pytest.mark.parametrize("size", [1000, 2 * packets.INLINE_BODY])
@pytest.mark.parametrize("kind", ["b", "c", "?"])
def test_bytes_of_any_kind(pipe: tuple[Any, Any], kind: str, size: int) -> None:
    """What has one byte for each item is bytes: integers with a sign, characters, booleans."""
    here, there = pipe
    data = bytes([0, 1]) * (size // 2)
    here.send_bytes(memoryview(data).cast(kind))  # type: ignore[call-overload]
    assert there.recv_bytes() == data


def test_bytes_into_a_buffer(pipe: tuple[Any, Any]) -> None:
    """They are written at the offset; a buffer that is too short is an error with the message."""
    here, there = pipe
    buffer = bytearray(10)
    here.send_bytes(b"abcdef", 1, 3)
    assert there.recv_bytes_into(buffer, 2) == 3
    assert bytes(buffer) == b"\0\0bcd\0\0\0\0\0"
    here.send_bytes(b"longer than ten")
    with pytest.raises(multiprocessing.BufferTooShort) as caught:
        there.recv_bytes_into(buffer)
    assert caught.value.args == (b"longer than ten",)


@pytest.mark.parametrize("size", [10, 100_000])
def test_longer_than_allowed_is_an_error(pipe: tuple[Any, Any], size: int) -> None:
    """``recv_bytes(maxlength)`` refuses longer messages."""
    here, there = pipe
    here.send_bytes(bytes(size))
    with pytest.raises(OSError, match="bad message length"):
        there.recv_bytes(size - 1)


def test_empty_message_is_no_end(pipe: tuple[Any, Any]) -> None:
    """A message of no bytes is a message."""
    here, there = pipe
    here.send_bytes(b"")
    assert there.recv_bytes() == b""


def test_poll_and_wait_and_selectors(pipe: tuple[Any, Any]) -> None:
    """All three tell when there is something to receive."""
    here, there = pipe
    with selectors.DefaultSelector() as selector:
        selector.register(there, selectors.EVENT_READ)
        assert not there.poll()
        assert not there.poll(0.01)
        assert not wait([there], 0)
        assert not selector.select(0)
        here.send(1)
        assert there.poll(PATIENCE)
        assert wait([there], PATIENCE) == [there]
        assert len(selector.select(PATIENCE)) == 1
        assert there.recv() == 1


def test_very_large_bytes_wait_for_their_reader(pipe: tuple[Any, Any]) -> None:
    """``send_bytes`` of 16 MiB returns once they are received; order and bytes are kept."""
    here, there = pipe
    data = os.urandom(16 << 20)
    sent = threading.Event()

    def send() -> None:
        here.send_bytes(data)
        sent.set()

    sender = threading.Thread(target=send)
    sender.start()
    assert there.poll(PATIENCE)
    assert not sent.is_set()
    assert there.recv_bytes() == data
    assert sent.wait(PATIENCE)
    sender.join(PATIENCE)


@pytest.mark.parametrize("read", [16 << 20, 5, 0, None], ids=["whole", "short", "end", "not"])
def test_large_bytes_however_their_file_is_read(
    pipe: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch, read: int | None
) -> None:
    """A file need not be readable, by read(2), whole or at all."""

    def some(fd: int, size: int, offset: int) -> bytes:
        if read is None:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return pread(fd, min(size, read), offset)

    here, there = pipe
    data, pread = os.urandom(5 << 20), os.pread
    here.send_bytes(data)
    with monkeypatch.context() as patch:
        patch.setattr(os, "pread", some)
        assert there.recv_bytes() == data


def test_very_large_bytes_for_nobody_are_a_broken_pipe(pipe: tuple[Any, Any]) -> None:
    """If the other end is closed meanwhile, the sender is told."""
    here, there = pipe
    errors: list[BaseException] = []

    def send() -> None:
        try:
            here.send_bytes(bytes(16 << 20))
        except OSError as error:
            errors.append(error)

    sender = threading.Thread(target=send)
    sender.start()
    assert there.poll(PATIENCE)
    there.close()
    sender.join(PATIENCE)
    assert [type(each) for each in errors] == [BrokenPipeError]


# Ends that are gone


@pytest.mark.parametrize("unread", [0, 3])
def test_end_of_file_comes_after_the_last_message(unread: int) -> None:
    """Messages that were sent before the other end was closed are received first."""
    here, there = shmreduce.Pipe()
    for number in range(unread):
        there.send(number)
    here.send("never read")
    there.close()
    assert [within(here.recv) for _ in range(unread)] == list(range(unread))
    with pytest.raises(EOFError):
        within(here.recv)
    with pytest.raises(EOFError):
        within(here.recv_bytes)
    here.close()


def test_nobody_to_receive_is_a_broken_pipe(shmreduce_no_leaks: None) -> None:
    """Sending to a closed end is BrokenPipeError, and the array's block is free again."""
    here, there = shmreduce.Pipe()
    here.send(1)
    there.close()
    for message in (1, np.zeros(100_000)):
        with pytest.raises(BrokenPipeError):
            here.send(message)
    here.close()


def test_message_that_is_dropped_with_the_pipe_leaves_no_descriptor() -> None:
    """Descriptors in unread messages go with the pipe."""
    array = shmreduce.zeros(1000)
    before: set[OpenFile] = set()
    for number in range(20):
        here, there = shmreduce.Pipe()
        here.send(array)
        del here, there
        # The first of all may open what stays.
        before = before if number else open_files()
    assert not open_files() - before


def test_full_pipe_waits(pipe: tuple[Any, Any]) -> None:
    """A sender waits for room; nothing is lost and the order is kept."""
    here, there = pipe
    count = 20_000
    sender = threading.Thread(target=lambda: [here.send(number) for number in range(count)])
    sender.start()
    assert within(lambda: [there.recv() for _ in range(count)]) == list(range(count))
    sender.join(PATIENCE)


def test_hundreds_of_messages_need_no_reader(pipe: tuple[Any, Any]) -> None:
    """As many small messages as a pipe always has room for can be sent with nobody reading."""
    here, there = pipe
    within(lambda: [here.send(number) for number in range(200)])
    assert [there.recv() for _ in range(200)] == list(range(200))


def fill(send: Any) -> int:
    """Return how many times something can be sent before the pipe is full."""
    count = 0
    with contextlib.suppress(BlockingIOError):
        while True:
            send()
            count += 1
    return count


@pytest.mark.parametrize("size", [1, 100, 1000, 10_000])
def test_no_less_fits_than_into_a_standard_pipe(size: int) -> None:
    """As many messages wait unread as in a pipe of the standard library, or more.

    Where the system keeps buffers small, that holds from some 100 bytes on.
    """
    here, there = Pipe(duplex=False)
    receiver, sender = multiprocessing.Pipe(duplex=False)
    message = bytes(size)
    with here, there, receiver, sender:
        os.set_blocking(sender.fileno(), False)
        standard = fill(lambda: sender.send(message))
        own = fill(lambda: there.transmit(pack_last([message]), wait=False))
        with socket.socket(fileno=os.dup(there.fileno())) as end:
            room = end.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
        assert own >= (standard if room >= 8 << 20 or size > 100 else 200)
        for _ in range(own):
            assert here.recv() == message
        assert not here.poll()


def test_interrupted_receive_goes_on(pipe: tuple[Any, Any]) -> None:
    """A signal whose handler returns interrupts neither ``recv`` nor ``poll``."""
    here, there = pipe
    caught: list[int] = []

    def answer(number: int, _: Any) -> None:
        caught.append(number)
        here.send("after the signal")

    before = signal.signal(signal.SIGALRM, answer)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        assert there.recv() == "after the signal"
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        assert there.poll(PATIENCE)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert len(caught) == 2


def test_interrupt_that_raises_loses_no_message(pipe: tuple[Any, Any]) -> None:
    """A handler that raises ends ``recv``; what comes later is received later."""
    here, there = pipe

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(KeyboardInterrupt):
            there.recv()
    finally:
        signal.signal(signal.SIGALRM, before)
    here.send(np.arange(100_000))
    assert there.recv()[-1] == 99_999


# Errors


class Explosive:
    """Cannot be unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _explode, ()


def _explode() -> None:
    raise ZeroDivisionError


def test_message_that_cannot_be_unpickled_releases_its_blocks(pipe: tuple[Any, Any]) -> None:
    """The error is the object's own; the blocks are free again."""
    here, there = pipe
    before = blocks_out()
    for _ in range(3):
        here.send([np.zeros(1 << 20), Explosive(), np.zeros(1 << 20)])
        with pytest.raises(ZeroDivisionError):
            there.recv()
    eventually(lambda: blocks_out() <= before)


def test_message_that_cannot_be_pickled_releases_its_blocks(pipe: tuple[Any, Any]) -> None:
    """Nothing is sent."""
    here, there = pipe
    before = blocks_out()
    with pytest.raises((AttributeError, pickle.PicklingError)):
        here.send([np.zeros(1 << 20), lambda: 1])
    assert not there.poll()
    eventually(lambda: blocks_out() <= before)


def blocks_out() -> int:
    """Return how many by-value blocks of this process are not free.

    Those that an interrupt in another test has left for good are among them.
    """
    state = runtime.current()
    state.live.settle()
    for heap in state.heaps:
        heap.collect()
    heaps = [heap for heap in state.heaps if heap.kind == BY_VALUE]
    return sum(len(segment.out) for heap in heaps for segment in heap.segments)


def test_too_many_descriptors_under_way(
    pipe: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the kernel takes no more descriptors, the message goes without."""
    here, there = pipe

    class Refusing:
        def __init__(self, real: Any) -> None:
            self._real = real

        def __getattr__(self, name: str) -> Any:
            return getattr(self._real, name)

        def write(self, data: bytes, descriptors: Sequence[int], flags: int) -> None:
            if descriptors:
                raise OSError(errno.ETOOMANYREFS, "Too many references")
            self._real.write(data, descriptors, flags)

    monkeypatch.setattr(here, "_socket", Refusing(here._socket))
    here.send(np.arange(100_000))
    assert there.recv()[-1] == 99_999


# Children


def produce_and_vanish(writer: Any, count: int, how: str) -> None:
    """Send arrays, and be gone."""
    for number in range(count):
        writer.send((number, np.full(1 << 18, number)))
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("how", ["killed", "ended"])
def test_producer_may_be_gone(children: Children, how: str) -> None:
    """What a process sent is received after it was killed, or ended."""
    reader, writer = context_of(children).Pipe(duplex=False)
    process = children.start(produce_and_vanish, writer, 5, how)
    writer.close()
    children.join(process)
    assert process.exitcode == (-signal.SIGKILL if how == "killed" else 0)
    for number in range(5):
        got, array = within(reader.recv)
        assert got == number
        assert (array == number).all()
    with pytest.raises(EOFError):
        within(reader.recv)
    reader.close()


def produce_from_two_segments(connection: Any) -> None:
    """Send from one segment, wait until that was dropped, send from two, and be killed."""
    connection.send(np.full(1 << 18, 1))
    connection.recv()
    connection.send((shmreduce.full(1 << 18, 2), np.full(1 << 18, 3)))
    os.kill(os.getpid(), signal.SIGKILL)


def test_killed_producer_loses_nothing_of_a_segment_known_before(children: Children) -> None:
    """Opening one segment of a message closes no other of it that is open and of no use yet."""
    here, there = context_of(children).Pipe()
    process = children.start(produce_from_two_segments, there)
    there.close()
    assert within(here.recv)[-1] == 1
    here.send("dropped")
    children.join(process)
    shared, value = within(here.recv)
    assert (shared == 2).all()
    assert (value == 3).all()
    here.close()


class Forwarding:
    """Receives what it consists of when it is pickled."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection

    def __reduce__(self) -> Any:
        return list, ([self._connection.recv()],)


@pytest.mark.parametrize("kind", ["shared", "value"])
def test_what_its_last_holder_sends_on_in_passing_arrives(children: Children, kind: str) -> None:
    """A message keeps open what it refers to, also when its maker was killed and the
    last view dies before the message is complete.
    """
    reader, writer = context_of(children).Pipe(duplex=False)
    process = children.start(produce_one_and_vanish, writer, kind)
    writer.close()
    children.join(process)
    here, there = shmreduce.Pipe()
    here.send(Forwarding(reader))
    (array,) = within(there.recv)
    assert (array == 7).all()
    for end in (reader, here, there):
        end.close()


def produce_one_and_vanish(writer: Any, kind: str) -> None:
    """Send one array, and be killed."""
    writer.send(shmreduce.full(1 << 18, 7) if kind == "shared" else np.full(1 << 18, 7))
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_packet_that_is_not_sent_gives_back_its_own_only(pipe: tuple[Any, Any]) -> None:
    """Another message, which it has as bytes, can be loaded all the same."""
    here, there = pipe
    with shmreduce.install():
        inner = bytes(ForkingPickler.dumps(np.full(1 << 18, 5)))
    packet = pack_last([{"inner": inner, "data": np.full(1 << 18, 6)}])
    packet.discard()
    here.send(inner)
    with shmreduce.install():
        assert (ForkingPickler.loads(there.recv()) == 5).all()


def echo(connection: Any) -> None:
    """Send back what comes, until None does."""
    while (message := connection.recv()) is not None:
        connection.send(message)
    connection.close()


def test_pipe_reaches_children(children: Children) -> None:
    """An end is an argument of a process under every start method."""
    here, there = context_of(children).Pipe()
    process = children.start(echo, there)
    there.close()
    for message in ("text", np.arange(3), np.arange(1 << 20), bytes(1 << 20)):
        here.send(message)
        assert within(here.poll, PATIENCE)
        assert np.array_equal(here.recv(), message)
    here.send(None)
    children.join(process)
    here.close()


def test_end_travels_through_another_pipe(pipe: tuple[Any, Any]) -> None:
    """An end can be sent as a message."""
    here, there = pipe
    reader, writer = shmreduce.Pipe(duplex=False)
    here.send(writer)
    copy = within(there.recv)
    assert isinstance(copy, Connection)
    copy.send(np.arange(100_000))
    assert within(reader.recv)[-1] == 99_999
    for end in (reader, writer, copy):
        end.close()
    resource_sharer.stop(PATIENCE)


def receive_without_descriptors(connection: Any) -> None:
    """Receive an array while no descriptor is free; then once more, when there are."""
    import resource

    for name in ("numpy", "shmreduce_fd.strategy", "shmreduce_numpy.rebuild"):
        # Not without descriptors.
        importlib.import_module(name)
    shmreduce.get_all_sharing_strategies()
    connection.send("ready")
    connection.poll(PATIENCE)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        while True:
            taken.append(os.dup(0))
    except OSError:
        pass
    try:
        connection.recv()
        raise RuntimeError("received without a descriptor")
    except shmreduce.AttachError as error:
        message = error.message_bytes
    finally:
        for fd in taken:
            os.close(fd)
    assert message is not None
    connection.send(pickle.loads(message).sum())


def test_reader_out_of_descriptors_is_told_and_can_try_again(children: Children) -> None:
    """The error keeps the message, which loads once descriptors are free."""
    here, there = context_of(children).Pipe()
    process = children.start(receive_without_descriptors, there)
    there.close()
    assert within(here.recv) == "ready"
    here.send(np.ones(1 << 18))
    assert within(here.recv) == 1 << 18
    here.close()
    children.join(process)


def test_the_descriptor_of_the_message_itself_goes_first() -> None:
    """Not all may get through: without it nothing of the message could be found."""
    packet = pack_last([[shmreduce.zeros(10), bytes(2 * packets.INLINE_BODY)]])
    try:
        assert packet._body is not None
        body = Handle.unpack(packet._body).token
        assert len(packet.segments) == 2
        assert packet.segments[0].token == body
    finally:
        packet.discard()
