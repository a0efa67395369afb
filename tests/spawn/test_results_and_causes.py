"""What comes back from the processes: results, and exceptions themselves."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import forkserver
from multiprocessing.connection import Pipe, wait
from threading import Event
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import shmreduce
from shmreduce import (
    ConfigurationError,
    ProcessExitedException,
    ProcessRaisedException,
    ProcessTimeoutError,
    process_ends,
    start_processes,
)
from shmreduce.spawn_child import PicklerChoice
from tests.conftest import PATIENCE, Children
from tests.faults.injection import no_descriptors
from tests.memory.waiting import eventually
from tests.spawn import functions

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from shmreduce.memory.mailbox import Letter


def failure_of(method: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """Return the error of one process that runs the function."""
    with pytest.raises(shmreduce.ProcessException) as caught:
        start_processes(function, arguments, start_method=method, results=True)
    return caught.value


def block_of(array: Any) -> shmreduce.Block | None:
    """Return the block of an array that was received."""
    while isinstance(array, np.ndarray):
        array = array.base
    return None if array is None else shmreduce.find_block(array)


# Results


def test_results_come_by_index(method: str) -> None:
    """Joined or not, what the function returned is had if asked for."""
    assert start_processes(
        functions.square, (1,), nprocs=3, start_method=method, results=True
    ) == [1, 4, 9]
    context = start_processes(
        functions.square, (1,), nprocs=3, join=False, start_method=method, results=True
    )
    assert context.results() == [1, 4, 9]
    assert context.join()


def test_results_stay_the_same_objects(method: str) -> None:
    """Results are loaded once."""
    context = start_processes(
        functions.large_array, nprocs=2, join=False, start_method=method, results=True
    )
    first = context.results()
    assert [a is b for a, b in zip(first, context.results(), strict=True)] == [True, True]


def test_results_must_be_asked_for() -> None:
    """Without results=True nothing is kept, and results() says what to do."""
    context = start_processes(functions.square, join=False, start_method="fork")
    with pytest.raises(ConfigurationError, match="results=True"):
        context.results()
    assert context.join(PATIENCE)


def test_what_is_not_asked_for_need_not_be_picklable(method: str) -> None:
    """A function may return what it likes if nobody wants it."""
    assert start_processes(functions.return_something_unpicklable, start_method=method) is None


def test_unpicklable_result_is_an_error_of_its_process(method: str) -> None:
    """A result that is wanted and cannot be pickled is reported as an exception."""
    error = failure_of(method, functions.return_something_unpicklable)
    assert isinstance(error, ProcessRaisedException)
    assert isinstance(error.__cause__, AttributeError | pickle.PicklingError)


def test_unloadable_result_is_named(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error while a result is loaded says which process the result is from."""
    context = start_processes(
        functions.return_something_unloadable, join=False, start_method=method, results=True
    )
    assert context.join(PATIENCE)
    monkeypatch.setattr(functions.UnloadableResult, "refusing", True)
    with pytest.raises(RuntimeError, match="not in this process") as caught:
        context.results()
    assert caught.value.__notes__ == ["while the result of process 0 was loaded"]


def test_large_results_do_not_wait_for_a_reader(method: str) -> None:
    """A process ends although nobody has read its result, which no pipe could hold."""
    context = start_processes(
        functions.many_bytes, (5_000_000,), join=False, start_method=method, results=True
    )
    context.processes[0].join(PATIENCE)
    assert context.processes[0].exitcode == 0
    assert [len(each) for each in context.results(PATIENCE)] == [5_000_000]


def test_results_have_a_deadline(method: str) -> None:
    """When the time is over, the error names the processes that run, and they run on."""
    reader, writer = Pipe(duplex=False)
    context = start_processes(
        functions.end_when_told, (reader,), join=False, start_method=method, results=True
    )
    with pytest.raises(ProcessTimeoutError, match=r"processes \[0\] have not ended") as caught:
        context.results(timeout=0.01)
    assert caught.value.running == [0]
    assert caught.value.waited == 0.01
    writer.send("end")
    assert context.results(PATIENCE) == [None]
    reader.close()
    writer.close()


