"""What a process has sent before it ended, and nobody can receive any more, is not kept."""

from __future__ import annotations

import errno
import os
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import shmreduce
from shmreduce import packet_socket
from shmreduce.memory import attachments, locks, segment
from shmreduce.memory.family import Family
from shmreduce.memory.runtime import current

if TYPE_CHECKING:
    from collections.abc import Callable

    from shmreduce.memory.mailbox import Letter
    from tests.conftest import Children

    Letters = Callable[[], list[Letter]]

COUNT = 300_000

pytestmark = pytest.mark.parametrize(
    "children", [("fork", "file_descriptor"), ("fork", "file_system")], ids="-".join, indirect=True
)


def put(queue: Any, value: int) -> None:
    queue.put(np.full(COUNT, value, np.uint8))


def send_apart(pipe: Any, value: int) -> None:
    """Send the pickle of an array, by a channel that knows nothing of arrays."""
    data = bytes(ForkingPickler.dumps(np.full(COUNT, value, np.uint8)))
    os.write(pipe, len(data).to_bytes(4, "little") + data)


def tidy(*, at_once: bool = True) -> None:
    current().attachments.tidy_mailbox(at_once=at_once)


def is_full_of(array: np.ndarray, value: int) -> bool:
    return len(array) == COUNT and bool((array == value).all())


def sent_and_over(children: Children, queue: Any, value: int) -> None:
    """Have a process put an array into a queue and end."""
    children.join(children.start(put, queue, value))


def test_a_dropped_queue(children: Children, new_letters: Letters) -> None:
    """The mailbox keeps what its sender has left until it is clear that nobody can read it."""
    queue = shmreduce.get_context("fork").SimpleQueue()
    sent_and_over(children, queue, 1)
    tidy()
    assert len(new_letters()) == 1
    queue.close()
    tidy()
    assert not new_letters()


