"""Where channels of ours cannot work, contexts have those of the standard library."""

from __future__ import annotations

import errno
import multiprocessing.connection
import multiprocessing.managers
import multiprocessing.pool
import multiprocessing.queues
import os
import resource
import socket
import sys
from typing import Any

import numpy as np
import pytest

import shmreduce
from shmreduce import PlatformError, StrategyUnusableError, channel_support, connection
from tests.open_files import open_files

pytestmark = pytest.mark.usefixtures("shmreduce_no_leaks")

PATIENCE = 30.0


@pytest.fixture
def context(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A context that believes to be on such a platform."""
    monkeypatch.setattr(channel_support, "supported", lambda: False)
    return shmreduce.get_context("fork")


def ask_with_no_descriptor_free() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(open_files()) + 1, hard))
    channel_support.supported.cache_clear()
    taken = []
    try:
        with pytest.raises(OSError, match="Too many open files"):
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))
        for make in (shmreduce.Pipe, shmreduce.SimpleQueue, shmreduce.Queue, shmreduce.Pool):
            with pytest.raises(OSError, match="Too many open files"):
                make()
    finally:
        for each in taken:
            os.close(each)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    here, there = shmreduce.Pipe()
    assert isinstance(here, connection.Connection)
    here.close()
    there.close()


def test_too_many_open_files_do_not_make_a_platform_another() -> None:
    """The first that is asked for then fails; the next is ours, not the standard library's."""
    fork = shmreduce.get_context("fork")
    asking = fork.Process(target=ask_with_no_descriptor_free)
    asking.start()
    asking.join(PATIENCE)
    assert asking.exitcode == 0


@pytest.mark.parametrize("number", [errno.EPROTONOSUPPORT, errno.EPERM])
def test_where_the_system_has_no_packets(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """What it says for good is remembered: the channels are those of the standard library."""

    def refuse(*_: Any) -> Any:
        raise OSError(number, os.strerror(number))

    channel_support.supported.cache_clear()
    try:
        with monkeypatch.context() as patch:
            patch.setattr(socket, "socketpair", refuse)
            assert not channel_support.supported()
        assert not channel_support.supported()
    finally:
        channel_support.supported.cache_clear()


def test_nothing_is_installed_in_a_free_threaded_python(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where nobody has seen it work: the error says what to do."""
    monkeypatch.setattr(sys, "abiflags", "t")
    channel_support.supported.cache_clear()
    try:
        assert not channel_support.supported()
        with pytest.raises(StrategyUnusableError, match="global interpreter lock") as caught:
            shmreduce.install(strategy="file_system")
    finally:
        channel_support.supported.cache_clear()
    assert caught.value.name == "file_system"
    assert caught.value.available == []


def test_channels_are_those_of_the_standard_library(context: Any) -> None:
    """They carry arrays all the same."""
    ends = context.Pipe()
    queues = [context.SimpleQueue(), context.Queue(), context.JoinableQueue()]
    assert [type(each) for each in (*ends, *queues)] == [
        *[multiprocessing.connection.Connection] * 2,
        multiprocessing.queues.SimpleQueue,
        multiprocessing.queues.Queue,
        multiprocessing.queues.JoinableQueue,
    ]
    ends[0].send(np.arange(1000))
    assert (ends[1].recv() == np.arange(1000)).all()
    for each in (*ends, *queues):
        each.close()


def test_pools_and_managers_are_those_of_the_standard_library(context: Any) -> None:
    """They work as theirs do."""
    with context.Pool(1) as pool, context.Manager() as manager:
        assert type(pool) is multiprocessing.pool.Pool
        assert type(manager) is multiprocessing.managers.SyncManager
        assert pool.map_async(abs, [-1, 2]).get(PATIENCE) == [1, 2]
        assert list(manager.list([1, 2])) == [1, 2]
    pool.join()


def test_what_their_pool_lacks_is_refused(context: Any) -> None:
    """Rather than left out in silence."""
    with pytest.raises(PlatformError, match="retries") as caught:
        context.Pool(1, retries=1)
    assert caught.value.missing
