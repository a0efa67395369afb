"""Arrays on their way through several processes and all stock channels."""

from __future__ import annotations

import errno
import multiprocessing
import os
import sys
import threading
from multiprocessing import Pipe, util
from multiprocessing.connection import Client, Listener
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import shmreduce
from shmreduce import AttachError, Message, import_block
from shmreduce.memory import loading, locks, runtime
from shmreduce.memory.handle import Handle
from shmreduce.memory.inspection import process_state
from shmreduce.memory.mailbox import Letter, Mailbox
from shmreduce.testing.processes import OtherProcess
from tests.conftest import STRATEGIES, letters
from tests.memory.waiting import PATIENCE, eventually, receive

if TYPE_CHECKING:
    from collections.abc import Callable

    from shmreduce.memory.segment import Segment
    from tests.conftest import Children

LENGTH = 300_000


def forward_one(reader: Any, writer: Any) -> None:
    writer.send(receive(reader))


def forward_and_change(reader: Any, writer: Any) -> None:
    array = receive(reader)
    writer.send(array)
    array[...] = 99


def send_ones(writer: Any, length: int) -> None:
    writer.send(np.ones(length, np.uint8))


def put_two_and_wait(queue: Any, reader: Any) -> None:
    queue.put(np.ones(LENGTH, np.uint8))
    queue.put(np.ones(LENGTH, np.uint8))
    receive(reader)


def put_ones(queue: Any, count: int) -> None:
    for number in range(count):
        queue.put(np.full(LENGTH, number, np.uint8))


def sum_of(array: Any) -> int:
    return int(array.sum())


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("step", [forward_one, forward_and_change])
def test_an_array_goes_on_and_outlives_who_passed_it(
    children: Children, step: Any, shared: bool
) -> None:
    """A sends to B, B sends on and ends before C reads: C has the bytes; what B wrote
    afterwards shows only if the array is shared.
    """
    to_b, from_a = children.context.Pipe(duplex=False)
    to_c, from_b = children.context.Pipe(duplex=False)
    array: Any = np.ones(LENGTH, np.uint8)
    if shared:
        array = shmreduce.share(array)
    b = children.start(step, to_b, from_b)
    from_a.send(array)
    children.join(b)
    loaded = receive(to_c)
    expected = 99 if shared and step is forward_and_change else 1
    assert set(loaded.tobytes()) == {expected}
    assert shmreduce.is_shared(loaded) == shared
    assert set(array.tobytes()) == {expected if shared else 1}
    for each in (to_b, from_a, to_c, from_b):
        each.close()


def test_messages_outlive_their_producer(children: Children) -> None:
    """A producer that ends normally before its messages are read loses none of them:
    join first, get afterwards.
    """
    queue = children.context.Queue()
    simple = children.context.SimpleQueue()
    reader, writer = children.context.Pipe(duplex=False)
    producers = [
        children.start(put_ones, queue, 3),
        children.start(put_ones, simple, 2),
        children.start(send_ones, writer, LENGTH),
    ]
    children.join(*producers)
    assert [sum_of(queue.get(timeout=PATIENCE)) for _ in range(3)] == [0, LENGTH, 2 * LENGTH]
    assert [sum_of(simple.get()) for _ in range(2)] == [0, LENGTH]
    assert sum_of(receive(reader)) == LENGTH
    queue.close()
    queue.join_thread()
    simple.close()
    reader.close()
    writer.close()


def go_on_in_a_thread(connection: Any) -> None:
    """Return while a thread of this process goes on to answer, until it is told the end."""
    finalized = threading.Event()
    # After all others. From Python 3.13 on threads are waited for before finalizers are called.
    util.Finalize(None, finalized.set, exitpriority=-1000)

    def answer() -> None:
        if sys.version_info < (3, 13):
            finalized.wait(PATIENCE)
        while (array := connection.recv()) is not None:
            connection.send(array + 1)
            del array

    threading.Thread(target=answer).start()


