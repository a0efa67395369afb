"""What was still to be written when an array was sent is written when it is received."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from shmreduce_cuda import CudaProducerDied, CudaSharingError, events, rebuild, runtime
from tests.cuda import actors as act
from tests.cuda.actors import actors, connect
from tests.memory.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.cuda.actors import Actor
    from tests.cuda.conftest import Pair, Standin

ZEROS = np.zeros(64, "i4")


@pytest.fixture
def slow(pair: Pair) -> Iterator[tuple[Actor, Actor]]:
    """A sender whose streams take 150 ms for each operation, and a receiver."""
    pair.sender.ask(act.make, "x", ZEROS)
    pair.sender.ask(act.set_delays, 150)
    yield pair.sender, pair.receiver
    pair.sender.ask(act.set_delays)


def test_a_plain_send_waits_for_all_streams(slow: tuple[Actor, Actor]) -> None:
    """A stream that does not wait for others is waited for, with every message."""
    sender, receiver = slow
    for value in (1, 2, 3):
        sender.ask(act.fill_and_send, "x", value)
        receiver.ask(act.receive, "a")
        assert set(receiver.ask(act.values, "a")) == {value}


def test_streams_of_other_devices_are_waited_for(slow: tuple[Actor, Actor]) -> None:
    """A kernel of one device may be at work on the memory of another: before an array is
    sent, and before a received one is closed. Closed early it is the end of the process.
    """
    sender, receiver = slow
    sender.ask(act.fill_by_peer_and_send, "x", 3)
    receiver.ask(act.receive, "a")
    assert set(receiver.ask(act.values, "a")) == {3}
    receiver.ask(act.set_delays, 150)
    receiver.ask(act.fill_by_peer_and_drop, "a", 4)
    receiver.ask(act.set_delays)
    assert set(sender.ask(act.values, "x")) == {4}


def test_an_event_is_waited_for_with_every_message(slow: tuple[Actor, Actor]) -> None:
    """Of arrays that were shared on a stream, the receiver sees what the stream was to
    write, the second and third time as well as the first.
    """
    sender, receiver = slow
    sender.ask(act.new_stream)
    before = [actor.ask(act.stats).events for actor in slow]
    for value in (1, 2, 3):
        sender.ask(act.share_after_fill, "s", "x", value)
        sender.ask(act.send, "s")
        receiver.ask(act.receive, "a")
        assert set(receiver.ask(act.values, "a")) == {value}
    # One each, however many messages.
    assert [
        actor.ask(act.stats).events - count for actor, count in zip(slow, before, strict=True)
    ] == [1, 1]
    sender.ask(act.drop, "s")


def test_a_handle_that_another_stream_has_got(slow: tuple[Actor, Actor]) -> None:
    """A stream may be destroyed while it is at work, and its handle be another one's: who
    waits for the first is not content with the second, which is done earlier.
    """
    sender, receiver = slow
    sender.ask(act.make, "y", ZEROS)
    handle = sender.ask(act.share_on_new_stream, "s", "x", 7, 5)
    assert sender.ask(act.share_on_new_stream, "t", "y", 8, 0) == handle
    sender.ask(act.send, "s")
    receiver.ask(act.receive, "a")
    assert set(receiver.ask(act.values, "a")) == {7}
    sender.ask(act.drop, "s", "t")


def test_an_event_is_waited_for_in_the_same_process(slow: tuple[Actor, Actor]) -> None:
    """A message that comes back to its own process waits, too."""
    sender, _ = slow
    sender.ask(act.share_after_fill, "s", "x", 5)
    sender.ask(act.load, "back", sender.ask(act.pickled, "s"))
    assert set(sender.ask(act.values, "back")) == {5}
    sender.ask(act.drop, "s")


def test_where_events_cannot_be_shared_the_stream_is_waited_for(
    slow: tuple[Actor, Actor],
) -> None:
    """A driver that says that it does not support such events is no obstacle."""
    sender, receiver = slow
    sender.ask(act.new_stream)
    sender.ask(act.fail, "cuEventCreate", 801, 1)
    before = sender.ask(act.stats).events
    sender.ask(act.share_after_fill, "s", "x", 5)
    sender.ask(act.send, "s")
    receiver.ask(act.receive, "a")
    assert set(receiver.ask(act.values, "a")) == {5}
    assert sender.ask(act.stats).events == before
    sender.ask(act.drop, "s")


@pytest.mark.parametrize("waits", [True, False])
def test_an_event_of_a_sender_that_is_killed(standin: Standin, waits: bool) -> None:
    """Who waits for an event of a process that dies is told, and does not wait for ever."""
    with actors(2) as (sender, receiver):
        connect(sender, receiver)
        sender.ask(act.make, "x", ZEROS)
        sender.ask(act.send, "x")
        receiver.ask(act.receive, "x")
        sender.ask(act.set_delays, 60_000)
        sender.ask(act.share_after_fill, "s", "x", 5)
        sender.ask(act.send, "s")
        if waits:
            receiver.start(act.receive, "a")
            eventually(
                lambda: "cuEventSynchronize" in standin.calls(receiver.pid), "the receiver waits"
            )
        sender.kill()
        if not waits:
            receiver.start(act.receive, "a")
        with pytest.raises(CudaProducerDied) as caught:
            receiver.finish()
        assert caught.value.pid == sender.pid
        receiver.ask(act.drop)


def be_in_another_namespace(patience: float) -> None:
    runtime.current().namespace += 1
    rebuild._PATIENCE = patience


def test_an_event_of_another_pid_namespace_is_not_waited_for_for_ever(standin: Standin) -> None:
    """Whether its process is alive cannot be seen: the error says so, and what to share."""
    with actors(2) as (sender, receiver):
        connect(sender, receiver)
        receiver.ask(be_in_another_namespace, 0.2)
        sender.ask(act.make, "x", ZEROS)
        sender.ask(act.set_delays, 20_000)
        sender.ask(act.share_after_fill, "s", "x", 5)
        sender.ask(act.send, "s")
        with pytest.raises(CudaSharingError, match="--pid"):
            receiver.ask(act.receive, "a")
        sender.kill()
    assert standin.folder.exists()


def share_while_sharing(name: str) -> None:
    """Do what a signal handler does that shares while an event is being made."""
    make = events._make

    def interrupt(driver: Any) -> Any:
        events._make = make
        act.share("t", name, 0)
        return make(driver)

    events._make = interrupt
    try:
        act.share("s", name, 0)
    finally:
        events._make = make


def test_a_stream_that_is_shared_on_while_it_is_shared_on(standin: Standin) -> None:
    """The inner call, a signal handler's, is told so, and does not hang."""
    with actors(1) as (sender,):
        sender.ask(act.make, "x", ZEROS)
        with pytest.raises(CudaSharingError, match="signal handler"):
            sender.ask(share_while_sharing, "x")
        assert sender.ask(act.stats).exports == 0
        sender.ask(act.share, "s", "x", 0)
        sender.ask(act.drop)
    assert standin.folder.exists()
