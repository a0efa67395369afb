"""Subclasses of ndarray keep their class, and their own way of being pickled."""

from __future__ import annotations

import copyreg
import pickle
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pytest
from numpy import ma
from numpy.ma import mrecords

import shmreduce
from shmreduce_numpy.classes import Protocol, protocol_of
from tests.plugins.messages import loads, message_of, round_trip

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

Array = np.ndarray[Any, Any]

SMALL, LARGE = 6, 100_000
SIZES = pytest.mark.parametrize("count", [SMALL, LARGE])


@pytest.fixture(autouse=True)
def _installed() -> Iterator[None]:
    with shmreduce.install():
        yield


class Plain(np.ndarray):
    """Adds nothing to what is pickled."""


class Finalized(np.ndarray):
    """Has an attribute that views inherit, and pickling drops."""

    unit: str | None

    def __array_finalize__(self, obj: Any) -> None:
        self.unit = getattr(obj, "unit", None)


class Documented(np.ndarray):
    """Pickles an attribute, as NumPy's manual advises."""

    info: str | None

    def __array_finalize__(self, obj: Any) -> None:
        self.info = getattr(obj, "info", None)

    def __reduce__(self) -> Any:
        function, arguments, state = cast("Any", super().__reduce__())
        return function, arguments, (*state, self.info)

    def __setstate__(self, state: Any) -> None:
        self.info = state[-1]
        super().__setstate__(state[:-1])


class Nested(Documented):
    """Keeps the state of ndarray whole inside its own, as astropy does."""

    def __reduce__(self) -> Any:
        function, arguments, state = cast("Any", np.ndarray.__reduce__(self))
        return function, arguments, (state, {"info": self.info})

    def __setstate__(self, state: Any) -> None:
        np.ndarray.__setstate__(self, state[0])
        self.info = state[1]["info"]


class Strict(np.ndarray):
    """Redefines what copying and viewing mean, and is not made by its constructor."""

    def __new__(cls) -> Any:
        raise TypeError("made by other means")

    def view(self, *arguments: Any, **options: Any) -> Any:
        raise TypeError("no views")

    def __array_function__(self, *arguments: Any, **options: Any) -> Any:
        raise TypeError("no functions")


@SIZES
@pytest.mark.parametrize("cls", [Plain, np.matrix])
def test_class_is_kept(cls: Any, count: int) -> None:
    """An array of a subclass arrives as one, contents and all."""
    original = np.arange(count, dtype=float).reshape(2, -1).view(cls)
    received = round_trip(original)
    assert type(received) is cls
    assert np.array_equal(np.asarray(received), np.asarray(original))


@SIZES
def test_recarray(count: int) -> None:
    """A recarray arrives with its fields as attributes."""
    original = np.zeros(count, [("x", "f8"), ("y", "i4")]).view(np.recarray)
    original.x = np.arange(count)
    received = round_trip(original)
    assert type(received) is np.recarray
    assert received.dtype == original.dtype
    assert received.dtype.type is np.record
    assert np.array_equal(received.x, original.x)


@pytest.mark.parametrize("mode", ["r", "r+", "c"])
@SIZES
def test_memmap(tmp_path: Path, count: int, mode: Any) -> None:
    """A memmap arrives as with ordinary pickling: its class, no file, a copy."""
    path = tmp_path / "data"
    np.arange(count, dtype=float).tofile(path)
    original = np.memmap(path, float, mode)
    received = round_trip(original)
    assert type(received) is np.memmap
    assert received.filename is None
    assert np.array_equal(received, original)
    assert received.flags.writeable == original.flags.writeable


@SIZES
def test_attributes_are_what_pickling_makes_them(count: int) -> None:
    """Attributes that ordinary pickling drops are dropped, whatever the size.

    They may be what cannot be pickled (an open file, a window).
    """
    original = np.arange(count, dtype=float).view(Finalized)
    original.unit = "m"
    pickled = pickle.loads(pickle.dumps(original))
    received = round_trip(original)
    assert type(received) is Finalized
    assert received.unit == pickled.unit is None
    assert np.array_equal(received, original)