@pytest.mark.parametrize(
    "children", [("fork", each) for each in STRATEGIES] + [("spawn", STRATEGIES[0])], indirect=True
)
def test_threads_that_go_on_after_their_function(children: Children) -> None:
    """A child whose function has returned lives on in its threads: what they receive is
    given back, and what they have sent when they end is not lost.
    """
    ours, theirs = children.context.Pipe()
    child = children.start(go_on_in_a_thread, theirs)
    theirs.close()
    for number in range(20):
        ours.send(np.full(LENGTH, number, np.uint8))
        assert sum_of(receive(ours)) == LENGTH * (number + 1)
    heaps = runtime.current().heaps
    assert sum(len(segment.out) for heap in heaps for segment in heap.segments) < 10
    ours.send(np.zeros(LENGTH, np.uint8))
    ours.send(None)
    children.join(child)
    assert sum_of(receive(ours)) == LENGTH
    ours.close()


def produce_in_a_grandchild(method: str, queue: Any) -> None:
    process = multiprocessing.get_context(method).Process(  # type: ignore[attr-defined]
        target=put_ones, args=(queue, 2)
    )
    process.start()
    process.join(PATIENCE)


@pytest.mark.parametrize("children", [("fork", "file_descriptor")], indirect=True)
def test_messages_outlive_grandchildren(children: Children) -> None:
    """So do the messages of a grandchild, after the child has ended as well."""
    queue = children.context.Queue()
    children.join(children.start(produce_in_a_grandchild, "fork", queue))
    assert [sum_of(queue.get(timeout=PATIENCE)) for _ in range(2)] == [0, LENGTH]
    queue.close()
    queue.join_thread()


@pytest.mark.parametrize("children", [("fork", "file_descriptor")], indirect=True)
def test_the_mailbox_does_not_grow(
    children: Children, new_letters: Callable[[], list[Letter]]
) -> None:
    """After a hundred producers that ended before they were read, the mailbox is empty
    and no segment of theirs is left.
    """
    queue = children.context.SimpleQueue()
    before = len(process_state().segments)
    for _ in range(100):
        process = children.start(put_ones, queue, 1)
        children.join(process)
        assert sum_of(queue.get()) == 0
        process.close()
        children.started.clear()
    runtime.current().attachments.tidy_mailbox()
    assert new_letters() == []
    runtime.current().attachments.close_idle(0)
    assert len(process_state().segments) <= before + 1
    queue.close()


def test_the_mailbox_lets_go_of_segments_that_were_open_here(
    children: Children, new_letters: Callable[[], list[Letter]]
) -> None:
    """A reader that had the segment open before its maker ended, and so did not find it
    in the mailbox, takes it out of there all the same when the last message is read.
    """
    queue = children.context.SimpleQueue()
    reader, writer = children.context.Pipe(duplex=False)
    process = children.start(put_two_and_wait, queue, reader)
    first = queue.get()
    writer.send("end")
    children.join(process)
    assert len(new_letters()) == 1
    second = queue.get()
    assert new_letters() == []
    assert first.sum() == second.sum() == LENGTH
    reader.close()
    writer.close()
    queue.close()


class ReplacedWhenClosed(dict[Any, Any]):
    """A directory in which others have a segment open just as it is taken out."""

    others: Callable[[Segment], None] | None = None

    def pop(self, key: Any, *default: Any) -> Any:
        found = super().pop(key, *default)
        others, self.others = self.others, None
        if others is not None:
            others(found)
        return found


@pytest.mark.parametrize("children", [("fork", "file_descriptor")], indirect=True)
def test_a_segment_that_is_opened_twice_is_closed_twice(children: Children) -> None:
    """One thread closes a segment, another has begun to use it, a third opens it anew: both
    are given back once nothing of theirs is in use.
    """
    attachments = runtime.current().attachments
    attachments.close_idle(0)
    queue = children.context.SimpleQueue()
    reader, writer = children.context.Pipe(duplex=False)
    process = children.start(put_two_and_wait, queue, reader)
    queue.get()
    before = set(attachments.directory.values())
    [segment] = [one for one in before if one.idle]
    arrays = []

    def others_use_it(found: Segment) -> None:
        found.pins["a call under way"] = None
        arrays.append(queue.get())

    attachments.directory = ReplacedWhenClosed(attachments.directory)
    attachments.directory.others = others_use_it
    attachments.close_idle(0)
    assert segment.fd != -1
    [again] = set(attachments.directory.values()) - before
    assert arrays.pop().sum() == LENGTH
    segment.unpin("a call under way")
    attachments.close_idle(0)
    assert segment.fd == again.fd == -1
    writer.send("end")
    children.join(process)
    reader.close()
    writer.close()
    queue.close()


