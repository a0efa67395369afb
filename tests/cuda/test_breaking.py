"""The stand-in notices what a driver would punish: the plugin is broken on purpose.

Each guard of the plugin is taken away in one process. The tests of this package
are worth what these say: that the fault shows.
"""

from __future__ import annotations

import signal
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import shmreduce_cuda
from shmreduce_cuda import (
    CudaDriverError,
    devices,
    events,
    exports,
    imports,
    mappings,
    rebuild,
    sending,
)
from shmreduce_cuda.driver import get_driver
from shmreduce_cuda.messages import Description
from tests.cuda import actors as act
from tests.cuda.actors import actors, connect
from tests.cuda.conftest import standing_in
from tests.cuda.test_lifetimes import keep_idle_for
from tests.memory.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.cuda.actors import Actor
    from tests.cuda.conftest import Standin

BASE = np.arange(1000.0)


# What is broken, in the process that is asked to


def replace(owner: Any, **changes: Any) -> None:
    for name, value in changes.items():
        assert hasattr(owner, name)
        setattr(owner, name, value)


def lose_offset() -> None:
    """The first byte of the allocation is taken for that of the array."""
    offset = Description._fields.index("offset")

    def describe(*fields: Any) -> Description:
        return Description._make((*fields[:offset], 0, *fields[offset + 1 :]))

    replace(sending, Description=describe)


def push_no_context() -> None:
    """The thread's own context is used: a thread that pickles has none."""

    @contextmanager
    def unpushed(*_: Any) -> Iterator[Any]:
        yield get_driver()

    for module in (exports, devices, mappings, events):
        replace(module, current_context=unpushed)


def release_before_closing() -> None:
    """The lease ends first, and then the mapping is closed."""

    def end(attachment: Any) -> None:
        attachment.lease = None
        attachment._imports.ended(attachment.mapping, None)

    replace(imports.Attachment, __del__=end)


def keep_idle_without_lease() -> None:
    """A mapping that nobody uses stays open, but its lease ends."""

    class Idle(imports._Idle):
        def __new__(cls, mapping: Any, _lease: Any, since: float) -> Any:
            nothing: Any = None
            return super().__new__(cls, mapping, nothing, since)

    replace(imports, _Idle=Idle)


def forget_the_array() -> None:
    """What was sent is not held."""

    def hold(_: Any, export: Any) -> None:
        export.source = None

    replace(exports.Exports, hold=hold)


def wait_for_nothing() -> None:
    """Nothing is waited for before an array is sent, received or closed."""
    replace(sending, synchronise_export=lambda _: None)
    replace(imports, synchronise=lambda _: None)
    replace(rebuild, _await_event=lambda *_: None)


def open_every_time() -> None:
    """Nobody remembers what is open."""
    replace(imports, mapping_key=lambda _: (object(),))


def believe_ordinals() -> None:
    """The device is looked for at the number that it has at the sender."""
    replace(rebuild, ordinal_of=lambda _: 0)


# The tests


class Broken:
    """A stand-in that is expected to find fault."""

    def __init__(self, standin: Standin) -> None:
        self.standin = standin

    def notices(self, text: str) -> None:
        """Wait for a violation."""
        eventually(
            lambda: any(text in line for line in self.standin.violations()), f"violation: {text}"
        )


@pytest.fixture
def broken(standin_library: Path, tmp_path: Path) -> Iterator[Broken]:
    """As ``standin``, for a test that misuses it."""
    with standing_in(standin_library, tmp_path / "device") as standin:
        yield Broken(standin)


def exchange(sender: Actor, receiver: Actor, name: str = "x") -> Any:
    sender.ask(act.send, name)
    receiver.ask(act.receive, name)
    return receiver.ask(act.values, name)


def put_in_queue(name: str) -> None:
    with pytest.raises(CudaDriverError, match="INVALID_CONTEXT"):
        shmreduce_cuda.share(act.arrays[name])


