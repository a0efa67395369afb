"""A load that fails for the moment: what somebody has by then stays theirs."""

from __future__ import annotations

import errno
import multiprocessing
import os
import pickle
import threading
from contextlib import ExitStack, suppress
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pytest

import shmreduce
from shmreduce import AlreadyLoadedError, AttachError
from shmreduce.descriptor import Descriptor
from shmreduce.memory import block_locks, locks, runtime
from shmreduce.memory.attachments import Attachments
from shmreduce.memory.blocks import LiveBlocks
from shmreduce.memory.inspection import process_state
from shmreduce.memory.layout import LOCK_BLOCK
from shmreduce.testing.processes import OtherProcess
from shmreduce_numpy.blocks import find_block_of
from tests.memory.waiting import PATIENCE, eventually, in_forked_child, wait_for_exit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from shmreduce.memory.blocks import Block

pytestmark = pytest.mark.usefixtures("installed", "nothing_happens")

LENGTH = 300_000
in_place = Attachments.is_one_too_many


class Trouble:
    """Stands in a message behind its array: something happens there, then the load fails once."""

    happens: ClassVar[Callable[[], object]]
    left: ClassVar[int]

    def __reduce__(self) -> Any:
        return _pass, ()


def _pass() -> None:
    if Trouble.left:
        Trouble.left -= 1
        Trouble.happens()
        raise AttachError(
            "no descriptor is free", segment="", locator="", reason="", errno=errno.EMFILE
        )


