"""Arrays of one shape and dtype of a message, as the rows of a larger array in a block.

May import NumPy, and ``rebuild`` of this plugin.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from shmreduce_numpy import rebuild

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["MOST_DIMENSIONS", "ArrayRows"]

MOST_DIMENSIONS = 31
"""An array of rows has one more, and NumPy 1 allows 32."""


class ArrayRows:
    """A block that is being filled with arrays; see :meth:`shmreduce.Message.add_row`.

    It is pickled once, and each array as a reference to it and a number.

    Attributes
    ----------
    array : numpy.ndarray
        Its rows are to be set.
    rebuild : callable
        Returns a row at the receiver.
    """

    __slots__ = ("_arguments", "array", "rebuild")

    def __init__(
        self,
        key: tuple[str, tuple[int, ...]],
        view: memoryview,
        block: object,
        length: int,
        copied: bool,
    ) -> None:
        kind, shape = key
        every = (length, *shape)
        self._arguments = block, kind, every
        self.array: Any = np.ndarray(every, rebuild.DTYPES[kind], view)
        self.rebuild: Callable[..., Any] = (
            rebuild.rebuild_row_apart if copied else rebuild.rebuild_row
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return rebuild.rebuild_rows, self._arguments

    def close(self) -> None:
        """Drop the view of the block."""
        self.array = None
