"""Managers of the contexts of shmreduce, without an installation."""

from __future__ import annotations

import multiprocessing
import os
from multiprocessing import managers as standard
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import shmreduce
from shmreduce.managers import BaseManager, SyncManager
from tests.conftest import PATIENCE, START_METHODS

if TYPE_CHECKING:
    from collections.abc import Iterator
    from multiprocessing.connection import Connection

SIZE = 1 << 20


def is_shared_memory(array: Any) -> bool:
    """Whether an array lies in a block of shmreduce."""
    while isinstance(array, np.ndarray):
        array = array.base
    return shmreduce.find_block(array) is not None


class Tray:
    """What a manager's process has, in the tests."""

    def __init__(self) -> None:
        self.array: Any = None

    def put(self, array: Any) -> int:
        """Keep an array; return the pid of the manager's process if it is in shared memory."""
        self.array = array
        return os.getpid() if is_shared_memory(array) else 0

    def get(self) -> Any:
        return self.array

    def write(self, value: float) -> None:
        self.array[:] = value

    def get_something_unpicklable(self) -> Any:
        return lambda: self.array


class TrayManager(SyncManager):
    """Has one more type than others, as programs define them."""


TrayManager.register("Tray", Tray)


def trays(address: Any = None) -> Any:
    return TrayManager(address, ctx=shmreduce.get_context("fork"))


@pytest.fixture
def manager() -> Iterator[Any]:
    with trays() as manager:
        yield manager


def test_arguments_may_be_given_by_their_places() -> None:
    """As the standard class takes them; arrays are shared all the same."""
    started: Any = TrayManager(None, b"key", "pickle", shmreduce.get_context("fork"))
    with started as manager:
        assert manager.Tray().put(np.zeros(SIZE)) == manager._process.pid


class BareManager(BaseManager):
    """Has nothing but its own type, as in the examples of the standard library."""


BareManager.register("Tray", Tray)


def test_managers_without_types_share_arrays() -> None:
    """So do those that are made of a BaseManager, and who connects to them."""
    started: Any = BareManager(authkey=b"key", ctx=shmreduce.get_context("fork"))
    with started as manager:
        connected: Any = BareManager(manager.address, b"key")
        connected.connect()
        for each in (manager, connected):
            tray = each.Tray()
            array = shmreduce.zeros(SIZE // 8)
            assert tray.put(array)
            tray.write(4.0)
            assert array[-1] == 4
            assert shmreduce.is_shared(tray.get())
            assert not hasattr(each, "list")


def test_another_serializer_is_that_of_the_standard_library() -> None:
    """A manager that is told to talk otherwise can be connected to by one that is as well."""
    context = shmreduce.get_context("fork")
    named: Any = {"authkey": b"key", "serializer": "xmlrpclib"}
    started: Any = BareManager(ctx=context, **named)
    with started as manager:
        connected: Any = standard.BaseManager(manager.address, **named)
        connected.connect()
        assert manager.Tray().get() is None


def test_arrays_go_there_and_back_by_shared_memory(manager: Any) -> None:
    """A manager's process and its users see blocks, not copies in pickles."""
    tray = manager.Tray()
    array = np.arange(SIZE / 8)
    assert tray.put(array) not in {0, os.getpid()}
    received = tray.get()
    assert is_shared_memory(received)
    np.testing.assert_array_equal(received, array)


def test_by_value_is_by_value(manager: Any) -> None:
    """What one side writes into an array that was not shared does not show at the other."""
    tray = manager.Tray()
    array = np.zeros(SIZE // 8)
    tray.put(array)
    array[:] = 1
    assert tray.get()[0] == 0
    first = tray.get()
    first[:] = 2
    tray.write(3.0)
    assert (first[0], tray.get()[0]) == (2, 3)


def test_shared_arrays_stay_shared(manager: Any) -> None:
    """What the manager's process writes into a shared array shows here."""
    tray = manager.Tray()
    array = shmreduce.zeros(SIZE // 8)
    tray.put(array)
    tray.write(4.0)
    assert array[-1] == 4
    assert shmreduce.is_shared(tray.get())


@pytest.mark.parametrize("method", START_METHODS)
def test_manager_of_a_context(method: str) -> None:
    """The managers that ``Manager()`` makes share arrays, however they are started."""
    with shmreduce.get_context(method).Manager() as manager:
        assert isinstance(manager, SyncManager)
        assert isinstance(manager, BaseManager)
        shelf = manager.dict(array=np.zeros(SIZE // 8))
        assert is_shared_memory(shelf["array"])
        queue = manager.Queue()
        queue.put(np.ones(SIZE // 8))
        received = queue.get()
        assert is_shared_memory(received)
        assert received.sum() == SIZE // 8


def fill(tray: Any, connection: Connection) -> None:
    connection.send(bool(tray.put(np.full(SIZE // 8, 5.0))))


def test_proxies_can_be_given_to_processes_of_multiprocessing(manager: Any) -> None:
    """A child that has never heard of shmreduce can use a proxy; what it puts in outlives it."""
    tray = manager.Tray()
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=fill, args=(tray, there))
    process.start()
    assert here.poll(PATIENCE)
    assert here.recv()
    process.join(PATIENCE)
    assert process.exitcode == 0
    assert tray.get()[-1] == 5
    here.close()
    there.close()


def test_over_tcp_the_ordinary_way() -> None:
    """With a port as its address a manager's messages are ordinary pickles."""
    with trays(("127.0.0.1", 0)) as manager:
        tray = manager.Tray()
        assert tray.put(np.ones(SIZE // 8)) == 0
        received = tray.get()
        assert not is_shared_memory(received)
        assert received.sum() == SIZE // 8


def test_errors_are_those_of_the_standard_managers(manager: Any) -> None:
    """A result that cannot be pickled is a RemoteError, and the manager goes on."""
    tray = manager.Tray()
    with pytest.raises(standard.RemoteError):
        tray.get_something_unpicklable()
    with pytest.raises(TypeError):
        tray.put()
    assert tray.get() is None


def test_managers_of_multiprocessing_are_as_ever() -> None:
    """A manager of the standard library pickles arrays itself, beside one of ours."""
    with (
        shmreduce.get_context("fork").Manager(),
        multiprocessing.get_context("fork").Manager() as manager,
    ):
        assert not is_shared_memory(manager.list([np.zeros(SIZE // 8)])[0])


@pytest.mark.usefixtures("shmreduce_no_leaks")
def test_nothing_is_left() -> None:
    """Arrays that went to a manager and back leave nothing when it has ended."""
    with trays() as manager:
        tray = manager.Tray()
        for _ in range(3):
            tray.put(np.zeros(SIZE // 8))
            tray.get()
        del tray


@pytest.mark.parametrize("module", [shmreduce, multiprocessing])
@pytest.mark.parametrize("kind", ["Queue", "SimpleQueue", "JoinableQueue"])
def test_a_manager_can_serve_a_queue(kind: str, module: Any) -> None:
    """Also in another process than the queue's maker, which cannot make the queue's locks."""
    queue = getattr(shmreduce, kind)()

    class Serving(module.managers.BaseManager):  # type: ignore[misc]
        pass

    Serving.register("queue", callable=lambda: queue)
    with Serving(ctx=module.get_context("fork")) as manager:
        manager.queue().put(7)
        assert queue.get() == 7
        assert "_rlock" not in dir(queue)
        assert queue._rlock is queue._rlock
        assert "_rlock" in dir(queue)
    queue.close()
