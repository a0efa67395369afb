"""Cases that check whether arrays arrive: round trips, order, refusals, lifetimes.

May import public names of :mod:`shmreduce`, the plugin, and ``lab``,
``outcomes`` and ``partner`` of this package.
"""

from __future__ import annotations

import multiprocessing
import time
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import numpy as np

import shmreduce_cuda
from shmreduce_cuda.verify import partner as far
from shmreduce_cuda.verify.lab import DeviceArray, Stream, read, write
from shmreduce_cuda.verify.outcomes import Case, Scale, expect
from shmreduce_cuda.verify.partner import eventually, free_bytes, installed, partner

__all__ = ["CASES"]

_SHAREABLE = ("legacy", "pool", "virtual")
_RECLAIM_SECONDS = 1.0
_BUSY_SECONDS = 0.02
"""How long a stream is busy: longer than any message takes."""
_FEWEST_FILLS, _MOST_FILLS = 20, 1000


def _nothing_is_out() -> float:
    return eventually(lambda: not shmreduce_cuda.stats().exports, "what was sent is let go of")


def _round_trip(_: Scale) -> dict[str, Any]:
    base = np.arange(600.0).reshape(20, 30)
    both = (slice(15, 2, -3), slice(None, 20, -2))
    keys: tuple[Any, ...] = (slice(None), slice(3, 9), (slice(None, None, -1), 4), both)
    tried = 0
    with installed(), partner() as other:
        for kind in _SHAREABLE:
            for dtype in ("?", "i1", "u2", "i4", "u8", "f2", "f4", "f8", "c8", "c16"):
                host = base.astype(dtype)
                array = DeviceArray.of(host, kind)
                for key in keys:
                    other.ask(far.keep, "x", array[key])
                    found = other.ask(far.values, "x")
                    expect(np.array_equal(found, host[key]), f"{kind} {dtype} {key} arrives wrong")
                    tried += 1
                other.ask(far.keep, "x", array)
                other.ask(far.set_values, "x", host[::-1].copy())
                expect(np.array_equal(read(array), host[::-1]), f"{kind}: writes are not seen")
                other.ask(far.drop)
            empty = DeviceArray.of(np.empty((0, 3), "f4"), "legacy")
            other.ask(far.keep, "x", empty)
            expect(other.ask(far.values, "x").shape == (0, 3), "an empty array arrives wrong")
            other.ask(far.drop)
        del array, empty
        _nothing_is_out()
    return {"round_trips": tried}


def _views(_: Scale) -> dict[str, Any]:
    array = DeviceArray.of(np.arange(1000.0))
    with installed(), partner() as other:
        for number in range(100):
            other.ask(far.keep, f"view{number}", array[number:])
        during = other.ask(far.own_stats)
        other.ask(far.drop)
        after = other.ask(far.own_stats)
    expect((during.opened, during.mappings) == (1, 1), f"{during.opened} mappings were opened")
    expect(after.closed == 1, f"{after.closed} mappings were closed")
    return {"opened": during.opened, "closed": after.closed}


def _again(_: Scale) -> dict[str, Any]:
    """Send arrays of the same memory one after another, to a receiver that drops each."""
    count = 20
    with installed(), partner() as other:
        array = DeviceArray.of(np.arange(1000.0))
        for _number in range(count):
            other.ask(far.keep, "x", array)
            other.ask(far.drop_only)
        opened = other.ask(far.own_stats).opened
        del array
        seconds = eventually(lambda: not other.ask(far.own_stats).mappings, "it is closed")
        _nothing_is_out()
    expect(opened < count, f"the memory was opened {opened} times")
    return {"sends": count, "opened": opened, "closed_after": round(seconds, 3)}


def _refusals(_: Scale) -> dict[str, Any]:
    figures = {}
    with installed():
        for kind in ("managed", "host", "default pool", "private virtual"):
            array = DeviceArray.of(np.arange(8.0), kind)
            try:
                shmreduce_cuda.share(array)
            except shmreduce_cuda.CudaMemoryError as error:
                figures[kind] = error.kind
        expect(len(figures) == 4, f"refused are only {sorted(figures)}")
    return figures


def _loads(_: Scale) -> dict[str, Any]:
    host = np.arange(1000.0)
    with installed(), partner() as first, partner() as second:
        array = DeviceArray.of(host)
        shared = shmreduce_cuda.share(array)
        message = bytes(ForkingPickler.dumps(shared))
        own: Any = ForkingPickler.loads(message)
        expect(np.array_equal(read(own), host), "the same process gets something else")
        for other in (first, second, first):
            other.ask(far.keep_loaded, "x", message)
            expect(
                np.array_equal(other.ask(far.values, "x"), host), "a loader gets something else"
            )
        back = first.ask(far.send_back, "x")
        pointers = [each.__cuda_array_interface__["data"][0] for each in (array, back)]
        expect(pointers[0] == pointers[1], "what comes back is elsewhere")
        second.ask(far.keep, "forwarded", back)
        del array, shared, own, back
        for other in (first, second):
            other.ask(far.drop)
        _nothing_is_out()
    return {}