def test_for_some_seconds_it_is_kept(
    children: Children, new_letters: Letters, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who had no descriptor free when the message came can load it later."""
    queue = shmreduce.get_context("fork").SimpleQueue()
    sent_and_over(children, queue, 1)
    queue.close()
    tidy(at_once=False)
    assert new_letters()[0].astray > 0
    tidy(at_once=False)
    assert len(new_letters()) == 1
    monkeypatch.setattr(attachments, "_ASTRAY_SECONDS", 0.0)
    tidy(at_once=False)
    assert not new_letters()


def test_the_next_who_ends_lets_go(
    children: Children, new_letters: Letters, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program that drops one queue after the other keeps no more than a few letters."""
    monkeypatch.setattr(attachments, "_ASTRAY_SECONDS", 0.0)
    for value in range(5):
        queue = shmreduce.get_context("fork").SimpleQueue()
        sent_and_over(children, queue, value)
        queue.close()
    assert len(new_letters()) == 1
    tidy()


def test_who_needs_memory_lets_go(children: Children, new_letters: Letters) -> None:
    """Before anybody is refused."""
    queue = shmreduce.get_context("fork").SimpleQueue()
    sent_and_over(children, queue, 1)
    queue.close()
    assert len(new_letters()) == 1
    reserved = sum(each for _, each in current().family.members())
    with (
        shmreduce.install(budget=reserved + 1),
        pytest.raises(shmreduce.BudgetExceededError),
    ):
        shmreduce.allocate(1 << 30)
    assert not new_letters()


def test_who_needs_room_in_the_mailbox_lets_go(
    children: Children, new_letters: Letters, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has room for some hundred letters."""
    queue = shmreduce.get_context("fork").SimpleQueue()
    sent_and_over(children, queue, 1)
    queue.close()
    (old,) = new_letters()
    post = Family.post

    def post_if_there_is_room(self: Family, letter: Letter, fd: int) -> None:
        if old.token in {each.token for each in new_letters()}:
            raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        post(self, letter, fd)

    monkeypatch.setattr(Family, "post", post_if_there_is_room)
    queue = shmreduce.get_context("fork").SimpleQueue()
    sent_and_over(children, queue, 2)
    assert [each.token != old.token for each in new_letters()] == [True]
    assert is_full_of(queue.get(), 2)
    queue.close()


def test_what_is_in_a_queue_stays(children: Children) -> None:
    """However often the mailbox is tidied."""
    queue = shmreduce.get_context("fork").SimpleQueue()
    for value in range(3):
        sent_and_over(children, queue, value)
        tidy()
        tidy()
    assert all(is_full_of(queue.get(), value) for value in range(3))
    queue.close()


def relay(source: Any, target: Any) -> None:
    """Pass on a message without looking into it."""
    target.send_bytes(source.recv_bytes())


def test_bytes_that_are_passed_on(children: Children, new_letters: Letters) -> None:
    """They may be loaded by somebody who gets no descriptor, when there is no packet left."""
    context = shmreduce.get_context("fork")
    (here, first), (last, there) = context.Pipe(), context.Pipe()
    sender = children.start(first.send, np.full(COUNT, 7, np.uint8))
    children.join(sender)
    children.join(children.start(relay, here, there))
    tidy()
    tidy()
    assert len(new_letters()) >= 1
    assert is_full_of(last.recv(), 7)
    for end in (here, first, last, there):
        end.close()


def test_messages_of_other_channels(children: Children) -> None:
    """What goes without descriptors stays until it is read, as long as the family is there."""
    reader, writer = os.pipe()
    with shmreduce.install():
        children.join(children.start(send_apart, writer, 9))
        tidy()
        size = int.from_bytes(os.read(reader, 4), "little")
        array = ForkingPickler.loads(os.read(reader, size))
    assert is_full_of(array, 9)
    os.close(reader)
    os.close(writer)


def refuse_descriptors(kind: type, patch: pytest.MonkeyPatch) -> None:
    write = kind.write  # type: ignore[attr-defined]

    def refusing(self: Any, data: Any, descriptors: Any, flags: int) -> None:
        if descriptors:
            raise OSError(errno.ETOOMANYREFS, os.strerror(errno.ETOOMANYREFS))
        write(self, data, descriptors, flags)

    patch.setattr(kind, "write", refusing)


def test_a_message_whose_descriptors_did_not_get_through(
    children: Children, new_letters: Letters, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Too many are under way (unix(7)): it is found in the mailbox."""
    queue = shmreduce.get_context("fork").SimpleQueue()
    with monkeypatch.context() as patch:
        for kind in (packet_socket.PlainPacketSocket, packet_socket.QuickPacketSocket):
            refuse_descriptors(kind, patch)
        sent_and_over(children, queue, 4)
    tidy()
    assert len(new_letters()) == 1
    assert is_full_of(queue.get(), 4)
    queue.close()


def test_without_the_look_at_packets_messages_are_let_go(
    children: Children, monkeypatch: pytest.MonkeyPatch, new_letters: Letters
) -> None:
    """The tests above would notice."""
    queue = shmreduce.get_context("fork").SimpleQueue()
    sent_and_over(children, queue, 1)
    with monkeypatch.context() as patch:
        patch.setattr(locks, "first_locked", lambda *_: None)
        tidy()
    assert not new_letters()
    # The packet has the segment all the same.
    assert is_full_of(queue.get(), 1)
    queue.close()


def test_a_full_mailbox_is_no_loss(children: Children, monkeypatch: pytest.MonkeyPatch) -> None:
    """What has its memory with it needs none, and nobody is warned."""

    def full(*_: Any) -> None:
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    queue = shmreduce.get_context("fork").SimpleQueue()
    with monkeypatch.context() as patch:
        patch.setattr("shmreduce.memory.family.Family.post", full)
        patch.setattr("warnings.warn", _fail)
        sent_and_over(children, queue, 3)
    assert children.started[-1].exitcode == 0
    assert is_full_of(queue.get(), 3)
    queue.close()


def _fail(*_: Any, **__: Any) -> None:
    os._exit(9)


def send_many(pipe: Any, count: int, least: int) -> None:
    """Send arrays without descriptors, of which what has been read is forgotten soon."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(segment, "_PRUNE_FROM", least)
        for value in range(count):
            send_apart(pipe, value % 251)


@pytest.mark.parametrize(("count", "least"), [(1, 0), (100, 4)])
def test_of_many_messages_none_is_taken_for_another(
    children: Children, count: int, least: int
) -> None:
    """However many are unread of those that go without descriptors."""
    reader, writer = os.pipe()
    with shmreduce.install():
        children.join(children.start(send_many, writer, count, least))
        tidy()
        for value in range(count):
            size = int.from_bytes(os.read(reader, 4), "little")
            assert is_full_of(ForkingPickler.loads(os.read(reader, size)), value % 251)
    os.close(reader)
    os.close(writer)
