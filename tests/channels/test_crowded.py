"""A thread notices that it lacks a processor."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import threading
import time
import traceback
import warnings
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from shmreduce import processors
from shmreduce.processors import is_crowded
from tests.channels.channels import PATIENCE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_OTHERS = 3


@pytest.fixture(autouse=True)
def no_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing has been read before."""
    monkeypatch.setattr(processors, "_last", processors._Reading())


def answers(monkeypatch: pytest.MonkeyPatch, times: list[tuple[float, float]]) -> list[bool]:
    """Return the answers for what a thread reads about itself, one a second."""
    readings = iter(times)
    clock = itertools.count(1000.0)
    monkeypatch.setattr(processors, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    monkeypatch.setattr(processors, "_times_of_this_thread", lambda: next(readings))
    return [is_crowded() for _ in times]


def test_who_waits_about_as_long_as_it_runs_is_crowded(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was before the last reading does not count, nor the time that a thread sleeps."""
    times = [(5.0, 50.0), (5.2, 50.14), (5.3, 50.22), (5.31, 50.227), (5.32, 50.235)]
    assert answers(monkeypatch, times) == [False, False, True, False, True]


def test_a_wait_after_waking_up_is_no_crowd(monkeypatch: pytest.MonkeyPatch) -> None:
    """Less than 0.1 ms, by a thread that ran for an even shorter time."""
    assert answers(monkeypatch, [(1.0, 1.0), (1.00001, 1.00009)]) == [False, False]


def test_a_forked_child_does_not_count_what_its_parent_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its own times begin at 0."""
    assert answers(monkeypatch, [(9.0, 9.0), (0.1, 0.2), (0.2, 0.21)]) == [False, False, False]


def test_what_cannot_be_read_is_no_crowd(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the kernel keeps no such times, or no descriptor is free; nor the reading after."""
    unknown = (processors._UNKNOWN, processors._UNKNOWN)
    times = [unknown, unknown, (1.0, 9.0), unknown, (1.1, 19.0), (1.2, 20.0)]
    assert answers(monkeypatch, times) == [False] * 5 + [True]


def test_a_stack_that_ends_leaves_no_file_open() -> None:
    """Wherever it ends. Read often before: then CPython's open() needs less of the stack."""

    def read(depth: int) -> None:
        if depth:
            read(depth - 1)
        else:
            processors._read("/proc/self/stat")

    for _ in range(300):
        read(0)
    limit = sys.getrecursionlimit()
    used = len(traceback.extract_stack())
    failed = 0
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for depth in range(80):
            try:
                sys.setrecursionlimit(used + 60)
                read(depth)
            except RecursionError:
                failed += 1
            finally:
                sys.setrecursionlimit(limit)
    assert caught == []
    assert 0 < failed < 80


def test_a_short_stack_is_no_crowd_and_no_free_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if nothing could be read."""

    def refuse(_: int) -> None:
        raise RecursionError

    monkeypatch.setattr(processors, "need_stack", refuse)
    assert processors._times_of_this_thread() == (processors._UNKNOWN, processors._UNKNOWN)
    assert processors.all_taken()


def test_it_is_read_every_ten_milliseconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """In between the last answer counts."""
    read = [(1.0, 1.0), (1.1, 1.1), (1.2, 1.1)]
    monkeypatch.setattr(processors, "_READ_AGAIN", 2.5)
    assert answers(monkeypatch, read + [(9.0, 9.0)] * 6) == 3 * [False] + 3 * [True] + 3 * [False]


@pytest.fixture
def shared_processor() -> Iterator[None]:
    """Three processes compute on the only processor that this process may use."""
    usable = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(usable)})
    others = []
    try:
        # They may use the same processor alone.
        others = [
            subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(_OTHERS)
        ]
        yield
    finally:
        os.sched_setaffinity(0, usable)
        for each in others:
            each.kill()
            each.wait()


def wait_until(condition: Callable[[], bool]) -> None:
    """Ask until it is so."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline


def test_who_lets_others_run_learns_whether_there_were_any() -> None:
    """Mostly there are none: whoever else runs here sleeps now and then."""
    wait_until(lambda: not processors.lets_others_run())


def test_others_who_wait_for_the_processor_are_let_run(shared_processor: None) -> None:
    """They run before the call returns, so it takes long."""
    wait_until(processors.lets_others_run)


def test_where_no_thread_can_let_others_run_none_did(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on Windows."""
    monkeypatch.delattr(os, "sched_yield")
    assert not processors.lets_others_run()


def test_a_thread_that_shares_its_processor_with_others_is_crowded(shared_processor: None) -> None:
    """With three processes that compute it soon is, and another thread learns that by itself."""
    if processors._UNKNOWN in processors._times_of_this_thread():
        pytest.skip("this kernel does not tell how long a thread waits")
    wait_until(is_crowded)
    found: list[bool] = []
    thread = threading.Thread(target=lambda: found.append(is_crowded()))
    thread.start()
    thread.join(PATIENCE)
    assert found == [False]
