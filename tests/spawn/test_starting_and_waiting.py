"""How processes are started, and how long one waits for them."""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Pipe, wait
from typing import TYPE_CHECKING, Any

import pytest

import shmreduce
from shmreduce import (
    ENV_VAR_PARALLEL_START,
    ConfigurationError,
    ProcessRaisedException,
    process_context,
    start_processes,
)
from tests.conftest import PATIENCE
from tests.open_files import open_files
from tests.spawn import functions

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.spawn.conftest import Line


def test_ctx_makes_the_processes(method: str) -> None:
    """A context that is given is used, by spawn() too."""
    context = multiprocessing.get_context(method)
    expected = [context.Process.__name__]  # type: ignore[attr-defined]
    assert start_processes(functions.kind_of_process, ctx=context, results=True) == expected
    assert shmreduce.spawn(functions.kind_of_process, ctx=context, results=True) == expected


def test_processes_are_named_after_function_and_index(method: str) -> None:
    """The kernel's name of a process has the function, as far as it fits, and the index."""
    names = start_processes(functions.name_of_thread, nprocs=2, start_method=method, results=True)
    assert names == ["name_of_threa:0", "name_of_threa:1"]


def test_a_function_may_have_any_name() -> None:
    """A callable object whose name is not text is called, too."""
    names = start_processes(functions.OddlyNamed(), start_method="fork", results=True)
    assert names == ["3:0"]


@pytest.mark.parametrize("number", [-1, 999, "SIGINT", [signal.SIGINT]])
def test_unknown_signal(number: Any) -> None:
    """A signal that there is not is refused before a process is started."""
    with pytest.raises(ConfigurationError, match="death_signal is") as caught:
        start_processes(functions.succeed, start_method="fork", death_signal=number)
    assert (caught.value.setting, caught.value.value) == ("death_signal", number)


def test_negative_number_of_processes() -> None:
    """A negative number of processes is refused."""
    with pytest.raises(ConfigurationError, match="nprocs is -1"):
        start_processes(functions.succeed, nprocs=-1)


def test_unknown_start_method() -> None:
    """An unknown start method is an error of ours, and a ValueError as in multiprocessing."""
    with pytest.raises(ConfigurationError, match="there are fork") as caught:
        start_processes(functions.succeed, start_method="spork")
    assert isinstance(caught.value, ValueError)
    assert (caught.value.setting, caught.value.value) == ("start_method", "spork")


def test_where_no_file_may_grow_the_error_says_what_to_do(method: str) -> None:
    """A limit of file sizes (ulimit -f) of zero is an error that names it."""
    before = open_files()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        with pytest.raises(shmreduce.SegmentError, match="ulimit -f"):
            start_processes(functions.succeed, start_method=method)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not open_files() - before


class FailsSecond:
    """Cannot be pickled a second time."""

    def __init__(self) -> None:
        self.count = 0

    def __reduce__(self) -> Any:
        self.count += 1
        if self.count > 1:
            raise RuntimeError("pickled too often")
        return FailsSecond, ()


def tell_twice(index: int, writer: Any, unused: FailsSecond) -> None:
    functions.tell_and_wait(index, writer)


