"""The receiving side: functions that messages name to rebuild arrays.

May import public names of :mod:`shmreduce`, NumPy, and ``blocks`` of this
plugin. The functions' names and parameters are what is written in messages.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from shmreduce import Block, InvalidHandleError, import_block
from shmreduce_numpy.blocks import array_over

__all__ = [
    "DTYPES",
    "rebuild_bytes",
    "rebuild_copy",
    "rebuild_inline",
    "rebuild_masked",
    "rebuild_part",
    "rebuild_small",
    "rebuild_view",
    "set_attributes",
    "take_attributes",
]

DTYPES: dict[Any, Any] = {kind: np.dtype(kind) for kind in "?bhilqBHILQefdgFDG"}
"""NumPy's own dtype objects, which live as long as NumPy, by their characters."""
# A message may have tens of thousands of small arrays: a lookup less each is a tenth less.
_ndarray: Any = np.ndarray
_NOTHING = (0,)
_BYTES = DTYPES["b"]


def rebuild_view(
    handle: bytes,
    offset: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...] | None,
    dtype: Any,
    writeable: bool,
    cls: type[np.ndarray[Any, Any]] = np.ndarray,
) -> Any:
    """Return an array over the part of a block that the sender's array lay in.

    Raises
    ------
    ShmreduceError
        As :func:`shmreduce.import_block`; an InvalidHandleError if the array
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
    """Return an array over a whole block that was filled for this message.

    Raises
    ------
    ShmreduceError
        As :func:`rebuild_view`.
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
    """Return an array over its part of a block that carries others, too.

    Raises
    ------
    ShmreduceError
        As :func:`rebuild_view`.
    """
    memory = block.buffer[start : start + nbytes]
    return _lay_over(memory, shape, dtype, 0, None, order, writeable, cls)


def rebuild_inline(
    data: bytes,
    shape: tuple[int, ...],
    order: Any,
    dtype: Any,
    writeable: bool,
    cls: type[np.ndarray[Any, Any]],
) -> Any:
    """Return an array over bytes that came in the message itself."""
    buffer = bytearray(data) if writeable else data
    return np.ndarray.__new__(cls, shape, dtype, buffer=buffer, order=order)


def rebuild_small(kind: str, shape: tuple[int, ...], fortran: bool, data: bytes) -> Any:
    """Return an array of its own memory from a small message.

    ``kind`` is the dtype's character. NumPy's own state protocol, called
    directly: the fewest steps there are.
    """
    array: Any = _ndarray(_NOTHING, _BYTES)
    array.__setstate__((1, shape, DTYPES[kind], fortran, data))
    return array


def rebuild_masked(
    cls: type[np.ma.MaskedArray[Any, Any]],
    data: np.ndarray[Any, Any],
    mask: np.ndarray[Any, Any] | None,
    fill_value: Any,
    hardmask: bool,
) -> Any:
    """Return a masked array over ``data`` and ``mask``, neither of which is copied."""
    # keep_mask=False: otherwise a structured array gets a new mask, made from
    # an empty one and this one.
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
    """Give ``array`` attributes as ``object.__getstate__`` returns them."""
    named, in_slots = state if isinstance(state, tuple) else (state, None)
    if named:
        array.__dict__.update(named)
    for name, value in (in_slots or {}).items():
        setattr(array, name, value)


def take_attributes(array: np.ndarray[Any, Any], template: np.ndarray[Any, Any]) -> None:
    """Give ``array`` the attributes that views of ``template`` have.

    By ``__array_finalize__``, NumPy's protocol for it:
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
        reason = f"an array of shape {shape} and dtype {dtype} does not fit: {error}"
        raise InvalidHandleError(
            f"The message names {memory.nbytes} bytes of shared memory, but {reason}. "
            "It was damaged, or made by another version of shmreduce.",
            reason=reason,
        ) from error
    if not writeable:
        np.ndarray.setflags(array, write=False)
    return array
