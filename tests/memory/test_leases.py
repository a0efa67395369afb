"""A message is a lease: who may load it, how often, and what ends it."""

from __future__ import annotations

import contextlib
import io
import pickle
import threading
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import pytest

import shmreduce
from shmreduce import SegmentFile
from shmreduce.memory import locks, runtime
from shmreduce.memory.inspection import process_state
from shmreduce.memory.layout import BY_VALUE, CHUNK_SLOTS, IMPORTERS
from shmreduce.memory.segment import Segment
from shmreduce.testing.processes import OtherProcess
from tests.memory.waiting import eventually

pytestmark = pytest.mark.usefixtures("installed")

SIZE = 10_000


def dumps(obj: object) -> bytes:
    return bytes(ForkingPickler.dumps(obj))


def loads(data: bytes) -> Any:
    return ForkingPickler.loads(data)


def load_or_name_error(data: bytes) -> Any:
    """Return the sum of what was loaded, or the error's name."""
    try:
        loaded = loads(data)
    except shmreduce.ShmreduceError as error:
        return type(error).__name__
    arrays = loaded if isinstance(loaded, tuple) else (loaded,)
    return float(sum(array.sum() for array in arrays))


def test_each_process_that_may_have_a_segment_open_can_send_its_blocks_on() -> None:
    """Each takes lease slots for itself: there are enough for as many as can have it open."""
    data = dumps(np.arange(SIZE))
    segment = runtime.current().heap(BY_VALUE).segments[0]
    assert segment.layout.slots // CHUNK_SLOTS >= IMPORTERS
    with contextlib.ExitStack() as opened:
        for _ in range(150):
            # As another process would open it.
            file = SegmentFile(locks.reopen(segment.fd), None)
            other = Segment.adopt(file, segment.token, segment.strategy)
            opened.callback(other.close)
            other._take_slot()
    loads(data)


def test_a_by_value_message_is_loaded_once() -> None:
    """The second load of a by-value message is an error that names segment and block."""
    data = dumps(np.arange(SIZE))
    first = loads(data)
    with pytest.raises(shmreduce.AlreadyLoadedError) as caught:
        loads(data)
    assert caught.value.block >= 0
    assert len(caught.value.segment) == 32
    assert (first == np.arange(SIZE)).all()


def test_a_second_load_fails_also_when_the_first_array_is_gone() -> None:
    """Loading again after the first loader's array has died is an error, not other bytes."""
    data = dumps(np.arange(SIZE))
    assert loads(data).sum() == np.arange(SIZE).sum()
    with pytest.raises(shmreduce.StaleHandleError):
        loads(data)