@SIZES
@pytest.mark.parametrize("cls", [Documented, Nested])
def test_pickle_methods_are_honoured(cls: Any, count: int) -> None:
    """What a class stores by methods of its own arrives."""
    original = np.arange(count, dtype=float).view(cls)
    original.info = "kept"
    received = round_trip(original)
    assert type(received) is cls
    assert received.info == "kept"
    assert np.array_equal(received, original)
    received[0] = -1
    assert original[0] == 0


@pytest.mark.parametrize("cls", [Documented, Nested])
def test_bytes_leave_the_message(cls: Any) -> None:
    """The class stores its bytes, but they travel by shared memory."""
    assert len(message_of(np.zeros(LARGE).view(cls))) < 1000


@SIZES
def test_nothing_of_the_class_is_called(count: int) -> None:
    """Constructor, view and functions of the class are not needed to send it."""
    original = np.ndarray.__new__(Strict, (count,), float)
    np.ndarray.fill(original, 3)
    received = round_trip(original)
    assert type(received) is Strict
    assert np.ndarray.tolist(received) == [3.0] * count


class Renaming(np.ndarray):
    """Has something of its own under names of ndarray, which C code never asks for."""

    dtype: Any = None
    flags: Any = None
    nbytes: Any = -1
    strides: Any = None
    __array_interface__: Any = MappingProxyType({"data": (12345, False)})

    @property
    def base(self) -> Any:
        return np.multiply(self, 2)


@SIZES
@pytest.mark.parametrize("shared", [False, True])
def test_names_of_ndarray_may_mean_something_else(count: int, shared: bool) -> None:
    """NumPy itself is asked for what an array is; above all, this comes to an end."""
    memory = shmreduce.ones(count) if shared else np.ones(count)
    received = round_trip(np.ndarray.view(memory, Renaming))
    assert type(received) is Renaming
    assert np.ndarray.tolist(received) == [1.0] * count
    assert np.shares_memory(received, memory) == shared


def test_a_part_of_such_an_array_keeps_its_place() -> None:
    """Where it lies is NumPy's to say, too."""
    memory = shmreduce.array(np.arange(10.0))
    received = round_trip(np.ndarray.view(memory[3:7], Renaming))
    assert np.ndarray.tolist(received) == [3.0, 4.0, 5.0, 6.0]
    assert np.shares_memory(received, memory)


@SIZES
def test_such_a_class_may_be_read_only_and_shared(count: int) -> None:
    """What it has under those names is in the way of neither."""
    memory = np.ones(count)
    memory.setflags(write=False)
    received = round_trip(np.ndarray.view(memory, Renaming))
    with pytest.raises(ValueError, match="read-only"):
        # Not fill(): in NumPy 1.24 it writes to read-only arrays.
        np.ndarray.__setitem__(received, ..., 2)
    copied = shmreduce.share(received)
    assert type(copied) is Renaming
    assert np.ndarray.tolist(copied) == [1.0] * count


class Reshaped(np.ndarray):
    """Says that it is longer than it is."""

    shape: Any = (10**6,)


def test_a_class_that_lies_about_its_shape() -> None:
    """What travels in a block is the array. Ordinary pickling makes none of it again."""
    received = round_trip(np.ndarray.view(np.ones(100_000), Reshaped))
    assert type(received) is Reshaped
    assert np.ndarray.tolist(received) == [1.0] * 100_000


def reduce_registered(array: Array) -> Any:
    return str, (f"registered, {array.size} elements",)


@SIZES
def test_registered_with_copyreg(count: int) -> None:
    """How copyreg says a subclass is pickled goes before how its base class is."""
    copyreg.pickle(Plain, reduce_registered)
    try:
        received = round_trip(np.zeros(count).view(Plain))
    finally:
        del copyreg.dispatch_table[Plain]
    assert received == f"registered, {count} elements"


def view_as_plain(array: Array) -> Array:
    return array.view(Plain)


def reduce_to_copy(array: Array) -> Any:
    return view_as_plain, (np.array(array),)


