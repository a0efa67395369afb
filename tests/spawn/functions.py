"""What the processes of these tests do. Each function gets its index first.

What waits here waits for a signal or for the test, and gives up in the end so
that nothing is left of a test that fails.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import multiprocessing
import os
import signal
import sys
import threading
from typing import TYPE_CHECKING, Any

import numpy as np

import shmreduce
from shmreduce import parent_death, start_processes
from tests.conftest import PATIENCE

if TYPE_CHECKING:
    from multiprocessing.connection import Connection


def wait_for_a_signal() -> None:
    threading.Event().wait(2 * PATIENCE)


def succeed(index: int) -> None:
    pass


def put_index(index: int, queue: Any) -> None:
    queue.put(index)


def square(index: int, base: int = 0) -> int:
    return (base + index) ** 2


def fail(index: int) -> None:
    raise ValueError(f"legitimate exception from process {index}")


def one_fails(index: int, failing: int) -> None:
    if index == failing:
        fail(index)
    wait_for_a_signal()


def one_fails_after_another(index: int, reader: Connection, writer: Connection) -> None:
    """Process 1 fails once process 0 has succeeded."""
    if index == 0:
        writer.send("done")
        return
    assert reader.poll(PATIENCE)
    fail(index)


def abort_one(index: int) -> None:
    if index == 0:
        # pytest's, which a forked process has inherited, prints a traceback.
        faulthandler.disable()
        os.kill(os.getpid(), signal.SIGABRT)
    wait_for_a_signal()


def exit_one(index: int, code: object) -> None:
    if index == 0:
        sys.exit(code)  # type: ignore[arg-type]
    wait_for_a_signal()


def exit_with(index: int, code: object) -> None:
    sys.exit(code)  # type: ignore[arg-type]


def wait_until_killed(index: int) -> None:
    wait_for_a_signal()


def interrupt_itself(index: int) -> None:
    signal.raise_signal(signal.SIGINT)
    wait_for_a_signal()


def fail_beside_a_stubborn_one(index: int, reader: Connection, writer: Connection) -> None:
    """Process 0 fails once process 1 ignores SIGTERM."""
    if index == 1:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        writer.send("stubborn")
        wait_for_a_signal()
    assert reader.poll(PATIENCE)
    fail(index)


def fail_beside_one_that_ends_when_told(index: int, reader: Connection) -> None:
    if index == 0:
        fail(index)
    assert reader.poll(PATIENCE)


def end_when_told(index: int, reader: Connection) -> None:
    assert reader.poll(PATIENCE)


def fail_when_told(index: int, reader: Connection) -> None:
    end_when_told(index, reader)
    fail(index)


def fail_after_the_next(index: int, reader: Connection, writer: Connection) -> None:
    """Process 0 fails once process 1 has ended, and with it the last who could write."""
    if index == 0:
        writer.close()
        assert reader.poll(PATIENCE)
    fail(index)


class TwoArgumentsError(Exception):
    """Can be pickled but not unpickled, as many can."""

    def __init__(self, first: object, second: object) -> None:
        super().__init__(f"{first} and {second}")


def fail_with_two_arguments(index: int) -> None:
    raise TwoArgumentsError(1, 2)


class EmptyError(Exception):
    """Is false, as a container without items."""

    def __len__(self) -> int:
        return 0


def fail_with_a_false_error(index: int) -> None:
    raise EmptyError("no items")


class ExitsWhenUnpickledError(Exception):
    """Raises SystemExit where it is unpickled."""

    def __reduce__(self) -> Any:
        return sys.exit, (3,)


def fail_with_what_exits_when_unpickled(index: int) -> None:
    raise ExitsWhenUnpickledError


def fail_with_a_local_class(index: int) -> None:
    class LocalError(Exception):
        pass

    raise LocalError("made on the spot")


def fail_from_another(index: int) -> None:
    try:
        fail(index)
    except ValueError as error:
        raise RuntimeError("the second error") from error


def return_something_unpicklable(index: int) -> object:
    return lambda: index


class UnloadableResult:
    """Cannot be unpickled in the process that has ``refusing`` set."""

    refusing = False

    def __setstate__(self, state: object) -> None:
        if type(self).refusing:
            raise RuntimeError("not in this process")


def return_something_unloadable(index: int) -> object:
    result = UnloadableResult()
    result.__dict__["index"] = index
    return result


class InterruptsWhenLoaded:
    """Gets SIGINT each time it is unpickled."""

    def __setstate__(self, state: object) -> None:
        signal.raise_signal(signal.SIGINT)


def large_array_and_interrupt(index: int) -> Any:
    result = InterruptsWhenLoaded()
    result.__dict__["index"] = index
    return large_array(index), result


def twice(index: int, array: Any) -> Any:
    return 2 * array


def large_array(index: int) -> Any:
    return np.full(500_000, index, dtype="f8")


def large_array_when_told(index: int, reader: Connection) -> Any:
    assert reader.poll(PATIENCE)
    return large_array(index)


def large_array_or_failure(index: int, reader: Connection, writer: Connection) -> Any:
    """Process 1 fails once process 0 is about to return."""
    if index == 0:
        writer.send("returning")
        return large_array(index)
    assert reader.poll(PATIENCE)
    return fail(index)


def write_index(index: int, array: Any) -> None:
    array[index] = index + 1


def many_bytes(index: int, size: int) -> bytes:
    return bytes(size)


OWN_TEXT = "what the function has written itself\n"


def close_inherited_and_open_own(index: int, folder: str) -> None:
    """Close what was inherited, as daemons do, and open files, which get the same numbers."""
    os.closerange(3, 256)
    for number in range(20):
        # They stay open until the process ends.
        file = os.open(f"{folder}/{number}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.write(file, OWN_TEXT.encode())


def close_inherited_and_exit(index: int) -> None:
    os.closerange(3, 256)
    sys.exit()


def kind_of_process(index: int) -> str:
    return type(multiprocessing.current_process()).__name__


def name_of_thread(index: int) -> str:
    return shmreduce.get_thread_name()


def leave_a_process_and_fail(index: int, reader: Connection) -> None:
    """Fork a process that lives until the test sends it a message, then fail."""
    if os.fork() == 0:
        reader.poll(2 * PATIENCE)
        os._exit(0)
    fail(index)


def start_where_sigchld_is_ignored(index: int, method: str) -> tuple[object, str]:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    results = start_processes(square, nprocs=3, start_method=method, results=True)
    try:
        start_processes(fail, start_method=method)
    except shmreduce.ProcessRaisedException as error:
        return results, repr(error.__cause__)
    return results, "no error"


def nested_failure(index: int, method: str, function: Any) -> None:
    start_processes(function, start_method=method)


# Deaths of parents


def tell_and_wait(index: int, writer: Connection) -> None:
    """Tell the test that this process runs, and wait."""
    writer.send(os.getpid())
    wait_for_a_signal()


def tell_and_wait_ignoring_sigint(index: int, writer: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    tell_and_wait(index, writer)


class WaitsInFinalizer:
    def __init__(self, writer: Connection) -> None:
        self.writer = writer

    def __del__(self) -> None:
        tell_and_wait(0, self.writer)


def lose_the_interrupt(index: int, writer: Connection) -> None:
    """Be in a finalizer, out of which no exception comes, when the signal comes; then wait."""
    WaitsInFinalizer(writer)
    wait_for_a_signal()


def swallow_the_interrupt(index: int, writer: Connection) -> None:
    """Go on after KeyboardInterrupt, in a process that is given little time to end."""
    parent_death._SECONDS_TO_END = 0.1
    with contextlib.suppress(KeyboardInterrupt):
        tell_and_wait(index, writer)
    wait_for_a_signal()


def answer_once(index: int, writer: Connection, questions: Connection) -> None:
    """Tell the test that this process runs, and answer one question."""
    writer.send(os.getpid())
    assert questions.poll(PATIENCE)
    writer.send(f"{questions.recv()} is answered")


def start_and_wait(
    index: int, method: str, nprocs: int, function: Any, arguments: Any, death_signal: int | None
) -> None:
    """Start processes, and wait without joining them."""
    context = start_processes(
        function,
        arguments,
        nprocs,
        join=False,
        start_method=method,
        death_signal=death_signal,
    )
    wait_for_a_signal()
    del context


def start_and_forget(index: int, method: str, writer: Connection) -> None:
    """Start a process, drop its context, and wait."""
    start_processes(tell_and_wait, (writer,), join=False, start_method=method)
    wait_for_a_signal()


def start_and_join(index: int, method: str, function: Any, arguments: Any) -> None:
    start_processes(function, arguments, start_method=method)


def start_in_the_background(index: int, method: str, writer: Connection) -> None:
    """Do as a program that a shell has put into the background."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    start_and_wait(index, method, 1, tell_and_wait, (writer,), None)


def fork_and_wait(index: int, hang_up: Connection, writer: Connection) -> None:
    """Start a process, fork another that waits for the test to hang up, and wait."""
    context = start_processes(tell_and_wait, (writer,), join=False, start_method="fork")
    if os.fork() == 0:
        writer.close()
        with contextlib.suppress(EOFError):
            hang_up.poll(2 * PATIENCE)
        os._exit(0)
    wait_for_a_signal()
    del context


def start_in_a_sandbox(index: int, writer: Connection) -> None:
    """Do as if the kernel could not send signals for pipes."""
    vars(fcntl)["F_SETSIG"] = -1
    start_and_wait(index, "fork", 1, tell_and_wait, (writer,), None)


class OddlyNamed:
    """Is called as a function, and has a name that is not text."""

    __name__ = 3

    def __call__(self, index: int) -> str:
        return shmreduce.get_thread_name()
