"""Relates arrays to blocks: finds an array's block, and makes arrays over a block.

May import public names of :mod:`shmreduce`, NumPy, and ``classes`` of this plugin.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

import shmreduce
from shmreduce_numpy.classes import address_of, base_of, flags_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shmreduce import Block

__all__ = ["array_over", "find_block_of", "offset_in", "owner_of", "root_of"]

# The base of an array from as_strided() is an object of a private class, which refers to
# the original array.
_strided: Any = as_strided(np.zeros(1))
_STRIDED_BASE = type(_strided.base)


def find_block_of(array: np.ndarray[Any, Any]) -> Block | None:
    """Return the block that the array's memory lies in, shared or by value, or None.

    It is found for all views that NumPy makes, and through memoryviews of arrays. It is
    not found if another library has passed the memory on, for example by DLPack.
    """
    bottom = _bottom_of(array)
    return None if isinstance(bottom, np.ndarray) else shmreduce.find_block(bottom)


def owner_of(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any] | None:
    """Return the array that owns the memory, if NumPy allocated it; it may be ``array``."""
    bottom = _bottom_of(array)
    return bottom if isinstance(bottom, np.ndarray) and flags_of(bottom).owndata else None


def _bottom_of(array: np.ndarray[Any, Any]) -> Any:
    """Return the object that owns the memory: an array that is no view, or another object."""
    bottom: Any = array
    while True:
        if isinstance(bottom, np.ndarray):
            base = base_of(bottom)
            # An array with WRITEBACKIFCOPY, such as numpy.nditer makes, owns its memory and
            # nevertheless has a base: the array to which it will be copied back.
            if base is None or flags_of(bottom).owndata:
                return bottom
            bottom = base
        elif type(bottom) is _STRIDED_BASE and bottom.base is not None:
            bottom = bottom.base
        elif isinstance(bottom, memoryview) and isinstance(bottom.obj, np.ndarray):
            bottom = bottom.obj
        else:
            return bottom


def offset_in(block: Block, array: np.ndarray[Any, Any]) -> int:
    """Return how far from the start of ``block`` the array's first element is, in bytes."""
    return address_of(array) - block.address


def root_of(block: Block) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return the bytes of ``block`` as an array; read-only if the block is.

    The array and its views keep the block alive.
    """
    return np.frombuffer(block.buffer, np.uint8)


def array_over(
    memory: memoryview,
    shape: Sequence[int],
    dtype: Any,
    offset: int = 0,
    strides: Sequence[int] | None = None,
    order: Any = "C",
    cls: type[np.ndarray[Any, Any]] = np.ndarray,
) -> Any:
    """Return an array of class ``cls`` over bytes of a block, which it keeps alive.

    As for any new array, NumPy calls ``__array_finalize__`` with None. ``offset`` counts
    from the start of ``memory``. The array's base is ``memory`` only, not the whole block.

    Raises
    ------
    TypeError, ValueError
        If the array would reach beyond the memory.
    """
    if offset < 0:
        # NumPy checks it only if strides are given.
        raise ValueError(f"it begins {-offset} bytes before the block")
    # Through an array of bytes. ndarray(buffer=memory) would forget that the buffer is
    # read-only, so that anybody could set ``flags.writeable``; and its base would be the
    # whole block.
    whole = np.frombuffer(memory, np.uint8)
    # Not cls(...): a subclass's constructor may take any arguments. By position, since NumPy
    # takes half a microsecond longer for keyword arguments.
    return np.ndarray.__new__(cls, shape, dtype, whole, offset, strides, order)