def test_faults_of_the_sender_show(broken: Broken) -> None:
    """A lost offset is wrong values; a context that is not pushed is an error; an array
    that is not held is freed under the receiver's eyes.
    """
    with actors(2) as (sender, receiver):
        connect(sender, receiver)
        sender.ask(act.make, "whole", BASE)
        sender.ask(act.cut, "x", "whole", slice(5, 50))
        assert np.array_equal(exchange(sender, receiver), BASE[5:50])
        sender.ask(lose_offset)
        assert not np.array_equal(exchange(sender, receiver), BASE[5:50])
        receiver.ask(act.drop)
        assert broken.standin.violations() == []
        sender.ask(forget_the_array)
        sender.ask(act.make, "y", BASE)
        exchange(sender, receiver, "y")
        sender.ask(act.drop, "y")
        broken.notices("was freed while another process has it open")
        assert not np.array_equal(receiver.ask(act.values, "y"), BASE)
        sender.ask(push_no_context)
        sender.ask(put_in_queue, "x")


def test_faults_of_the_receiver_show(broken: Broken) -> None:
    """Opening twice is an error of the driver; a lease that ends before the mapping is
    closed lets the sender free what is still mapped.
    """
    with actors(2) as (sender, receiver):
        connect(sender, receiver)
        sender.ask(act.make, "x", BASE)
        exchange(sender, receiver)
        receiver.ask(release_before_closing)
        receiver.ask(act.set_delays, 0, 1500)
        sender.ask(act.drop)
        assert broken.standin.violations() == []
        receiver.ask(act.drop)
        broken.notices("was freed while another process has it open")
        receiver.ask(act.set_delays)
        sender.ask(act.make, "x", BASE)
        exchange(sender, receiver)
        receiver.ask(open_every_time)
        sender.ask(act.send, "x")
        with pytest.raises(CudaDriverError, match="ALREADY_MAPPED"):
            receiver.ask(act.receive, "again")
        receiver.kill()


def test_an_idle_mapping_without_a_lease_shows(broken: Broken) -> None:
    """The sender frees memory that is still open elsewhere."""
    with actors(2) as (sender, receiver):
        connect(sender, receiver)
        receiver.ask(keep_idle_without_lease)
        receiver.ask(keep_idle_for, 600.0)
        sender.ask(act.make, "x", BASE)
        exchange(sender, receiver)
        sender.ask(act.drop)
        assert broken.standin.violations() == []
        receiver.ask(act.drop_only)
        broken.notices("was freed while another process has it open")
        receiver.kill()


def test_an_ordinal_that_is_believed_shows(
    broken: Broken, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where devices are numbered otherwise, the wrong one refuses the memory."""
    with actors(1) as (sender,):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
        with actors(1) as (receiver,):
            connect(sender, receiver)
            sender.ask(act.make, "x", BASE)
            receiver.ask(believe_ordinals)
            sender.ask(act.send, "x")
            with pytest.raises(CudaDriverError, match="PEER_ACCESS_UNSUPPORTED"):
                receiver.ask(act.receive, "x")
    assert broken.standin.folder.exists()


def test_waiting_for_nothing_shows(broken: Broken) -> None:
    """Without waiting the receiver reads what was there before, also where it should
    wait for an event. A kernel that is at work on memory that is closed meanwhile is
    the end of the process.
    """
    with actors(2) as (sender, receiver):
        connect(sender, receiver)
        sender.ask(act.make, "x", np.zeros(64, "i4"))
        for actor in (sender, receiver):
            actor.ask(wait_for_nothing)
            actor.ask(act.set_delays, 2000)
        sender.ask(act.fill_and_send, "x", 7)
        receiver.ask(act.receive, "x")
        assert set(receiver.ask(act.values, "x")) == {0}
        sender.ask(act.share_after_fill, "s", "x", 8)
        sender.ask(act.send, "s")
        receiver.ask(act.receive, "s")
        assert 8 not in receiver.ask(act.values, "s")
        receiver.ask(act.drop, "s")
        receiver.ask(act.set_delays, 300)
        receiver.start(act.fill_and_drop, "x", 5)
        receiver._process.process.join(30)
        assert receiver._process.process.exitcode == -signal.SIGSEGV
        sender.kill()
    assert broken.standin.folder.exists()
