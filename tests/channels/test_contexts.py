"""The names of multiprocessing, and that the standard library stays as it is."""

from __future__ import annotations

import errno
import importlib
import inspect
import multiprocessing
import pickle
import subprocess
import sys
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import shmreduce
from shmreduce import Reducer
from shmreduce.memory import runtime
from shmreduce.settings import set_settings
from tests.channels.channels import PATIENCE, context_of, within

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import Children


@pytest.mark.parametrize("name", multiprocessing.__all__)
def test_every_name_of_multiprocessing_is_there(name: str) -> None:
    """On the module and on each context, with the same parameters."""
    ours, theirs = getattr(shmreduce, name), getattr(multiprocessing, name)
    if not inspect.isclass(ours) and callable(ours):
        expected = list(inspect.signature(theirs).parameters)
        assert list(inspect.signature(ours).parameters)[: len(expected)] == expected
    for method in multiprocessing.get_all_start_methods():
        standard = multiprocessing.get_context(method)
        if hasattr(standard, name):
            assert hasattr(shmreduce.get_context(method), name)


@pytest.mark.parametrize("name", ["SUBDEBUG", "SUBWARNING"])
def test_the_levels_of_logging_are_there(name: str) -> None:
    """Names of multiprocessing that its ``__all__`` leaves out."""
    assert getattr(shmreduce, name) == getattr(multiprocessing, name)


@pytest.mark.parametrize(
    "name",
    [
        "connection.wait",
        "connection.Listener",
        "context.BaseContext",
        "dummy.Pool",
        "forkserver.ForkServer",
        "heap.Arena",
        "managers.Token",
        "pool.ThreadPool",
        "process.current_process",
        "queues.Full",
        "reduction.ForkingPickler",
        "resource_sharer.DupFd",
        "resource_tracker.register",
        "shared_memory.SharedMemory",
        "sharedctypes.copy",
        "synchronize.SEM_VALUE_MAX",
        "util.log_to_stderr",
    ],
)
def test_what_is_in_the_modules_of_multiprocessing_is_there(name: str) -> None:
    """Also where a module of ours has the name of one of them."""
    module, name = name.split(".")
    theirs = getattr(importlib.import_module(f"multiprocessing.{module}"), name)
    assert getattr(getattr(shmreduce, module), name) is theirs


def test_what_is_nowhere_is_an_attribute_error() -> None:
    """It names both places that were looked at."""
    ours: Any = shmreduce
    with pytest.raises(AttributeError, match=r"neither shmreduce\.pool nor multiprocessing\.pool"):
        _ = ours.pool.nothing
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = ours.nothing