def reduce_to_view(array: Array) -> Any:
    return view_as_plain, (array.view(np.ndarray),)


@pytest.mark.parametrize(("reduce", "shared"), [(reduce_to_copy, False), (reduce_to_view, True)])
@SIZES
def test_a_registered_function_decides_what_stays_shared(
    count: int, reduce: Any, shared: bool
) -> None:
    """A shared array stays shared if the function returns a view of it, and not if a copy."""
    array = shmreduce.zeros(count).view(Plain)
    copyreg.pickle(Plain, reduce)
    try:
        received = round_trip(array)
    finally:
        del copyreg.dispatch_table[Plain]
    array[-1] = 7
    assert type(received) is Plain
    assert shmreduce.is_shared(received) is shared
    assert received[-1] == (7 if shared else 0)


def test_protocols_are_told_apart() -> None:
    """A class has the pickle methods of ndarray, of MaskedArray, or some of its own."""
    assert protocol_of(Plain) is Protocol.ARRAY
    assert protocol_of(np.memmap) is Protocol.ARRAY
    assert protocol_of(ma.MaskedArray) is Protocol.MASKED
    assert protocol_of(Documented) is Protocol.OWN
    assert protocol_of(Nested) is Protocol.OWN
    assert protocol_of(type(ma.masked)) is Protocol.OWN


# Shared


@pytest.mark.parametrize("cls", [Plain, np.matrix, Finalized, Documented, Nested])
def test_shared_subclasses(cls: Any) -> None:
    """Shared arrays of subclasses stay shared, with the attributes that views have."""
    original = np.zeros((2, 3)).view(cls)
    if hasattr(cls, "__annotations__"):
        original.unit = original.info = "kept"
    shared = shmreduce.share(original)
    received = round_trip(shared)
    assert type(shared) is type(received) is cls
    assert shmreduce.is_shared(received)
    received[0, 0] = 7
    assert shared[0, 0] == 7
    assert original[0, 0] == 0
    for name in ("info",) if protocol_of(cls) is Protocol.OWN else ():
        assert getattr(shared, name) == getattr(received, name) == "kept"


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("cls", [Documented, Nested])
@SIZES
def test_attributes_may_lead_back_to_the_array(count: int, cls: Any, shared: bool) -> None:
    """As with pickling: what refers to the array there refers to it here."""
    original = np.zeros(count).view(cls)
    if shared:
        original = shmreduce.share(original)
    original.info = {"of": original}
    here, there = shmreduce.Pipe()
    with here, there:
        here.send(original)
        for received in (round_trip(original), there.recv()):
            assert received.info["of"] is received
            assert shmreduce.is_shared(received) == shared


class Weighted(np.ndarray):
    """Has a weight for each element, so an array of another shape cannot take its weights."""

    weights: Any

    def __array_finalize__(self, obj: Any) -> None:
        self.weights = np.ones(self.shape)
        self.weights[...] = getattr(obj, "weights", 1)

    def __reduce__(self) -> Any:
        return weighted, (self.tolist(), self.weights)


def weighted(elements: list[float], weights: Array) -> Weighted:
    array = np.array(elements).view(Weighted)
    array.weights = weights
    return array


@SIZES
def test_shared_array_with_attributes_of_its_own_shape(count: int) -> None:
    """They arrive although there is no empty array that has them."""
    original = shmreduce.share(weighted([1.0] * count, np.arange(count)))
    received = round_trip(original)
    assert type(received) is Weighted
    assert np.shares_memory(received, original)
    assert np.array_equal(received.weights, np.arange(count))


# Masked arrays


def masked(count: int, **options: Any) -> Any:
    data = np.arange(count, dtype=float)
    return ma.masked_array(data, mask=data % 3 == 0, **options)


def assert_same_masked(received: Any, original: Any) -> None:
    assert type(received) is type(original)
    assert received.dtype == original.dtype
    assert received.baseclass is original.baseclass
    assert received.hardmask == original.hardmask
    assert np.array_equal(received.data, original.data)
    assert np.array_equal(ma.getmaskarray(received), ma.getmaskarray(original))
    assert (ma.getmask(received) is ma.nomask) == (ma.getmask(original) is ma.nomask)
    assert received.fill_value == original.fill_value


