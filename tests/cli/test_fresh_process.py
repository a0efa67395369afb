"""Processes of a demo or benchmark run: no wait without end, nothing left."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from shmreduce import ConfigurationError
from shmreduce.fresh_process import FreshProcess, RunFailedError, fail
from tests.conftest import is_running
from tests.memory.waiting import PATIENCE, eventually

if TYPE_CHECKING:
    from multiprocessing.connection import Connection


def answer(connection: Connection, offset: int) -> None:
    connection.send(connection.recv() + offset)


def exit_at_once(_connection: Connection) -> None:
    os._exit(7)


def kill_itself(_connection: Connection) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def raise_ours(_connection: Connection) -> None:
    raise ConfigurationError("no such thing", setting="--input", value="x")


def raise_other(_connection: Connection) -> None:
    raise ZeroDivisionError("by nothing")


def be_silent(connection: Connection) -> None:
    connection.recv()


def give_up(connection: Connection) -> None:
    fail(connection, "the worker is gone")


def leave_a_child(connection: Connection) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    connection.send(child.pid)
    connection.recv()


SHARER = """
import signal
from multiprocessing.shared_memory import SharedMemory

print(SharedMemory(create=True, size=4096).name, flush=True)
signal.pause()
"""


def start_one_that_shares(connection: Connection) -> None:
    child = subprocess.Popen([sys.executable, "-c", SHARER], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    connection.send(child.stdout.readline().strip())
    signal.pause()


def test_it_is_asked_and_answers() -> None:
    """Messages go both ways, and it ends by itself."""
    with FreshProcess("adder", answer, 5, patience=PATIENCE) as process:
        process.send(2)
        assert process.receive() == 7
        process.finish()
        assert process.processes_left() == 0


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        (exit_at_once, "exit status 7"),
        (kill_itself, "SIGKILL"),
        (raise_other, "ZeroDivisionError: by nothing"),
        (give_up, "the worker is gone"),
    ],
)
def test_a_process_that_fails_is_an_error_that_says_how(target: object, reason: str) -> None:
    """receive() names the process and what became of it."""
    with (
        pytest.raises(RunFailedError) as caught,
        FreshProcess("unlucky", target, patience=PATIENCE) as process,  # type: ignore[arg-type]
    ):
        process.receive()
    assert caught.value.process == "unlucky"
    assert reason in str(caught.value)


def test_an_error_of_ours_arrives_as_itself() -> None:
    """A ShmreduceError that the process raised is raised here, fields and all."""
    with (
        pytest.raises(ConfigurationError) as caught,
        FreshProcess("raiser", raise_ours, patience=PATIENCE) as process,
    ):
        process.receive()
    assert caught.value.setting == "--input"


def test_silence_is_an_error_after_the_patience() -> None:
    """receive() gives up on a process that does not answer."""
    with (
        pytest.raises(RunFailedError, match=r"no answer within 0\.1 s"),
        FreshProcess("silent", be_silent, patience=0.1) as process,
    ):
        process.receive()


def test_what_the_process_started_goes_with_it() -> None:
    """Leaving the context ends the process's children, which hold its process group."""
    with FreshProcess("parent", leave_a_child, patience=PATIENCE) as process:
        child = process.receive()
        process.send("end")
        process.finish()
        assert process.processes_left(patience=0) == 1
    # Killed, but it may not be reaped yet by whoever adopted it.
    eventually(lambda: not is_running(child), "it has ended")


def test_processes_are_counted_though_others_are_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where /proc does not tell of other users' processes (hidepid), those of the run are."""

    def read(path: Path, *_: object, **__: object) -> str:
        if path == Path("/proc/1/stat"):
            raise PermissionError(errno.EPERM, "Operation not permitted", str(path))
        return real(path)

    real = Path.read_text
    with FreshProcess("adder", answer, 5, patience=PATIENCE) as process:
        monkeypatch.setattr(Path, "read_text", read)
        process.send(2)
        assert process.receive() == 7
        process.finish()
        assert process.processes_left() == 0


def start_another(connection: Connection, path: str) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    Path(path).write_text(f"{os.getpid()} {child.pid}")
    connection.recv()


STARTER = """
import sys
from shmreduce.fresh_process import FreshProcess
from tests.cli.test_fresh_process import start_another

if __name__ == "__main__":
    with FreshProcess("starter", start_another, sys.argv[1]) as process:
        process.receive()
"""


def test_nothing_is_left_of_a_starter_that_is_killed(tmp_path: Path) -> None:
    """The process and what it has started go with it."""
    program, told = tmp_path / "program.py", tmp_path / "told"
    program.write_text(STARTER)
    here = Path(__file__).parents[2]
    starter = subprocess.Popen(
        [sys.executable, program, told], env={**os.environ, "PYTHONPATH": str(here)}
    )
    try:
        deadline = time.monotonic() + PATIENCE
        while not (told.exists() and len(told.read_text().split()) == 2):
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        starter.kill()
        starter.wait(PATIENCE)
    pids = [int(pid) for pid in told.read_text().split()]
    eventually(lambda: not any(map(is_running, pids)), "all have ended")


def test_named_memory_of_one_that_has_to_be_killed_is_unlinked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As after Ctrl-C in a benchmark: a resource tracker lives until it has tidied up."""
    monkeypatch.setattr("shmreduce.fresh_process._FAREWELL", 0.1)
    monkeypatch.setattr("shmreduce.fresh_process._TIDYING", PATIENCE)
    with (
        pytest.raises(KeyboardInterrupt),
        FreshProcess("busy", start_one_that_shares, patience=PATIENCE) as process,
    ):
        file = Path("/dev/shm", process.receive())
        assert file.exists()
        raise KeyboardInterrupt
    assert not file.exists()