def test_results_outlive_an_interrupt(method: str) -> None:
    """Ctrl-C while results are loaded does not lose them: the next call returns them."""
    context = start_processes(
        functions.large_array_and_interrupt, join=False, start_method=method, results=True
    )
    with pytest.raises(KeyboardInterrupt):
        context.results(PATIENCE)
    [(array, _)] = context.results(PATIENCE)
    assert array.tolist() == [0] * 500_000


@pytest.mark.usefixtures("shmreduce_no_leaks")
def test_arrays_come_back_without_installation(method: str) -> None:
    """With a context of shmreduce's own arrays travel by shared memory in any case."""
    arguments = (np.full(500_000, 7.0),)
    results = start_processes(functions.twice, arguments, start_method=method, results=True)
    assert block_of(results[0]) is not None
    assert results[0][-1] == 14
    del results
    standard = multiprocessing.get_context(method)
    results = start_processes(functions.twice, arguments, ctx=standard, results=True)
    assert block_of(results[0]) is None
    assert results[0][-1] == 14


def test_arrays_come_back(children: Children) -> None:
    """Arrays in results arrive, by shared memory since shmreduce is installed."""
    results = start_processes(
        functions.large_array, nprocs=3, start_method=children.method, results=True
    )
    for index, array in enumerate(results):
        assert block_of(array) is not None
        np.testing.assert_array_equal(array, np.full(500_000, index, dtype="f8"))


def test_arrays_of_a_call_that_fails_are_given_back(
    children: Children, new_letters: Callable[[], list[Letter]]
) -> None:
    """Results that nobody will read, since another process failed, hold no memory."""
    reader, writer = Pipe(duplex=False)
    with pytest.raises(ProcessRaisedException):
        start_processes(
            functions.large_array_or_failure,
            (reader, writer),
            nprocs=2,
            start_method=children.method,
            results=True,
        )
    assert new_letters() == []
    reader.close()
    writer.close()


@pytest.mark.usefixtures("shmreduce_no_leaks")
def test_results_that_nobody_reads_are_given_back(
    children: Children, new_letters: Callable[[], list[Letter]]
) -> None:
    """So do results whose context is dropped."""
    context = start_processes(
        functions.large_array, join=False, start_method=children.method, results=True
    )
    assert context.join(PATIENCE)
    assert len(new_letters()) == 1
    del context
    eventually(lambda: not new_letters(), "the results are given back")


