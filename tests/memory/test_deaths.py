"""What is left when a process is killed: nothing, and nobody hangs."""

from __future__ import annotations

import os
import pickle
import signal
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import shmreduce
from shmreduce.memory import locks, runtime
from shmreduce.memory.inspection import leftovers, process_state
from shmreduce.memory.layout import SHARED
from shmreduce.testing.processes import OtherProcess
from tests.conftest import give_memory_back
from tests.memory.resending import resent
from tests.memory.waiting import PATIENCE, eventually, receive

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.conftest import Children

LENGTH = 300_000

_kept: list[Any] = []


def keep(array: Any) -> int:
    """Hold an array for as long as this process lives."""
    _kept.append(array)
    return os.getpid()


def make_and_keep() -> Any:
    _kept.append(shmreduce.ones(LENGTH, np.uint8))
    return _kept[-1]


def dumped(*arrays: Any) -> bytes:
    """Return a message with the array that this process got last, and keep it."""
    _kept.extend(arrays)
    return bytes(ForkingPickler.dumps(_kept[-1]))


def sum_of(message: bytes) -> int:
    return int(pickle.loads(message).sum())


def send_and_wait(writer: Any) -> None:
    writer.send(np.ones(LENGTH, np.uint8))
    signal.pause()


@pytest.fixture
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Named segments lie in a folder of the test's: any process of this user sweeps the usual."""
    give_memory_back()
    monkeypatch.setenv("SHMREDUCE_DIRECTORY", str(tmp_path))
    yield
    # Children of later tests refuse a segment in this folder.
    give_memory_back()


@pytest.mark.usefixtures("strategy")
@pytest.mark.parametrize("shared", [False, True])
def test_what_a_killed_process_held_comes_back(shared: bool) -> None:
    """The blocks of arrays in a process that is killed are free again."""
    with OtherProcess("fork") as other:
        for _ in range(5):
            array: Any = np.ones(LENGTH, np.uint8)
            other.ask(keep, shmreduce.share(array) if shared else array)
        assert process_state().out == 5
        other.kill()
        eventually(lambda: process_state().out == 0, "the blocks are free")