@pytest.mark.parametrize(
    ("method", "parallel"), [("spawn", "0"), ("forkserver", "0"), ("forkserver", "1")]
)
def test_all_are_started_or_none(
    method: str, parallel: str, line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a process cannot be started, those that were started are gone."""
    monkeypatch.setenv(ENV_VAR_PARALLEL_START, parallel)
    with pytest.raises(RuntimeError, match="pickled too often"):
        start_processes(tell_twice, (line.writer, FailsSecond()), nprocs=3, start_method=method)
    line.writer.close()
    while line.reader.poll(PATIENCE):
        try:
            line.reader.recv()
        except EOFError:
            break
    else:
        pytest.fail("processes are still there")


def test_deadline_holds_while_peers_are_stopped(method: str) -> None:
    """join() returns when its time is over, although a process withstands SIGTERM."""
    reader, writer = Pipe(duplex=False)
    context = start_processes(
        functions.fail_beside_a_stubborn_one,
        (reader, writer),
        nprocs=2,
        join=False,
        start_method=method,
    )
    assert wait([each for each, index in context.sentinels.items() if index == 0], PATIENCE)
    start = time.monotonic()
    assert not context.join(timeout=0.05)
    assert not context.join(timeout=0)
    # SIGKILL would come after 30 s.
    assert time.monotonic() - start < 10
    context.processes[1].kill()
    with pytest.raises(ProcessRaisedException, match="process 0"):
        context.join(PATIENCE)
    reader.close()
    writer.close()


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_processes_left_by_a_process_do_not_hold_up_the_join(method: str) -> None:
    """A failed process is noticed although something that it forked runs on."""
    reader, writer = Pipe(duplex=False)
    context = start_processes(
        functions.leave_a_process_and_fail, (reader,), join=False, start_method=method
    )
    with pytest.raises(ProcessRaisedException):
        context.join(PATIENCE)
    # Closing would not end it: where it was forked, it has this end too.
    writer.send(None)
    reader.close()
    writer.close()


def test_interrupted_wait_leaves_no_process(method: str, line: Line) -> None:
    """Processes whose joiner is interrupted are stopped, since nobody else can join them."""
    context = start_processes(
        functions.start_and_join,
        (method, functions.tell_and_wait, (line.writer,)),
        join=False,
        start_method=method,
    )
    line.receive()
    os.kill(context.pids()[0], signal.SIGINT)
    with pytest.raises(ProcessRaisedException) as caught:
        context.join(PATIENCE)
    assert isinstance(caught.value.__cause__, KeyboardInterrupt)
    line.wait_until_all_gone()


def test_contexts_leave_no_descriptor(method: str) -> None:
    """Joined or not, a context that is dropped has closed what it opened."""
    start_processes(functions.succeed, nprocs=2, start_method=method)
    before = open_files()
    start_processes(functions.succeed, nprocs=2, start_method=method)
    with pytest.raises(ProcessRaisedException) as caught:
        start_processes(functions.fail, nprocs=2, start_method=method)
    del caught
    context = start_processes(functions.succeed, nprocs=2, join=False, start_method=method)
    processes = context.processes
    del context
    for process in processes:
        process.join(PATIENCE)
    del processes, process
    multiprocessing.active_children()
    assert not open_files() - before


def test_threads_may_join_at_the_same_time(method: str) -> None:
    """Each gets what it would get alone: the results, or the failure."""
    reader, writer = Pipe(duplex=False)
    context = start_processes(
        functions.end_when_told, (reader,), nprocs=2, join=False, start_method=method, results=True
    )
    failing = start_processes(functions.fail, nprocs=2, join=False, start_method=method)
    with ThreadPoolExecutor(8) as executor:
        answers = [executor.submit(context.results, PATIENCE) for _ in range(4)]
        failures = [executor.submit(failing.join, PATIENCE) for _ in range(4)]
        assert context.join(timeout=0) is False
        writer.send("end")
        assert [each.result(PATIENCE) for each in answers] == [[None, None]] * 4
        assert {type(each.exception(PATIENCE)) for each in failures} == {ProcessRaisedException}
    reader.close()
    writer.close()


class CallsAnotherFirst:
    """In the place of a function: calls another one first, but only once."""

    def __init__(self, function: Callable[..., Any], other: Callable[[], None]) -> None:
        self.function = function
        self.others = [other]

    def __call__(self, *arguments: Any) -> Any:
        while self.others:
            self.others.pop()()
        return self.function(*arguments)


@pytest.mark.parametrize("place", ["as it waits", "as it looks who has ended"])
@pytest.mark.parametrize("function", [functions.end_when_told, functions.fail_when_told])
def test_a_signal_handler_may_join_what_is_being_joined(
    function: Callable[..., None], place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The interrupted join goes on, and raises a failure although the handler has seen it."""
    reader, writer = Pipe(duplex=False)
    context = start_processes(function, (reader,), nprocs=3, join=False, start_method="fork")
    outcomes: list[object] = []

    def join_all() -> None:
        try:
            while not context.join(PATIENCE):
                pass
        except ProcessRaisedException as error:
            outcomes.append(str(error))
        else:
            outcomes.append("all have ended well")

    def let_end_and_join(number: int, frame: object) -> None:
        writer.send("end")
        join_all()

    def be_struck() -> None:
        signal.raise_signal(signal.SIGUSR1)

    owner, name = vars(context.processes[1])["_popen"], "poll"
    if place == "as it waits":
        owner, name = process_context, "wait"
    monkeypatch.setattr(owner, name, CallsAnotherFirst(getattr(owner, name), be_struck))
    before = signal.signal(signal.SIGUSR1, let_end_and_join)
    try:
        join_all()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert len(outcomes) == 2
    assert outcomes[0] == outcomes[1]
    assert (outcomes[0] == "all have ended well") == (function is functions.end_when_told)
    reader.close()
    writer.close()
