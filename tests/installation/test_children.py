"""Installation reaches children, under every start method and from every kind of starter."""

from __future__ import annotations

import inspect
import multiprocessing
import os
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import popen_forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import shmreduce
from shmreduce import Reducer, ReducerError, get_settings, get_sharing_strategy
from shmreduce.forking import _state
from shmreduce.memory import runtime
from tests.conftest import PATIENCE, Children, registered

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


LENGTH = 300_000


def sum_up(array: Any) -> int:
    return int(array.sum())


class Signal:
    """A type of the tests' own."""

    def __init__(self, value: Any) -> None:
        self.value = value
        self.way = "ordinary"


def rebuild(value: Any) -> Signal:
    """Make a signal that says it came through the reducer."""
    signal = Signal(value)
    signal.way = "reducer"
    return signal


class SignalReducer(Reducer):
    types = (Signal,)

    def reduce(self, obj: Any, message: Any) -> Any:
        return rebuild, (obj.value,)


@pytest.fixture
def reducer() -> Iterator[SignalReducer]:
    """A reducer for signals, registered."""
    with registered(SignalReducer()) as reducer:
        yield reducer


def what_holds_here() -> tuple[str, int | None, bool]:
    """Return strategy, a setting, and whether shmreduce is installed."""
    return get_sharing_strategy(), get_settings().inline_limit, _state.patch is not None


def in_grandchild(method: str, strategy: str) -> tuple[str, int | None, bool]:
    """Return what holds in a child of this child."""
    helper = Children(method, strategy)
    answer: tuple[str, int | None, bool] = helper.call(what_holds_here)
    return answer


def way_of(signal: Signal) -> str:
    """Return how a signal came here."""
    return signal.way


def echo(signal: Signal) -> Signal:
    """Return a new signal, which travels by itself."""
    return Signal(signal.value)


def put_what_holds(queue: Any, signal: Signal | None = None) -> None:
    """Tell by queue what holds here and how the signal came."""
    queue.put((what_holds_here(), signal and signal.way))


def test_child_has_strategy_and_settings(children: Children) -> None:
    """A child is installed with its parent's strategy and settings."""
    with shmreduce.install(inline_limit=77):
        assert children.call(what_holds_here) == (children.strategy, 77, True)


def test_grandchild_has_them_too(children: Children) -> None:
    """So is the child's own child."""
    with shmreduce.install(inline_limit=77):
        answer = children.call(in_grandchild, children.method, children.strategy)
    assert answer == (children.strategy, 77, True)


@pytest.mark.usefixtures("reducer")
def test_reducers_registered_by_hand_reach_children(children: Children) -> None:
    """A child unpickles with, and pickles with, what its parent registered by hand."""
    assert children.call(echo, Signal(1)).way == "reducer"
    # The arguments of a forked child are not pickled.
    expected = "ordinary" if children.method == "fork" else "reducer"
    assert children.call(way_of, Signal(1)) == expected


@pytest.mark.usefixtures("reducer")
def test_pool_workers_are_installed(children: Children) -> None:
    """Arguments and results of a Pool travel by reducers."""
    with children.context.Pool(2) as pool:
        assert pool.map(way_of, [Signal(1), Signal(2)]) == ["reducer"] * 2
        assert [each.way for each in pool.map(echo, [Signal(1)])] == ["reducer"]
        pool.close()
        pool.join()


@pytest.mark.usefixtures("reducer")
def test_executor_workers_are_installed(children: Children) -> None:
    """Arguments and results of a ProcessPoolExecutor travel by reducers."""
    with ProcessPoolExecutor(1, mp_context=children.context) as executor:
        assert executor.submit(way_of, Signal(1)).result(PATIENCE) == "reducer"
        assert executor.submit(echo, Signal(1)).result(PATIENCE).way == "reducer"
        assert executor.submit(what_holds_here).result(PATIENCE)[0] == children.strategy


@pytest.mark.usefixtures("reducer")
def test_managers_are_installed(children: Children) -> None:
    """A Manager's server process takes and gives by reducers."""
    with children.context.Manager() as manager:
        shared = manager.list([Signal(1)])
        assert shared[0].way == "reducer"


