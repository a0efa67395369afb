"""The receiving side: functions that messages name to rebuild memoryviews.

May import public names of :mod:`shmreduce`. Messages contain the functions' names and
arguments, so these are a protocol.
"""

from __future__ import annotations

import math
import struct
from typing import Any

from shmreduce import InvalidHandleError, import_block

__all__ = ["cast", "rebuild_inline", "rebuild_view"]


def rebuild_view(
    handle: bytes, offset: int, element: str, shape: tuple[int, ...], step: int, readonly: bool
) -> memoryview:
    """Return a view of rows in a block.

    Parameters
    ----------
    handle : bytes
        The block's handle.
    offset : int
        Bytes from the start of the block to the lowest row.
    element : str
        Format of one element, as ``memoryview.format``.
    shape : tuple of int
        The view's shape.
    step : int
        The distance from one row to the next, in rows; negative if they run backwards.
    readonly : bool
        Whether the view is read-only even if the block is not.

    Raises
    ------
    ShmreduceError
        Those of :func:`shmreduce.import_block`, and InvalidHandleError if the view
        would reach beyond its block.
    """
    block = import_block(handle)
    span = shape
    if shape and shape[0] > 0:
        span = ((shape[0] - 1) * abs(step) + 1, *shape[1:])
    end = offset + math.prod(span) * struct.calcsize(element)
    if offset < 0 or end > block.nbytes:
        reason = f"a view of bytes {offset} to {end} does not fit"
        raise InvalidHandleError(
            f"The message names {block.nbytes} bytes of shared memory, but {reason}. "
            "It was damaged, or made by another version of shmreduce.",
            reason=reason,
        )
    view = cast(block.buffer[offset : end or None], element, span)
    if step != 1:
        view = view[::step]
    return view.toreadonly() if readonly else view


def rebuild_inline(
    data: bytes, element: str, shape: tuple[int, ...], readonly: bool
) -> memoryview:
    """Return a view of bytes of the message itself."""
    view = cast(memoryview(data if readonly else bytearray(data)), element, shape)
    return view.toreadonly() if readonly else view


def cast(data: memoryview, element: Any, shape: tuple[int, ...]) -> memoryview:
    """Return the view that ``data.cast`` makes, even for a shape with zeros.

    ``memoryview.cast`` refuses such a shape. So a view of one row is made, and sliced to
    no rows.
    """
    if len(shape) == 1:
        return data[: shape[0] * struct.calcsize(element)].cast(element)
    if 0 not in shape:
        return data.cast(element, shape)
    nbytes = math.prod(shape[1:]) * struct.calcsize(element)
    row = data[:nbytes] if len(data) >= nbytes else memoryview(bytearray(nbytes))
    return row.cast(element, (1, *shape[1:]))[:0]
