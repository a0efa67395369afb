"""Ctrl-C while processes are started and joined."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from multiprocessing.connection import Pipe, wait
from typing import TYPE_CHECKING, Any

import pytest

import shmreduce
from shmreduce import ProcessRaisedException, process_context, spawning, start_processes
from shmreduce.interrupts import Interrupts
from tests.conftest import PATIENCE
from tests.spawn import functions

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

    from tests.spawn.conftest import Line

PLACES = 8
"""At how many lines of code an interrupt is tried, with each start method."""


class InterruptAt:
    """Traces this thread, and raises SIGINT at one of the lines that it executes.

    Parameters
    ----------
    line : int or None
        Which one; None to count them only.
    """

    def __init__(self, line: int | None) -> None:
        self.count = 0
        self._line = line
        self._pid = os.getpid()

    def __call__(self, frame: FrameType, event: str, argument: object) -> Any:
        if os.getpid() != self._pid:
            return None
        if event == "line":
            self.count += 1
            if self.count == self._line:
                sys.settrace(None)
                signal.raise_signal(signal.SIGINT)
                return None
        return self


def count_lines_of_start(index: int, method: str) -> int:
    # What is imported once is not to count.
    start_processes(functions.succeed, start_method=method)
    trace = InterruptAt(None)
    sys.settrace(trace)
    context = start_processes(functions.succeed, join=False, start_method=method)
    sys.settrace(None)
    assert context.join(PATIENCE)
    return trace.count


def start_and_interrupt(index: int, method: str, line: int) -> None:
    start_processes(functions.succeed, start_method=method)
    spawning._INTERRUPTED_SECONDS = 0.0
    sys.settrace(InterruptAt(line))
    start_processes(functions.wait_until_killed, start_method=method)


def test_interrupt_anywhere_in_the_start_leaves_no_process(method: str) -> None:
    """Wherever in the code SIGINT comes, it is raised, and the new process is gone."""
    outer = "forkserver" if method == "forkserver" else "fork"
    (lines,) = start_processes(count_lines_of_start, (method,), start_method=outer, results=True)
    assert lines > PLACES
    for place in range(PLACES):
        line = 1 + place * lines // PLACES
        context = start_processes(
            start_and_interrupt, (method, line), join=False, start_method=outer
        )
        with pytest.raises(ProcessRaisedException) as caught:
            while not context.join(PATIENCE):
                context.processes[0].kill()
        assert isinstance(caught.value.__cause__, KeyboardInterrupt), line
        # The fixture sees whether any is left.


def raise_interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


def hold_and_wait(index: int, writer: Any) -> None:
    functions.wait_for_a_signal()


def start_with_interrupting_hook(index: int, writer: Any) -> None:
    os.register_at_fork(after_in_parent=raise_interrupt)
    start_processes(hold_and_wait, (writer,), start_method="fork")


class InterruptsInFinalizer:
    def __del__(self) -> None:
        signal.raise_signal(signal.SIGINT)


class InterruptedWait:
    """In the place of ``wait``: the signal comes in a destructor, the first time."""

    def __init__(self, wait: Callable[..., Any]) -> None:
        self.wait = wait
        self.things = [InterruptsInFinalizer()]

    def __call__(self, *arguments: Any) -> Any:
        self.things.clear()
        return self.wait(*arguments)


def join_with_interrupt_in_finalizer(index: int, writer: Any) -> None:
    module = vars(process_context)
    module["wait"] = InterruptedWait(module["wait"])
    start_processes(hold_and_wait, (writer,), start_method="fork")


@pytest.mark.parametrize(
    "function", [start_with_interrupting_hook, join_with_interrupt_in_finalizer]
)
def test_interrupt_where_no_exception_gets_out_is_not_lost(
    function: Callable[..., None], line: Line
) -> None:
    """SIGINT in a hook of fork(), or in a destructor, ends the wait all the same."""
    context = start_processes(function, (line.writer,), join=False, start_method="fork")
    with pytest.raises(ProcessRaisedException) as caught:
        while not context.join(PATIENCE):
            context.processes[0].kill()
    assert isinstance(caught.value.__cause__, KeyboardInterrupt)
    line.wait_until_all_gone()


def tell_of_sigterm_and_wait(index: int, writer: Any) -> None:
    signal.signal(signal.SIGTERM, lambda number, frame: writer.send("SIGTERM"))
    functions.tell_and_wait(index, writer)


def join_stubborn_one(index: int, writer: Any) -> None:
    start_processes(tell_of_sigterm_and_wait, (writer,), start_method="fork", death_signal=0)


def test_second_interrupt_does_not_stop_the_stopping(line: Line) -> None:
    """Who presses Ctrl-C again while processes are being stopped leaves none behind either."""
    context = start_processes(join_stubborn_one, (line.writer,), join=False, start_method="fork")
    line.receive()
    pid = context.pids()[0]
    os.kill(pid, signal.SIGINT)
    assert line.receive() == "SIGTERM"
    for _ in range(3):
        os.kill(pid, signal.SIGINT)
    with pytest.raises(ProcessRaisedException) as caught:
        context.join(PATIENCE)
    assert isinstance(caught.value.__cause__, KeyboardInterrupt)
    line.wait_until_all_gone()


def start_with_hook_that_interrupts_the_child(index: int) -> str:
    os.register_at_fork(after_in_child=raise_interrupt)
    try:
        start_processes(functions.wait_until_killed, start_method="fork")
    except ProcessRaisedException as error:
        return repr(error.__cause__)
    return "no error"


def test_interrupt_at_birth_is_not_lost() -> None:
    """SIGINT in a new process, in a hook of fork(), is what its function raises."""
    outcome = start_processes(
        start_with_hook_that_interrupts_the_child, start_method="fork", results=True
    )
    assert outcome == ["KeyboardInterrupt()"]


def fork_in_a_handler(index: int, writer: Any) -> None:
    """Join a process, and get a signal meanwhile whose handler forks a process."""
    reader, teller = Pipe(duplex=False)
    module = vars(process_context)
    wait = module["wait"]

    def signalled_wait(*arguments: Any) -> Any:
        module["wait"] = wait
        signal.raise_signal(signal.SIGUSR1)
        return wait(*arguments)

    def fork(number: int, frame: object) -> None:
        if os.fork() == 0:
            try:
                signal.raise_signal(signal.SIGINT)
            except KeyboardInterrupt:
                writer.send("interrupted")
            else:
                writer.send("not interrupted")
            os._exit(0)
        teller.send("end")

    module["wait"] = signalled_wait
    signal.signal(signal.SIGUSR1, fork)
    start_processes(functions.end_when_told, (reader,), start_method="fork")


def test_what_a_signal_handler_forks_during_the_join_is_not_deaf(line: Line) -> None:
    """SIGINT reaches a process that is not one of those that are joined."""
    context = start_processes(fork_in_a_handler, (line.writer,), join=False, start_method="fork")
    assert line.receive() == "interrupted"
    assert context.join(PATIENCE)


@pytest.fixture
def handled() -> Iterator[list[int]]:
    """The signals that a handler of SIGINT has got, which raises nothing."""
    got: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: got.append(number))
    yield got
    signal.signal(signal.SIGINT, before)


def test_signals_are_passed_on_at_the_end(handled: list[int]) -> None:
    """What came during the block reaches the handler after it, which is in force again."""
    handler = signal.getsignal(signal.SIGINT)
    with Interrupts():
        signal.raise_signal(signal.SIGINT)
        assert handled == []
    assert handled == [signal.SIGINT]
    assert signal.getsignal(signal.SIGINT) is handler


@pytest.mark.parametrize(("every", "passed"), [(False, 2), (True, 0)])
def test_second_signal_is_held_back_only_if_asked(
    handled: list[int], every: bool, passed: int
) -> None:
    """In a block that may hang, a second and a third SIGINT get through."""
    with Interrupts(every=every):
        for _ in range(3):
            signal.raise_signal(signal.SIGINT)
        assert len(handled) == passed
    assert len(handled) == passed + 1


def test_a_signal_wakes_whoever_waits(handled: list[int]) -> None:
    """The block can be waited for: it is ready while a signal is kept, and only then."""
    with Interrupts() as interrupts:
        number = interrupts.fileno()
        for _ in range(2):
            assert not wait([number], 0)
            signal.raise_signal(signal.SIGINT)
            assert wait([number], 0)
            interrupts.pass_on()
    assert len(handled) == 2


def test_forked_child_has_the_handler_of_before(handled: list[int]) -> None:
    """A process that is forked in such a block is not deaf to SIGINT."""
    handler = signal.getsignal(signal.SIGINT)
    reader, writer = Pipe(duplex=False)
    with Interrupts(), Interrupts():
        pid = os.fork()
        if pid == 0:
            writer.send(signal.getsignal(signal.SIGINT) is handler)
            os._exit(0)
    assert reader.poll(PATIENCE)
    assert reader.recv()
    os.waitpid(pid, 0)
    reader.close()
    writer.close()


def test_threads_and_programs_that_ignore_sigint_are_left_alone() -> None:
    """Nothing is changed outside the main thread, or where SIGINT is not handled in Python."""
    handlers: list[Any] = []

    def look() -> None:
        with Interrupts():
            handlers.append(signal.getsignal(signal.SIGINT))

    before = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=look)
    thread.start()
    thread.join(PATIENCE)
    assert handlers == [before]
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        look()
    finally:
        signal.signal(signal.SIGINT, before)
    assert handlers[1] is signal.SIG_IGN


def test_processes_can_be_started_and_joined_in_a_thread() -> None:
    """Where no signal can be handled, starting and joining go as ever."""
    results: list[Any] = []

    def run() -> None:
        results.append(
            shmreduce.start_processes(functions.square, start_method="fork", results=True)
        )

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(PATIENCE)
    assert results == [[0]]


_FORKS_BESIDE = """
import os, signal, sys, threading, time