def test_functions_of_multiprocessing_can_be_sent(children: Children) -> None:
    """A process or a pool can be given a function that shmreduce has replaced, by its name."""
    ours, theirs = children.context.Pipe()
    with shmreduce.install(), children.context.Pool(1) as pool:
        process = children.start(Connection.send, theirs, "arrived")
        assert ours.poll(PATIENCE)
        assert ours.recv() == "arrived"
        children.join(process)
        data = bytes(ForkingPickler.dumps(["loaded"]))
        assert pool.apply_async(ForkingPickler.loads, (data,)).get(PATIENCE) == ["loaded"]
        pool.close()
        pool.join()
    ours.close()
    theirs.close()


@pytest.mark.usefixtures("reducer")
def test_process_made_before_install_is_installed_when_started(children: Children) -> None:
    """What counts is when the process is started, not when the object was made."""
    shmreduce.uninstall()
    queue = children.context.SimpleQueue()
    process = children.context.Process(target=put_what_holds, args=(queue, Signal(1)))
    with shmreduce.install(strategy=children.strategy, inline_limit=99):
        process.start()
        children.started.append(process)
        holds, way = queue.get()
        children.join()
    queue.close()
    assert holds == (children.strategy, 99, True)
    # A forked child does not unpickle its arguments.
    assert way == ("ordinary" if children.method == "fork" else "reducer")


class EarlyAttribute(multiprocessing.get_context("spawn").Process):  # type: ignore[misc]
    """A process that takes an attribute before it initialises itself."""

    def __init__(self, signal: Signal, queue: Any) -> None:
        self.signal = signal
        self.queue = queue
        super().__init__()

    def run(self) -> None:
        """Tell how the attribute came here."""
        put_what_holds(self.queue, self.signal)


@pytest.mark.usefixtures("reducer")
def test_attributes_set_before_init_arrive_too() -> None:
    """The child is installed before anything of the process object is unpickled."""
    context = multiprocessing.get_context("spawn")
    queue = context.SimpleQueue()
    with shmreduce.install(inline_limit=55):
        process = EarlyAttribute(Signal(1), queue)
        process.start()
        holds, way = queue.get()
        process.join(PATIENCE)
    queue.close()
    assert (holds[1:], way) == ((55, True), "reducer")


def test_children_started_after_uninstall_are_plain(children: Children) -> None:
    """Once uninstalled, new children know nothing of it."""
    shmreduce.uninstall()
    assert not children.call(what_holds_here)[2]


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_reducer_that_cannot_be_sent_is_named(method: str) -> None:
    """A child cannot be given a reducer whose class cannot be found by name."""

    class Local(SignalReducer):
        types = (Signal,)

    reducer = Local()
    shmreduce.register_reducer(reducer)
    try:
        context: Any = multiprocessing.get_context(method)
        process = context.Process(target=what_holds_here)
        with (
            shmreduce.install(),
            pytest.raises(ReducerError, match=r"Local cannot be sent to the child"),
        ):
            process.start()
    finally:
        shmreduce.unregister_reducer(reducer)


PROGRAM = """
import multiprocessing
import os
import sys

import shmreduce


class Signal:
    def __init__(self, value):
        self.value = value


def rebuild(value):
    signal = Signal(value)
    signal.way = "reducer"
    return signal


class SignalReducer(shmreduce.Reducer):
    types = (Signal,)

    def reduce(self, obj, message):
        return rebuild, (obj.value,)


shmreduce.register_reducer(SignalReducer())


def answer(queue, signal):
    queue.put((signal.way, shmreduce.get_sharing_strategy()))


if __name__ == "__main__":
    context = multiprocessing.get_context(sys.argv[1])
    with shmreduce.install(strategy="file_system"):
        queue = context.SimpleQueue()
        process = context.Process(target=answer, args=(queue, Signal(1)))
        process.start()
        print(*queue.get())
        process.join()
"""


def output_of(program: str, folder: Path, *arguments: str) -> str:
    """Return what a program prints that is a file, so that its children import it."""
    script = folder / "script.py"
    script.write_text(program)
    return subprocess.run(
        [sys.executable, "-W", "error", str(script), *arguments],
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
        # A fork server looks there for what it preloads, not beside the script.
        cwd=folder,
    ).stdout


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_main_module_that_registers_in_every_process(method: str, tmp_path: Path) -> None:
    """A script whose top level registers a reducer is no conflict in its children."""
    assert output_of(PROGRAM, tmp_path, method).split() == ["reducer", "file_system"]


