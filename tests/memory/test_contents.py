"""Large blocks that are new are written with what they carry, and are as good as filled ones."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import shmreduce
from shmreduce import Message, import_block
from shmreduce.memory import reservation, runtime
from shmreduce.memory.layout import BY_VALUE
from shmreduce.memory.mapping import Mapping
from shmreduce.memory.owned_segment import OwnedSegment
from tests.memory.waiting import in_forked_child, wait_for_exit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("strategy")

MIB = 1 << 20


@pytest.fixture
def size() -> int:
    """Of which there is no block by value at hand; no size of a class."""
    heap = runtime.current().heap(BY_VALUE)
    heap.collect()
    with heap.exclusive():
        heap.cool(0)
    return 3 * MIB + 5


@pytest.fixture
def message() -> Iterator[Message]:
    made = Message()
    yield made
    made.rollback()


class Writing:
    """The module os with another way to write, for one module alone."""

    def __init__(self, pwrite: Callable[..., int]) -> None:
        self.pwrite = pwrite

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)


def segment_of(message: Message) -> OwnedSegment:
    """Return the segment of the only block that a message has."""
    (lease,) = message.leases()
    assert isinstance(lease.segment, OwnedSegment)
    return lease.segment


def returning(value: object) -> Callable[[], object]:
    """Return contents that are this object."""
    return lambda: value


def lacks_pages(segment: OwnedSegment) -> bool:
    """Return whether a file has fewer pages than its segment counts for its blocks."""
    return os.fstat(segment.fd).st_blocks * 512 < segment.reserved


def pages_of(heap: Any) -> int:
    """Return how many bytes of pages the files of a heap have."""
    return sum(os.fstat(segment.fd).st_blocks * 512 for segment in heap.segments)


def test_a_new_block_has_its_contents_and_a_used_one_is_to_be_filled(size: int) -> None:
    """Both arrive, and no page of either is missing."""
    for number in range(2):
        data, message = os.urandom(size), Message()
        given = message.allocate(size, returning(data))
        assert given is not None
        view, handle = given
        assert (view is None) == (number == 0)
        if view is not None:
            view[:] = data
            del view
        del given
        assert not lacks_pages(segment_of(message))
        message.commit()
        assert bytes(import_block(handle).buffer) == data


def test_a_small_block_is_to_be_filled(message: Message) -> None:
    """Nobody is asked for what it is going to carry."""
    asked: list[int] = []
    given = message.allocate(100, lambda: asked.append(1))
    assert given is not None
    assert given[0] is not None
    assert asked == []


@pytest.mark.parametrize(
    "make",
    [
        lambda n: np.arange(n // 8, dtype=np.int64),
        lambda n: np.asfortranarray(np.arange(n // 8.0).reshape(-1, 1) * np.ones(2)),
        lambda n: np.arange(n // 4.0)[::2],
        lambda n: np.arange(n // 8).astype("datetime64[us]"),
        lambda n: np.zeros(n // 9, [("a", "i1"), ("b", ">f8")]),
        lambda n: np.zeros(n // 16, np.dtype("i1,f8", align=True)),
        lambda n: np.frombuffer(os.urandom(n), np.uint8),
        lambda n: np.zeros(n // 16, "i8,f8").view(np.recarray),
        lambda n: memoryview(bytearray(os.urandom(n))),
        lambda n: memoryview(os.urandom(n))[::2],
        os.urandom,
    ],
    ids=[
        "C",
        "F",
        "strided",
        "dates",
        "packed",
        "aligned",
        "readonly",
        "records",
        "view",
        "steps",
        "bytes",
    ],
)
def test_whatever_has_bytes_arrives_in_a_new_block(size: int, make: Callable[[int], Any]) -> None:
    """In the layout that it has, and unlike what came before."""
    reader, writer = shmreduce.Pipe(duplex=False)
    with reader, writer:
        sent = make(size)
        writer.send(sent)
        arrived = reader.recv()
    assert type(arrived) is type(sent)
    assert arrived == sent if isinstance(sent, (bytes, memoryview)) else (arrived == sent).all()
    if isinstance(sent, np.ndarray):
        assert arrived.flags.f_contiguous == (sent.flags.f_contiguous or sent.strides[0] > 8)
        assert arrived.flags.writeable == sent.flags.writeable


def test_contents_that_are_not_as_said_are_an_error(size: int) -> None:
    """They would come over what is behind the block. Nothing is kept of the message."""
    heap = runtime.current().heap(BY_VALUE)
    before = pages_of(heap)
    gaps = memoryview(bytearray(2 * size))[::2]
    for wrong in (b"", bytes(size - 1), bytes(size + 1), gaps, 5):
        message = Message()
        with pytest.raises(shmreduce.ConfigurationError, match="contents") as caught:
            message.allocate(size, returning(wrong))
        assert caught.value.setting == "contents"
        assert message.is_empty
    # Tables of a segment that was made for them.
    assert pages_of(heap) <= before + MIB


@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError])
def test_what_contents_raise_is_raised(size: int, error: type[BaseException]) -> None:
    """The call is as if it had not been made."""
    heap = runtime.current().heap(BY_VALUE)

    def failing() -> bytes:
        raise error

    booked = heap.block_bytes
    with pytest.raises(error):
        Message().allocate(size, failing)
    assert heap.block_bytes == booked


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EPERM, errno.EFBIG])
def test_a_file_that_cannot_be_written_to_is_filled(
    size: int, message: Message, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """As those of hugetlbfs, or ones that are sealed."""

    def refuse(*_: Any) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(reservation, "os", Writing(refuse))
    given = message.allocate(size, lambda: bytes(size))
    assert given is not None
    assert given[0] is not None
    assert not lacks_pages(segment_of(message))


@pytest.mark.parametrize("reason", [KeyboardInterrupt(), OSError(errno.ENOSPC, "full")])
def test_a_block_that_could_not_be_written_whole_leaves_no_pages(
    size: int, monkeypatch: pytest.MonkeyPatch, reason: BaseException
) -> None:
    """They would be memory that nobody counts."""
    heap = runtime.current().heap(BY_VALUE)
    parts: list[int] = []

    def half(fd: int, data: memoryview, where: int) -> int:
        parts.append(where)
        return os.pwrite(fd, data[: len(data) // 2], where)

    def refuse(*_: Any) -> None:
        raise reason

    monkeypatch.setattr(reservation, "os", Writing(half))
    monkeypatch.setattr(reservation, "reserve_pages", refuse)
    before, booked = pages_of(heap), heap.block_bytes
    with pytest.raises((KeyboardInterrupt, shmreduce.OutOfSharedMemoryError)):
        Message().allocate(size, lambda: bytes(size))
    assert len(parts) > 1
    assert heap.block_bytes == booked
    assert pages_of(heap) <= before + MIB


def test_nothing_is_done_to_another_file_that_has_the_descriptors_number(
    size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the time that pages are there to be written to: a daemon closes what it finds open."""
    other = tmp_path / "file"
    other.write_bytes(b"mine" * MIB)

    def reuse(_self: Mapping, fd: int, offset: int, _size: int, *, patience: int) -> Any:
        assert patience >= 0
        file = os.open(other, os.O_RDWR)
        os.dup2(file, fd, inheritable=False)
        os.close(file)
        return 0, offset

    def child() -> bool:
        monkeypatch.setattr(Mapping, "make_huge", reuse)
        with pytest.raises(shmreduce.SegmentError) as caught:
            Message().allocate(size, lambda: bytes(size))
        return bool(caught.value.errno == errno.EBADF)

    assert wait_for_exit(in_forked_child(child)) == 0
    assert other.read_bytes() == b"mine" * MIB