@pytest.mark.usefixtures("strategy")
def test_to_look_for_the_dead_is_to_ask_for_each_process_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And not for each of the thousands of blocks that it holds."""
    heap = runtime.current().heap(SHARED)
    asked: list[int] = []
    first_locked = locks.first_locked

    def count(fd: int, start: int, *more: Any) -> Any:
        asked.append(start)
        return first_locked(fd, start, *more)

    with OtherProcess("fork") as other, OtherProcess("fork") as third:
        kept = [shmreduce.zeros(100, np.uint8) for _ in range(50)]
        for array in kept:
            other.ask(keep, array)
        for array in kept[:20]:
            third.ask(keep, array)
        with monkeypatch.context() as patch:
            patch.setattr(locks, "first_locked", count)
            heap.reap()
        assert 0 < len(asked) <= 2 * len(heap.segments)
        other.kill()
        del kept, array
        # Which looks for the dead, too.
        eventually(lambda: process_state().out == 20, "one process's are free")


@pytest.mark.usefixtures("strategy")
def test_what_a_killed_process_made_lives_on_where_it_is_used() -> None:
    """An array received from a process that is killed then stays readable, and can be
    sent on.
    """
    with OtherProcess("fork") as other, OtherProcess("fork") as third:
        array = other.ask(make_and_keep)
        other.kill()
        assert array.sum() == LENGTH
        array[0] = 7
        assert third.ask(np.sum, array) == LENGTH + 6
        del array


@pytest.mark.usefixtures("strategy")
@pytest.mark.parametrize("way", ["by value", "shared", "inherited"])
def test_what_a_killed_process_had_sent_on_is_to_be_had_from_its_maker(way: str) -> None:
    """An array is there for its reader if the process that has made it lives, although the one
    that sent it on was killed before the reader, who had nothing of the maker, began to load it.
    """
    give_memory_back()
    array: Any = np.ones(LENGTH, np.uint8)
    if way != "by value":
        array = shmreduce.share(array)
    # Spawned, so that it inherits no segment.
    with OtherProcess("spawn") as reader:
        if way == "inherited":
            _kept.append(array)
        with OtherProcess("fork") as other:
            _kept.clear()
            message = other.ask(dumped, *(() if way == "inherited" else (array,)))
            other.kill()
        assert reader.ask(sum_of, message) == LENGTH
    del array
    eventually(lambda: process_state().out == 0, "the block is free")


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.usefixtures("own_folder", "strategy")
def test_a_producer_killed_before_it_was_read_is_named(method: str) -> None:
    """An array whose producer was killed is a ``ProducerDied`` with its pid, or is
    still there; other messages of the channel are not affected.
    """
    import multiprocessing

    context: Any = multiprocessing.get_context(method)
    reader, writer = context.Pipe(duplex=False)
    # A process sweeps before its first message; so the sweep is not after the kill.
    writer.send(np.ones(LENGTH, np.uint8))
    assert receive(reader).sum() == LENGTH
    process = context.Process(target=send_and_wait, args=(writer,))
    process.start()
    assert reader.poll(PATIENCE)
    os.kill(process.pid, signal.SIGKILL)
    process.join(PATIENCE)
    writer.send(np.ones(LENGTH, np.uint8))
    if shmreduce.get_sharing_strategy() == "file_descriptor":
        with pytest.raises(shmreduce.ProducerDied, match=str(process.pid)) as caught:
            receive(reader)
        assert caught.value.pid == process.pid
    else:
        # A file is there until the next sweep.
        assert receive(reader).sum() == LENGTH
    assert receive(reader).sum() == LENGTH
    process.close()
    reader.close()
    writer.close()


@pytest.mark.usefixtures("installed")
def test_a_producer_that_is_a_zombie_is_dead() -> None:
    """The error is the same while nobody has waited for the killed producer."""
    reader, writer = os.pipe()
    from multiprocessing import Pipe

    ours, theirs = Pipe(duplex=False)
    pid = os.fork()
    if pid == 0:
        theirs.send(np.ones(LENGTH, np.uint8))
        os.write(writer, b"x")
        signal.pause()
    assert os.read(reader, 1) == b"x"
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    with pytest.raises(shmreduce.ProducerDied) as caught:
        receive(ours)
    assert caught.value.pid == pid
    os.waitpid(pid, 0)
    for each in (reader, writer):
        os.close(each)
    ours.close()
    theirs.close()


@pytest.mark.usefixtures("own_folder")
@pytest.mark.parametrize("children", [("fork", "file_system")], indirect=True)
def test_files_of_killed_processes_are_swept_by_the_living(children: Children) -> None:
    """Names that a killed process left are removed without anybody asking."""
    reader, writer = children.context.Pipe(duplex=False)
    process = children.start(send_and_wait, writer)
    assert reader.poll(PATIENCE)
    process.kill()
    children.join(process)
    assert len(leftovers()) >= 1
    with OtherProcess("fork") as other:
        other.ask(make_and_keep)
    assert leftovers() == []
    reader.close()
    writer.close()


@pytest.mark.usefixtures("strategy")
def test_a_reader_killed_in_the_middle_leaves_no_lock() -> None:
    """Readers that are killed at random while they load block nobody afterwards; what
    they did not load is given up in time.
    """
    import multiprocessing
    import random
    import time

    chooser = random.Random(5)
    context: Any = multiprocessing.get_context("fork")
    for _ in range(10):
        reader, writer = context.Pipe(duplex=False)
        process = context.Process(target=read_for_ever, args=(reader,))
        process.start()
        array = shmreduce.ones(LENGTH, np.uint8)
        end = time.monotonic() + chooser.uniform(0.01, 0.06)
        while time.monotonic() < end:
            writer.send([array, np.ones(20_000, np.uint8)])
        process.kill()
        process.join(PATIENCE)
        process.close()
        # The pipe may be in the middle of a message; its blocks are not locked.
        reader.close()
        writer.close()
        assert resent(array)[0] == 1
    with shmreduce.install(message_timeout=0.001):
        eventually(lambda: process_state().unread == 0, "the messages are given up")
    del array
    eventually(lambda: process_state().out == 0, "all blocks are free")


def read_for_ever(reader: Any) -> None:
    while True:
        keep(reader.recv())
        del _kept[:-3]


def dumps_kept() -> bytes:
    return bytes(ForkingPickler.dumps(_kept[-1]))


@pytest.mark.usefixtures("strategy")
@pytest.mark.parametrize("killed", [False, True])
def test_a_message_of_another_about_a_block_is_given_up_by_its_maker(killed: bool) -> None:
    """What somebody has sent on who is gone, and nobody reads, is given up after
    ``message_timeout``, and not before.
    """
    array = shmreduce.ones(LENGTH, np.uint8)
    with OtherProcess("fork") as other:
        other.ask(keep, array)
        data = other.ask(dumps_kept)
        if killed:
            other.kill()
    del array
    with shmreduce.install(message_timeout=600.0):
        assert [process_state().out for _ in range(3)] == [1, 1, 1]
        assert pickle.loads(data).sum() == LENGTH
    with OtherProcess("fork") as other:
        other.ask(keep, shmreduce.ones(LENGTH, np.uint8))
        data = other.ask(dumps_kept)
        if killed:
            other.kill()
    with shmreduce.install(message_timeout=0.001):
        eventually(lambda: process_state().out == 0, "the message is given up")
    with pytest.raises(shmreduce.StaleHandleError):
        pickle.loads(data)


@pytest.mark.usefixtures("strategy")
@pytest.mark.parametrize("shared", [False, True])
def test_a_message_is_not_old_before_it_is_complete(shared: bool) -> None:
    """``message_timeout`` does not count how long it is pickled, while others need memory."""
    message = shmreduce.Message()
    if shared:
        handle = message.refer(shmreduce.allocate(LENGTH), LENGTH)
    else:
        handle = (message.allocate(LENGTH) or (None, None))[1]
    with shmreduce.install(message_timeout=1e-9):
        for _ in range(3):
            runtime.current().give_up()
            shmreduce.allocate(LENGTH)
    message.commit()
    assert handle is not None
    assert shmreduce.import_block(handle).nbytes == LENGTH


class Logged:
    """Sends an array to somebody whenever it is pickled."""

    def __init__(self, *writers: Any) -> None:
        self.writers = writers

    def __getstate__(self) -> dict[str, Any]:
        for writer in self.writers:
            writer.send(np.full(LENGTH, 3, np.uint8))
        return {}


class Deadly:
    """Whoever unpickles it is dead."""

    def __reduce__(self) -> Any:
        return os._exit, (1,)


@pytest.mark.usefixtures("strategy")
@pytest.mark.parametrize("ours", [False, True])
def test_what_a_dead_child_has_not_read_is_given_up_and_nothing_else(ours: bool) -> None:
    """What its arguments sent to others while they were pickled is not the child's."""
    import multiprocessing

    context: Any = (shmreduce if ours else multiprocessing).get_context("spawn")
    pipes = [multiprocessing.Pipe(duplex=False), shmreduce.Pipe(duplex=False)]
    arguments = Logged(*(writer for _, writer in pipes)), Deadly(), np.ones(LENGTH, np.uint8)
    process = context.Process(target=len, args=arguments)
    process.start()
    process.join(PATIENCE)
    assert process.exitcode == 1
    # To count them, messages that nobody is going to read are given up.
    assert process_state().unread == 2
    for reader, writer in pipes:
        assert receive(reader).sum() == 3 * LENGTH
        reader.close()
        writer.close()
    process.close()