def test_dropping_a_context_waits_for_nothing(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever drops it may hold the very lock that giving its results back needs."""
    may_go_on, ended = threading.Event(), threading.Event()

    def wait_and_discard(data: bytes) -> None:
        may_go_on.wait(PATIENCE)
        ended.set()

    monkeypatch.setattr(PicklerChoice.OWN, "discard", wait_and_discard)
    context = start_processes(functions.succeed, join=False, start_method=method, results=True)
    assert context.join(PATIENCE)
    del context
    assert not ended.is_set()
    may_go_on.set()
    assert ended.wait(PATIENCE)


def test_results_that_come_after_their_context_was_dropped(
    children: Children, new_letters: Callable[[], list[Letter]]
) -> None:
    """And those of processes that ended later: once they are known to have ended."""
    reader, writer = Pipe(duplex=False)
    context = start_processes(
        functions.large_array_when_told,
        (reader,),
        join=False,
        start_method=children.method,
        results=True,
    )
    [process] = context.processes
    del context
    writer.send("go on")
    process.join(PATIENCE)
    assert len(new_letters()) == 1
    del process
    eventually(lambda: not new_letters(), "the results are given back")
    reader.close()
    writer.close()


@pytest.mark.parametrize("children", [("fork", "file_descriptor")], indirect=True)
def test_a_forked_child_leaves_results_to_its_parent(children: Children) -> None:
    """Dropping an inherited context gives nothing up."""
    context = start_processes(
        functions.large_array, join=False, start_method=children.method, results=True
    )
    assert context.join(PATIENCE)
    held = [context]
    del context
    children.join(children.start(held.clear))
    assert held[0].results()[0][-1] == 0


def test_shared_arguments_are_shared(children: Children) -> None:
    """What the processes write to a shared array is seen here."""
    array = shmreduce.zeros(3)
    start_processes(functions.write_index, (array,), nprocs=3, start_method=children.method)
    assert array.tolist() == [1, 2, 3]


# Causes


def test_cause_is_the_exception_itself(method: str) -> None:
    """The exception of the process is the cause of the error here."""
    error = failure_of(method, functions.fail)
    assert repr(error.__cause__) == "ValueError('legitimate exception from process 0')"
    assert "functions.py" in error.msg
    assert "spawn_child.py" not in error.msg


def test_causes_of_the_cause_stay_as_text(method: str) -> None:
    """The traceback has the whole chain."""
    error = failure_of(method, functions.fail_from_another)
    assert isinstance(error.__cause__, RuntimeError)
    assert "ValueError: legitimate exception from process 0" in error.msg


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (functions.fail_with_a_local_class, "LocalError"),
        (functions.fail_with_two_arguments, "missing 1 required positional argument"),
        (functions.fail_with_what_exits_when_unpickled, "SystemExit: 3"),
    ],
)
def test_exceptions_that_cannot_travel_come_as_text(
    method: str, function: Callable[..., Any], reason: str
) -> None:
    """An exception that cannot be pickled, or not unpickled, is text with the reason."""
    error = failure_of(method, function)
    assert isinstance(error, ProcessRaisedException)
    assert error.__cause__ is None
    assert function.__name__ in error.msg
    [note] = error.__notes__
    assert reason in note


def test_nested_failures_keep_their_causes(method: str) -> None:
    """An error of the processes of a process arrives with its own cause."""
    error = failure_of(method, functions.nested_failure, method, functions.fail)
    assert isinstance(error.__cause__, ProcessRaisedException)
    assert isinstance(error.__cause__.__cause__, ValueError)


def test_a_cause_that_is_false_is_kept(method: str) -> None:
    """An exception counts as one whatever its bool() is, over several processes, too."""
    error = failure_of(method, functions.nested_failure, method, functions.fail_with_a_false_error)
    assert isinstance(error.__cause__, ProcessRaisedException)
    assert repr(error.__cause__.__cause__) == "EmptyError('no items')"


def test_interrupted_function_has_not_succeeded(method: str) -> None:
    """KeyboardInterrupt in a process is reported like any exception."""
    error = failure_of(method, functions.interrupt_itself)
    assert isinstance(error, ProcessRaisedException)
    assert isinstance(error.__cause__, KeyboardInterrupt)


@pytest.mark.parametrize(
    ("code", "exit_code"), [(12, 12), (True, 1), ("a message", 1), ("", 1), ([], 1)]
)
def test_exit_codes_are_kept(method: str, code: object, exit_code: int) -> None:
    """SystemExit is no exception but an exit, with the code that it has in any program."""
    error = failure_of(method, functions.exit_with, code)
    assert isinstance(error, ProcessExitedException)
    assert error.exit_code == exit_code
    assert error.__cause__ is None


@pytest.mark.parametrize("code", [0, None])
def test_exit_without_error_is_success(method: str, code: object) -> None:
    """sys.exit() ends a process well; its result is None."""
    results = start_processes(functions.exit_with, (code,), start_method=method, results=True)
    assert results == [None]


def test_earliest_exception_is_raised(method: str) -> None:
    """Of exceptions that are seen at once the one that was first is raised."""
    reader, writer = Pipe(duplex=False)
    context = start_processes(
        functions.fail_after_the_next,
        (reader, writer),
        nprocs=2,
        join=False,
        start_method=method,
    )
    writer.close()
    for process in context.processes:
        process.join(PATIENCE)
    with pytest.raises(ProcessRaisedException) as caught:
        context.join(PATIENCE)
    assert caught.value.error_index == 1
    reader.close()


def test_failure_is_raised_again(method: str) -> None:
    """Every further call of join and results raises the error again."""
    context = start_processes(functions.fail, join=False, start_method=method, results=True)
    with pytest.raises(ProcessRaisedException) as first:
        context.join()
    with pytest.raises(ProcessRaisedException) as second:
        context.join(timeout=0)
    with pytest.raises(ProcessRaisedException) as third:
        context.results()
    assert str(first.value) == str(second.value) == str(third.value)
    assert first.value.__cause__ is second.value.__cause__ is third.value.__cause__


def test_ctrl_c_while_a_failure_is_looked_at_does_not_make_it_a_success(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next call of join raises it."""
    context = start_processes(functions.fail, join=False, start_method=method, results=True)

    def interrupt(_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(context, "_first_failure", interrupt)
        context.join()
    with pytest.raises(ProcessRaisedException):
        context.join(timeout=0)
    with pytest.raises(ProcessRaisedException):
        context.results()


def test_a_failure_is_told_without_a_free_descriptor() -> None:
    """It lies in a file that is open already."""
    context = start_processes(functions.fail, join=False, start_method="fork")
    [process] = context.processes
    process.join(PATIENCE)
    with no_descriptors(), pytest.raises(ProcessRaisedException) as caught:
        context.join()
    assert "legitimate exception from process 0" in str(caught.value)


def test_an_exit_code_that_another_thread_has_collected(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is waited for if that thread has not stored it yet, as when it looks for processes."""
    monkeypatch.setattr(process_ends, "_SECONDS_TO_STORE", PATIENCE)
    context = start_processes(functions.wait_until_killed, join=False, start_method="fork")
    [process] = context.processes
    process.kill()
    os.waitpid(context.pids()[0], 0)
    popen: Any = vars(process)["_popen"]
    looks = iter([None] * 10)

    def poll(flag: int = 0) -> int | None:
        popen.returncode = next(looks, -signal.SIGKILL)
        return popen.returncode  # type: ignore[no-any-return]

    monkeypatch.setattr(popen, "poll", poll)
    with pytest.raises(ProcessExitedException, match="SIGKILL"):
        context.join(PATIENCE)


def test_two_threads_may_read_the_exit_code_from_a_fork_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It comes through a pipe: the one who finds the pipe empty gets what the other has read."""
    monkeypatch.setattr(process_ends, "_SECONDS_TO_STORE", PATIENCE)
    process = shmreduce.get_context("forkserver").Process(target=os.getpid)
    process.start()
    assert wait([process.sentinel], PATIENCE)
    read, one_has_read, one_got_none = forkserver.read_signed, Event(), Event()

    def read_at_the_same_time(fd: int) -> Any:
        try:
            code = read(fd)
        except EOFError:
            one_got_none.set()
            raise
        one_has_read.set()
        assert one_got_none.wait(PATIENCE)
        return code

    monkeypatch.setattr(forkserver, "read_signed", read_at_the_same_time)
    with ThreadPoolExecutor(2) as executor:
        first = executor.submit(lambda: process.exitcode)
        assert one_has_read.wait(PATIENCE)
        # 0, as join() has it: wait until there is nothing more to read.
        second = executor.submit(vars(process)["_popen"].poll, 0)
        assert (first.result(PATIENCE), second.result(PATIENCE)) == (0, 0)


def test_exit_codes_that_the_kernel_does_not_keep() -> None:
    """Where SIGCHLD is ignored, the outcome tells success from failure."""
    [(results, cause)] = start_processes(
        functions.start_where_sigchld_is_ignored, ("fork",), start_method="fork", results=True
    )
    assert results == [0, 1, 4]
    assert cause == "ValueError('legitimate exception from process 0')"


def test_an_outcome_is_not_written_into_a_file_of_the_function(
    method: str, tmp_path: Path
) -> None:
    """If the function has closed the outcome's file, nothing is written to one that has got its
    number: a result that is wanted is an error, and otherwise the exit code says it all.
    """
    error = failure_of(method, functions.close_inherited_and_open_own, str(tmp_path))
    assert isinstance(error, ProcessExitedException)
    assert error.exit_code == 1
    start_processes(functions.close_inherited_and_open_own, (str(tmp_path),), start_method=method)
    texts = [file.read_text() for file in tmp_path.iterdir()]
    assert texts == [functions.OWN_TEXT] * 20


def test_a_function_may_close_inherited_files_and_exit(method: str) -> None:
    """An exit without an error is a success, as if the outcome could be written."""
    start_processes(functions.close_inherited_and_exit, start_method=method)


def test_unknown_signals_have_a_name() -> None:
    """A real-time signal, for which there is no name, is named by its number."""
    context = start_processes(functions.wait_until_killed, join=False, start_method="fork")
    [pid] = context.pids()
    number = int(signal.SIGRTMIN) + 3
    os.kill(pid, number)
    with pytest.raises(ProcessExitedException, match="<Unknown signal ") as caught:
        context.join(PATIENCE)
    assert caught.value.signal_name == f"<Unknown signal {number}>"
