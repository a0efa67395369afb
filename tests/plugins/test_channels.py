"""Arrays through the channels of multiprocessing, by every start method and strategy."""

from __future__ import annotations

import pickle
import threading
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.connection import Client, Listener
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from numpy import ma

import shmreduce

if TYPE_CHECKING:
    from tests.conftest import Children

COUNT = 20_000
PATIENCE = 30.0


def samples() -> dict[str, Any]:
    """Return arrays and views of many kinds, each above the inline limit where it can be."""
    numbers = np.arange(float(COUNT))
    read_only = numbers.copy()
    read_only.flags.writeable = False
    return {
        "float": numbers,
        "small": numbers[:3],
        "empty": numbers[:0],
        "zero dimensions": np.array(5.0),
        "slice": numbers[::3],
        "transposed": numbers.reshape(100, -1).T,
        "read-only": read_only,
        "big-endian": numbers.astype(">f4"),
        "text": np.array(["short", "longer"] * (COUNT // 2)),
        "dates": np.datetime64("2000-01-01") + np.arange(COUNT).astype("m8[D]"),
        "records": numbers.view([("x", "f4"), ("y", "i4")]).view(np.recarray),
        "masked": ma.masked_array(numbers, mask=numbers % 2 == 0),
        "objects": np.array([None, "text"] * 3, object),
        "memoryview": memoryview(bytearray(range(256)) * 256),
        "small memoryview": memoryview(b"abc"),
    }


def digest(obj: Any) -> Any:
    """Return the contents of a sample in a form that can be compared."""
    if isinstance(obj, memoryview):
        return obj.format, obj.shape, obj.readonly, obj.tobytes()
    if isinstance(obj, ma.MaskedArray):
        return digest(obj.data), digest(ma.getmaskarray(obj))
    if obj.dtype.hasobject:
        return obj.tolist()
    return type(obj).__name__, obj.dtype.descr, obj.shape, obj.flags.writeable, obj.tobytes()


def digests(objects: dict[str, Any]) -> dict[str, Any]:
    return {name: digest(obj) for name, obj in objects.items()}


def echo(obj: Any) -> Any:
    return obj


def echo_digests(objects: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what arrived, and what it looked like on arrival."""
    return objects, digests(objects)


def test_arguments_and_pipes(children: Children) -> None:
    """Everything arrives as an argument of a process, and comes back by a pipe."""
    originals = samples()
    returned, seen = children.call(echo_digests, originals)
    assert seen == digests(originals)
    assert digests(returned) == digests(originals)


def relay(source: Any, target: Any) -> None:
    while (item := source.get()) is not None:
        target.put(item)
    # The parent says when it has read everything.
    source.get()


@pytest.mark.parametrize("kind", ["Queue", "SimpleQueue"])
def test_queues(children: Children, kind: str) -> None:
    """Everything goes through queues, there and back."""
    there: Any = getattr(children.context, kind)()
    back: Any = getattr(children.context, kind)()
    process = children.start(relay, there, back)
    for _ in range(3):
        originals = samples()
        there.put(originals)
        assert digests(back.get()) == digests(originals)
    there.put(None)
    there.put(None)
    children.join(process)
    for queue in (there, back):
        queue.close()
        if kind == "Queue":
            queue.join_thread()


def fill(number: int) -> Any:
    buffer.fill(number)
    return buffer


buffer = np.zeros(COUNT)


def double(array: Any) -> Any:
    array *= 2
    return array


def test_pool(children: Children) -> None:
    """A worker that returns the same buffer again and again returns different arrays."""
    context: Any = children.context
    with context.Pool(2) as pool:
        filled = pool.map(fill, range(6), chunksize=1)
        doubled = pool.map(double, [np.ones(COUNT), shmreduce.ones(COUNT)])
        pool.close()
        pool.join()
    assert [array[0] for array in filled] == [0, 1, 2, 3, 4, 5]
    assert [array[-1] for array in filled] == [0, 1, 2, 3, 4, 5]
    assert [array[0] for array in doubled] == [2, 2]


def test_executor(children: Children) -> None:
    """Arrays go to and from the workers of an executor."""
    with ProcessPoolExecutor(2, mp_context=children.context) as executor:
        originals = samples()
        assert digests(executor.submit(echo, originals).result(PATIENCE)) == digests(originals)


def test_manager(children: Children) -> None:
    """Arrays pass through a manager, more than once, to whoever asks."""
    context: Any = children.context
    with context.Manager() as manager:
        originals = samples()
        held = manager.list([originals])
        first, second = held[0], held[0]
        assert digests(first) == digests(originals)
        first["float"][0] = -1
        assert digests(second) == digests(originals)


def write(array: Any, index: int, value: float) -> None:
    array[index] = value


def test_shared_arrays_alias_both_ways(children: Children) -> None:
    """Writes of parent and child show on the other side, in views as well."""
    shared = shmreduce.zeros((10, 10))
    children.call(write, shared, 0, 1.0)
    children.call(write, shared.T[5], 7, 2.0)
    assert shared[0].tolist() == [1.0] * 10
    assert shared[7, 5] == 2.0
    returned = children.call(echo, shared[:, 5])
    shared[7, 5] = 3.0
    assert returned[7] == 3.0
    returned[0] = 4.0
    assert shared[0, 5] == 4.0


def write_and_read(front: Any, back: Any) -> float:
    front[50] = 7
    return float(back[10])


def test_private_views_among_arguments_share_their_pages(children: Children) -> None:
    """Views of a ``cow`` array that a process gets as arguments are views of the same pages."""
    shared = shmreduce.zeros(100, mode="cow")
    assert children.call(write_and_read, shared[:60], shared[40:]) == 7


def test_shared_memoryviews_alias_both_ways(children: Children) -> None:
    """A memoryview of shared memory is one everywhere."""
    shared = shmreduce.share(memoryview(bytes(100)))
    children.call(write, shared[::-1], 0, 7)
    assert shared[99] == 7


def keep_and_send(first: Any, second: Any) -> None:
    """Send on what came, and end: the middle of a chain that is gone."""
    second.send(first.recv())
    first.recv()


def test_through_a_process_that_is_gone(children: Children) -> None:
    """An array sent on by a process that has ended since is its receiver's all the same."""
    context: Any = children.context
    here, middle_in = context.Pipe()
    middle_out, end = context.Pipe()
    process = children.start(keep_and_send, middle_in, middle_out)
    middle_in.close()
    middle_out.close()
    shared = shmreduce.ones(COUNT)
    here.send((np.arange(float(COUNT)), shared))
    assert end.poll(PATIENCE)
    here.send("end")
    children.join(process)
    by_value, again = end.recv()
    assert by_value.sum() == np.arange(float(COUNT)).sum()
    again[0] = 5
    assert shared[0] == 5
    here.close()
    end.close()


def load(message: bytes) -> Any:
    return ForkingPickler.loads(message)


def test_one_message_for_several(children: Children) -> None:
    """One pickled message given to several: each gets the array or a named error."""
    message = bytes(ForkingPickler.dumps(np.arange(float(COUNT))))
    outcomes = []
    for _ in range(3):
        try:
            outcomes.append(children.call(load, message).sum())
        except shmreduce.ShmreduceError as error:
            outcomes.append(type(error))
    expected = np.arange(float(COUNT)).sum()
    assert outcomes[0] == expected
    assert all(
        outcome == expected
        or (isinstance(outcome, type) and issubclass(outcome, shmreduce.ShmreduceError))
        for outcome in outcomes[1:]
    )


def test_over_tcp_plugins_are_not_needed() -> None:
    """To another host arrays go as if shmreduce were not there: nothing of it is named."""
    arrays = [obj for obj in samples().values() if not isinstance(obj, memoryview)]
    received: list[bytes] = []

    def serve() -> None:
        with listener.accept() as connection:
            received.append(connection.recv_bytes())

    with shmreduce.install(), Listener(("localhost", 0)) as listener:
        server = threading.Thread(target=serve)
        server.start()
        with Client(listener.address) as connection:
            connection.send([*arrays, shmreduce.ones(COUNT)])
            server.join(PATIENCE)
    assert b"shmreduce" not in received[0]
    for original, copy in zip(arrays, pickle.loads(received[0]), strict=False):
        assert np.array_equal(np.asarray(original), np.asarray(copy))
