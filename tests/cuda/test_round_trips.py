"""Arrays of every kind arrive, without a copy, and where they belong."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from shmreduce_cuda import CudaDeviceError
from tests.cuda import actors as act
from tests.cuda.actors import actors, connect
from tests.memory.waiting import eventually

if TYPE_CHECKING:
    from tests.cuda.conftest import Pair, Standin

KINDS = ("legacy", "pool", "virtual")
BASE = np.arange(600.0).reshape(20, 30)
STRUCTURED = np.array([(1, 2.5), (3, 4.5)], dtype=[("a", "<i2"), ("b", "<f8")])


def trip(pair: Pair, name: str = "x") -> Any:
    """Send an array; return its values at the receiver."""
    pair.sender.ask(act.send, name)
    pair.receiver.ask(act.receive, name)
    return pair.receiver.ask(act.values, name)


@pytest.mark.parametrize("ordinal", [0, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_both_sides_see_each_others_writes(pair: Pair, kind: str, ordinal: int) -> None:
    """The receiver's array is the sender's memory, whatever kind and device it is of."""
    pair.sender.ask(act.make, "x", BASE, kind, ordinal)
    assert np.array_equal(trip(pair), BASE)
    pair.receiver.ask(act.set_values, "x", BASE + 1)
    assert np.array_equal(pair.sender.ask(act.values, "x"), BASE + 1)
    pair.sender.ask(act.set_values, "x", BASE + 2)
    assert np.array_equal(pair.receiver.ask(act.values, "x"), BASE + 2)


@pytest.mark.parametrize(
    "values",
    [
        np.array([True, False]),
        *(
            np.arange(5).astype(kind)
            for kind in ("i1", "u2", "i4", "u8", "f2", ">f4", "c8", "c16")
        ),
        np.array(["2020-01-01", "2021-02-03"], "M8[s]"),
        np.array([b"ab", b"c"]),
        np.array(["ab", "cde"]),
        STRUCTURED,
        np.array(3.5),
    ],
    ids=lambda values: str(values.dtype),
)
def test_types_of_elements(pair: Pair, values: Any) -> None:
    """Every type of fixed size arrives as what it is."""
    pair.sender.ask(act.make, "x", values)
    found = trip(pair)
    assert found.dtype == values.dtype
    assert found.shape == values.shape
    assert np.array_equal(found, values)


@pytest.mark.parametrize("shape", [(0,), (3, 0, 2)])
def test_arrays_without_elements(pair: Pair, shape: tuple[int, ...]) -> None:
    """They travel as shape and type alone: nothing is opened, nothing held."""
    pair.sender.ask(act.make, "x", np.empty(shape, "f4"))
    opened = pair.receiver.ask(act.stats).opened
    found = trip(pair)
    assert (found.shape, found.dtype) == (shape, np.dtype("f4"))
    assert pair.sender.ask(act.stats).exports == 0
    assert pair.receiver.ask(act.stats).opened == opened


KEYS: list[tuple[Any, ...]] = [
    (slice(5, None), slice(7, 20)),
    (slice(None, None, -1),),
    (slice(15, 2, -3), slice(None, None, -2)),
    (3,),
    (slice(None), 4),
    (19, 29),
    (None, slice(2, 3)),
]


@pytest.mark.parametrize("kind", KINDS)
def test_parts_arrive_at_their_place(pair: Pair, kind: str) -> None:
    """Slices, also those that run backwards, keep offset and strides, and stay parts."""
    pair.sender.ask(act.make, "x", BASE, kind)
    for number, key in enumerate(KEYS):
        pair.sender.ask(act.cut, f"part{number}", "x", *key)
        assert np.array_equal(trip(pair, f"part{number}"), BASE[key])
    pair.sender.ask(act.transpose, "turned", "x")
    assert np.array_equal(trip(pair, "turned"), BASE.T)
    assert pair.receiver.ask(act.stats).mappings == 1
    pair.sender.ask(act.set_values, "x", BASE + 1)
    assert np.array_equal(pair.receiver.ask(act.values, "part2"), (BASE + 1)[KEYS[2]])


def test_virtual_memory_of_several_pieces(pair: Pair) -> None:
    """An array over several pieces of virtual memory arrives whole, and so does a
    part that begins in the second.
    """
    values = np.arange(600_000.0)
    pair.sender.ask(act.make, "x", values, "virtual", 0, 3)
    assert np.array_equal(trip(pair), values)
    pair.sender.ask(act.cut, "late", "x", slice(400_000, 500_000))
    assert np.array_equal(trip(pair, "late"), values[400_000:500_000])


def test_the_receiver_without_the_library_gets_a_view(pair: Pair) -> None:
    """The view speaks the interface, version 3, and asks nobody to synchronise."""
    pair.sender.ask(act.make, "x", BASE)
    trip(pair)
    name, interface = pair.receiver.ask(act.describe, "x")
    assert name == "CudaArrayView"
    assert interface == {
        "version": 3,
        "shape": (20, 30),
        "typestr": "<f8",
        "data": False,
        "strides": None,
        "stream": None,
    }


@pytest.mark.parametrize("kind", KINDS)
def test_many_views_open_one_mapping(pair: Pair, kind: str) -> None:
    """A hundred views of one allocation open it once, and close it once, with the last."""
    pair.sender.ask(act.make, "x", BASE, kind)
    before = pair.receiver.ask(act.stats)
    names = [f"view{number}" for number in range(100)]
    for number, name in enumerate(names):
        pair.sender.ask(act.cut, name, "x", slice(number % 20, None))
    pair.sender.start(act.send, *names)
    pair.receiver.ask(act.receive, *names)
    pair.sender.finish()
    during = pair.receiver.ask(act.stats)
    assert (during.opened - before.opened, during.arrays, during.mappings) == (1, 100, 1)
    pair.receiver.ask(act.drop, *names[:-1])
    assert pair.receiver.ask(act.stats).closed == before.closed
    assert np.array_equal(pair.receiver.ask(act.values, names[-1]), BASE[99 % 20 :])
    pair.receiver.ask(act.drop, names[-1])
    assert pair.receiver.ask(act.stats).closed == before.closed + 1


def test_arrays_of_one_pool(pair: Pair) -> None:
    """The pool's descriptor is fetched once for all of its arrays that are in use."""
    names = ["a", "b", "c"]
    pair.sender.ask(act.make_in_pool, names, BASE)
    start = len(pair.standin.log())
    for name in names:
        assert np.array_equal(trip(pair, name), BASE)
    calls = pair.standin.calls(pair.receiver.pid, start)
    assert calls.count("cuMemPoolImportFromShareableHandle") == 1
    assert pair.sender.ask(act.stats).offers == 1
    pair.receiver.ask(act.drop)
    calls = pair.standin.calls(pair.receiver.pid, start)
    assert calls.count("cuMemPoolDestroy") == 1


