"""Large arrays are copied in several threads: whole, and done when the copy returns."""

from __future__ import annotations

import os
import threading
import warnings
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import shmreduce.copying
from shmreduce_numpy import copying
from tests.memory.waiting import wait_for_exit

if TYPE_CHECKING:
    from collections.abc import Callable

PATIENCE = 30.0

SHAPES: dict[str, Callable[[], Any]] = {
    "one dimension": lambda: np.arange(100_003),
    "C order": lambda: np.arange(90_000).reshape(300, 300),
    "Fortran order": lambda: np.asfortranarray(np.arange(90_000).reshape(300, 300)),
    "one row": lambda: np.arange(50_000).reshape(1, 50_000),
    "two rows with gaps": lambda: np.arange(100_000).reshape(2, 50_000)[:, ::2],
    "reversed": lambda: np.arange(50_000)[::-1],
    "transposed and cut": lambda: np.arange(90_000).reshape(30, 30, 100).T[1:, :, 2:],
    "opaque elements": lambda: np.arange(60_000).view("V24"),
}


@pytest.fixture(autouse=True)
def several_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies of any size are made by three threads and the caller."""
    monkeypatch.setattr(copying, "_LARGE", 1)
    monkeypatch.setattr(shmreduce.copying, "_PARALLEL_FROM", 1)
    monkeypatch.setattr(shmreduce.copying, "usable_processors", lambda: 4)


def with_gaps(length: int) -> Any:
    """Ones that ``numpy.copyto`` copies, and no copy of plain bytes."""
    return np.ones(2 * length)[::2]


def copied(source: Any) -> Any:
    target = np.zeros_like(source, order="F" if source.flags.f_contiguous else "C")
    copying.copy_elements(target, source)
    return target


@pytest.mark.parametrize("shape", SHAPES)
def test_every_element_is_copied(shape: str) -> None:
    """The parts are the whole, whatever the layout."""
    source = SHAPES[shape]()
    assert copied(source).tobytes() == source.tobytes()


@pytest.mark.parametrize("length", range(9))
def test_few_elements_make_fewer_parts(length: int) -> None:
    """Arrays shorter than the number of threads are copied as well."""
    source = np.arange(length)
    assert copied(source).tolist() == source.tolist()


def test_without_threads_the_caller_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no thread can be started the copy is whole all the same."""

    def refuse(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("shmreduce.copying._thread.start_new_thread", refuse)
    source = np.arange(1000)
    assert (copied(source) == source).all()


class Slow:
    """Stands for ``numpy.copyto``: in other threads than the caller's it waits to be let go."""

    def __init__(self, in_caller: Callable[[], None]) -> None:
        self.caller = threading.get_ident()
        self.in_caller = in_caller
        self.begun = threading.Semaphore(0)
        self.go_on = threading.Event()
        self.finished = 0

    def __call__(self, target: Any, source: Any, casting: str) -> None:
        if threading.get_ident() == self.caller:
            for _ in range(3):
                assert self.begun.acquire(timeout=PATIENCE)
            self.in_caller()
            return
        self.begun.release()
        assert self.go_on.wait(PATIENCE)
        target[...] = source
        self.finished += 1


def test_an_interrupted_copy_waits_for_its_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in the caller is raised when no thread writes any more: the memory is reused."""

    def interrupt() -> None:
        threading.Timer(0.05, slow.go_on.set).start()
        raise KeyboardInterrupt

    slow = Slow(interrupt)
    monkeypatch.setattr("shmreduce_numpy.copying.np.copyto", slow)
    with pytest.raises(KeyboardInterrupt):
        copying.copy_elements(np.zeros(400), with_gaps(400))
    assert slow.finished == 3


def test_a_child_forked_during_the_copy_makes_it_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a signal handler forks and the child goes on, it does not wait for threads that
    are its parent's.
    """
    caller, parent, copyto = threading.get_ident(), os.getpid(), np.copyto
    begun, go_on = threading.Semaphore(0), threading.Event()

    def forking(target: Any, source: Any, casting: Any) -> None:
        if threading.get_ident() != caller:
            begun.release()
            assert go_on.wait(PATIENCE)
        elif os.getpid() == parent:
            for _ in range(3):
                assert begun.acquire(timeout=PATIENCE)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)
                pid = os.fork()
            if pid:
                try:
                    assert wait_for_exit(pid) == 0
                finally:
                    go_on.set()
        copyto(target, source, casting=casting)

    monkeypatch.setattr("shmreduce_numpy.copying.np.copyto", forking)
    target = np.zeros(400)
    try:
        copying.copy_elements(target, with_gaps(400))
    finally:
        if os.getpid() != parent:
            os._exit(0 if (target == 1).all() else 1)
    assert (target == 1).all()


def test_the_error_of_a_thread_is_the_callers(monkeypatch: pytest.MonkeyPatch) -> None:
    """What goes wrong in a thread is raised by the copy."""
    caller = threading.get_ident()
    begun = threading.Event()

    def fail(_target: Any, _source: Any, casting: str) -> None:
        if threading.get_ident() != caller:
            begun.set()
            raise MemoryError(casting)
        assert begun.wait(PATIENCE)

    monkeypatch.setattr("shmreduce_numpy.copying.np.copyto", fail)
    with pytest.raises(MemoryError):
        copying.copy_elements(np.zeros(400), with_gaps(400))


def test_threads_that_are_late_keep_nothing_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that has not begun when the copy is done, or has not ended, refers to no array."""
    late: list[Callable[[], None]] = []

    def start(function: Callable[[], None], _: tuple[()]) -> None:
        late.append(function)
        if len(late) == 1:
            function()

    monkeypatch.setattr("shmreduce.copying._thread.start_new_thread", start)
    arrays = [np.zeros(400), with_gaps(400)]
    seen = [weakref.ref(each) for each in arrays]
    copying.copy_elements(*arrays)
    assert (arrays.pop(0) == 1).all()
    arrays.clear()
    assert len(late) == 3
    assert all(each() is None for each in seen)
    for function in late[1:]:
        function()
