"""The fixtures that all tests share."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import signal
from typing import TYPE_CHECKING, Any, TypeVar

import psutil
import pytest

import shmreduce
from shmreduce import presized_pickle
from shmreduce.memory import quick_slots, runtime
from shmreduce.memory.family import _LOCK_MAILBOX

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from multiprocessing.connection import Connection
    from multiprocessing.process import BaseProcess

    from shmreduce.memory.mailbox import Letter

_Reducer = TypeVar("_Reducer", bound=shmreduce.Reducer)

pytest_plugins = ["shmreduce.testing.pytest_plugin"]

START_METHODS = ("fork", "forkserver", "spawn")
STRATEGIES = ("file_descriptor", "file_system")
PATIENCE = 30.0
"""Seconds that a test waits for a child before it fails."""


def _answer(connection: Connection, function: Callable[..., Any], arguments: Any) -> None:
    try:
        answer = (True, function(*arguments))
    except Exception as error:
        answer = (False, error)
    connection.send(answer)
    # The answer may refer to memory of this process: stay until it is read.
    connection.poll(PATIENCE)
    connection.close()


def letters() -> list[Letter]:
    """Return what is in the mailbox of this process's family: it keeps memory."""
    family = runtime.current().family

    def look() -> list[Letter]:
        found = []
        for letter, fd in family.mailbox.letters():
            found.append(letter)
            os.close(fd)
        return found

    # Two who look at once, each from a place of its own, would look from one.
    return family._locked(_LOCK_MAILBOX, look)


@pytest.fixture
def new_letters() -> Callable[[], list[Letter]]:
    """Returns what has come into the mailbox since the test began.

    Messages that tests before it left unread are in there for good.
    """
    before = {letter.token for letter in letters()}
    return lambda: [letter for letter in letters() if letter.token not in before]


@contextlib.contextmanager
def registered(reducer: _Reducer) -> Iterator[_Reducer]:
    """Have a reducer registered."""
    shmreduce.register_reducer(reducer)
    try:
        yield reducer
    finally:
        shmreduce.unregister_reducer(reducer)


class Children:
    """Starts child processes and sees to it that none survives the test.

    Attributes
    ----------
    method, strategy : str
        The start method and the sharing strategy of this run.
    context : multiprocessing context
        Of that start method.
    """

    def __init__(self, method: str, strategy: str) -> None:
        self.method = method
        self.strategy = strategy
        self.context: Any = multiprocessing.get_context(method)
        self.started: list[BaseProcess] = []
        # Others may keep processes for all their tests.
        self._before = {process.pid for process in descendants()}

    def start(self, function: Callable[..., object], *arguments: Any) -> BaseProcess:
        """Start a child that calls ``function(*arguments)``."""
        process: BaseProcess = self.context.Process(target=function, args=arguments)
        process.start()
        self.started.append(process)
        return process

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Return what ``function(*arguments)`` returns in a child, or raise what it raises."""
        ours, theirs = self.context.Pipe()
        process = self.start(_answer, theirs, function, arguments)
        theirs.close()
        if not ours.poll(PATIENCE):
            pytest.fail(f"the child did not answer within {PATIENCE} s")
        try:
            succeeded, answer = ours.recv()
        except EOFError:
            process.join(PATIENCE)
            pytest.fail(f"the child died with exit code {process.exitcode}")
        ours.send("read")
        ours.close()
        self.join(process)
        if not succeeded:
            raise answer
        return answer

    def join(self, *processes: BaseProcess) -> None:
        """Wait for children, all that were started if none is named."""
        for process in processes or self.started:
            process.join(PATIENCE)
            assert process.exitcode is not None, f"{process} did not end within {PATIENCE} s"

    def close(self) -> None:
        """Fail if a child is left, having killed it."""
        # Reaps those that have ended.
        multiprocessing.active_children()
        survivors = []
        for process in self.started:
            if process.is_alive():
                process.join(1.0)
        for process in descendants():
            # One may end by itself between any two of these lines.
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.pid not in self._before and process.is_running():
                    survivors.append(f"{process.pid}: {' '.join(process.cmdline())}")
                    process.kill()
        for process in self.started:
            process.join(PATIENCE)
            process.close()
        assert not survivors, f"processes survived the test: {survivors}"


def descendants() -> list[psutil.Process]:
    """Return all processes below this one but the standard library's servants."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            command = " ".join(process.cmdline())
            ended = process.status() == psutil.STATUS_ZOMBIE
            is_server = "multiprocessing.forkserver" in command and _is_child_of_this(process)
        except psutil.NoSuchProcess:
            continue
        if not ended and not is_server and "resource_tracker" not in command:
            found.append(process)
    return found