INSTALLED_AT_IMPORT = """
import multiprocessing
import os
import sys

import numpy as np
import shmreduce
from shmreduce.memory.inspection import process_state
from shmreduce.memory.runtime import current

kept = shmreduce.zeros(500_000)
shmreduce.install()


def answer(queue):
    queue.put(np.ones(500_000))
    family = current().family
    queue.put((family.identity, family.reserved == process_state().reserved > 0))


if __name__ == "__main__":
    context = multiprocessing.get_context(sys.argv[1])
    context.set_forkserver_preload(["__main__"] if "preload" in sys.argv else [])
    queue = context.SimpleQueue()
    process = context.Process(target=answer, args=(queue,))
    process.start()
    process.join()
    array, (family, booked) = queue.get(), queue.get()
    print(int(array.sum()), family == current().family.identity, booked)
"""


@pytest.mark.parametrize("how", ["fork", "spawn", "forkserver", "forkserver preload"])
def test_a_child_that_installs_at_import_is_of_its_parents_family(
    how: str, tmp_path: Path
) -> None:
    """What it has sent can be read when it has ended, and what it had reserved before counts."""
    output = output_of(INSTALLED_AT_IMPORT, tmp_path, *how.split())
    assert output.split() == ["500000", "True", "True"]


WITHOUT_ARRAYS = """
import sys

import shmreduce

UNNEEDED = {"importlib.metadata", "numpy", "pathlib", "pluggy"}


def look(connection):
    connection.send(sorted(UNNEEDED & sys.modules.keys()))


if __name__ == "__main__":
    context = shmreduce.get_context(sys.argv[1])
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=look, args=(there,))
    process.start()
    print(here.recv())
    process.join()
"""


@pytest.mark.parametrize(("method", "imported"), [("spawn", "[]"), ("forkserver", "['pluggy']")])
def test_a_child_that_is_sent_no_arrays_imports_nothing_for_them(
    method: str, imported: str, tmp_path: Path
) -> None:
    """Each would take as long as all else that a child needs; but a fork server imports what
    plugins need, once for all of its children.
    """
    assert output_of(WITHOUT_ARRAYS, tmp_path, method) == f"{imported}\n"


WITHOUT_CHANNELS = """
import sys

import numpy

import shmreduce


def look(array):
    unneeded = ("connection", "packets", "pickler", "pickling", "pool", "queues")
    print([name for name in unneeded if f"shmreduce.{name}" in sys.modules], array.sum())


if __name__ == "__main__":
    context = shmreduce.get_context("spawn")
    process = context.Process(target=look, args=(numpy.ones(100_000),))
    process.start()
    process.join()
"""


def test_a_child_that_is_given_no_channel_imports_none(tmp_path: Path) -> None:
    """Nor does it import what pickles messages, since it only receives its arguments."""
    assert output_of(WITHOUT_CHANNELS, tmp_path) == "[] 100000.0\n"


@pytest.mark.parametrize("children", [("forkserver", "file_descriptor")], indirect=True)
@pytest.mark.parametrize("own", [False, True], ids=["multiprocessing", "shmreduce"])
def test_a_look_for_lost_messages_while_a_child_starts(
    children: Children, monkeypatch: pytest.MonkeyPatch, own: bool
) -> None:
    """A child of the fork server has told its pid, and waits for what it is to do, while its
    parent looks which messages nobody will read: its arguments are not among those.
    """
    looked = []

    def look_and_open(*arguments: Any, **options: Any) -> Any:
        # What the standard library writes the process object to, by the sentinel's side.
        sentinel = inspect.stack()[1].frame.f_locals["self"].sentinel
        assert wait([sentinel], PATIENCE)
        runtime.current().give_up()
        looked.append(sentinel)
        return os.fdopen(*arguments, **options)

    monkeypatch.setattr(popen_forkserver, "open", look_and_open, raising=False)
    if own:
        children.context = shmreduce.get_context("forkserver")
    array = np.full(LENGTH, 7, np.uint8)
    assert children.call(sum_up, array) == 7 * LENGTH
    assert looked