@SIZES
@pytest.mark.parametrize("options", [{}, {"fill_value": -5.0}, {"hard_mask": True}])
def test_masked_array(count: int, options: dict[str, Any]) -> None:
    """Data, mask, fill value and hard mask arrive; both parts are independent."""
    original = masked(count, **options)
    received = round_trip(original)
    assert_same_masked(received, original)
    received[1] = ma.masked
    received[2] = -1
    assert original[1] == 1
    assert original[2] == 2


@SIZES
def test_masked_array_without_mask(count: int) -> None:
    """No mask at all is still no mask at all."""
    assert_same_masked(round_trip(ma.arange(count)), ma.arange(count))


def test_default_fill_value_follows_the_dtype() -> None:
    """A fill value that nobody set is not fixed by sending the array."""
    received = round_trip(masked(LARGE))
    assert received.astype(int).fill_value == masked(LARGE).astype(int).fill_value


@SIZES
def test_structured_masked_array(count: int) -> None:
    """A structured masked array keeps its mask for each field."""
    original = ma.zeros(count, [("x", "f8"), ("y", "i4")])
    original["x"][1] = ma.masked
    received = round_trip(original)
    assert_same_masked(received, original)
    assert received.mask["x"][1]
    assert not received.mask["y"].any()


@SIZES
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("mask", [False, [(True, False), (False, True)]])
def test_record_of_a_masked_array(count: int, mask: Any, *, shared: bool) -> None:
    """An element of a structured masked array, whose mask is no array, arrives with its mask."""
    whole = ma.zeros(2, [("x", "f8"), ("y", "f4", count)])
    whole[["x", "y"]] = [(1, 2), (3, 4)]
    whole.mask = mask
    record = whole[1]
    assert isinstance(ma.getmask(record), np.void)
    original = shmreduce.share(record) if shared else record
    received = round_trip(original)
    assert_same_masked(received, record)
    assert received["x"] == 3
    assert shmreduce.is_shared(received) == shared
    assert shmreduce.is_shared(received.mask) == shared


@SIZES
def test_masked_views(count: int) -> None:
    """Slices of masked arrays arrive as slices."""
    original = masked(count)[::-2]
    assert_same_masked(round_trip(original), original)


@SIZES
def test_masked_arrays_that_share_a_mask_arrive_independent(count: int) -> None:
    """What one of them masks is not masked in another, as when pickled."""
    first = masked(count)
    second = -first
    mask = ma.getmask(first)
    assert ma.getmask(second) is mask
    received, other, bare = round_trip([first, second, mask])
    received[2] = ma.masked
    assert not ma.getmaskarray(other)[2]
    assert not bare[2]


def test_masked_matrix() -> None:
    """A masked array of a matrix stays one."""
    matrix = np.arange(4.0).reshape(2, 2).view(np.matrix)
    original = ma.masked_array(matrix, mask=np.eye(2, dtype=bool))
    received = round_trip(original)
    assert_same_masked(received, original)
    assert type(received.data) is np.matrix


def test_masked_objects_are_pickled() -> None:
    """A masked array of Python objects goes by ordinary pickling."""
    mask = np.array([False, True, False])
    original: Any = ma.masked_array(np.array([1, "two", None], object), mask=mask)
    received = round_trip(original)
    assert received.tolist() == original.tolist()


def test_the_masked_constant_stays_one() -> None:
    """There is one numpy.ma.masked in a process."""
    assert round_trip(ma.masked) is ma.masked


def test_shared_masked_array() -> None:
    """Everybody sees what anybody masks, and writes."""
    original = masked(SMALL, fill_value=-5.0)
    shared = shmreduce.share(original)
    assert_same_masked(shared, original)
    received = round_trip(shared)
    assert_same_masked(received, shared)
    received[1] = ma.masked
    received[2] = 77
    assert ma.getmaskarray(shared)[1]
    assert shared[2] == 77
    assert original[1] == 1
    assert shmreduce.is_shared(received)


