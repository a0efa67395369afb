"""The behaviour that torch's own tests check, those included that it has switched off."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
from multiprocessing.connection import Pipe, wait
from typing import TYPE_CHECKING

import pytest

import shmreduce
from shmreduce import (
    ENV_VAR_PARALLEL_START,
    ProcessContext,
    ProcessException,
    ProcessExitedException,
    ProcessRaisedException,
    SpawnContext,
    start_processes,
)
from tests.conftest import PATIENCE
from tests.spawn import functions

if TYPE_CHECKING:
    from tests.spawn.conftest import Line


def test_success_is_none(method: str) -> None:
    """Processes that succeed are joined, and None is returned."""
    assert start_processes(functions.succeed, nprocs=2, start_method=method) is None


def test_join_can_be_repeated(method: str) -> None:
    """With join=False a context is returned, whose join is True in the end, and stays so."""
    context = start_processes(functions.succeed, nprocs=2, join=False, start_method=method)
    assert isinstance(context, ProcessContext)
    context.join(timeout=None)
    context.join(timeout=None)
    assert context.join(timeout=None)
    assert context.join(timeout=0)


def test_join_does_not_block_without_time(method: str) -> None:
    """With a timeout of 0, join is False as long as a process runs."""
    reader, writer = Pipe(duplex=False)
    context = start_processes(functions.end_when_told, (reader,), join=False, start_method=method)
    assert not context.join(timeout=0)
    assert not context.join(timeout=-1)
    writer.send("end")
    assert context.join(timeout=PATIENCE)
    reader.close()
    writer.close()


def test_first_argument_is_the_index(method: str) -> None:
    """The function gets its index, then the arguments."""
    queue = multiprocessing.get_context(method).SimpleQueue()
    start_processes(functions.put_index, args=(queue,), nprocs=2, start_method=method)
    assert sorted([queue.get(), queue.get()]) == [0, 1]
    queue.close()


@pytest.mark.parametrize("failing", [0, 1])
def test_exception_in_one_process(method: str, failing: int) -> None:
    """An exception in one process reaches the parent, with its traceback as text."""
    with pytest.raises(
        ProcessRaisedException,
        match=rf"Traceback (?s:.*)\nValueError: legitimate exception from process {failing}$",
    ) as caught:
        start_processes(functions.one_fails, args=(failing,), nprocs=2, start_method=method)
    assert caught.value.error_index == failing


def test_exception_in_all_processes(method: str) -> None:
    """If all raise, one of their exceptions is raised."""
    with pytest.raises(
        ProcessRaisedException, match=r"\nValueError: legitimate exception from process [01]$"
    ):
        start_processes(functions.fail, nprocs=2, start_method=method)


def test_abort_is_named(method: str) -> None:
    """A process that aborts is reported with the name of the signal."""
    with pytest.raises(
        ProcessExitedException, match=r"^process 0 terminated with signal SIGABRT$"
    ) as caught:
        start_processes(functions.abort_one, nprocs=2, start_method=method)
    assert caught.value.signal_name == "SIGABRT"
    assert caught.value.exit_code == -signal.SIGABRT


def test_exit_code_is_reported(method: str) -> None:
    """A process that exits with a code is reported with it."""
    with pytest.raises(
        ProcessExitedException, match=r"^process 0 terminated with exit code 123$"
    ) as caught:
        start_processes(functions.exit_one, args=(123,), nprocs=2, start_method=method)
    assert caught.value.exit_code == 123
    assert caught.value.signal_name is None


def test_process_exited() -> None:
    """So is the only process of spawn()."""
    with pytest.raises(ProcessExitedException) as caught:
        shmreduce.spawn(functions.exit_with, args=(12,), nprocs=1)
    assert caught.value.exit_code == 12
    assert caught.value.error_index == 0


def test_success_first_then_exception(method: str) -> None:
    """An exception is raised although another process has succeeded before."""
    reader, writer = Pipe(duplex=False)
    with pytest.raises(ProcessRaisedException, match="legitimate exception from process 1"):
        start_processes(
            functions.one_fails_after_another, (reader, writer), nprocs=2, start_method=method
        )
    reader.close()
    writer.close()


def test_signal_from_outside(method: str) -> None:
    """A process that somebody terminates is reported."""
    context = start_processes(functions.wait_until_killed, join=False, start_method=method)
    [pid] = context.pids()
    os.kill(pid, signal.SIGTERM)
    with pytest.raises(ProcessExitedException, match="signal SIGTERM") as caught:
        context.join(PATIENCE)
    assert caught.value.error_pid == pid
    assert caught.value.pid == pid, "the name that torch's exceptions have it by"


def test_peers_are_terminated(method: str) -> None:
    """After a failure the others get SIGTERM at once."""
    context = start_processes(functions.one_fails, (0,), nprocs=3, join=False, start_method=method)
    with pytest.raises(ProcessRaisedException):
        context.join()
    assert [process.exitcode for process in context.processes] == [1, -15, -15]


def test_peers_have_a_grace_period(method: str) -> None:
    """During the grace period the others are left alone, and may end well."""
    reader, writer = Pipe(duplex=False)
    context = start_processes(
        functions.fail_beside_one_that_ends_when_told,
        (reader,),
        nprocs=2,
        join=False,
        start_method=method,
    )
    assert wait([each for each, index in context.sentinels.items() if index == 0], PATIENCE)
    assert not context.join(timeout=0, grace_period=PATIENCE)
    writer.send("end")
    with pytest.raises(ProcessRaisedException, match="process 0"):
        context.join(timeout=PATIENCE)
    assert [process.exitcode for process in context.processes] == [1, 0]
    reader.close()
    writer.close()


def test_peers_that_ignore_sigterm_are_killed(method: str) -> None:
    """A process that survives SIGTERM for another grace period gets SIGKILL."""
    reader, writer = Pipe(duplex=False)
    context = start_processes(
        functions.fail_beside_a_stubborn_one,
        (reader, writer),
        nprocs=2,
        join=False,
        start_method=method,
    )
    with pytest.raises(ProcessRaisedException, match="process 0"):
        context.join(grace_period=0.1)
    assert [process.exitcode for process in context.processes] == [1, -9]
    reader.close()
    writer.close()


def test_nested_processes_die_with_their_parent(method: str, line: Line) -> None:
    """Processes whose parent is terminated end, too."""
    arguments = (method, 2, functions.tell_and_wait, (line.writer,), None)
    context = start_processes(functions.start_and_wait, arguments, join=False, start_method=method)
    nested = {line.receive(), line.receive()}
    assert len(nested) == 2
    os.kill(context.pids()[0], signal.SIGTERM)
    line.wait_until_all_gone()
    with pytest.raises(ProcessExitedException, match="SIGTERM"):
        context.join(PATIENCE)


@pytest.mark.parametrize(
    "error",
    [
        ProcessException("message", 3, 77),
        ProcessRaisedException("message", 3, 77),
        ProcessExitedException("message", 3, 77, -6, "SIGABRT"),
        ProcessExitedException("message", error_index=3, error_pid=77, exit_code=2),
    ],
    ids=repr,
)
def test_errors_are_picklable(error: ProcessException) -> None:
    """An error keeps its fields, cause and notes when it is pickled."""
    error.__cause__ = KeyError("cause")
    error.add_note("a note")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert (copy.msg, copy.error_index, copy.error_pid) == ("message", 3, 77)
    assert copy.pid == 77
    assert copy.fields == error.fields
    assert repr(copy.__cause__) == "KeyError('cause')"
    assert copy.__notes__ == ["a note"]
    assert str(copy) == "message"


def test_start_in_parallel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes of a fork server started at once have their own indexes."""
    monkeypatch.setenv(ENV_VAR_PARALLEL_START, "1")
    context = start_processes(
        functions.square, nprocs=6, join=False, start_method="forkserver", results=True
    )
    assert len(set(context.pids())) == 6
    assert context.results(PATIENCE) == [0, 1, 4, 9, 16, 25]


