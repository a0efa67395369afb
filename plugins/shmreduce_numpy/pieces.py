"""Arrays of one dtype of a message, as pieces of a larger array in a block.

May import NumPy, and ``rebuild`` of this plugin.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from shmreduce_numpy import rebuild

__all__ = ["ArrayPieces"]


class ArrayPieces:
    """A block that is being filled with arrays; see :meth:`shmreduce.Message.add_piece`.

    It is pickled once, and each array as a reference to it and two numbers.

    Attributes
    ----------
    array : numpy.ndarray
        All of the block, with one axis. Its pieces are to be set.
    itemsize : int
        Bytes of an element.
    short : bool
        Whether the receiver copies pieces of any size.
    """

    __slots__ = ("_arguments", "array", "itemsize", "short")

    def __init__(self, kind: str, view: memoryview, block: object, short: bool) -> None:
        dtype = rebuild.DTYPES[kind]
        self._arguments = block, kind
        self.itemsize: int = dtype.itemsize
        self.array: Any = np.ndarray((view.nbytes // self.itemsize,), dtype, view)
        self.short = short

    def __reduce__(self) -> tuple[Any, ...]:
        return rebuild.rebuild_pieces, self._arguments

    def close(self) -> None:
        """Drop the view of the block."""
        self.array = None
