"""Taking back a block that stands for something else, once nobody else has it."""

from __future__ import annotations

import os
from typing import Any

import pytest

import shmreduce
from shmreduce.memory import lease_transitions, locks
from shmreduce.memory.inspection import process_state
from shmreduce.memory.layout import LOCK_BLOCK
from shmreduce.memory.processes import is_alive, is_closing
from shmreduce.testing.processes import OtherProcess
from tests.memory.waiting import eventually

_held: list[Any] = []


def send(block: shmreduce.Block) -> bytes:
    """Return a handle of the block, in a message that counts as sent."""
    message = shmreduce.Message()
    handle = message.refer(block, block.nbytes)
    message.commit()
    assert handle is not None
    return handle


def hold(handle: bytes) -> bool:
    """Load a handle and keep its block; return False if it is stale."""
    try:
        _held.append(shmreduce.import_block(handle))
    except shmreduce.StaleHandleError:
        return False
    return True


def drop() -> None:
    _held.clear()


def reclaim_what_is_held() -> bool:
    return bool(_held[0].reclaim())


@pytest.mark.usefixtures("strategy")
def test_a_block_is_reclaimed_when_neither_message_nor_process_has_it() -> None:
    """``reclaim`` is False for a message under way and for a holder, then True."""
    block = shmreduce.allocate(8)
    handle = send(block)
    assert not block.reclaim()
    with OtherProcess("spawn") as other:
        assert other.ask(hold, handle)
        assert not block.reclaim()
        other.ask(drop)
        eventually(block.reclaim, "the block is reclaimed")
        assert not other.ask(hold, handle)


@pytest.mark.usefixtures("installed")
def test_a_reclaimed_block_can_travel_again() -> None:
    """After ``reclaim`` old handles are stale in every process, and new ones are not."""
    block = shmreduce.allocate(8)
    old = send(block)
    shmreduce.import_block(old)
    assert block.reclaim()
    assert not hold(old)
    new = send(block)
    with OtherProcess("spawn") as other:
        assert not other.ask(hold, old)
        assert other.ask(hold, new)
        assert not block.reclaim()
        other.ask(drop)
        eventually(block.reclaim, "the block is reclaimed")


@pytest.mark.usefixtures("strategy")
def test_a_killed_holder_is_noticed() -> None:
    """A block whose holder was killed is reclaimed without anybody allocating."""
    block = shmreduce.allocate(8)
    with OtherProcess("spawn") as other:
        assert other.ask(hold, send(block))
        other.kill()
        eventually(block.reclaim, "the block is reclaimed")


@pytest.mark.usefixtures("installed")
def test_a_holder_that_still_closes_its_files_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lease of a killed process lasts until it has closed all of its files, not
    only the one that its lock is on.
    """
    block = shmreduce.allocate(8)
    with OtherProcess("spawn") as other:
        assert other.ask(hold, send(block))
        pid = other.ask(os.getpid)
        monkeypatch.setattr(lease_transitions, "is_closing", lambda found: found == pid)
        other.kill()
        # Which ends the leases of killed processes.
        process_state()
        assert not block.reclaim()
        monkeypatch.undo()
        eventually(block.reclaim, "the block is reclaimed")


@pytest.mark.usefixtures("installed")
def test_only_the_maker_can_reclaim() -> None:
    """A receiver, and a forked child of the maker, get False."""
    block = shmreduce.allocate(8)
    _held.append(block)
    try:
        with OtherProcess("fork") as child:
            assert not child.ask(reclaim_what_is_held)
        _held.clear()
        with OtherProcess("spawn") as other:
            assert other.ask(hold, send(block))
            assert not other.ask(reclaim_what_is_held)
            other.ask(drop)
    finally:
        _held.clear()


@pytest.mark.usefixtures("installed")
def test_loading_and_reclaiming_at_once_never_both_succeed() -> None:
    """A handle that was loaded before can be loaded again as long as its block lives.
    Of a process that does so, and the maker that reclaims the block, one comes late.
    """
    loaded = reclaimed = 0
    with OtherProcess("spawn") as other:
        for _ in range(300):
            block = shmreduce.allocate(8)
            handle = send(block)
            shmreduce.import_block(handle)
            other._connection.send((hold, (handle,)))
            taken = any(block.reclaim() for _ in range(loaded % 40))
            succeeded, got = other._connection.recv()
            assert succeeded
            assert taken is not got
            loaded += got
            reclaimed += taken
            other.ask(drop)
    assert loaded
    assert reclaimed


@pytest.mark.usefixtures("installed")
def test_a_block_whose_chain_is_being_changed_is_not_reclaimed() -> None:
    """While another process changes the block's leases, ``reclaim`` does not decide."""
    block = shmreduce.allocate(8)
    record = block._record
    lock = locks.reopen(record.segment.fd)
    try:
        assert locks.try_lock(lock, LOCK_BLOCK + record.block)
        assert not block.reclaim()
    finally:
        os.close(lock)
    assert block.reclaim()


def test_processes_are_told_apart_by_whether_they_live() -> None:
    """A process that lives is alive and not closing; one that has gone is neither."""
    with OtherProcess("fork") as other:
        pid = other.ask(os.getpid)
        assert (is_alive(pid), is_closing(pid)) == (True, False)
    assert (is_alive(pid), is_closing(pid)) == (False, False)
