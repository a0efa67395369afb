"""Processes do not survive their parent, however it goes."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from multiprocessing.connection import Pipe
from typing import TYPE_CHECKING, Any

import pytest

from shmreduce import ProcessException, ProcessExitedException, start_processes
from shmreduce.parent_death import Lifeline, die_with_parent
from tests.conftest import PATIENCE
from tests.spawn import functions

if TYPE_CHECKING:
    from tests.spawn.conftest import Line


def start_parent(method: str, function: Any, *arguments: Any) -> Any:
    """Start a process that will start others, and be killed."""
    return start_processes(function, arguments, join=False, start_method=method)


def kill(parent: Any) -> None:
    """Kill the process that started the others."""
    parent.processes[0].kill()
    with pytest.raises(ProcessExitedException, match="SIGKILL"):
        parent.join(PATIENCE)


def test_killed_parent(method: str, line: Line) -> None:
    """Processes whose parent is killed end."""
    parent = start_parent(
        method, functions.start_and_wait, method, 2, functions.tell_and_wait, (line.writer,), None
    )
    line.receive()
    line.receive()
    kill(parent)
    line.wait_until_all_gone()


def test_context_need_not_be_kept(method: str, line: Line) -> None:
    """Processes whose context was dropped run on, and end with their parent."""
    parent = start_parent(method, functions.start_and_forget, method, line.writer)
    line.receive()
    kill(parent)
    line.wait_until_all_gone()


def test_death_is_handed_down(method: str, line: Line) -> None:
    """A process that is told of its parent's death takes its own processes with it."""
    inner = (method, functions.tell_and_wait, (line.writer,))
    for middle, arguments in [
        (functions.start_and_join, inner),
        (functions.start_and_wait, (method, 1, functions.tell_and_wait, (line.writer,), None)),
    ]:
        parent = start_parent(method, functions.start_and_wait, method, 1, middle, arguments, None)
        line.receive()
        kill(parent)
    line.wait_until_all_gone()


def test_program_in_the_background(method: str, line: Line) -> None:
    """Where SIGINT is ignored, as in programs in the background, another signal is taken."""
    parent = start_parent(method, functions.start_in_the_background, method, line.writer)
    line.receive()
    kill(parent)
    line.wait_until_all_gone()


def test_function_that_ignores_sigint(method: str, line: Line) -> None:
    """SIGKILL can be asked for instead of SIGINT."""
    parent = start_parent(
        method,
        functions.start_and_wait,
        method,
        1,
        functions.tell_and_wait_ignoring_sigint,
        (line.writer,),
        signal.SIGKILL,
    )
    line.receive()
    kill(parent)
    line.wait_until_all_gone()


@pytest.mark.parametrize(
    "function", [functions.lose_the_interrupt, functions.swallow_the_interrupt]
)
def test_interrupt_that_is_lost(method: str, function: Any, line: Line) -> None:
    """A process ends although the interpreter drops its KeyboardInterrupt, as it does in
    finalizers, or the function does.
    """
    parent = start_parent(
        method, functions.start_and_wait, method, 1, function, (line.writer,), None
    )
    line.receive()
    kill(parent)
    line.wait_until_all_gone()


def test_processes_can_be_let_live(method: str, line: Line) -> None:
    """With death_signal=0 the processes go on when their parent is dead."""
    questions, ask = Pipe(duplex=False)
    parent = start_parent(
        method,
        functions.start_and_wait,
        method,
        1,
        functions.answer_once,
        (line.writer, questions),
        0,
    )
    line.receive()
    kill(parent)
    ask.send("a question")
    assert line.receive() == "a question is answered"
    line.wait_until_all_gone()
    questions.close()
    ask.close()


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_thread_that_started_them_may_end(method: str) -> None:
    """The end of the thread that started the processes is not the end of their parent."""
    reader, writer = Pipe(duplex=False)
    contexts: list[Any] = []

    def start() -> None:
        contexts.append(
            start_processes(functions.end_when_told, (reader,), join=False, start_method=method)
        )

    thread = threading.Thread(target=start)
    thread.start()
    thread.join(PATIENCE)
    writer.send("end")
    assert contexts[0].join(PATIENCE)
    reader.close()
    writer.close()


def test_kernel_without_signals_for_pipes(line: Line) -> None:
    """Where the pipe gives no signal, PR_SET_PDEATHSIG does."""
    parent = start_parent("fork", functions.start_in_a_sandbox, line.writer)
    line.receive()
    kill(parent)
    line.wait_until_all_gone()


def wait_for_a_dead_parent(reader: Any, parent: int) -> None:
    die_with_parent(reader, signal.SIGINT, parent)
    os._exit(77)


def test_parent_that_is_dead_already(method: str) -> None:
    """A process whose parent died before it could ask for the signal ends at once."""
    lifeline = Lifeline()
    lifeline.cut()
    process = multiprocessing.get_context(method).Process(  # type: ignore[attr-defined]
        target=wait_for_a_dead_parent, args=(lifeline.reader, os.getpid())
    )
    process.start()
    lifeline.reader.close()
    process.join(PATIENCE)
    assert process.exitcode == 1


def test_forked_processes_do_not_keep_others_alive(line: Line) -> None:
    """What a parent forks, and what outlives it, does not hold the lifelines of its processes."""
    hang_up, held = Pipe(duplex=False)
    parent = start_parent("fork", functions.fork_and_wait, hang_up, line.writer)
    line.receive()
    kill(parent)
    line.wait_until_all_gone()
    hang_up.close()
    held.close()


_FORKS_MEANWHILE = """
import os, threading
from shmreduce.memory import standard_streams

made, forked = threading.Event(), threading.Event()
ends = []
make_pipe = os.pipe

def pipe():
    ends.extend(make_pipe())
    made.set()
    # A time that a fork does not need.
    forked.wait(0.5)
    return ends

standard_streams.os.pipe = pipe
from shmreduce.parent_death import Lifeline

thread = threading.Thread(target=lambda: lifelines.append(Lifeline()))
lifelines = []
thread.start()
assert made.wait(30)
pid = os.fork()
if pid == 0:
    try:
        os.fstat(ends[1])
    except OSError:
        os._exit(0)
    os._exit(1)
forked.set()
thread.join()
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


def test_what_is_forked_while_a_lifeline_is_made_does_not_hold_it() -> None:
    """A fork of another thread waits until the writing end is known: its child closes it."""
    command = [sys.executable, "-W", "ignore", "-c", _FORKS_MEANWHILE]
    assert subprocess.run(command, timeout=PATIENCE, check=False).returncode == 0


def test_failures_are_one_family() -> None:
    """Whoever catches ProcessException catches both."""
    assert issubclass(ProcessExitedException, ProcessException)
