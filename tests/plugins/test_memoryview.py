"""Memoryviews: the contract, formats, layouts, and views of shared memory."""

from __future__ import annotations

import array
import ctypes
import mmap
import pickle
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import shmreduce
from shmreduce.testing import OtherProcess, ReducerContract
from shmreduce_memoryview.layout import Rows, address_of, rows_of
from tests.plugins.messages import message_of, round_trip

if TYPE_CHECKING:
    from collections.abc import Iterator

FORMATS = "bBhHiIlLqQnNfd?cP"


def view_of(exporter: Any) -> memoryview:
    """Return ``memoryview(exporter)``, of arrays too, which typing does not take for buffers."""
    return memoryview(exporter)


class TestContract(ReducerContract):
    picklable = False

    def make(self, nbytes: int) -> Any:
        return memoryview(bytearray(index % 251 for index in range(nbytes)))

    def write(self, obj: Any) -> None:
        obj[:] = bytes(len(obj))


class TestContractOfTables(ReducerContract):
    picklable = False

    def make(self, nbytes: int) -> Any:
        data = bytearray(index % 251 for index in range(nbytes // 16 * 16 or 16))
        return memoryview(data).cast("H", (2, len(data) // 4))

    def write(self, obj: Any) -> None:
        obj[1, 0] = 9999


@pytest.fixture(params=[0, None], ids=["everything in blocks", "default limit"])
def installed(request: pytest.FixtureRequest) -> Iterator[None]:
    """Install with small buffers in shared memory too, and as usual."""
    options = {} if request.param is None else {"inline_limit": request.param}
    with shmreduce.install(**options):
        yield


pytestmark = pytest.mark.usefixtures("installed")


def assert_same(received: memoryview, original: memoryview) -> None:
    assert type(received) is memoryview
    assert received.format == original.format
    assert received.shape == original.shape
    assert received.readonly == original.readonly
    assert received.tobytes() == original.tobytes()


@st.composite
def memoryviews(draw: st.DrawFn) -> Any:
    """Return views of every format, of up to three dimensions, sliced and reversed."""
    shape = draw(st.lists(st.integers(1, 6), max_size=3))
    element: Any = draw(st.sampled_from(FORMATS))
    size = memoryview(bytes(16)).cast(element).itemsize
    for length in shape:
        size *= length
    data = draw(st.binary(min_size=size, max_size=size))
    flat: Any = memoryview(bytearray(data) if draw(st.booleans()) else data)
    view = flat.cast(element, shape)
    if shape:
        view = view[draw(st.slices(shape[0]))]
    return view


@settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(memoryviews())
def test_any_view_arrives(original: Any) -> None:
    """Format, shape, contents and read-only flag are kept, whatever the layout."""
    received = round_trip(original)
    assert_same(received, original)
    assert not shmreduce.is_shared(received)


@settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(st.data())
def test_any_view_of_shared_memory_keeps_its_place(data: st.DataObject) -> None:
    """Slices of shared memory arrive with their strides, at the same address."""
    shared: Any = shmreduce.share(data.draw(memoryviews()))
    original = shared[data.draw(st.slices(shared.shape[0]))] if shared.ndim else shared
    if data.draw(st.booleans()):
        original = original.toreadonly()
    received = round_trip(original)
    assert_same(received, original)
    assert shmreduce.is_shared(received)
    if original.nbytes:
        # Where there is one row only, it lies nowhere else.
        assert received.strides == original.strides or original.shape[0] == 1
        assert address_of(received) == address_of(original)


@pytest.mark.parametrize(
    "original",
    [
        memoryview(b""),
        memoryview(array.array("d", [1, 2, 3])),
        memoryview(array.array("i")),
        memoryview(bytearray(range(200)) * 1000),
        view_of(np.arange(100_000.0)),
        view_of(np.arange(100_000.0)[::-2]),
        view_of(np.arange(100_000.0).reshape(100, -1)[:, ::3]),
        view_of(np.asfortranarray(np.ones((50, 300)))),
        view_of(np.zeros((3, 0))),
        view_of(np.array(5.0)),
        view_of(np.zeros(20_000, complex)),
        view_of(np.zeros(20_000, ">f8")),
        view_of(np.zeros(20_000, [("a", "u1"), ("b", "f8")])),
        view_of(np.zeros(20_000, "S3")),
    ],
    ids=lambda view: f"{view.format}{view.shape}",
)
def test_views_of_other_objects(original: memoryview) -> None:
    """Views of arrays of any library arrive, also of formats that cast() cannot make."""
    assert_same(round_trip(original), original)


def test_views_of_ctypes() -> None:
    """A view of a ctypes array arrives equal; its format may be spelt otherwise."""
    values = (ctypes.c_int * 3)(1, 2, 3)
    received = round_trip(memoryview(values))
    assert received == memoryview(values)


class Packed(ctypes.Structure):
    """Its views call it "B", and say that it has nine bytes."""

    _pack_ = 1
    _layout_ = "ms"
    _fields_ = (("flag", ctypes.c_byte), ("value", ctypes.c_double))


class Either(ctypes.Union):
    """Has fields in one place, which no array of NumPy's can be a view of."""

    _fields_ = (("whole", ctypes.c_int), ("part", ctypes.c_float))


class Swapped(ctypes.BigEndianStructure):
    """Has a gap at its end, of which NumPy does not tell."""

    _fields_ = (("first", ctypes.c_int), ("second", ctypes.c_short))


@pytest.mark.parametrize("kind", [Packed, Either, Swapped])
@pytest.mark.parametrize("count", [None, 3, 20_000])
def test_views_of_structures(kind: Any, count: int | None) -> None:
    """Every byte of a structure arrives, and once more; also of a shared copy."""
    values = kind() if count is None else (kind * count)()
    ctypes.memset(ctypes.byref(values), 0x55, ctypes.sizeof(values))
    original = memoryview(values)
    for received in (
        round_trip(original),
        round_trip(round_trip(original)),
        round_trip(shmreduce.share(original)),
    ):
        assert received.tobytes() == original.tobytes()
        assert received.itemsize == original.itemsize
        assert received.shape == original.shape


@pytest.mark.parametrize("count", [10, 100_000])
def test_views_of_opaque_elements(count: int) -> None:
    """Bytes without any type arrive, from a view with gaps too, and once more."""
    elements = np.frombuffer(bytes(index % 251 for index in range(5 * count)), "V5")
    for array_of_them in (elements, elements[::-2]):
        received = round_trip(round_trip(view_of(array_of_them)))
        assert_same(received, view_of(array_of_them))


def test_fortran_order_is_kept() -> None:
    """A view in Fortran order is in Fortran order where it arrives."""
    received = round_trip(view_of(np.asfortranarray(np.ones((50, 300)))))
    assert received.f_contiguous
    assert not received.c_contiguous


def test_views_of_shared_arrays() -> None:
    """A memoryview of a shared array is a view of the same memory where it arrives."""
    shared = shmreduce.array(np.arange(600.0).reshape(20, 30))
    for view in (shared, shared[3:, ::7], shared.T, shared[::-1], shared.view(complex)):
        original = memoryview(view)
        received = round_trip(original)
        assert_same(received, original)
        assert received.strides == original.strides
        assert shmreduce.is_shared(received)
        assert address_of(received) == address_of(original)


def test_share_takes_anything_with_a_buffer() -> None:
    """The shared copy of a view is writeable, also of one that is not."""
    for source in (b"hello", bytearray(b"hello"), array.array("B", b"hello")):
        shared = shmreduce.share(view_of(source))
        assert shared.tobytes() == b"hello"
        assert not shared.readonly
        shared[0] = ord("j")
        assert bytes(source) == b"hello"


def test_share_of_what_cast_cannot_make() -> None:
    """Views of complex numbers, and in Fortran order, can be shared as well."""
    for source in (np.ones(10, complex), np.asfortranarray(np.ones((2, 3)))):
        shared = shmreduce.share(view_of(source))
        assert_same(shared, view_of(source))
        assert shared.strides == source.strides
        assert shmreduce.is_shared(shared)


def test_read_only_memory() -> None:
    """A receiver of ``ro`` memory gets a read-only view."""
    shared = shmreduce.share(memoryview(b"hello"), mode="ro")
    with OtherProcess("spawn") as other:
        assert other.ask(_is_read_only, shared)


def _is_read_only(view: memoryview) -> bool:
    return view.readonly


def test_messages_are_snapshots() -> None:
    """What is written after pickling does not show."""
    data = bytearray(100_000)
    message = message_of(memoryview(data))
    data[:5] = b"later"
    assert bytes(pickle.loads(message)[:5]) == bytes(5)


def test_views_that_nobody_can_read() -> None:
    """A format that NumPy does not know either is an error that shows it."""

    class Pointers(ctypes.Structure):
        _fields_ = (("function", ctypes.CFUNCTYPE(None)),)

    class Bits(ctypes.Structure):
        _fields_ = (("low", ctypes.c_int, 3), ("high", ctypes.c_int, 5))

    for view in (memoryview((Pointers * 3)()), memoryview((Bits * 3)())):
        with pytest.raises(shmreduce.NotShareableError) as caught:
            shmreduce.share(view)
        assert view.format in str(caught.value)
        with pytest.raises(TypeError, match="pickle"):
            message_of(view)


def test_views_of_mapped_files() -> None:
    """A view of a mapped file travels by value."""
    with mmap.mmap(-1, 1 << 20) as file:
        with memoryview(file) as view:
            received = round_trip(view)
        file[0] = 1
    assert received[0] == 0


@pytest.mark.parametrize(
    ("view", "expected"),
    [
        (memoryview(bytes(10)), Rows(1, 1)),
        (memoryview(bytes(10))[::-3], Rows(1, -3)),
        (memoryview(bytes(24)).cast("I", (3, 2))[::2], Rows(8, 2)),
        (view_of(np.ones((2, 3)).T), None),
        (view_of(np.broadcast_to(np.ones(3), (2, 3))), None),
        (memoryview(b""), Rows(1, 1)),
        (memoryview(bytes(24)).cast("I", (3, 2))[:0], Rows(8, 1)),
        (view_of(np.zeros((3, 0))), None),
        (memoryview(bytes(8)).cast("d", ()), None),
    ],
)
def test_rows(view: memoryview, expected: Rows | None) -> None:
    """Only what slicing of the first dimension leads to is made of rows."""
    assert rows_of(view) == expected


class Based(bytearray):
    """Has its own bytes, and a ``base`` that is something else."""

    base: Any = None


def test_bytes_that_only_seem_to_lie_in_a_block_are_copied() -> None:
    """An exporter's ``base`` need not be where its memory is."""
    with shmreduce.install(inline_limit=0):
        source = Based(b"x" * 8)
        source.base = shmreduce.zeros(100)
        received = ForkingPickler.loads(ForkingPickler.dumps(memoryview(source)))
    assert bytes(received) == b"x" * 8


class Renaming(np.ndarray):
    """Has something of its own under the name of ``base``, which C code never asks for."""

    @property
    def base(self) -> Any:
        return np.multiply(self, 2)


@pytest.mark.parametrize("shared", [False, True])
def test_a_base_may_mean_something_else(shared: bool) -> None:
    """NumPy itself is asked what an array is a view of; above all, this comes to an end."""
    memory = shmreduce.ones(10_000) if shared else np.ones(10_000)
    original = view_of(np.ndarray.view(memory, Renaming))
    received = round_trip(original)
    assert_same(received, original)
    assert shmreduce.is_shared(received) == shared


def test_a_base_may_lead_in_a_circle() -> None:
    """An exporter that calls itself its ``base`` arrives."""
    source = Based(b"x" * 8)
    source.base = source
    assert bytes(round_trip(memoryview(source))) == b"x" * 8