def test_failure_after_start_in_parallel(monkeypatch: pytest.MonkeyPatch) -> None:
    """The failing process is the one that is reported."""
    monkeypatch.setenv(ENV_VAR_PARALLEL_START, "1")
    with pytest.raises(ProcessRaisedException, match="from process 2") as caught:
        start_processes(functions.one_fails, (2,), nprocs=4, start_method="forkserver")
    assert caught.value.error_index == 2


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_parallel_start_is_for_fork_servers(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With other start methods the variable changes nothing."""
    monkeypatch.setenv(ENV_VAR_PARALLEL_START, "1")
    results = start_processes(functions.square, nprocs=2, start_method=method, results=True)
    assert results == [0, 1]


def test_spawn_always_spawns() -> None:
    """Another start method given to spawn() is not heeded, with a warning that says so."""
    with pytest.warns(FutureWarning, match=r"start_processes\(\.\.\., start_method='fork'\)"):
        results = shmreduce.spawn(functions.kind_of_process, start_method="fork", results=True)
    assert results == ["SpawnProcess"]


def test_daemons(method: str) -> None:
    """The processes are daemons if wanted."""
    context = start_processes(
        functions.wait_until_killed, daemon=True, join=False, start_method=method
    )
    assert [process.daemon for process in context.processes] == [True]
    context.processes[0].kill()
    with pytest.raises(ProcessExitedException, match="SIGKILL"):
        context.join(PATIENCE)


def test_former_name_of_the_context() -> None:
    """SpawnContext is ProcessContext."""
    assert SpawnContext is ProcessContext


def test_no_process() -> None:
    """No process at all succeeds."""
    assert start_processes(functions.fail, nprocs=0) is None
