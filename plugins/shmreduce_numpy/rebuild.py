"""The receiving side: functions that messages name to rebuild arrays.

May import public names of :mod:`shmreduce`, NumPy, and ``blocks`` of this plugin.
Messages contain the functions' names and arguments, so these are a protocol.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from shmreduce import Block, InvalidHandleError, import_block
from shmreduce_numpy.blocks import array_over

__all__ = [
    "DTYPES",
    "rebuild_any_small",
    "rebuild_bytes",
    "rebuild_copy",
    "rebuild_inline",
    "rebuild_masked",
    "rebuild_part",
    "rebuild_piece",
    "rebuild_piece_apart",
    "rebuild_pieces",
    "rebuild_small",
    "rebuild_view",
    "set_attributes",
    "take_attributes",
]

DTYPES: dict[Any, Any] = {kind: np.dtype(kind) for kind in "?bhilqBHILQefdgFDG"}
"""NumPy's built-in dtype objects, which are never freed, by their characters."""
# Globals: a message may have tens of thousands of small arrays, and one attribute lookup
# less for each saves a tenth of the time.
_ndarray: Any = np.ndarray
_NOTHING = (0,)
"""The shape of an array without elements."""
_BYTES = DTYPES["b"]
_dtype_of_text = functools.lru_cache(maxsize=256)(np.dtype)
"""Dtypes without fields cannot be changed, so several arrays can have the same."""


def rebuild_view(
    handle: bytes,
    offset: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...] | None,
    dtype: Any,
    writeable: bool,
    cls: type[np.ndarray[Any, Any]] = np.ndarray,
) -> Any:
    """Return an array over the part of a block that the sender's array covered.

    Raises
    ------
    ShmreduceError
        Those of :func:`shmreduce.import_block`, and InvalidHandleError if the array
        would reach beyond its block.
    """
    memory = import_block(handle).buffer
    return _lay_over(memory, shape, dtype, offset, strides, "C", writeable, cls)


def rebuild_copy(
    handle: bytes,
    shape: tuple[int, ...],
    order: str,
    dtype: Any,
    writeable: bool,
    cls: type[np.ndarray[Any, Any]] = np.ndarray,
) -> Any:
    """Return an array over a whole block.

    Raises
    ------
    ShmreduceError
        As for :func:`rebuild_view`.
    """
    memory = import_block(handle).buffer
    return _lay_over(memory, shape, dtype, 0, None, order, writeable, cls)


def rebuild_part(
    block: Block,
    start: int,
    nbytes: int,
    shape: tuple[int, ...],
    order: str,
    dtype: Any,
    writeable: bool,
    cls: type[np.ndarray[Any, Any]] = np.ndarray,
) -> Any:
    """Return an array over its part of a block that has several arrays.

    Raises
    ------
    ShmreduceError
        As for :func:`rebuild_view`.
    """
    memory = block.buffer[start : start + nbytes]
    return _lay_over(memory, shape, dtype, 0, None, order, writeable, cls)