@pytest.mark.usefixtures("strategy")
def test_a_killed_member_frees_its_part_of_the_budget() -> None:
    """What a killed process had reserved no longer counts against the family."""
    for heap in runtime.current().heaps:
        with heap.exclusive():
            heap.cool(0)
    with shmreduce.install(budget=96 << 20), OtherProcess("fork") as other:
        other.ask(make_large, 48 << 20)
        with pytest.raises(shmreduce.BudgetExceededError):
            shmreduce.zeros(64 << 20, np.uint8)
        other.kill()
        assert len(shmreduce.zeros(64 << 20, np.uint8)) == 64 << 20


def make_large(nbytes: int) -> None:
    keep(shmreduce.zeros(nbytes, np.uint8))


def fork_and_end(ended: Any, writer: Any) -> None:
    """Leave a child behind that looks at the budget when this process has ended."""
    array = np.ones(64 << 20, np.uint8)
    ForkingPickler.loads(ForkingPickler.dumps(array))
    kept = shmreduce.ones(LENGTH, np.uint8)
    if os.fork():
        return
    code = 1
    try:
        ended[1].close()
        assert ended[0].poll(PATIENCE)
        writer.send(sum(reserved for _, reserved in runtime.current().family.members()))
        assert kept.sum() == LENGTH
        code = 0
    finally:
        os._exit(code)


@pytest.mark.usefixtures("strategy")
def test_what_was_idle_in_a_parent_that_has_ended_counts_no_more() -> None:
    """Though its forked child keeps it in the family, as what that can still see counts."""
    import multiprocessing

    context = multiprocessing.get_context("fork")
    ended: Any = context.Pipe(duplex=False)
    reader, writer = context.Pipe(duplex=False)
    process = context.Process(target=fork_and_end, args=(ended, writer))
    # What tests before this one have left must not go back in between.
    with shmreduce.install(idle_seconds=10 * PATIENCE):
        before = sum(reserved for _, reserved in runtime.current().family.members())
        process.start()
        ended[1].close()
        process.join(PATIENCE)
        assert process.exitcode == 0
        assert LENGTH <= receive(reader) - before < 16 << 20
    for each in (*ended, reader, writer):
        each.close()