def send_handles_and_wait(count: int, writer: Any, reader: Any) -> None:
    """Send blocks, each full of its number, by their handles alone."""
    for number in range(count):
        message = Message()
        given = message.allocate(LENGTH)
        assert given is not None
        given[0][:] = bytes([number]) * LENGTH
        message.commit()
        writer.send(given[1])
    receive(reader)


def pass_on_from_one_that_is_open_twice(reader: Any, queue: Any) -> None:
    """Send on what came in two segments, which are one: see what the test below says."""
    handles = [receive(reader) for _ in range(3)]
    state = runtime.current()
    attachments = state.attachments
    import_block(handles[0])
    [segment] = [one for one in attachments.directory.values() if one.idle]
    blocks = []

    def others_use_it(found: Segment) -> None:
        found.pins["a call under way"] = None
        blocks.append(import_block(handles[1]))

    attachments.directory = ReplacedWhenClosed(attachments.directory)
    attachments.directory.others = others_use_it
    attachments.close_idle(0)
    blocks.append(loading._claim(state, segment, handles[2], Handle.unpack(handles[2])))
    segment.unpin("a call under way")
    assert blocks[0]._record.segment is not blocks[1]._record.segment
    for block in blocks:
        queue.put(np.frombuffer(block.buffer, np.uint8))


@pytest.mark.parametrize("children", [("fork", "file_descriptor")], indirect=True)
def test_what_is_sent_on_from_a_segment_that_is_open_twice_outlives_its_sender(
    children: Children, new_letters: Callable[[], list[Letter]]
) -> None:
    """One thread begins to use a segment that another is about to close, and a third opens it
    anew: the messages of both go into the mailbox, as those of one segment.
    """
    queue = children.context.SimpleQueue()
    reader, writer = children.context.Pipe(duplex=False)
    ear, mouth = children.context.Pipe(duplex=False)
    maker = children.start(send_handles_and_wait, 3, writer, ear)
    children.join(children.start(pass_on_from_one_that_is_open_twice, reader, queue))
    mouth.send("end")
    children.join(maker)
    assert len(new_letters()) == 1
    assert [set(queue.get().tobytes()) for _ in range(2)] == [{1}, {2}]
    assert new_letters() == []
    for each in (reader, writer, ear, mouth, queue):
        each.close()


@pytest.mark.parametrize("children", [("fork", "file_descriptor")], indirect=True)
@pytest.mark.parametrize("rest", ["asked for", "next in the list"])
def test_a_segment_that_another_thread_closes_meanwhile(
    children: Children, monkeypatch: pytest.MonkeyPatch, rest: str
) -> None:
    """Two threads find the segments of dead owners unused: one closes them while the other asks
    the kernel about the owner, or before it comes to ask.
    """
    attachments = runtime.current().attachments
    attachments.close_idle(0)
    before = set(attachments.directory.values())
    queue = children.context.SimpleQueue()
    reader, writer = children.context.Pipe(duplex=False)
    for _ in range(2):
        children.start(put_two_and_wait, queue, reader)
        for _ in range(2):
            queue.get()
    for _ in range(2):
        writer.send("end")
    children.join()
    unused = [one for one in attachments.directory.values() if one not in before]
    assert [one.idle for one in unused] == [True, True]
    asked = []

    def others_close(fd: int, offset: int) -> int | None:
        asked.append(fd)
        if len(asked) == 1:
            monkeypatch.setattr(locks, "first_locked", first_locked)
            theirs = unused if rest == "asked for" else unused[1:]
            thread = threading.Thread(
                target=lambda: list(map(attachments.close_ownerless, theirs))
            )
            thread.start()
            thread.join(PATIENCE)
            assert [one.fd for one in theirs] == [-1] * len(theirs)
        return first_locked(fd, offset)

    first_locked = locks.first_locked
    monkeypatch.setattr(locks, "first_locked", others_close)
    closed = attachments.close_idle(len(unused))
    assert closed == (0 if rest == "asked for" else 1)
    assert len(asked) == 1
    assert [one.fd for one in unused] == [-1, -1]
    assert set(attachments.directory.values()) == before
    reader.close()
    writer.close()
    queue.close()