def rebuild_pieces(block: Block, kind: str) -> Any:
    """Return an array over a block, of which pieces are the arrays of the message.

    Raises
    ------
    ShmreduceError
        As for :func:`rebuild_view`.
    """
    memory = block.buffer
    return _lay_over(
        memory, (memory.nbytes // DTYPES[kind].itemsize,), kind, 0, None, "C", True, _ndarray
    )


def rebuild_piece(
    pieces: np.ndarray[Any, Any], start: int, stop: int, shape: tuple[int, ...] | None = None
) -> Any:
    """Return a piece, in its place: the array keeps the block.

    Raises
    ------
    InvalidHandleError
        If there is no such piece.
    """
    piece = pieces[start:stop]
    if shape is None and len(piece) == stop - start:
        return piece
    try:
        if len(piece) != stop - start:
            raise ValueError("they are not all there")
        return piece.reshape(shape)
    except ValueError as error:
        which = f"elements {start} to {stop} with shape {shape}"
        raise _misfit(pieces.nbytes, which, error) from error


def rebuild_piece_apart(
    pieces: np.ndarray[Any, Any], start: int, stop: int, shape: tuple[int, ...] | None = None
) -> Any:
    """Return a copy of a piece; otherwise as :func:`rebuild_piece`."""
    return rebuild_piece(pieces, start, stop, shape).copy()


def rebuild_inline(
    data: bytes,
    shape: tuple[int, ...],
    order: Any,
    dtype: Any,
    writeable: bool,
    cls: type[np.ndarray[Any, Any]],
) -> Any:
    """Return an array over bytes of the message itself."""
    buffer = bytearray(data) if writeable else data
    return np.ndarray.__new__(cls, shape, dtype, buffer=buffer, order=order)


def rebuild_small(kind: str, shape: tuple[int, ...], fortran: bool, data: bytes) -> Any:
    """Return an array with its own memory, from bytes of the message itself.

    ``kind`` is the dtype's character. This calls ``ndarray.__setstate__`` directly, which
    is the fastest way.
    """
    array: Any = _ndarray(_NOTHING, _BYTES)
    array.__setstate__((1, shape, DTYPES[kind], fortran, data))
    return array


def rebuild_any_small(
    dtype: Any,
    shape: tuple[int, ...],
    fortran: bool,
    data: bytes,
    cls: type[np.ndarray[Any, Any]] = np.ndarray,
) -> Any:
    """Return an array as :func:`rebuild_small` does, of any class and native dtype.

    A dtype that has no fields comes as text. The class has the pickle methods of
    ``numpy.ndarray``, which make an array in the same two steps.
    """
    array = _ndarray.__new__(cls, _NOTHING, _BYTES)
    whole = _dtype_of_text(dtype) if type(dtype) is str else dtype
    _ndarray.__setstate__(array, (1, shape, whole, fortran, data))
    return array


def rebuild_masked(
    cls: type[np.ma.MaskedArray[Any, Any]],
    data: np.ndarray[Any, Any],
    mask: np.ndarray[Any, Any] | None,
    fill_value: Any,
    hardmask: bool,
) -> Any:
    """Return a masked array over ``data`` and ``mask``, neither of which is copied."""
    # Without keep_mask=False, a structured array would get a new mask, combined from an
    # empty one and this one.
    return np.ma.MaskedArray.__new__(
        cls,
        data,
        mask=np.ma.nomask if mask is None else mask,
        keep_mask=False,
        fill_value=fill_value,
        hard_mask=hardmask,
    )


def rebuild_bytes(handle: bytes) -> bytes:
    """Return the contents of a block."""
    return bytes(import_block(handle).buffer)


def set_attributes(array: np.ndarray[Any, Any], state: Any) -> None:
    """Set attributes of ``array``, in the form that ``object.__getstate__`` returns."""
    named, in_slots = state if isinstance(state, tuple) else (state, None)
    if named:
        array.__dict__.update(named)
    for name, value in (in_slots or {}).items():
        setattr(array, name, value)


def take_attributes(array: np.ndarray[Any, Any], template: np.ndarray[Any, Any]) -> None:
    """Give ``array`` the attributes that views of ``template`` have.

    NumPy's protocol for that is ``__array_finalize__``:
    https://numpy.org/doc/stable/user/basics.subclassing.html
    """
    array.__array_finalize__(template)


def _lay_over(
    memory: memoryview,
    shape: tuple[int, ...],
    dtype: Any,
    offset: int,
    strides: tuple[int, ...] | None,
    order: str,
    writeable: bool,
    cls: type[np.ndarray[Any, Any]],
) -> Any:
    try:
        array = array_over(memory, shape, dtype, offset, strides, order, cls)
    except (TypeError, ValueError) as error:
        which = f"an array of shape {shape} and dtype {dtype}"
        raise _misfit(memory.nbytes, which, error) from error
    if not writeable:
        np.ndarray.setflags(array, write=False)
    return array


def _misfit(nbytes: int, which: str, error: Exception) -> InvalidHandleError:
    """Return the error for a message whose array does not fit its memory."""
    reason = f"{which} does not fit: {error}"
    return InvalidHandleError(
        f"The message names {nbytes} bytes of shared memory, but {reason}. "
        "It was damaged, or made by another version of shmreduce.",
        reason=reason,
    )
