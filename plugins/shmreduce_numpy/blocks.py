"""Relates arrays to blocks: which block an array lies in, and arrays over a block.

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

# as_strided() leaves an object of a class without public name between its
# result and the array it was given.
_strided: Any = as_strided(np.zeros(1))
_STRIDED_BASE = type(_strided.base)


def find_block_of(array: np.ndarray[Any, Any]) -> Block | None:
    """Return the block that the array's memory lies in, shared or by value, or None.

    Found for every view that NumPy derives, and through memoryviews of arrays.
    Memory that came by way of another library (DLPack, say) is not recognised.
    """
    bottom = _bottom_of(array)
    return None if isinstance(bottom, np.ndarray) else shmreduce.find_block(bottom)


def owner_of(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any] | None:
    """Return the array whose memory, allocated by NumPy, this one lies in; maybe itself."""
    bottom = _bottom_of(array)
    return bottom if isinstance(bottom, np.ndarray) and flags_of(bottom).owndata else None


def _bottom_of(array: np.ndarray[Any, Any]) -> Any:
    """Return the object whose memory it is: an array that is not a view, or a foreign one."""
    bottom: Any = array
    while True:
        if isinstance(bottom, np.ndarray):
            base = base_of(bottom)
            # One that is to be written back later (WRITEBACKIFCOPY), as numpy.nditer
            # makes them, has memory of its own; its base is where that goes in the end.
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

    What is derived from it keeps the block alive.
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

    As NumPy does for a new array, ``__array_finalize__`` is called with None.
    ``offset`` counts from the start of ``memory``, of which alone the array has a view.

    Raises
    ------
    TypeError, ValueError
        If the array would reach beyond the memory.
    """
    if offset < 0:
        # NumPy looks at it only where there are strides.
        raise ValueError(f"it begins {-offset} bytes before the block")
    # By way of an array of bytes: ndarray(buffer=) forgets that a buffer was read-only, and
    # would let anybody set ``flags.writeable``; and its base is the whole block.
    whole = np.frombuffer(memory, np.uint8)
    # Not cls(...): the constructor of a subclass takes what it likes. By position: NumPy
    # takes half a microsecond longer to find arguments by their names.
    return np.ndarray.__new__(cls, shape, dtype, whole, offset, strides, order)