def handles_of(data: bytes) -> list[bytes]:
    """Return the handles in a pickled message, in order."""
    found: list[bytes] = []

    class Reader(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            if name.startswith("rebuild_"):
                return lambda handle, *_: found.append(handle)
            return super().find_class(module, name)

    Reader(io.BytesIO(data)).load()
    return found


def test_a_failed_second_load_leaves_the_first_loaders_message_alone() -> None:
    """Who comes second to a message of two arrays does not take the second array away."""
    data = dumps((np.arange(SIZE), np.ones(SIZE)))
    first_handle, second_handle = handles_of(data)
    # The first loader is half through.
    first = shmreduce.import_block(first_handle)
    assert load_or_name_error(data) == "AlreadyLoadedError"
    second = shmreduce.import_block(second_handle)
    assert first.nbytes == second.nbytes == 8 * SIZE


@pytest.mark.parametrize("mode", ["rw", "ro"])
def test_a_shared_message_is_loaded_often(mode: Any) -> None:
    """Every load of a message with a shared array gives the same memory."""
    array = shmreduce.share(np.arange(SIZE), mode=mode)
    data = dumps(array)
    loaded = [loads(data) for _ in range(3)]
    array[7] = -1
    assert [int(each[7]) for each in loaded] == [-1, -1, -1]


def test_a_cow_message_loads_into_private_pages_each_time() -> None:
    """Loads of a ``cow`` array see its bytes and keep their writes to themselves."""
    array = shmreduce.share(np.arange(SIZE), mode="cow")
    data = dumps(array)
    one, other = loads(data), loads(data)
    one[0] = 5
    other[0] = 6
    assert (int(array[0]), int(one[0]), int(other[0])) == (0, 5, 6)


def test_a_shared_message_is_stale_once_nobody_has_the_array() -> None:
    """Once the block of a shared array has been taken back its messages are stale."""
    array = shmreduce.share(np.arange(SIZE))
    data = dumps(array)
    del array
    assert loads(data)[1] == 1
    process_state()
    with pytest.raises(shmreduce.StaleHandleError):
        loads(data)


def test_a_reused_block_does_not_answer_to_old_messages() -> None:
    """A message of a block's former life does not load what lives there now."""
    array = shmreduce.share(np.zeros(SIZE))
    address = array.__array_interface__["data"][0]
    data = dumps(array)
    del array
    loads(data)
    successor = shmreduce.share(np.ones(SIZE))
    assert successor.__array_interface__["data"][0] == address
    with pytest.raises(shmreduce.StaleHandleError):
        loads(data)
    assert (successor == 1).all()


def test_one_pickled_message_goes_to_one_of_several_processes() -> None:
    """Of three processes that get the same by-value message one has it, whole;
    the others get an error.
    """
    pair = (np.arange(SIZE, dtype=float), np.ones(SIZE))
    expected = float(pair[0].sum() + pair[1].sum())
    with OtherProcess("fork") as a, OtherProcess("fork") as b, OtherProcess("fork") as c:
        others = [a, b, c]
        for _ in range(20):
            data = dumps(pair)
            for other in others:
                other._connection.send((load_or_name_error, (data,)))
            answers = []
            for other in others:
                assert other._connection.poll(30)
                answers.append(other._connection.recv()[1])
            assert answers.count(expected) == 1, answers
            assert answers.count("AlreadyLoadedError") == 2, answers


def test_one_pickled_message_of_a_shared_array_goes_to_all() -> None:
    """All processes that get the same message of a shared array have the array."""
    array = shmreduce.share(np.ones(SIZE))
    data = dumps(array)
    with OtherProcess("fork") as a, OtherProcess("spawn") as b:
        assert a.ask(load_or_name_error, data) == SIZE
        assert b.ask(load_or_name_error, data) == SIZE
        assert a.ask(load_or_name_error, data) == SIZE


def test_threads_that_load_one_message_do_not_share_the_array() -> None:
    """Of many threads that load a by-value message at once exactly one has it."""
    for _ in range(20):
        data = dumps(np.ones(SIZE))
        answers: list[Any] = []
        gate = threading.Barrier(6)

        def load(
            data: bytes = data, gate: threading.Barrier = gate, answers: list[Any] = answers
        ) -> None:
            gate.wait(30)
            answers.append(load_or_name_error(data))

        threads = [threading.Thread(target=load) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert answers.count(float(SIZE)) == 1
        assert answers.count("AlreadyLoadedError") == 5


def test_thousands_of_messages_of_one_block_end_one_by_one() -> None:
    """A block with 3,000 unread messages is free when, and only when, all were loaded."""
    array = shmreduce.share(np.ones(SIZE))
    messages = [dumps(array) for _ in range(3000)]
    del array
    before = process_state().out
    for number, data in enumerate(reversed(messages)):
        if number % 500 == 0:
            assert process_state().out == before
        assert loads(data)[0] == 1
    eventually(lambda: process_state().out == before - 1, "the block is free")


def test_a_message_that_cannot_be_pickled_leaves_nothing() -> None:
    """An unpicklable object behind arrays in a message gives their blocks back."""
    shared = shmreduce.share(np.ones(SIZE))
    before = process_state()
    for _ in range(5):
        with pytest.raises(TypeError, match="pickle"):
            dumps([np.ones(SIZE), shared, np.zeros(3 * SIZE), threading.Lock()])
    after = process_state()
    assert (after.out, after.unread) == (before.out, before.unread)


class FailsToLoad:
    def __reduce__(self) -> Any:
        return int, ("no number",)


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_message_that_cannot_be_unpickled_is_released(place: int) -> None:
    """Whatever stands before or behind the object that fails, all blocks are free."""
    shared = shmreduce.share(np.ones(SIZE))
    items: list[Any] = [np.ones(SIZE), shared]
    items.insert(place, FailsToLoad())
    before = process_state()
    data = dumps(items)
    assert process_state().unread == before.unread + 2
    with pytest.raises(ValueError, match="no number"):
        loads(data)
    after = process_state()
    assert (after.out, after.unread) == (before.out, before.unread)


def test_an_error_keeps_no_hold_of_the_rest_of_a_message() -> None:
    """A stale array in a message does not keep the others of the message alive."""
    doomed = shmreduce.share(np.ones(SIZE))
    data_of_doomed = dumps(doomed)

    class Nested:
        def __reduce__(self) -> Any:
            return loads, (data_of_doomed,)

    data = dumps([np.ones(SIZE), Nested(), np.ones(SIZE)])
    del doomed
    loads(data_of_doomed)
    process_state()
    before = process_state().unread
    with pytest.raises(shmreduce.StaleHandleError):
        loads(data)
    assert process_state().unread == before - 2


@pytest.mark.parametrize("nbytes", [-3, 3.5, "3", None])
def test_an_impossible_number_of_bytes(nbytes: Any) -> None:
    """It is refused by name, wherever a reducer asks for memory, and nothing is held."""
    before = process_state()
    message = shmreduce.Message()
    for ask in (message.allocate, message.allocate_part, shmreduce.allocate):
        with pytest.raises(shmreduce.ConfigurationError, match="nbytes"):
            ask(nbytes)
    assert message.is_empty
    assert process_state().reserved == before.reserved


def test_numbers_of_bytes_may_be_of_numpy() -> None:
    """What NumPy says of shapes and sizes is an integer as well."""
    nbytes: Any = np.prod((100, 10))
    message = shmreduce.Message()
    taken = message.allocate(nbytes)
    assert taken is not None
    view, handle = taken
    view[:] = bytes(1000)
    message.commit()
    assert shmreduce.import_block(handle).nbytes == 1000
    assert shmreduce.allocate(nbytes).nbytes == 1000
