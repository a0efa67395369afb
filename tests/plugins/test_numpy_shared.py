"""Shared arrays: views stay views of one memory, wherever they arrive."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.lib.stride_tricks import as_strided, sliding_window_view

import shmreduce
from shmreduce.testing import OtherProcess
from shmreduce_numpy.blocks import find_block_of
from tests.plugins.messages import loads, message_of, round_trip
from tests.plugins.numpy_samples import arrays, views

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

Array = np.ndarray[Any, Any]


@pytest.fixture(autouse=True)
def _installed() -> Iterator[None]:
    with shmreduce.install():
        yield


def address(array: Array) -> int:
    found: int = array.__array_interface__["data"][0]
    return found


@settings(
    max_examples=200,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(st.data())
def test_any_view_keeps_its_place(data: st.DataObject) -> None:
    """Every view of a shared array of any dtype arrives with its strides, at its place."""
    shared = shmreduce.share(data.draw(arrays()))
    original = data.draw(views(shared))
    received = round_trip(original)
    assert type(received) is np.ndarray
    assert received.dtype == original.dtype
    assert received.shape == original.shape
    assert received.strides == original.strides or original.size == 0
    assert received.flags.writeable == original.flags.writeable
    assert received.tobytes() == original.tobytes()
    assert shmreduce.is_shared(received)
    if original.nbytes:
        assert address(received) == address(original)


@settings(
    max_examples=100,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(arrays())
def test_share_copies_any_array(original: Array) -> None:
    """share() keeps dtype, shape, order and every bit, and leaves its source alone."""
    before = original.tobytes()
    shared = shmreduce.share(original)
    assert shared.dtype == original.dtype
    assert shared.shape == original.shape
    assert shared.flags.c_contiguous == original.flags.c_contiguous
    assert shared.flags.f_contiguous == original.flags.f_contiguous
    assert shared.strides == original.copy(order="K").strides or not original.size
    assert shared.flags.writeable
    assert shared.tobytes() == before
    assert shmreduce.is_shared(shared)
    assert not shmreduce.is_shared(original)
    shared[...] = np.zeros((), original.dtype)
    assert original.tobytes() == before


PAIRS = [("a", "f8"), ("b", "f8")]

VIEWS: dict[str, Callable[[Any], Any]] = {
    "whole": lambda base: base,
    "row": lambda base: base[3],
    "column": lambda base: base[:, 3],
    "one element": lambda base: base[3, 4],
    "zero dimensions": lambda base: base[3, 4, ...],
    "transposed": lambda base: base.T,
    "backwards": lambda base: base[::-1, ::-2],
    "broadcast": lambda base: np.broadcast_to(base[0], (5, base.shape[1])),
    "windows": lambda base: sliding_window_view(base, (2, 3)),
    "strided by hand": lambda base: as_strided(base, (2, 2), (16, 8)),
    "other dtype": lambda base: base.view(np.uint8),
    "real part": lambda base: base.view(complex).real,
    "flat": lambda base: base.reshape(-1),
    "through a memoryview": lambda base: np.asarray(memoryview(base)[2:]),
    "through frombuffer": lambda base: np.frombuffer(base, "f4"),
    "as matrix": lambda base: base.view(np.matrix),
    "as recarray": lambda base: base.reshape(-1).view(PAIRS).view(np.recarray),
}


@pytest.mark.parametrize("name", [name for name in VIEWS if name != "one element"])
def test_views_in_one_message(name: str) -> None:
    """A view and its base share memory at the receiver as they do at the sender."""
    base = shmreduce.array(np.arange(200.0).reshape(10, 20))
    view = VIEWS[name](base)
    received_base, received = round_trip((base, view))
    assert type(received) is type(view)
    assert received.strides == view.strides
    assert np.shares_memory(received_base, received)
    assert address(received) - address(received_base) == address(view) - address(base)
    received_base += 1
    assert np.array_equal(received, view)


def test_one_element_is_a_value() -> None:
    """Taking one element gives a number, no view: it is a value."""
    base = shmreduce.zeros((10, 20))
    received = round_trip(VIEWS["one element"](base))
    assert isinstance(received, np.float64)
    assert not shmreduce.is_shared(received)


def test_aliases_from_several_messages() -> None:
    """Views that arrive in different messages are views of one memory."""
    base = shmreduce.zeros(100)
    front, back = loads(message_of(base[:60])), loads(message_of(base[40:]))
    front[50] = 7
    assert back[10] == 7
    assert base[50] == 7


def test_a_view_keeps_its_block_alive() -> None:
    """The smallest view holds the whole block, also when everything else is gone."""
    view = round_trip(shmreduce.array(np.arange(100_000.0))[5:6])
    others = [shmreduce.full(100_000, -1.0) for _ in range(20)]
    assert view[0] == 5
    assert len(others) == 20


def test_empty_arrays_are_shared_too() -> None:
    """An array without elements is shared if it was made so."""
    for shape in (0, (0, 3), (3, 0, 2)):
        shared = shmreduce.zeros(shape)
        received = round_trip(shared)
        assert received.shape == shared.shape
        assert shmreduce.is_shared(received)
    assert shmreduce.is_shared(round_trip(shmreduce.zeros(10)[10:]))
    assert not shmreduce.is_shared(round_trip(np.zeros(0)))


def test_large_messages_of_views_are_small() -> None:
    """However large a shared array is, its message is a few hundred bytes."""
    assert len(message_of(shmreduce.empty(10_000_000)[::-1])) < 400


def test_what_is_made_of_shared_arrays_is_not_shared() -> None:
    """Results of computations and copies are ordinary arrays."""
    shared = shmreduce.ones(10)
    assert not shmreduce.is_shared(shared + 1)
    assert not shmreduce.is_shared(shared.copy())
    assert not shmreduce.is_shared(shared[[0, 1]])
    assert shmreduce.is_shared(shared[0:2])


# Modes


def _write_first(array: Array) -> float:
    array[0] = 99
    return float(array[0])


def _can_be_made_writeable(array: Array) -> bool:
    if array.flags.writeable:
        return True
    try:
        array.flags.writeable = True
    except ValueError:
        return False
    return True


def _send_on(array: Array) -> Array:
    return array


def test_a_read_only_block_cannot_be_made_writeable() -> None:
    """Receivers of ``ro`` arrays get read-only memory, whatever flags they set."""
    shared = shmreduce.share(np.zeros(10), mode="ro")
    with OtherProcess("spawn") as other:
        assert not other.ask(_can_be_made_writeable, shared)
        assert not other.ask(_can_be_made_writeable, shared[2:])
        with pytest.raises(ValueError, match="read-only"):
            other.ask(_write_first, shared)
    shared[0] = 1
    assert shared[0] == 1


def test_read_only_views_stay_read_only() -> None:
    """A view that is not writeable here is not writeable there."""
    shared = shmreduce.zeros(10)
    view = shared[:]
    view.flags.writeable = False
    received = round_trip(view)
    assert not received.flags.writeable
    assert shmreduce.is_shared(received)
    shared[0] = 5
    assert received[0] == 5


def test_private_views_in_one_message() -> None:
    """Views of a ``cow`` array that arrive together share their private pages, and no others."""
    base = shmreduce.zeros(100, mode="cow")
    front, back = round_trip((base[:60], base[40:]))
    other = round_trip(base)
    front[50] = 7
    assert back[10] == 7
    assert base[50] == other[50] == 0


def test_a_private_copy_is_sent_on_as_it_is() -> None:
    """What the receiver of a ``cow`` array wrote goes along when it sends it on."""
    shared = shmreduce.share(np.zeros(100_000), mode="cow")
    with OtherProcess("spawn") as other:
        returned = other.ask(_write_and_return, shared)
    assert returned[0] == 99
    assert returned[-1] == 0
    assert shared[0] == 0


def _write_and_return(array: Array) -> Array:
    array[0] = 99
    return array


def test_sent_on_by_a_receiver() -> None:
    """A shared array that comes back is the array that was sent."""
    shared = shmreduce.zeros(100)
    with OtherProcess("spawn") as other:
        returned = other.ask(_send_on, shared[10:20])
    returned[0] = 3
    assert shared[10] == 3


# Making


@pytest.mark.parametrize("dtype", [None, "f4", "M8[s]", "U3", [("a", "u1"), ("b", "f8")]])
@pytest.mark.parametrize("order", ["C", "F", "f", None])
@pytest.mark.parametrize("shape", [5, (), (2, 3), (0, 2)])
def test_made_as_numpy_makes_them(shape: Any, order: Any, dtype: Any) -> None:
    """shape, dtype and order mean what they mean to NumPy."""
    shared, plain = shmreduce.zeros(shape, dtype, order), np.zeros(shape, dtype, order)
    assert shared.dtype == plain.dtype
    assert shared.shape == plain.shape
    assert shared.tobytes() == plain.tobytes()
    if plain.size:
        assert shared.strides == plain.strides
        assert shmreduce.empty(shape, dtype, order).strides == plain.strides


def test_flexible_and_subarray_dtypes() -> None:
    """A dtype without a size, and one with a shape of its own, are settled as by NumPy."""
    assert shmreduce.zeros(3, "S").dtype == np.zeros(3, "S").dtype
    assert shmreduce.zeros(3, "(2,)f8").shape == (3, 2)


def test_full_and_ones_and_array() -> None:
    """Full takes the dtype of its value; array takes lists, and scalars."""
    assert shmreduce.ones(2).tolist() == [1.0, 1.0]
    assert shmreduce.full(2, 7).dtype == np.full(2, 7).dtype
    assert shmreduce.full((2, 2), [1, 2]).tolist() == [[1, 2], [1, 2]]
    assert shmreduce.array([[1, 2], [3, 4]], "i2").dtype == np.dtype("i2")
    assert shmreduce.array(5.0).shape == ()
    assert shmreduce.array(np.ones((2, 3), order="F")).flags.f_contiguous
    assert shmreduce.array(np.ones((2, 3), order="F"), order="C").flags.c_contiguous
    assert type(shmreduce.array(np.ones((2, 2)).view(np.matrix))) is np.ndarray


@pytest.mark.parametrize("order", ["K", "A", "C", "F", "f", None])
@pytest.mark.parametrize("axes", list(itertools.permutations(range(3))))
def test_layout_of_copies(axes: tuple[int, ...], order: Any) -> None:
    """array() lays out its copy as numpy.array does, for permuted axes and steps too."""
    original = np.arange(120).reshape(4, 5, 6).transpose(axes)
    for view in (original, original[::-1, ::2], original[:, :1], original[..., None]):
        shared = shmreduce.array(view, order=order)
        assert shared.strides == np.array(view, order=order).strides
        assert (shared == view).all()


def test_python_objects_cannot_be_shared() -> None:
    """Arrays of Python objects are refused with the dtype in the message."""
    makers: list[Callable[[], Any]] = [
        lambda: shmreduce.share(np.array([None])),
        lambda: shmreduce.empty(3, object),
        lambda: shmreduce.array([object()]),
        lambda: shmreduce.zeros(3, [("number", "i4"), ("list", "O")]),
    ]
    for make in makers:
        with pytest.raises(shmreduce.NotShareableError) as caught:
            make()
        assert "Python objects" in str(caught.value)


@pytest.mark.parametrize("order", ["X", "K", 1])
def test_impossible_orders(order: Any) -> None:
    """New arrays are in C or Fortran order; anything else is a ValueError."""
    with pytest.raises(ValueError, match="order"):
        shmreduce.empty(3, order=order)


@pytest.mark.parametrize("shape", [-1, (2, -3), "three", 2**62])
def test_impossible_shapes(shape: Any) -> None:
    """A shape that NumPy refuses is refused in the same way, or there is no room."""
    with pytest.raises((ValueError, TypeError, shmreduce.OutOfSharedMemoryError)):
        shmreduce.empty(shape)


@pytest.mark.parametrize("shape", ["x", [[1]], -1, (2, "a"), 1.5, (1 << 70,)])
def test_what_is_no_shape_is_said_as_numpy_says_it(shape: Any) -> None:
    """The error is that of ``numpy.zeros``, word for word."""
    with pytest.raises((ValueError, TypeError)) as expected:
        np.zeros(shape)
    with pytest.raises(type(expected.value)) as caught:
        shmreduce.zeros(shape)
    assert str(caught.value) == str(expected.value)


@pytest.mark.filterwarnings("ignore:Passing None into shape:DeprecationWarning")
def test_none_is_a_shape_if_numpy_says_so() -> None:
    """Former versions of NumPy take None for ``()``; to others it is no shape."""
    answers: list[Any] = []
    shape: Any = None
    for zeros in (np.zeros, shmreduce.zeros):
        try:
            answers.append(zeros(shape).shape)
        except TypeError as error:
            answers.append(str(error))
    assert answers[0] == answers[1]


def test_find_block_of_an_ordinary_array() -> None:
    """Ordinary arrays, and views of foreign memory, lie in no block."""
    assert find_block_of(np.zeros(3)) is None
    assert find_block_of(np.frombuffer(b"abc", np.uint8)) is None