def interrupt_main_thread():
    # Hooks from before the import of ours run after ours. What the thread waits for must
    # be the lock: CPython does not look for signals between a wait for the GIL and that.
    # The GIL is free while this thread sleeps, so who waits for it does not wait on.
    before, now = None, sleeps()
    while (not now or now != before) and time.monotonic() < end:
        time.sleep(0.002)
        before, now = now, sleeps()
    os.kill(os.getpid(), signal.SIGINT)

def sleeps():
    # How often the main thread has gone to sleep, None if it is awake (proc_pid_status(5)).
    with open(f"/proc/self/task/{threading.main_thread().native_id}/status") as file:
        lines = dict(line.split(":", 1) for line in file)
    asleep = lines["State"].split()[0] == "S"
    return lines["voluntary_ctxt_switches"].strip() if asleep else None

os.register_at_fork(before=interrupt_main_thread)
import shmreduce.interrupts

def fork():
    pid = os.fork()
    if not pid:
        os._exit(signal.pthread_sigmask(signal.SIG_BLOCK, []) != set())
    codes.add(os.waitpid(pid, 0)[1])
    blocked.update(signal.pthread_sigmask(signal.SIG_BLOCK, []))

codes, blocked, never = set(), set(), threading.Lock()
never.acquire()
for number in range(50):
    end = time.monotonic() + 10
    thread = threading.Thread(target=fork)
    try:
        thread.start()
        never.acquire(timeout=10)
    except KeyboardInterrupt:
        pass
    if time.monotonic() > end:
        sys.exit(f"signal {number} did not wake the main thread")
    thread.join()