@pytest.mark.parametrize("children", [("fork", "file_descriptor")], indirect=True)
def test_the_mailbox_lets_go_of_more_than_a_letter_names(
    children: Children, new_letters: Callable[[], list[Letter]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A segment with more unread messages than a letter has room for goes with the last."""
    monkeypatch.setattr("shmreduce.memory.mailbox._MOST_UNREAD", 2)
    queue = children.context.SimpleQueue()
    children.join(children.start(put_ones, queue, 4))
    for _ in range(4):
        assert [letter.complete for letter in new_letters()] == [False]
        queue.get()
    assert new_letters() == []
    queue.close()


@pytest.mark.parametrize("children", [("fork", "file_descriptor")], indirect=True)
@pytest.mark.parametrize("number", [errno.EAGAIN, errno.ETOOMANYREFS])
def test_no_array_is_lost_where_the_mailbox_is_full(
    children: Children,
    new_letters: Callable[[], list[Letter]],
    monkeypatch: pytest.MonkeyPatch,
    number: int,
) -> None:
    """Who reads one of two messages of a dead sender gets it, also where the letter about
    the other cannot be posted again.
    """

    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    queue = children.context.SimpleQueue()
    children.join(children.start(put_ones, queue, 2))
    with monkeypatch.context() as patch:
        patch.setattr(Mailbox, "post", refuse)
        assert queue.get() is not None
    assert queue.get() is not None
    assert new_letters() == []
    queue.close()


class LoadableLater:
    """Cannot be opened at the first attempt."""

    attempts = 0

    def __reduce__(self) -> tuple[Any, ...]:
        return LoadableLater.load, ()

    @classmethod
    def load(cls) -> str:
        cls.attempts += 1
        if cls.attempts == 1:
            raise AttachError("not now", segment=None, locator=None, reason="test", errno=0)
        return "loaded"


@pytest.mark.parametrize("children", [("fork", "file_descriptor")], indirect=True)
def test_a_message_that_can_be_loaded_again_stays_in_the_mailbox(
    children: Children, new_letters: Callable[[], list[Letter]]
) -> None:
    """Also if its array was there already when what comes after it could not be opened."""
    LoadableLater.attempts = 0
    queue = children.context.SimpleQueue()
    children.join(children.start(queue.put, (np.ones(LENGTH, np.uint8), LoadableLater())))
    with pytest.raises(AttachError, match="not now") as caught:
        queue.get()
    runtime.current().attachments.close_idle(0)
    assert len(new_letters()) == 1
    assert caught.value.message_bytes is not None
    array, word = ForkingPickler.loads(caught.value.message_bytes)
    assert (array.sum(), word) == (LENGTH, "loaded")
    assert new_letters() == []
    queue.close()


@pytest.mark.parametrize("children", [("fork", "file_descriptor")], indirect=True)
def test_two_looks_into_the_mailbox_at_once(children: Children) -> None:
    """A signal handler that looks for a segment does not hide others from who looks already."""
    queue = children.context.SimpleQueue()
    before = {letter.token for letter in letters()}
    for _ in range(3):
        children.join(children.start(put_ones, queue, 1))
    family = runtime.current().family
    seen = []
    for letter, fd in family.mailbox.letters():
        seen.append(letter.token)
        os.close(fd)
        assert family.look_for(b"nobody's segment") is None
    assert len(set(seen) - before) == 3
    for _ in range(3):
        queue.get()
    queue.close()


@pytest.mark.usefixtures("strategy")
class TestEcho:
    """Two processes that send arrays back and forth."""

    def test_a_received_array_is_the_receivers(self) -> None:
        """What is echoed comes back as it was sent, whatever the echoing process, or
        this one, writes before or afterwards.
        """
        with OtherProcess("fork") as other:
            for number in range(20):
                mine = np.full(LENGTH, number, np.uint8)
                back = other.ask(echo_then_spoil, mine)
                mine[...] = 50
                assert set(back.tobytes()) == {number}
                back[...] = 51
                again = other.ask(echo_then_spoil, back)
                back[...] = 52
                assert set(again.tobytes()) == {51}

    def test_one_buffer_again_and_again(self) -> None:
        """``buf[:] = i; return buf`` in a worker gives 0, 1, 2, 3."""
        with OtherProcess("fork") as other:
            back = [other.ask(next_of_buffer) for _ in range(4)]
        assert [int(each[-1]) for each in back] == [0, 1, 2, 3]

    def test_a_shared_array_is_one_mapping_wherever_it_has_been(self) -> None:
        """A shared array that comes back is the same memory, not one more mapping."""
        mine = shmreduce.zeros(LENGTH, np.uint8)
        with OtherProcess("fork") as other:
            back = other.ask(np.asarray, mine)
            twice = other.ask(lambda_free_pair, mine)
        assert np.shares_memory(back, mine)
        assert twice[0].__array_interface__["data"] == twice[1].__array_interface__["data"]
        mine[5] = 8
        assert int(back[5]) == int(twice[0][5]) == 8


_spoiled: list[Any] = []


def echo_then_spoil(array: Any) -> Any:
    """Return an array; the one returned before is written to."""
    for each in _spoiled:
        each[...] = 77
    _spoiled[:] = [array]
    return array


_buffer = np.zeros(LENGTH, np.uint8)
_turn = iter(range(100))


def next_of_buffer() -> Any:
    _buffer[:] = next(_turn)
    return _buffer


def lambda_free_pair(array: Any) -> Any:
    return [array, array]


@pytest.mark.usefixtures("strategy")
def test_a_manager_keeps_arrays() -> None:
    """Arrays put into a manager's dict, list and queue come out whole, more than once
    where they stay inside, and by value.
    """
    with multiprocessing.get_context("fork").Manager() as manager:
        table = manager.dict()
        row = manager.list()
        queue = manager.Queue()
        array = np.ones(LENGTH, np.uint8)
        table["a"] = array
        row.append(array)
        queue.put(array)
        array[...] = 9
        for _ in range(3):
            first = table["a"]
            assert sum_of(first) == LENGTH
            first[...] = 7
            assert sum_of(row[0]) == LENGTH
        assert sum_of(queue.get(timeout=PATIENCE)) == LENGTH
        shared = shmreduce.share(np.ones(LENGTH, np.uint8))
        table["shared"] = shared
        shared[0] = 5
        assert int(table["shared"][0]) == 5
        del table, row, queue, first


@pytest.mark.usefixtures("installed")
def test_a_connection_to_another_host_pickles_in_the_ordinary_way() -> None:
    """Over TCP no shared memory is used, in either direction, shared arrays included."""
    with Listener(("127.0.0.1", 0)) as listener:
        answers: list[Any] = []

        def serve() -> None:
            with listener.accept() as connection:
                answers.append(receive(connection))
                connection.send(answers[0])

        thread = threading.Thread(target=serve)
        thread.start()
        with Client(listener.address) as connection:
            array = shmreduce.share(np.ones(LENGTH, np.uint8))
            connection.send(array)
            back = receive(connection)
            thread.join(PATIENCE)
    assert (back == 1).all()
    assert not shmreduce.is_shared(back)
    assert not shmreduce.is_shared(answers[0])
    assert process_state().unread == 0


@pytest.mark.usefixtures("installed")
def test_an_unread_message_goes_with_its_channel_and_process() -> None:
    """A message that was never read keeps its block while its sender lives, and
    ``message_timeout`` gives it up.
    """
    reader, writer = Pipe(duplex=False)
    with shmreduce.install(inline_limit=4096):
        writer.send(np.ones(LENGTH, np.uint8))
        reader.close()
        writer.close()
        assert process_state().unread == 1
        with shmreduce.install(message_timeout=0.001):
            eventually(lambda: process_state().unread == 0, "the message is given up")


@pytest.mark.parametrize("kept", [0, 5])
def test_a_full_mailbox_is_tidied_wherever_a_letter_stays(kept: int) -> None:
    """Also if it is the first, which must be moved to the end: there is room for that."""
    mailbox, family = Mailbox.made(), bytes(16)
    file = os.memfd_create("segment")
    tokens = [number.to_bytes(16, "big") for number in range(5000)]
    try:
        with pytest.raises(OSError, match="temporarily unavailable"):
            for token in tokens:
                mailbox.post(Letter(token, [(1, 1)], complete=True), file, family)
        mailbox.tidy(lambda letter, _: letter.token != tokens[kept], family)
        left = list(mailbox.letters())
        assert [letter.token for letter, _ in left] == [tokens[kept]]
        os.close(left[0][1])
        # Its size is what it was.
        with pytest.raises(OSError, match="temporarily unavailable"):
            for token in tokens[:400]:
                mailbox.post(Letter(token, [(1, 1)], complete=True), file, family)
    finally:
        os.close(file)
        mailbox.close()