def test_nothing_of_the_standard_library_is_changed(tmp_path: Path) -> None:
    """A program that uses every channel of ours finds multiprocessing as it was."""
    program = """
import multiprocessing as theirs, shmreduce as ours
import multiprocessing.connection, multiprocessing.queues
from multiprocessing.reduction import ForkingPickler

def state():
    classes = (
        ForkingPickler,
        theirs.connection.Connection,
        theirs.queues.Queue,
        theirs.context.BaseContext,
    )
    return [dict(vars(each)) for each in classes] + [dict(ForkingPickler._extra_reducers)]

def work(queue):
    queue.put(1)

if __name__ == "__main__":
    before = state()
    for method in ("fork", "spawn"):
        context = ours.get_context(method)
        queue = context.SimpleQueue()
        process = context.Process(target=work, args=(queue,))
        process.start(); queue.get(); process.join()
    with ours.Pool(1) as pool:
        pool.map(abs, [1])
    assert state() == before
    print("the same")
"""
    path = tmp_path / "program.py"
    path.write_text(program)
    answer = subprocess.run(
        [sys.executable, "-W", "error", path],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert answer.stdout == "the same\n", answer.stderr


def test_a_frozen_program_starts_processes(tmp_path: Path) -> None:
    """What PyInstaller puts in the place of ``multiprocessing.freeze_support`` is called."""
    program = tmp_path / "program.py"
    executable = tmp_path / "program"
    # The tracker of resources is started with -c; the rest, as in a bundle, is the program.
    executable.write_text(
        "#!/bin/sh\n"
        f'case " $* " in *" -c "*) exec {sys.executable} "$@" ;; esac\n'
        f'exec {sys.executable} {program} "$@"\n'
    )
    executable.chmod(0o700)
    program.write_text(
        f"""
import sys

sys.frozen = True
sys.executable = {str(executable)!r}

import multiprocessing.spawn

# What the hook of PyInstaller does.
multiprocessing.freeze_support = multiprocessing.spawn.freeze_support
multiprocessing.process.ORIGINAL_DIR = None

import shmreduce


if __name__ == "__main__":
    shmreduce.freeze_support()
    if len(sys.argv) > 1:
        sys.exit("a child has become the program once more")
    context = shmreduce.get_context("spawn")
    process = context.Process(target=print, args=("worked",))
    process.start()
    process.join()
    print(process.exitcode)
"""
    )
    answer = subprocess.run(
        [executable], capture_output=True, text=True, timeout=2 * PATIENCE, check=False
    )
    assert answer.stdout == "worked\n0\n", answer.stderr


def test_contexts_keep_to_themselves() -> None:
    """Those of one module are never those of the other."""
    assert shmreduce.get_context("spawn") is shmreduce.get_context("spawn")
    assert shmreduce.get_context("spawn") is not multiprocessing.get_context("spawn")
    with pytest.raises(ValueError, match="cannot find context"):
        shmreduce.get_context("spoon")
    with pytest.raises(ValueError, match="concrete"):
        shmreduce.get_context("fork").set_start_method("spawn")


def test_the_start_method_is_one_for_both() -> None:
    """What was chosen in one module holds in the other: locks go to children of either."""
    before = multiprocessing.get_start_method(allow_none=True)
    try:
        for chosen, other in ((shmreduce, multiprocessing), (multiprocessing, shmreduce)):
            for method in ("spawn", "fork"):
                chosen.set_start_method(method, force=True)
                assert other.get_start_method() == method
                assert chosen.get_all_start_methods() == other.get_all_start_methods()
                assert shmreduce.get_context() is shmreduce.get_context(method)
        with pytest.raises(RuntimeError, match="already"):
            shmreduce.set_start_method("spawn")
        shmreduce.set_start_method(None, force=True)
        # Asking what there is chooses nothing.
        assert shmreduce.get_all_start_methods() == multiprocessing.get_all_start_methods()
        assert shmreduce.get_start_method(allow_none=True) is None
    finally:
        multiprocessing.set_start_method(before, force=True)


def what_holds(queue: Any, array: Any) -> None:
    """Tell what a child finds."""
    queue.put(
        (
            shmreduce.get_start_method(),
            shmreduce.get_sharing_strategy(),
            shmreduce.get_settings().inline_limit,
            "reducer_override" in vars(ForkingPickler),
            shmreduce.is_shared(array),
        )
    )


@pytest.mark.parametrize("installed", [False, True])
def test_child_has_start_method_strategy_and_settings(children: Children, installed: bool) -> None:
    """It has its parent's, and is installed only if the parent is."""
    context = context_of(children)
    shmreduce.uninstall()
    before = shmreduce.get_settings()
    shmreduce.set_sharing_strategy(children.strategy)
    try:
        if installed:
            shmreduce.install()
        queue = context.SimpleQueue()
        process = children.start(what_holds, queue, shmreduce.ones(3))
        method, strategy, limit, is_installed, is_shared = within(queue.get)
        children.join(process)
        queue.close()
    finally:
        shmreduce.uninstall()
        set_settings(before)
    assert (method, strategy) == (children.method, children.strategy)
    assert limit == shmreduce.get_settings().inline_limit
    assert is_installed is installed
    assert is_shared


class Marked:
    """A class of the tests' own."""

    def __init__(self, way: str) -> None:
        self.way = way


class MarkedReducer(Reducer):
    """Reduces it."""

    types = (Marked,)

    def reduce(self, obj: Any, message: Any) -> Any:
        return Marked, ("ours",)


def pickled_by_user(_: Any) -> Any:
    """Reduce it for ``ForkingPickler.register``."""
    return Marked, ("theirs",)


def test_registrations_of_both_kinds_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reducers of the registry, and before them those registered with ForkingPickler."""
    reducer = MarkedReducer()
    shmreduce.register_reducer(reducer)
    here, there = shmreduce.Pipe()
    try:
        here.send(Marked("as it is"))
        assert there.recv().way == "ours"
        monkeypatch.setitem(ForkingPickler._extra_reducers, Marked, pickled_by_user)  # type: ignore[attr-defined]
        here.send(Marked("as it is"))
        assert there.recv().way == "theirs"
    finally:
        shmreduce.unregister_reducer(reducer)
        here.close()
        there.close()


def test_override_that_somebody_gave_to_the_pickler_holds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A ``reducer_override`` of ForkingPickler is asked, installed or not."""

    def override(pickler: Any, obj: Any) -> Any:
        return pickled_by_user(obj) if isinstance(obj, Marked) else NotImplemented

    monkeypatch.setattr(ForkingPickler, "reducer_override", override, raising=False)
    here, there = shmreduce.Pipe()
    with here, there:
        here.send(Marked("as it is"))
        assert there.recv().way == "theirs"
        with shmreduce.install(override=True):
            here.send(Marked("as it is"))
            assert there.recv().way == "theirs"


def add(queue: Any, array: Any) -> None:
    """Add one to a shared array and tell the sum."""
    array += 1
    queue.put(array.sum())


def test_both_libraries_side_by_side(children: Children) -> None:
    """A process of the standard library and one of ours, each with its own channels."""
    shmreduce.uninstall()
    ours = shmreduce.get_context(children.method)
    array = shmreduce.zeros(1000)
    queue = ours.Queue()
    process = children.start(add, children.context.Queue(), np.zeros(3))
    children.join(process)
    children.context = ours
    process = children.start(add, queue, array)
    assert within(queue.get) == 1000
    children.join(process)
    assert array.sum() == 1000
    queue.close()
    queue.join_thread()


def unpicklable(_: Any) -> None:
    """Do nothing."""


def test_arguments_that_cannot_be_pickled_are_an_error(children: Children) -> None:
    """Of ``start``, where arguments are pickled; nothing is left behind."""
    process = context_of(children).Process(
        target=unpicklable, args=((np.ones(1 << 18), lambda: 1),)
    )
    if children.method == "fork":
        pytest.skip("the arguments of a forked child are not pickled")
    with pytest.raises((AttributeError, pickle.PicklingError)):
        process.start()


def in_worker(array: Any) -> Any:
    """Return the double."""
    return array * 2


def test_manager_and_pool_and_locks(children: Children) -> None:
    """What a context makes besides channels works in its children."""
    context = context_of(children)
    with context.Manager() as manager:
        shared = manager.dict(a=1)
        assert dict(shared) == {"a": 1}
    with context.Pool(2) as pool:
        results = pool.map_async(in_worker, [np.ones(1 << 18)] * 3).get(PATIENCE)
        pool.close()
        pool.join()
    assert all((each == 2).all() for each in results)
    with context.Lock(), context.RLock():
        assert context.Semaphore(1).acquire(timeout=PATIENCE)


def blocks_out() -> int:
    """Return how many blocks of this process are in use."""
    heaps = runtime.current().heaps
    for heap in heaps:
        heap.collect()
    return sum(len(segment.out) for heap in heaps for segment in heap.segments)


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_child_that_cannot_be_started_keeps_nothing(
    shmreduce_no_leaks: None, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """The memory of its arguments is free again."""

    def refuse(*_: Any) -> Any:
        raise OSError(errno.EAGAIN, "no process is free")

    monkeypatch.setattr("multiprocessing.util.spawnv_passfds", refuse)
    monkeypatch.setattr("multiprocessing.forkserver.connect_to_new_process", refuse)
    process = shmreduce.get_context(method).Process(target=len, args=(np.ones(100_000),))
    before = blocks_out()
    with pytest.raises(OSError, match="no process is free"):
        process.start()
    assert blocks_out() == before


class OwnContext(multiprocessing.context.ForkContext):
    """A start method that another package has added."""

    _name = "own"


def test_a_start_method_of_another_package_is_one_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both modules have one start method, so what the standard library takes is valid here."""
    monkeypatch.setitem(vars(multiprocessing.context)["_concrete_contexts"], "own", OwnContext())
    before = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_start_method("own", force=True)
    try:
        assert shmreduce.get_start_method() == "own"
        queue = shmreduce.SimpleQueue()
        process = shmreduce.Process(target=queue.put, args=(np.ones(3),))
        process.start()
        assert (within(queue.get) == 1).all()
        process.join(PATIENCE)
        assert process.exitcode == 0
        queue.close()
        with shmreduce.Pool(1) as pool:
            assert pool.apply(sum, ([1, 2],)) == 3
        pool.join()
    finally:
        multiprocessing.set_start_method(before, force=True)