def test_memory_that_is_freed_and_allocated_at_the_same_address(pair: Pair) -> None:
    """What is sent next from an address that was sent before is what is there then."""
    addresses = set()
    for number in range(10):
        pair.sender.ask(act.make, "x", BASE + number)
        addresses.add(pair.sender.ask(act.address, "x"))
        assert np.array_equal(trip(pair), BASE + number)
        for actor in (pair.sender, pair.receiver):
            actor.ask(act.drop)
        act.nothing_is_out(pair.sender)
    assert len(addresses) < 10


def test_no_context_is_left_behind(pair: Pair) -> None:
    """Every context that was pushed is popped: libraries find the one they had."""
    pair.sender.ask(act.make, "x", BASE)
    trip(pair)
    pair.receiver.ask(act.drop)
    assert pair.sender.ask(act.context_depth) == 0
    assert pair.receiver.ask(act.context_depth) == 0


def put_in_queue(name: str) -> Any:
    import multiprocessing

    queue: Any = multiprocessing.get_context("spawn").Queue()
    queue.put(act.arrays[name])
    # The same process gets it: CUDA cannot open one's own memory.
    act.arrays["back"] = queue.get(timeout=30)
    queue.close()
    queue.join_thread()


def test_a_queue_pickles_in_a_thread_without_a_context(pair: Pair) -> None:
    """An array that goes through a queue's feeder thread, and comes back to its own
    process, is the same memory.
    """
    pair.sender.ask(act.make, "x", BASE)
    pair.sender.ask(act.cut, "part", "x", slice(5, None, 2))
    pair.sender.ask(put_in_queue, "part")
    assert np.array_equal(pair.sender.ask(act.values, "back"), BASE[5::2])
    assert pair.sender.ask(act.stats).opened == 0
    pair.sender.ask(act.set_values, "x", BASE * 2)
    assert np.array_equal(pair.sender.ask(act.values, "back"), BASE[5::2] * 2)
    # The memory stays with the array that came back, though it is not held for others.
    eventually(lambda: not pair.sender.ask(act.stats).exports, "nothing is held")
    pair.sender.ask(act.drop, "x", "part")
    assert np.array_equal(pair.sender.ask(act.values, "back"), BASE[5::2] * 2)


def test_what_was_received_can_be_sent_back(pair: Pair) -> None:
    """A part of a received array, sent back to its origin, is the origin's memory."""
    pair.sender.ask(act.make, "x", BASE)
    trip(pair)
    pair.receiver.ask(act.send, "x")
    pair.sender.ask(act.receive, "again")
    assert pair.sender.ask(act.address, "again") == pair.sender.ask(act.address, "x")
    assert pair.sender.ask(act.stats).opened == 0


def test_devices_are_found_by_uuid(standin: Standin, monkeypatch: pytest.MonkeyPatch) -> None:
    """A receiver whose devices are numbered otherwise opens the right one, and makes a
    context on no other; one that does not see the device is told which it is.
    """
    with actors(1) as (sender,):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
        with actors(1) as (turned,):
            connect(sender, turned)
            for ordinal in (0, 1):
                sender.ask(act.make, "x", BASE + ordinal, "legacy", ordinal)
                sender.ask(act.send, "x")
                turned.ask(act.receive, f"x{ordinal}")
                assert np.array_equal(turned.ask(act.values, f"x{ordinal}"), BASE + ordinal)
                assert "on device " + str(1 - ordinal) in turned.ask(told, f"x{ordinal}")
                retained = standin.calls(turned.pid).count("cuDevicePrimaryCtxRetain")
                assert retained == ordinal + 1
            turned.ask(act.drop)
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
        with actors(1) as (blind,):
            connect(sender, blind, "blind")
            sender.ask(act.send_to, "blind", "x")
            with pytest.raises(CudaDeviceError, match="CUDA_VISIBLE_DEVICES") as caught:
                blind.ask(act.receive_from, "blind", "x")
            assert caught.value.uuid.startswith("GPU-5354414e")
            assert len(caught.value.visible) == 1
            del caught
            act.nothing_is_out(sender)


def told(name: str) -> str:
    return repr(act.arrays[name])
