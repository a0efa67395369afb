"""Locks that a stopped process has: what waited for them is told, and nothing is lost."""

from __future__ import annotations

import os
import pickle
from contextlib import contextmanager
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING

import numpy as np
import pytest

import shmreduce
from shmreduce import LeaseTimeoutError
from shmreduce.memory import block_locks, family, locks, runtime
from shmreduce.memory.inspection import all_names
from shmreduce.memory.layout import LOCK_BLOCK, SHARED
from shmreduce.memory.loading import _handles_in

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.usefixtures("installed")

LENGTH = 300_000


@contextmanager
def stopped_process_has(data: bytes, patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Lock the block of a message as another process would, which is then stopped."""
    (handle,) = _handles_in(data)
    segment = runtime.current().directory[handle.token]
    # A description of its own, as only another process has it.
    other = locks.reopen(segment.fd)
    assert locks.try_lock(other, LOCK_BLOCK + handle.block)
    patch.setattr(block_locks, "LOCK_PATIENCE", 0.05)
    yield
    os.close(other)


def test_a_message_about_a_locked_block_can_be_loaded_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The error keeps the message, as other errors do that may pass."""
    data = bytes(ForkingPickler.dumps(np.full(LENGTH, 3.0)))
    with (
        stopped_process_has(data, monkeypatch),
        pytest.raises(LeaseTimeoutError) as caught,
    ):
        ForkingPickler.loads(data)
    assert data in (caught.value.message_bytes or b"")
    assert (pickle.loads(data) == 3).all()


def test_a_body_in_a_locked_block_can_be_loaded_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """So does the error of a message that travels in a block as a whole."""
    here, there = shmreduce.Pipe()
    sent = list(range(100_000))
    here.send(sent)
    (segment,) = (each for each in runtime.current().directory.values() if each.unread())
    (message,) = segment.unread()
    other = locks.reopen(segment.fd)
    assert locks.try_lock(other, LOCK_BLOCK + message.block)
    monkeypatch.setattr(block_locks, "LOCK_PATIENCE", 0.05)
    with pytest.raises(LeaseTimeoutError) as caught:
        there.recv()
    os.close(other)
    assert pickle.loads(caught.value.message_bytes or b"") == sent
    here.close()
    there.close()


def test_an_array_that_is_here_comes_though_its_block_is_locked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another message about a shared array that this process has needs no lock to be loaded."""
    shared = shmreduce.ones(LENGTH)
    data = bytes(ForkingPickler.dumps(shared))
    with stopped_process_has(data, monkeypatch):
        again = ForkingPickler.loads(data)
    assert np.shares_memory(again, shared)
    # The message is left; it ends when it is loaded once more.
    assert ForkingPickler.loads(data) is not None


def test_memory_goes_back_though_the_budget_is_locked(
    strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who gives memory back waits for nobody, and closes the segments that are empty then."""
    current = runtime.current()
    heap = current.heap_for(SHARED, "of its own")
    array = heap.allocate(8 * LENGTH)
    reserved = current.family.reserved
    (segment, block) = array
    del segment.records[block]
    assert heap.give_back(segment, block)
    other = locks.reopen(current.family.fd)
    assert locks.try_lock(other, family._LOCK_BUDGET)
    monkeypatch.setattr(family, "_PATIENCE", 0.05)
    with heap.exclusive():
        assert heap.cool(0) >= 8 * LENGTH
    assert heap.segments == []
    assert current.family.reserved <= reserved - 8 * LENGTH
    assert segment.fd == -1
    assert strategy == "file_descriptor" or segment.file.name not in all_names()
    with pytest.raises(LeaseTimeoutError, match="family's lock"):
        heap.allocate(8 * LENGTH)
    os.close(other)
