"""Makes new shared arrays, and shared copies of arrays.

May import public names of :mod:`shmreduce`, NumPy, and ``blocks``, ``classes``,
``copying`` and ``rebuild`` of this plugin.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from shmreduce import NotShareableError, allocate
from shmreduce_numpy.blocks import array_over, root_of
from shmreduce_numpy.classes import Protocol, dtype_of, is_masked, mask_of, protocol_of
from shmreduce_numpy.copying import copy_elements
from shmreduce_numpy.rebuild import rebuild_masked, take_attributes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shmreduce import Mode

__all__ = ["array_like", "fill", "new_array", "share_array"]

_NOTHING = np.dtype([])
"""A dtype of 0 bytes: an array of any shape takes no memory."""


def new_array(shape: Any, dtype: Any, order: Any, mode: Mode, *, zeroed: bool = False) -> Any:
    """Return an array in its own shared block, zeroed or uninitialised.

    Raises
    ------
    NotShareableError
        If the dtype has Python objects inside.
    TypeError, ValueError
        Those of ``numpy.empty`` for an impossible shape, dtype or order.
    """
    # NumPy interprets dtype and shape, for arrays without memory: "S" means S1, a subarray
    # dtype adds dimensions, and shape may be a number.
    settled = np.empty((0,), dtype)
    _refuse_objects(settled.dtype)
    lengths = np.empty(shape, _NOTHING).shape
    # broadcast_to() raises if there would be too many elements.
    outline = np.broadcast_to(np.empty((), settled.dtype), lengths).shape + settled.shape[1:]
    order = _letter(order, "C")
    if order not in ("C", "F"):
        raise ValueError(f"order must be 'C' or 'F', not {order!r}")
    return _new(outline, settled.dtype, mode, order=order, zeroed=zeroed)


def array_like(obj: Any, dtype: Any, order: Any, mode: Mode) -> Any:
    """Return a plain shared array with the contents of ``obj``.

    Raises
    ------
    NotShareableError
        If the dtype has Python objects inside.
    """
    source = np.asarray(obj, dtype)
    _refuse_objects(source.dtype)
    strides = _strides(source, _letter(order, "K"))
    array = _new(source.shape, source.dtype, mode, strides=strides)
    _copy(array, source)
    return array


def share_array(array: np.ndarray[Any, Any], mode: Mode) -> Any:
    """Return a shared copy of ``array``: same class, dtype, shape and order.

    The copy of a masked array has a shared mask of full size, so that all processes
    see the same mask.

    Raises
    ------
    NotShareableError
        If the dtype has Python objects inside.
    """
    _refuse_objects(dtype_of(array))
    protocol = protocol_of(type(array))
    if protocol is Protocol.MASKED:
        return _share_masked(array, mode)
    plain = np.ndarray.view(array, np.ndarray)
    shared = _new(plain.shape, plain.dtype, mode, type(array), strides=_strides(plain, "K"))
    _copy(np.ndarray.view(shared, np.ndarray), plain)
    if type(array) is not np.ndarray:
        take_attributes(shared, array)
    if is_masked(type(array)):
        # Not by setattr, which a class may redefine.
        shared.__dict__["_mask"] = _share_mask(array, mode)
    return shared


def fill(array: np.ndarray[Any, Any], value: Any) -> None:
    """Set all elements to ``value``, as ``numpy.full`` does."""
    np.copyto(array, value, casting="unsafe")


def _share_masked(array: Any, mode: Mode) -> Any:
    return rebuild_masked(
        type(array),
        share_array(np.ndarray.view(array, array.baseclass), mode),
        _share_mask(array, mode),
        array._fill_value,  # reading the public one would fix the dtype's default
        array.hardmask,
    )


def _share_mask(array: Any, mode: Mode) -> Any:
    mask = mask_of(array)
    return share_array(np.ma.getmaskarray(array) if mask is None else mask, mode)


def _new(
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    mode: Mode,
    cls: type[np.ndarray[Any, Any]] = np.ndarray,
    *,
    order: str = "C",
    strides: Sequence[int] | None = None,
    zeroed: bool = False,
) -> Any:
    nbytes = dtype.itemsize
    for length in shape:
        nbytes *= length
    block = allocate(nbytes, mode)
    if zeroed:
        root_of(block).fill(0)
    return array_over(block.buffer, shape, dtype, 0, strides, order, cls)


def _copy(target: np.ndarray[Any, Any], source: np.ndarray[Any, Any]) -> None:
    copy_elements(_opaque(target), _opaque(source))


def _opaque(array: np.ndarray[Any, Any]) -> Any:
    """Return a view with opaque elements, so that gaps between fields are copied too.

    Otherwise they would keep what the memory held before, perhaps data of another array.
    """
    return array if array.dtype.names is None else array.view(f"V{array.itemsize}")


def _letter(order: Any, default: str) -> Any:
    """Return an order as a capital letter: NumPy also accepts small letters and None."""
    if order is None:
        return default
    return order.upper() if isinstance(order, str) else order


def _strides(array: np.ndarray[Any, Any], order: str) -> list[int]:
    """Return the strides of the gapless copy of ``array`` that ``numpy.array`` would make."""
    axes = list(range(array.ndim))
    fortran = array.flags.f_contiguous and not array.flags.c_contiguous
    if order == "F" or (order in ("K", "A") and fortran):
        axes.reverse()
    elif order == "K" and not array.flags.c_contiguous:
        # The axis with the longest stride is the outermost; the sort is stable.
        axes.sort(key=lambda axis: -abs(array.strides[axis]))
    elif order not in ("C", "A", "K"):
        raise ValueError(f"order must be 'C', 'F', 'A' or 'K', not {order!r}")
    strides = [0] * array.ndim
    step = array.itemsize
    for axis in reversed(axes):
        strides[axis] = step
        step *= array.shape[axis]
    return strides


def _refuse_objects(dtype: np.dtype[Any]) -> None:
    if dtype.hasobject:
        raise NotShareableError(
            f"Arrays of dtype {dtype} cannot be shared: their elements are Python objects, "
            "which live in one process. Convert to a dtype with a fixed size, such as "
            "'U10' for text or float64 for numbers.",
            type_name="numpy.ndarray",
            reason=f"dtype {dtype} has Python objects inside",
        )
