"""The leak guard finds what is left on purpose, and nothing else."""

from __future__ import annotations

import mmap
import os
import secrets
import time
from multiprocessing import Pipe
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import shmreduce
from shmreduce.memory import locks
from shmreduce.memory.inspection import all_names, process_state
from shmreduce.memory.layout import LOCK_OWNER
from shmreduce.testing import OtherProcess, find_leaks, take_census

if TYPE_CHECKING:
    from collections.abc import Iterator

pytest_plugins = "pytester"


@pytest.fixture(autouse=True)
def _installed() -> Iterator[None]:
    with shmreduce.install():
        yield


def leaks_since(before: Any) -> str:
    return "\n".join(find_leaks(before, patience=0))


def test_nothing_is_no_leak() -> None:
    """Arrays that came and went leave nothing that is reported."""
    before = take_census()
    shared = shmreduce.zeros(1000)
    received = ForkingPickler.loads(ForkingPickler.dumps([np.zeros(100_000), shared]))
    del shared, received
    assert find_leaks(before) == []


def test_a_forgotten_array() -> None:
    """An array that is still referenced is a leak until it is dropped."""
    before = take_census()
    forgotten = [shmreduce.zeros(10), shmreduce.zeros(10)]
    assert "2 blocks of shared memory still has views in this process" in leaks_since(before)
    forgotten.clear()
    assert find_leaks(before) == []


def test_an_unread_message() -> None:
    """A message that nobody read is a leak until somebody does."""
    before = take_census()
    message = ForkingPickler.dumps(np.zeros(100_000))
    assert "1 message from this process still unread" in leaks_since(before)
    ForkingPickler.loads(message)
    assert find_leaks(before) == []


def _send_one(_: Any = None) -> Any:
    return np.zeros(100_000)


def test_an_array_received_before_that_is_dropped_is_no_leak() -> None:
    """What was there at the start may go, without being taken for a block that others hold."""
    with OtherProcess("spawn") as other:
        received = [other.ask(_send_one)]
        before = take_census()
        received.clear()
        assert find_leaks(before, patience=0) == []


def _keep(array: Any) -> None:
    kept.append(array)


def _let_go() -> None:
    kept.clear()


kept: list[Any] = []


def test_a_block_that_another_process_keeps() -> None:
    """An array that lives on elsewhere is a leak until it is dropped there."""
    before = take_census()
    with OtherProcess("spawn") as other:
        other.ask(_keep, shmreduce.zeros(10))
        found = find_leaks(before, patience=0)
        assert any("is held by another process" in leak for leak in found)
        other.ask(_let_go)
    assert find_leaks(before) == []


def test_an_open_descriptor() -> None:
    """A descriptor that stays open is a leak, named with what it leads to."""
    before = take_census()
    fd = os.open("/etc/hosts", os.O_RDONLY)
    assert leaks_since(before) == f"descriptor {fd} is still open: /etc/hosts"
    os.close(fd)
    assert find_leaks(before) == []


def test_a_connection_that_is_not_closed() -> None:
    """Both ends of a forgotten pipe are reported."""
    before = take_census()
    here, there = Pipe()
    assert len(find_leaks(before, patience=0)) == 2
    here.close()
    there.close()


def test_a_descriptor_number_that_leads_elsewhere() -> None:
    """A number that was open before, but led elsewhere, is a leak."""
    first = os.open("/etc/hosts", os.O_RDONLY)
    before = take_census()
    second = os.open("/etc/passwd", os.O_RDONLY)
    os.dup2(second, first)
    os.close(second)
    assert leaks_since(before) == f"descriptor {first} is still open: /etc/passwd"
    os.close(first)


def test_a_descriptor_of_a_segment() -> None:
    """A duplicate of a segment's descriptor is a leak, though the segment is in use."""
    before = take_census()
    block = shmreduce.allocate(8)
    segment = next(
        fd
        for fd in process_state().segments.values()
        if "shmreduce-" in str(Path(f"/proc/self/fd/{fd}").readlink())
    )
    duplicate = os.dup(segment)
    del block
    assert f"descriptor {duplicate} is still open" in leaks_since(before)
    os.close(duplicate)
    assert find_leaks(before) == []


def test_a_name_that_stays() -> None:
    """A segment's file that was not removed with the segment is a leak."""
    with shmreduce.install(strategy="file_system"):
        block = shmreduce.allocate(8)
        before = take_census()
        name = next(name for name in all_names() if f"-{os.getpid()}-" in name)
        data = bytearray(Path(name).read_bytes()[: mmap.PAGESIZE])
        # The same segment again, but for its token: one that the core does not know.
        token = bytes.fromhex(Path(name).name.rpartition("-")[2])
        other = secrets.token_bytes(16)
        copy = Path(name.replace(token.hex(), other.hex()))
        copy.touch(mode=0o600)
        with copy.open("r+b") as file:
            # As its maker would, lest another program that sweeps at this moment
            # takes it for what a dead one has left.
            assert locks.try_lock(file.fileno(), LOCK_OWNER)
            file.truncate(Path(name).stat().st_size)
            file.write(data.replace(token, other))
            file.flush()
            assert f"{copy} exists, and the segment is not in use" in leaks_since(before)
            copy.unlink()
        assert find_leaks(before) == []
        assert block.nbytes == 8


def test_waiting_is_bounded() -> None:
    """A leak that stays is reported after the patience that was asked for."""
    before = take_census()
    forgotten = shmreduce.zeros(10)
    begin = time.monotonic()
    assert find_leaks(before, patience=0.2)
    assert time.monotonic() - begin >= 0.2
    assert forgotten.size == 10


CONFTEST = """
    import pytest

    pytest_plugins = ["shmreduce.testing.pytest_plugin"]

    @pytest.fixture
    def shmreduce_patience():
        return 0.1
"""

GUARDED = """
    import multiprocessing
    import os
    import numpy as np
    import pytest
    import shmreduce
    from multiprocessing.reduction import ForkingPickler

    kept = []

    def test_array(shmreduce_no_leaks):
        kept.append(shmreduce.zeros(10))

    def test_message(shmreduce_no_leaks):
        with shmreduce.install():
            ForkingPickler.dumps(np.zeros(100_000))

    @pytest.fixture
    def shared():
        return shmreduce.zeros(10)

    def test_fixture(shmreduce_no_leaks, shared):
        pass

    def test_connection(shmreduce_no_leaks):
        here, there = multiprocessing.Pipe()
        with here, there:
            here.send(there)
            there.recv().close()

    def test_descriptor(shmreduce_no_leaks):
        os.open("/etc/hosts", os.O_RDONLY)

    def test_clean(shmreduce_no_leaks):
        with shmreduce.install():
            array = shmreduce.zeros(10)
            ForkingPickler.loads(ForkingPickler.dumps([array, np.zeros(100_000)]))
"""


def test_the_fixture_fails_tests_that_leak(pytester: pytest.Pytester) -> None:
    """Each leaking test has an error that says what it left; the clean one passes."""
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(GUARDED)
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider", timeout=60)
    result.assert_outcomes(passed=6, errors=3)
    result.stdout.fnmatch_lines(
        [
            "*ERROR at teardown of test_array*",
            "*the test left shared memory behind:*",
            "*1 block of shared memory still has views*",
            "*ERROR at teardown of test_message*",
            "*1 message from this process still unread*",
            "*ERROR at teardown of test_descriptor*",
            "*descriptor * is still open: /etc/hosts*",
        ]
    )