def _addresses(scale: Scale) -> dict[str, Any]:
    addresses = set()
    count = max(10, scale.trials // 20)
    with installed(), partner() as other:
        for number in range(count):
            array = DeviceArray.of(np.full(1000, number))
            addresses.add(array.pointer)
            other.ask(far.keep, "x", array)
            del array
            found = other.ask(far.values, "x")
            expect(set(found) == {number}, f"send {number} arrives as {set(found)}")
            other.ask(far.drop)
            shmreduce_cuda.collect()
    return {"sends": count, "addresses": len(addresses)}


def _order(scale: Scale) -> dict[str, Any]:
    """Send while a non-blocking stream is busy for a long time."""
    stale = {"send": 0, "share": 0, "queue": 0}
    with installed(), partner() as other:
        array = DeviceArray.of(np.zeros(scale.busy // 4, "u4"))
        stream = Stream(0)
        times = _times(stream, array)
        queue: Any = multiprocessing.get_context("spawn").Queue()
        for number in range(1, scale.trials + 1):
            way = ("send", "share", "queue")[number % 3]
            stream.fill(array.memory, number - 1, times=times)
            stream.fill(array.memory, number)
            if way == "queue":
                # The feeder thread pickles it. This process gets its own memory back.
                queue.put(array[-4:])
                found = read(queue.get(timeout=far.PATIENCE))
            else:
                end = array[-4:]
                sent = shmreduce_cuda.share(end, stream.handle.value) if way == "share" else end
                other.ask(far.keep, "x", sent)
                found = other.ask(far.values, "x")
                del sent, end
            stale[way] += set(found) != {number}
            stream.wait()
        other.ask(far.drop)
        queue.close()
        queue.join_thread()
        del array
    expect(not sum(stale.values()), f"stale reads: {stale}")
    return {"trials": scale.trials, "stale": stale, "fills": times}


def _times(stream: Stream, array: DeviceArray) -> int:
    """Return how often a stream must fill an array to be busy for longer than a message takes."""
    stream.fill(array.memory, 0, times=_FEWEST_FILLS)
    stream.wait()
    began = time.perf_counter()
    stream.fill(array.memory, 0, times=_FEWEST_FILLS)
    stream.wait()
    wanted = _FEWEST_FILLS * _BUSY_SECONDS / (time.perf_counter() - began)
    return min(_MOST_FILLS, max(_FEWEST_FILLS, round(wanted)))


def _resources() -> tuple[int, int, int]:
    found = shmreduce_cuda.stats()
    return len(list(Path("/proc/self/fd").iterdir())), found.exports, found.mappings


def _many(scale: Scale) -> dict[str, Any]:
    with installed(), partner() as other:

        def send(count: int) -> None:
            for number in range(count):
                array = DeviceArray.of(np.full(64, number))
                other.ask(far.keep, "x", array)
            other.ask(far.drop)
            del array
            _nothing_is_out()

        send(20)
        before = (_resources(), other.ask(_resources), free_bytes())
        send(scale.sends)
        after = (_resources(), other.ask(_resources), free_bytes())
    expect(before[:2] == after[:2], f"descriptors, exports, mappings: {before}, {after}")
    lost = before[2] - after[2]
    expect(lost < (2 << 20), f"{lost} bytes of device memory are gone")
    return {"sends": scale.sends, "device_bytes_lost": lost}


def _receiver_dies(_: Scale) -> dict[str, Any]:
    seconds = []
    with installed():
        for kind in _SHAREABLE:
            with partner() as other:
                array = DeviceArray.of(np.arange(1000.0), kind)
                other.ask(far.keep, "x", array)
                del array
                expect(shmreduce_cuda.stats().exports == 1, "it was let go of too early")
                other.kill()
                seconds.append(round(_nothing_is_out(), 3))
    expect(max(seconds) < _RECLAIM_SECONDS, f"it took {seconds} s")
    return {"seconds": seconds}


def _make_message(kind: str) -> bytes:
    far.received["kept"] = array = DeviceArray.of(np.arange(1000.0), kind)
    return bytes(ForkingPickler.dumps(array))


def _sender_dies(_: Scale) -> dict[str, Any]:
    told = []
    with installed():
        for kind in _SHAREABLE:
            with partner() as other:
                messages = [other.ask(_make_message, kind) for _ in range(2)]
                held: Any = ForkingPickler.loads(messages[0])
                other.kill()
            try:
                ForkingPickler.loads(messages[1])
            except shmreduce_cuda.CudaProducerDied as error:
                told.append(error.pid == other.pid)
            del held
    expect(told == [True] * 3, f"the dead sender is named in {told}")
    return {"mappings_afterwards": shmreduce_cuda.stats().mappings}


def _writes(scale: Scale) -> dict[str, Any]:
    with installed(), partner() as other:
        array = DeviceArray.of(np.zeros(1000))
        other.ask(far.keep, "x", array)
        count = max(10, scale.trials // 10)
        for number in range(count):
            other.ask(far.set_values, "x", np.full(1000, float(number)))
            expect(set(read(array)) == {number}, f"write {number} of the receiver is not seen")
            write(array, np.full(1000, float(-number)))
            expect(set(other.ask(far.values, "x")) == {-number}, "a write is not seen")
        other.ask(far.drop)
        del array
    return {"writes": 2 * count}


CASES = [
    Case(
        "round trip", "dtypes, slices, strides of all shareable kinds arrive", _round_trip, 180.0
    ),
    Case("writes", "each side sees the other's writes", _writes),
    Case("views", "100 views of one allocation are one mapping", _views),
    Case("again", "memory that is sent again and again is not opened each time", _again),
    Case("refusals", "kinds that cannot be shared are refused by name", _refusals),
    Case("loads", "same process, twice, two receivers, back and on", _loads),
    Case("addresses", "freed and allocated again at one address", _addresses),
    Case("order", "no stale read while a non-blocking stream is at work", _order, 600.0),
    Case("many", "many sends leave nothing", _many, 600.0),
    Case("receiver dies", "its memory is let go of within 1 s", _receiver_dies),
    Case("sender dies", "a message of a dead sender names it", _sender_dies),
]