@pytest.fixture(params=["in place", "copied"])
def nothing_happens(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """Nothing happens, and the first load fails; arrays by value stay in their block, or are
    copied as where too many segments are open.
    """
    if request.param == "copied":
        monkeypatch.setattr(Attachments, "is_one_too_many", lambda *_: True)
    Trouble.left = 1
    Trouble.happens = lambda: None
    yield
    _kept.clear()


class Cached:
    """Has its array kept when it is loaded."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def __setstate__(self, state: Any) -> None:
        self.__dict__.update(state)
        _kept.append(self.array)


_kept: list[Any] = []


def dumped(obj: Any) -> bytes:
    return bytes(ForkingPickler.dumps((obj, Trouble())))


def make_shared() -> tuple[bytes, bytes]:
    """Return a message about a new shared array, and another one without trouble."""
    _kept[:] = [shmreduce.full(LENGTH, 1.0)]
    return dumped(_kept[0]), bytes(ForkingPickler.dumps(_kept[0]))


def make_others() -> None:
    """Drop the shared array, and make others where there is room for them."""
    _kept.clear()
    _kept.extend(shmreduce.full(LENGTH, 666.0) for _ in range(3))


def fail_to_load(data: bytes) -> bytes:
    """Return the bytes of the message for another try."""
    with pytest.raises(AttachError) as caught:
        ForkingPickler.loads(data)
    again: bytes | None = caught.value.message_bytes
    assert again is not None
    return again


def test_what_nobody_has_is_loaded_by_the_next_try() -> None:
    """And is the loader's alone, though the traceback of the error is kept."""
    with pytest.raises(AttachError) as caught:
        ForkingPickler.loads(dumped(np.full(LENGTH, 1.0)))
    assert caught.value.message_bytes is not None
    array, _ = ForkingPickler.loads(caught.value.message_bytes)
    assert (array == 1).all()
    array[:] = 2
    assert (ForkingPickler.loads(ForkingPickler.dumps(array)) == 2).all()


@pytest.mark.parametrize("load", [pickle.loads, ForkingPickler.loads])
def test_a_message_can_be_tried_until_it_loads(load: Callable[[bytes], Any]) -> None:
    """Each try that fails gives back what it had claimed, and has the message."""
    Trouble.left = 4
    first = again = fail_to_load(dumped(np.full(LENGTH, 1.0)))
    for _ in range(3):
        with pytest.raises(AttachError) as caught:
            load(again)
        assert caught.value.message_bytes is not None
        again = caught.value.message_bytes
    assert again == first
    array, _ = load(again)
    assert (array == 1).all()


@pytest.mark.parametrize(("kind", "length"), [("standard", 1), ("ours", 1), ("ours", LENGTH)])
def test_a_message_whose_block_stays_locked_can_be_loaded_later(
    monkeypatch: pytest.MonkeyPatch, kind: str, length: int
) -> None:
    """By a process that is stopped, say: neither this array nor those before it are lost."""
    monkeypatch.setattr(block_locks, "LOCK_PATIENCE", 0.05)
    reader, writer = multiprocessing.Pipe() if kind == "standard" else shmreduce.Pipe()
    before = np.full(LENGTH, 3.0)
    shared = shmreduce.full(LENGTH, 1.0)
    block = find_block_of(shared)
    assert block is not None
    with OtherProcess("fork") as other:
        # Of several packets' size, so that the message itself is in a block.
        writer.send([before, shared, [str(number) for number in range(length)]])
        record = block._record
        other.ask(hold_lock, record.segment.token, record.block)
        with pytest.raises(shmreduce.LeaseTimeoutError) as caught:
            # It has the shared array, which would need no lock here.
            del shared, block, record
            reader.recv()
        other.ask(_kept.clear)
    first, second, _ = pickle.loads(caught.value.message_bytes or b"")
    assert (first == 3).all()
    assert (second == 1).all()
    reader.close()
    writer.close()


def hold_lock(token: bytes, number: int) -> None:
    """Have a block's lock as its maker has it who is stopped in the middle of a transition."""
    parents = runtime.current().attachments.lineage()[token]
    fd = locks.reopen(parents.fd)
    assert locks.try_lock(fd, LOCK_BLOCK + number)
    _kept.append(Descriptor(fd))


def test_the_memory_of_an_array_that_an_object_has_kept_is_not_given_out_again() -> None:
    """The next try says so, or brings another copy; the array that was kept is never reused."""
    again = fail_to_load(dumped(Cached(np.full(LENGTH, 1.0))))
    try:
        ForkingPickler.loads(again)
    except AlreadyLoadedError:
        pass
    else:
        assert Attachments.is_one_too_many is not in_place
        assert not np.shares_memory(*_kept)
        _kept.pop()[:] = 7
    for number in range(3):
        ForkingPickler.loads(ForkingPickler.dumps(np.full(LENGTH, float(number))))[:] = 5
    assert (_kept[0] == 1).all()


class Keeping:
    """Is rebuilt by a function that keeps the Block, of which there is no view then."""

    def __init__(self, handle: bytes) -> None:
        self.handle = handle

    def __reduce__(self) -> Any:
        return _keep_block, (self.handle,)


def _keep_block(handle: bytes) -> None:
    _kept.append(shmreduce.import_block(handle))


@pytest.mark.parametrize("way", ["short", "long"])
def test_a_block_that_a_function_has_kept_is_not_given_out_again(
    way: str, request: pytest.FixtureRequest
) -> None:
    """As an array that was kept: the next try says so, and the block is never reused."""
    if way == "long":
        request.getfixturevalue("long_way")
    message = shmreduce.Message()
    given = message.allocate(LENGTH)
    assert given is not None
    given[0][:] = bytes([1]) * LENGTH
    handle = given[1]
    del given
    again = fail_to_load(dumped(Keeping(handle)))
    message.commit()
    with suppress(AlreadyLoadedError):
        ForkingPickler.loads(again)
    del _kept[1:]
    for _ in range(3):
        ForkingPickler.loads(ForkingPickler.dumps(np.full(LENGTH, 5, np.uint8)))
    assert bytes(_kept[0].buffer) == bytes([1]) * LENGTH


def test_a_private_block_that_a_function_has_kept_stays_its() -> None:
    """Two objects of the message have the same one; the next try brings another."""
    block = shmreduce.allocate(LENGTH, mode="cow")
    block.buffer[:] = bytes([1]) * LENGTH
    message = shmreduce.Message()
    handles = [message.refer(block, LENGTH) for _ in range(2)]
    again = fail_to_load(dumped([Keeping(each) for each in handles if each]))
    message.commit()
    ForkingPickler.loads(again)
    first, second, third, fourth = (each.address for each in _kept)
    assert first == second != third == fourth
    del block, _kept[1:]
    for _ in range(3):
        shmreduce.allocate(LENGTH).buffer[:] = bytes([5]) * LENGTH
    assert bytes(_kept[0].buffer) == bytes([1]) * LENGTH


def test_a_shared_array_that_another_thread_has_stays_its() -> None:
    """It is not reused while that thread has it, and the next try brings it once more."""
    found: list[Any] = []
    with OtherProcess("fork") as owner:
        data, another = owner.ask(make_shared)

        def find_elsewhere() -> None:
            thread = threading.Thread(target=lambda: found.append(ForkingPickler.loads(another)))
            thread.start()
            thread.join(PATIENCE)

        Trouble.happens = find_elsewhere
        again = fail_to_load(data)
        owner.ask(make_others)
        assert (found[0] == 1).all()
        found.clear()
        # The message alone keeps it now.
        array, _ = ForkingPickler.loads(again)
        assert (array == 1).all()
        del array
        owner.ask(_kept.clear)


def test_what_is_given_back_stays_open_until_it_is_a_message_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another thread that is out of descriptors, too, closes what nobody uses meanwhile."""
    attachments = runtime.current().attachments
    take_back = LiveBlocks.take_back
    closed: list[int] = []

    def take_back_while_others_close(live: LiveBlocks, block: Block) -> bool:
        taken = take_back(live, block)
        thread = threading.Thread(target=lambda: closed.append(attachments.close_idle(0)))
        thread.start()
        thread.join(PATIENCE)
        return taken

    with OtherProcess("fork") as owner:
        data = owner.ask(dump_by_value)
        attachments.close_idle(0)
        with monkeypatch.context() as patch:
            patch.setattr(LiveBlocks, "take_back", take_back_while_others_close)
            again = fail_to_load(data)
        assert closed == [0]
        attachments.close_idle(0)
        array, _ = ForkingPickler.loads(again)
        assert (array == 1).all()
        del array


@pytest.mark.parametrize("kind", ["by value", "had elsewhere"])
def test_what_is_given_back_is_there_though_its_sender_has_ended(kind: str) -> None:
    """The sender has seen that it was read, so the process that gives it back keeps it."""
    found: list[Any] = []
    with ExitStack() as stack:
        owner = stack.enter_context(OtherProcess("fork"))
        another = data = b""
        if kind == "by value":
            data = owner.ask(dump_by_value)
        else:
            data, another = owner.ask(make_shared)

        def end_the_sender() -> None:
            if kind == "had elsewhere":
                found.append(ForkingPickler.loads(another))
            stack.close()

        Trouble.happens = end_the_sender
        again = fail_to_load(data)
    found.clear()
    runtime.current().attachments.close_idle(0)
    array, _ = ForkingPickler.loads(again)
    assert (array == 1).all()


def dump_by_value() -> bytes:
    return dumped(np.full(LENGTH, 1.0))


def test_an_array_that_a_forked_child_has_is_not_given_out_again() -> None:
    """The child may see it for as long as it lives: the next try finds it loaded."""
    reader, writer = os.pipe()
    pids: list[int] = []

    def wait() -> bool:
        os.close(writer)
        os.read(reader, 1)
        os._exit(0)

    def fork() -> None:
        pids.append(in_forked_child(wait))

    Trouble.happens = fork
    again = fail_to_load(dumped(np.full(LENGTH, 1.0)))
    with pytest.raises(AlreadyLoadedError):
        ForkingPickler.loads(again)
    os.close(writer)
    os.close(reader)
    assert wait_for_exit(pids[0]) == 0
    eventually(lambda: process_state().waiting == 0, "the block is released")


def test_pages_that_a_fork_has_made_private_are_the_blocks_again() -> None:
    """What the next loader writes is what it sends, though a fork came into the first try."""
    Trouble.happens = lambda: wait_for_exit(in_forked_child(lambda: True))
    again = fail_to_load(dumped(np.full(LENGTH, 1.0)))
    array, _ = ForkingPickler.loads(again)
    array[:] = -9
    assert (ForkingPickler.loads(ForkingPickler.dumps(array)) == -9).all()
    assert (array == -9).all()
