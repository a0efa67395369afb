"""The layout of an array in memory: shape, strides and element type.

May import ``errors`` of this plugin.
"""

from __future__ import annotations

import math
import re
from typing import NamedTuple

from shmreduce_cuda.errors import CudaMemoryError

__all__ = ["Layout", "itemsize_of"]

_TYPESTR = re.compile(r"^[<>|=]([biufcmMOSUV])(\d+)(\[.*\])?$")
_UNICODE_BYTES = 4


def itemsize_of(typestr: str) -> int:
    """Return the size of one element, in bytes, from an array interface's type string.

    Raises
    ------
    CudaMemoryError
        If it is not a type string, or that of Python objects.

    Examples
    --------
    >>> itemsize_of("<f8"), itemsize_of("<U3"), itemsize_of("<M8[ns]")
    (8, 12, 8)
    """
    found = _TYPESTR.match(typestr)
    if found is None or found[1] == "O":
        raise CudaMemoryError(
            f"arrays of type {typestr!r} cannot be sent: convert to a type of fixed size",
            kind=f"elements of type {typestr!r}",
            remedy="convert to a type of fixed size",
        )
    return int(found[2]) * (_UNICODE_BYTES if found[1] == "U" else 1)


class Layout(NamedTuple):
    """Shape, strides and element type of an array.

    Parameters
    ----------
    shape : tuple of int
        Length of each axis.
    strides : tuple of int or None
        Bytes from one element of each axis to the next; None for C order
        without gaps.
    typestr, descr : str, list or None
        As in ``__array_interface__``.
    dtype_name : str
        The library's name of a type that a typestr cannot express, such as
        ``bfloat16``; otherwise empty.

    Examples
    --------
    >>> Layout((2, 3), None, "<f4").extent
    (0, 24)
    >>> Layout((3,), (-8,), "<f8").extent
    (-16, 8)
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    typestr: str
    descr: list[tuple[str, ...]] | None = None
    dtype_name: str = ""

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return math.prod(self.shape) * itemsize_of(self.typestr)

    @property
    def extent(self) -> tuple[int, int]:
        """The offsets from the first element to the lowest byte, and to behind the highest."""
        if self.strides is None:
            return 0, self.nbytes
        low = high = 0
        for length, stride in zip(self.shape, self.strides, strict=True):
            low += min(0, stride * (length - 1))
            high += max(0, stride * (length - 1))
        return low, high + itemsize_of(self.typestr)