print(codes, blocked)
"""


def test_ctrl_c_wakes_the_main_thread_while_another_forks() -> None:
    """A fork in another thread takes no signal from it; afterwards that thread has none
    blocked, and the child has none.
    """
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _FORKS_BESIDE],
        capture_output=True,
        text=True,
        timeout=2 * PATIENCE,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "{0} set()\n"), done.stderr


_WAITED_FOR = """
import os, signal, threading
import shmreduce.interrupts

waited = {signal.SIGUSR1, signal.SIGABRT}
signal.pthread_sigmask(signal.SIG_BLOCK, waited)
for number in waited:
    os.kill(os.getpid(), number)
thread = threading.Thread(target=lambda: os.waitpid(os.fork() or os._exit(0), 0))
thread.start()
thread.join()
found = []
thread = threading.Thread(
    target=lambda: found.extend(signal.sigtimedwait(waited, 5).si_signo for _ in waited)
)
thread.start()
thread.join()
print(set(found) == waited)
"""


def test_a_signal_that_somebody_waits_for_stays_pending() -> None:
    """A fork in another thread takes none that was blocked before."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _WAITED_FOR],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr


_FORKS_WITHIN = """
import os, signal
signals, blocked = [], []

def strike():
    while signals:
        signal.raise_signal(signals.pop())

# Hooks from before the import of ours run after ours.
os.register_at_fork(before=strike)
from shmreduce.interrupts import Interrupts

def is_blocked():
    return signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, [])

def fork(*_):
    pid = os.fork()
    if not pid:
        os._exit(is_blocked())
    blocked.append(os.waitpid(pid, 0)[1] != 0)
    blocked.append(is_blocked())

signal.signal(signal.SIGUSR1, fork)
signals.append(signal.SIGUSR1)
with Interrupts(to_children=True):
    fork()
print(*blocked)
"""


def test_a_signal_handler_may_fork_while_its_thread_does() -> None:
    """Both children can be interrupted, and the parent as soon as both forks are over."""
    done = subprocess.run(
        [sys.executable, "-c", _FORKS_WITHIN],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "False True False False\n"), done.stderr


_STARTS_WITHIN = """
import os, signal
signals, codes = [], []

def strike():
    while signals:
        signal.raise_signal(signals.pop())

# Hooks from before the import of ours run after ours.
os.register_at_fork(before=strike)
import shmreduce

def start(*_):
    process = shmreduce.get_context("fork").Process(target=int)
    process.start()
    process.join()
    codes.append(process.exitcode)

shmreduce.start_processes(abs, start_method="fork")
signal.signal(signal.SIGUSR1, start)
signals.append(signal.SIGUSR1)
signal.alarm(20)
shmreduce.start_processes(abs, start_method="fork")
print(codes)
"""


def test_a_signal_handler_may_start_a_process_while_one_is_started() -> None:
    """No module that is imported for that takes a lock in a hook of forks."""
    done = subprocess.run(
        [sys.executable, "-c", _STARTS_WITHIN],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "[0]\n"), done.stderr
