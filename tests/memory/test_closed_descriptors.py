"""Descriptors that somebody else has closed, as daemons do with all that they find open."""

from __future__ import annotations

import os
from multiprocessing import Pipe
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import shmreduce
from shmreduce.memory import runtime
from shmreduce.memory.inspection import process_state
from tests.memory.waiting import in_forked_child, wait_for_exit

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

LENGTH = 300_000
HIGHEST = 4096


def close_all_but(*kept: int) -> None:
    """Close every descriptor that a daemon closes."""
    before = 3
    for number in sorted(kept):
        os.closerange(before, number)
        before = number + 1
    os.closerange(before, HIGHEST)


def take_all_numbers(path: Path) -> list[int]:
    """Open a file so often that it has every number that was closed."""
    return [os.open(path, os.O_RDWR) for _ in range(64)]


def round_trip(array: Any) -> Any:
    """Send an array to this process."""
    here, there = Pipe()
    here.send(array)
    return there.recv()


@pytest.mark.parametrize("size", [0, 100_000])
@pytest.mark.usefixtures("strategy", "shmreduce_no_leaks")
def test_a_daemon_that_closes_all_descriptors_begins_a_family(size: int, tmp_path: Path) -> None:
    """A forked child that has closed what it inherited sends and receives, and does not
    take the files that have the numbers now for the family's.
    """
    path = tmp_path / "file"
    path.write_bytes(b"x" * size)
    inherited = shmreduce.ones(LENGTH)
    round_trip(np.ones(LENGTH))

    def child() -> bool:
        close_all_but()
        files = take_all_numbers(path)
        received = round_trip(np.full(LENGTH, 3.0))
        with pytest.raises(shmreduce.AttachError, match="closed here"):
            round_trip(inherited)
        return bool(
            (received == 3).all()
            and path.read_bytes() == b"x" * size
            and all(os.fstat(each).st_size == size for each in files)
        )

    assert wait_for_exit(in_forked_child(child)) == 0


@pytest.mark.usefixtures("strategy", "shmreduce_no_leaks")
def test_memory_of_a_child_without_descriptors_is_not_reused() -> None:
    """What a forked child sees stays as it is, also if the child has closed everything."""
    (ready, is_ready), (look, may_look) = os.pipe(), os.pipe()
    arrays = [shmreduce.ones(LENGTH)]

    def child() -> bool:
        close_all_but(look, is_ready)
        os.write(is_ready, b"!")
        os.read(look, 1)
        return bool((arrays[0] == 1).all())

    pid = in_forked_child(child)
    os.read(ready, 1)
    arrays.clear()
    others = [shmreduce.full(LENGTH, 9.0) for _ in range(3)]
    os.write(may_look, b"!")
    assert wait_for_exit(pid) == 0
    for each in (ready, is_ready, look, may_look):
        os.close(each)
    del others
    assert process_state().waiting == 0


def lose_all_descriptors(path: Path) -> list[str]:
    """Close everything in a process that has arrays; return what is wrong afterwards."""
    shmreduce.install(idle_keep=0)
    received = [round_trip(np.full(LENGTH, 5.0)) for _ in range(3)]
    shared = [shmreduce.full(LENGTH, 2.0) for _ in range(3)]
    before = path.read_bytes()
    close_all_but()
    files = take_all_numbers(path)
    wrong = []
    tasks: list[Callable[[], Any]] = [
        lambda: shmreduce.ones(100 * LENGTH),
        lambda: round_trip(received[0]),
    ]
    for task in tasks:
        try:
            task()
        except shmreduce.SegmentError as error:
            wrong += [] if "os.closerange" in str(error) else [str(error)]
        else:
            wrong.append("no error")
    if wait_for_exit(in_forked_child((received[1] == 5).all)):
        wrong.append("array in a child")
    if not all((each == 5).all() for each in received):
        wrong.append("array")
    received.clear()
    shared.clear()
    process_state()
    runtime.current().leave()
    if path.read_bytes() != before:
        wrong.append("file")
    for each in files:
        os.fstat(each)
    return wrong


@pytest.mark.filterwarnings("ignore::shmreduce.ShmreduceWarning")
@pytest.mark.usefixtures("strategy")
def test_files_that_have_the_numbers_of_closed_descriptors_are_left_alone(tmp_path: Path) -> None:
    """Who closes all descriptors under arrays gets a named error where one is needed; the
    arrays keep their bytes, and files that are opened then theirs.
    """
    path, answer = tmp_path / "file", tmp_path / "answer"
    path.write_bytes(os.urandom(8 << 20))

    def child() -> bool:
        answer.write_text("; ".join(lose_all_descriptors(path)))
        return True

    status = wait_for_exit(in_forked_child(child))
    assert (status, answer.read_text()) == (0, "")
