"""Handles from anybody: damaged, forged, outdated; never a crash, never others' bytes."""

from __future__ import annotations

import os
import struct
import zlib
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import shmreduce
from shmreduce.memory.handle import MARK, Handle, find_mark
from shmreduce.memory.inspection import process_state
from shmreduce.memory.loading import discard_message
from shmreduce.memory.message import Message

if TYPE_CHECKING:
    from collections.abc import Iterator

EXPECTED = (
    shmreduce.InvalidHandleError,
    shmreduce.StaleHandleError,
    shmreduce.AttachError,
)
QUICK = settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@pytest.fixture
def sent(strategy: str) -> Iterator[list[Any]]:
    """Return a shared block of ones, and a handle to it that is under way."""
    block = shmreduce.allocate(5000)
    block.buffer[:] = b"\1" * 5000
    message = Message()
    handle = message.refer(block, 5000)
    assert handle is not None
    message.commit()
    both = [block, handle]
    del block
    yield both
    # pytest keeps the list for longer than leaks are looked for.
    both.clear()
    discard_message(handle)


@QUICK
@given(data=st.data())
def test_a_damaged_handle_is_noticed(sent: list[Any], data: st.DataObject) -> None:
    """A handle with a bit changed, cut off or lengthened is an InvalidHandleError."""
    _, handle = sent
    kind = data.draw(st.sampled_from(["flip", "cut", "append"]))
    if kind == "flip":
        place = data.draw(st.integers(0, 8 * len(handle) - 1))
        damaged = bytearray(handle)
        damaged[place // 8] ^= 1 << place % 8
        bad = bytes(damaged)
    elif kind == "cut":
        bad = handle[: data.draw(st.integers(0, len(handle) - 1))]
    else:
        bad = handle + data.draw(st.binary(min_size=1, max_size=9))
    with pytest.raises(shmreduce.InvalidHandleError):
        shmreduce.import_block(bad)


@QUICK
@given(garbage=st.one_of(st.binary(max_size=300), st.binary(max_size=300).map(MARK.__add__)))
def test_garbage_is_no_handle(installed: None, garbage: bytes) -> None:
    """Any bytes are either a handle or an InvalidHandleError."""
    with pytest.raises(shmreduce.InvalidHandleError):
        shmreduce.import_block(garbage)


NUMBERS = st.one_of(st.integers(0, 5), st.sampled_from([2**16, 2**31 - 1, 2**32 - 1]))
LARGE = st.one_of(st.integers(0, 10_000), st.sampled_from([2**40, 2**63, 2**64 - 1]))


@QUICK
@given(
    changes=st.fixed_dictionaries(
        {},
        optional={
            "token": st.binary(min_size=16, max_size=16),
            "boot": st.binary(min_size=16, max_size=16),
            "generation": LARGE,
            "nonce": LARGE,
            "nbytes": LARGE,
            # Beyond the table. To name another shared block of the same process
            # is no forgery but what whoever may run code here can do anyway.
            "block": st.sampled_from([2**16, 2**31 - 1, 2**32 - 1]),
            "slot": NUMBERS,
            "shared": st.booleans(),
            "mode": st.sampled_from(["rw", "ro", "cow"]),
            "strategy": st.sampled_from(["file_descriptor", "file_system"]),
            "locator": st.one_of(
                st.text(max_size=30),
                st.just("1:0"),
                st.builds("{}:{}".format, st.just(os.getpid()), st.integers(0, 80)),
                st.sampled_from(["/etc/passwd", "/dev/shm/../../etc/passwd", "/dev/tty", "/"]),
            ),
            "maker_locator": st.one_of(
                st.text(max_size=30),
                st.just("1:0"),
                st.builds("{}:{}".format, st.just(os.getpid()), st.integers(0, 80)),
                st.sampled_from(["/etc/passwd", "/dev/tty", "/"]),
            ),
        },
    )
)
def test_a_forged_handle_reaches_nothing_else(sent: list[Any], changes: dict[str, Any]) -> None:
    """A well-formed handle with made-up fields is one of three errors, or the block
    that its holder may see anyway, within its bounds.
    """
    _, handle = sent
    forged = Handle.unpack(handle)._replace(**changes)
    try:
        block = shmreduce.import_block(forged.pack())
    except EXPECTED:
        return
    assert forged.token == Handle.unpack(handle).token
    assert block.nbytes <= 8192
    assert bytes(block.buffer[:5000]) == b"\1" * min(5000, block.nbytes)


def test_an_unknown_strategy_is_named(sent: list[Any]) -> None:
    """A handle of a strategy that is not installed here names the strategy."""
    _, handle = sent
    forged = Handle.unpack(handle)._replace(strategy="carrier_pigeon", token=b"t" * 16)
    with pytest.raises(shmreduce.ShmreduceError, match="carrier_pigeon"):
        shmreduce.import_block(forged.pack())


def test_another_boot_is_another_host(sent: list[Any]) -> None:
    """A handle from another host, or from before a reboot, says so."""
    _, handle = sent
    forged = Handle.unpack(handle)._replace(boot=b"b" * 16, token=b"t" * 16)
    with pytest.raises(shmreduce.WrongHostError) as caught:
        shmreduce.import_block(forged.pack())
    assert caught.value.there == (b"b" * 16).hex()


def test_the_checksum_covers_what_it_says(sent: list[Any]) -> None:
    """The checksum is the CRC-32 of all that follows it."""
    _, handle = sent
    (found,) = struct.unpack_from("<I", handle, len(MARK))
    assert found == zlib.crc32(handle[len(MARK) + 4 :])


@QUICK
@given(data=st.data())
def test_a_damaged_message_never_crashes(installed: None, data: st.DataObject) -> None:
    """Whatever bit of a handle in a message is damaged, loading is an error, and the
    block goes to whoever has the whole message.
    """
    message = bytearray(ForkingPickler.dumps(np.ones(2000)))
    whole = bytes(message)
    start = whole.find(MARK)
    place = data.draw(st.integers(start, start + Handle.size_at(whole, start) - 1))
    message[place] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(shmreduce.InvalidHandleError):
        ForkingPickler.loads(bytes(message))
    # The damaged message could not name its block; the whole one releases it.
    assert ForkingPickler.loads(whole).sum() == 2000


def test_a_truncated_message_is_released(installed: None) -> None:
    """A message that is cut off behind its handles gives their blocks back."""
    before = process_state().unread
    data = bytes(ForkingPickler.dumps([np.ones(2000), np.ones(3000), "tail" * 50]))
    with pytest.raises(Exception, match=r"truncated|ran out|Ran out"):
        ForkingPickler.loads(data[:-20])
    assert process_state().unread == before


def test_a_block_is_found_through_arrays_and_memoryviews() -> None:
    """Whatever a type keeps over its block can be asked for it; other memory is in none."""
    block = shmreduce.allocate(24)
    array: Any = np.frombuffer(block.buffer, np.uint8)
    for view in (array, array[::-2], array[4:].view(np.uint32), memoryview(array)[3:]):
        for exporter in (view, memoryview(view), np.asarray(memoryview(view))):
            found = shmreduce.find_block(exporter)
            assert found is not None
            assert found.address == block.address
    alone: Any = np.ones(3)
    for other in (alone, alone[1:], memoryview(alone), [array], None):
        assert shmreduce.find_block(other) is None


def test_an_array_over_a_block_is_carried_as_the_block() -> None:
    """All of it travels without a copy; a part is better left to its type's reducer."""
    block = shmreduce.allocate(24)
    array = np.frombuffer(block.buffer, np.uint8)
    message = Message()
    handle = message.carry(array)
    assert message.carry(array[1:]) is None
    message.commit()
    assert handle is not None
    assert shmreduce.import_block(handle).address == block.address


@pytest.mark.parametrize("block", [None, b"bytes", 5])
def test_only_a_block_can_be_referred_to(block: Any) -> None:
    """What find_block() returns for memory of one's own is no block, and said to be none."""
    with pytest.raises(shmreduce.ConfigurationError, match="must be a Block") as caught:
        Message().refer(block, 5)
    assert caught.value.setting == "block"


@pytest.mark.parametrize("size", [100, 32 << 10, (32 << 10) + 1, 5_000_000])
@pytest.mark.parametrize("filler", [b"\0", b"s", b"shmreduce\0"])
def test_a_mark_is_found_where_it_is(size: int, filler: bytes) -> None:
    """In texts of any length, behind any beginning, beside what begins like one."""
    plain = (filler * (size // len(filler) + 1))[:size]
    assert find_mark(plain, 0) == -1
    for place in (0, 1, size // 2, size - 1, size):
        text = plain[:place] + MARK + plain[place:]
        assert find_mark(text, 0) == text.find(MARK) == place
        assert find_mark(text, place) == place
        assert find_mark(text, place + 1) == -1
        assert find_mark(text + MARK, place + len(MARK)) == len(text)
    assert find_mark(plain + MARK[:-1], 0) == -1