def is_running(pid: int) -> bool:
    """Return whether a process has not ended; one that was not waited for may have."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _is_child_of_this(process: psutil.Process) -> bool:
    # Children of the fork server have its command line too.
    return bool(process.ppid() == psutil.Process().pid)


@pytest.fixture(autouse=True)
def _uninstalled_afterwards() -> Iterator[None]:
    """Leave no installation to the next test."""
    yield
    shmreduce.uninstall()


@pytest.fixture(autouse=True)
def _no_idle_memory_goes_back_meanwhile() -> None:
    """Give back now what tests before this one have left so much of that a thread looks after it.

    It would take blocks back, close segments and lower what is booked at any moment.
    """
    if any(state.idle_return.stop() for state in runtime._current):
        give_memory_back()


def give_memory_back() -> None:
    """Give back the memory that nobody has any more, and close the segments that are empty."""
    for state in runtime._current:
        for heap in state.heaps:
            # What nobody has any more may not have been noticed yet.
            heap.collect()
            with heap.exclusive():
                heap.cool(0)


@pytest.fixture
def long_way() -> Iterator[None]:
    """Every step of a message goes the long way in this process, as where nothing was compiled."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quick_slots, "_module", None)
        for segment in runtime.current().directory.values():
            patch.setattr(segment, "_quick", quick_slots.LongWay())
        yield
    # Those that were made meanwhile: other tests go the short way in them.
    for segment in runtime.current().directory.values():
        if isinstance(segment._quick, quick_slots.LongWay):
            segment._quick = quick_slots.quick_slots(
                segment.tables.pages, segment.layout, segment._busy, segment._identity
            )


@pytest.fixture(autouse=True)
def _nothing_is_expected() -> None:
    """Forget how large the pickles of other tests were: the next may be made in a block."""
    presized_pickle._sizes.clear()


@pytest.fixture(
    params=[(method, strategy) for method in START_METHODS for strategy in STRATEGIES],
    ids="-".join,
)
def children(request: pytest.FixtureRequest, shmreduce_no_leaks: None) -> Iterator[Children]:
    """Child processes of each start method, with each strategy installed.

    The test fails if one of them survives it, or if it leaks shared memory.
    """
    method, strategy = request.param
    with shmreduce.install(strategy=strategy):
        helper = Children(method, strategy)
        try:
            yield helper
        finally:
            helper.close()


def pytest_configure() -> None:
    """Let SIGINT interrupt, which programs that a shell starts in the background ignore."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the examples in docstrings that need the allocator, where it was not built."""
    for item in items:
        if isinstance(item, pytest.DoctestItem) and any(
            "shared_allocations()" in example.source for example in item.dtest.examples
        ):
            from tests.born.allocator import reason_without_allocator

            reason = reason_without_allocator()
            item.add_marker(pytest.mark.skipif(reason is not None, reason=str(reason)))


@pytest.fixture(autouse=True, scope="module")
def _young_memory() -> None:
    """Leave out of later collections what is there when the tests of a module begin.

    The tests collect garbage before and after each of thousands of them. The modules,
    tests and reports in memory would be gone through each time, in half of all time.
    """
    gc.collect()
    gc.freeze()
