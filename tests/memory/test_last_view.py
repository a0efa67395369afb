"""A block lives as long as anything derived from it, and no longer."""

from __future__ import annotations

import ctypes
import gc
import io
import itertools
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pytest

import shmreduce
from shmreduce.memory.inspection import process_state

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.usefixtures("installed")

LENGTH = 4096
VALUE = 0x5A


def as_strided(array: Any) -> Any:
    return np.lib.stride_tricks.as_strided(array, (LENGTH // 2,), (2,))


def through_a_cycle(array: Any) -> Any:
    cycle: list[Any] = [array[8:16]]
    cycle.append(cycle)
    return cycle


def structured(array: Any) -> Any:
    return array.view([("a", "u1"), ("b", "u1", 3)])["b"]


KINDS: dict[str, Callable[[Any], Any]] = {
    "slice": lambda array: array[100:200],
    "stepped slice": lambda array: array[::7],
    "reversed": lambda array: array[::-1],
    "element as array": lambda array: array[5:6].reshape(()),
    "transposed": lambda array: array.reshape(64, 64).T,
    "other dtype": lambda array: array.view("u4"),
    "field of a structure": structured,
    "real part": lambda array: array.view("c16").real,
    "broadcast": lambda array: np.broadcast_to(array, (3, LENGTH)),
    "strided by hand": as_strided,
    "window": lambda array: np.lib.stride_tricks.sliding_window_view(array, 5),
    "ravel": lambda array: array.reshape(64, 64).ravel(),
    "swapped axes": lambda array: array.reshape(4, 32, 32).swapaxes(0, 2),
    "diagonal": lambda array: array.reshape(64, 64).diagonal(),
    "split": lambda array: np.split(array, 4)[1],
    "matrix": lambda array: array.reshape(64, 64).view(np.matrix),
    "masked": lambda array: np.ma.masked_array(array, copy=False)[3:9],
    "read-only view": lambda array: array.view(),
    "flat iterator": lambda array: array.flat,
    "nditer": np.nditer,
    "memoryview": memoryview,
    "memoryview slice": lambda array: memoryview(array)[10:20],
    "memoryview cast": lambda array: memoryview(array).cast("B").cast("I"),
    "read-only memoryview": lambda array: memoryview(array).toreadonly(),
    "frombuffer": lambda array: np.frombuffer(array, "u2", 16, 32),
    "frombuffer of memoryview": lambda array: np.frombuffer(memoryview(array)[64:128], "u1"),
    "ctypes": lambda array: (ctypes.c_ubyte * 16).from_buffer(array, 16),
    "ctypes slice of ctypes": lambda array: memoryview(
        (ctypes.c_ubyte * 16).from_buffer(array, 16)
    )[2:4],
    "ctypeslib": np.ctypeslib.as_ctypes,
    "asarray": lambda array: np.asarray(memoryview(array)),
    "iterator": lambda array: iter(array.reshape(64, 64)),
    "data frame": lambda array: pd.DataFrame(array.reshape(64, 64), copy=False).iloc[3:7],
    "series": lambda array: pd.Series(array, copy=False)[10:30],
    "reference cycle": through_a_cycle,
    "array of the interface": lambda array: np.asarray(Interface(array)),
    "dlpack": np.from_dlpack,
    "generator": lambda array: (each for each in array[3:7]),
    "buffered reader": lambda array: io.BufferedReader(Raw(array)),
}


class Interface:
    def __init__(self, array: Any) -> None:
        self.array = array
        self.__array_interface__ = array.__array_interface__


class Raw(io.RawIOBase):
    def __init__(self, array: Any) -> None:
        self.array = memoryview(array)[3:9]

    def readable(self) -> bool:
        return True


def arrays_alive() -> int:
    return process_state().arrays


def born_shared() -> Any:
    return shmreduce.full(LENGTH, VALUE, np.uint8)


def received_by_value() -> Any:
    from multiprocessing.reduction import ForkingPickler

    return ForkingPickler.loads(ForkingPickler.dumps(np.full(LENGTH, VALUE, np.uint8)))


def kept_by_its_sender() -> Any:
    message = shmreduce.Message()
    given = message.allocate(LENGTH)
    assert given is not None
    view, handle = given
    array = np.frombuffer(view, np.uint8)
    array[...] = VALUE
    message.commit()
    # Loaded and dropped: from here on the sender's own view alone keeps it.
    shmreduce.import_block(handle)
    return array


@pytest.mark.parametrize("make", [born_shared, received_by_value, kept_by_its_sender])
@pytest.mark.parametrize("kind", KINDS)
def test_a_derived_view_keeps_the_block(make: Callable[[], Any], kind: str) -> None:
    """While the view lives the block is not given to others; afterwards it is."""
    gc.collect()
    before = arrays_alive()
    view = KINDS[kind](make())
    gc.collect()
    assert arrays_alive() == before + 1
    others = [shmreduce.zeros(LENGTH, np.uint8) for _ in range(40)]
    others += [received_by_value() for _ in range(40)]
    for other in others:
        other[...] = 0xFF
    assert bytes_of(view) <= {VALUE}
    del others, other, view
    gc.collect()
    assert arrays_alive() == before


def bytes_of(view: Any) -> set[int]:
    """Return the values of the bytes that a view shows, as far as they can be read."""
    if isinstance(view, list):
        view = view[0]
    if isinstance(view, io.BufferedReader):
        view = view.raw.array
    if isinstance(view, np.nditer):
        return {int(each) for each in itertools.islice(view, 100)}  # type: ignore[call-overload]
    if not hasattr(view, "dtype") and not isinstance(view, memoryview):
        try:
            view = np.asarray(view)
        except (TypeError, ValueError):
            return set()
    if isinstance(view, pd.DataFrame | pd.Series):
        view = view.to_numpy()
    if isinstance(view, np.ndarray) and view.dtype == object:
        return set()
    return set(view.tobytes())


def test_a_finalizer_in_a_dying_cycle_still_sees_its_array() -> None:
    """``__del__`` of an object in a garbage cycle reads the array, and the block is
    not another's by then.
    """
    seen: list[set[int]] = []

    class Owner:
        def __init__(self, array: Any) -> None:
            self.array = array
            self.myself = self

        def __del__(self) -> None:
            # Whoever wants the block now would get it, were it free.
            others = [shmreduce.full(LENGTH, 0xFF, np.uint8) for _ in range(40)]
            seen.append(set(self.array.tobytes()))
            del others

    gc.collect()
    before = arrays_alive()
    Owner(born_shared())
    gc.collect()
    gc.collect()
    assert seen == [{VALUE}]
    assert arrays_alive() == before


def test_a_view_made_by_a_finalizer_keeps_the_block() -> None:
    """A view that escapes from ``__del__`` of a garbage cycle keeps the block."""
    escaped: list[Any] = []

    class Owner:
        def __init__(self, array: Any) -> None:
            self.array = array
            self.myself = self

        def __del__(self) -> None:
            escaped.append(self.array[10:20])

    Owner(born_shared())
    gc.collect()
    others = [shmreduce.full(LENGTH, 0xFF, np.uint8) for _ in range(40)]
    assert set(escaped[0].tobytes()) == {VALUE}
    del others


def test_a_block_object_and_its_buffer_keep_the_memory_each() -> None:
    """The memory of a Block lives as long as the Block or its buffer."""
    before = arrays_alive()
    block = shmreduce.allocate(100)
    view = block.buffer[3:9]
    del block
    gc.collect()
    assert arrays_alive() == before + 1
    found = shmreduce.find_block(view)
    del view
    assert found is not None
    assert arrays_alive() == before + 1
    del found
    assert arrays_alive() == before