def test_shared_masked_array_that_had_no_mask() -> None:
    """A shared masked array has a mask of full size, so that masking shows."""
    shared = shmreduce.share(ma.arange(SMALL))
    received = loads(message_of(shared))
    received[1] = ma.masked
    assert ma.getmaskarray(shared).tolist() == [False, True, False, False, False, False]


class MaskedSubclass(ma.MaskedArray):
    """Adds nothing to what is pickled."""


@SIZES
def test_subclass_of_masked_array(count: int) -> None:
    """A subclass of MaskedArray keeps its class."""
    original = masked(count).view(MaskedSubclass)
    received = round_trip(original)
    assert_same_masked(received, original)


class Vector(np.ndarray):
    """Is made anew from its elements."""

    name: str
    __slots__ = ("__dict__", "mark")

    def __array_finalize__(self, obj: Any) -> None:
        self.name = getattr(obj, "name", "v")
        self.mark = getattr(obj, "mark", None)

    def __reduce__(self) -> Any:
        return _make_vector, (float(self[0]), float(self[1]), float(self[2]))


def _make_vector(*elements: float) -> Any:
    return np.array(elements).view(Vector)


class Refusing(np.ndarray):
    """Cannot be pickled."""

    def __reduce__(self) -> Any:
        raise TypeError("it has a socket")


def test_a_shared_array_of_a_class_that_is_pickled_by_its_elements() -> None:
    """It travels without them, and its attributes as they are, those in slots too."""
    shared = shmreduce.share(_make_vector(1, 2, 3))
    shared.name, shared.mark = "north", "m"
    whole, back = round_trip([shared, shared[::-1]])
    assert type(whole) is type(back) is Vector
    assert np.shares_memory(whole, shared)
    assert back.tolist() == [3, 2, 1]
    assert np.shares_memory(back, shared)
    assert (whole.name, whole.mark, back.name) == ("north", "m", "north")


@pytest.mark.parametrize("shared", [False, True])
def test_a_class_that_refuses_to_be_pickled_is_heard(shared: bool) -> None:
    """The error is the class's own, whether the array is shared or not."""
    array: Any = np.zeros(LARGE).view(Refusing)
    with pytest.raises(TypeError, match="it has a socket"):
        round_trip(shmreduce.share(array) if shared else array)


class Measured(ma.MaskedArray):
    """Masked, and pickles an attribute besides."""

    unit: str | None

    def _update_from(self, obj: Any) -> None:
        super()._update_from(obj)  # type: ignore[misc]
        self.unit = getattr(obj, "unit", None)

    def __reduce__(self) -> Any:
        function, arguments, state = cast("Any", super().__reduce__())
        return function, arguments, (state, self.unit)

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state[0])
        self.unit = state[1]


def make_measured() -> Any:
    made: Any = ma.masked_array(np.arange(SMALL), np.arange(SMALL) % 3 == 0).view(Measured)
    made.unit = "m"
    return made


def make_records() -> Any:
    make: Any = mrecords.fromarrays
    made = make([np.arange(SMALL), np.ones(SMALL)], names="a,b")
    made[0] = ma.masked
    return made


@pytest.mark.parametrize("make", [make_measured, make_records])
@pytest.mark.parametrize("mode", ["rw", "cow"])
def test_a_masked_class_with_pickle_methods_shares_its_mask(make: Any, mode: Any) -> None:
    """Mask and attributes arrive; the mask is shared like the data, and not with the source."""
    original = make()
    shared = shmreduce.share(original, mode=mode)
    shared[1] = ma.masked
    assert original.tolist() == make().tolist()
    received = round_trip(shared)
    assert type(received) is type(original)
    assert received.tolist() == shared.tolist()
    assert getattr(received, "unit", "m") == "m"
    assert shmreduce.is_shared(received)
    received[2] = ma.masked
    assert (received.tolist() == shared.tolist()) == (mode == "rw")
