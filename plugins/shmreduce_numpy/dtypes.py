"""How dtypes are written in messages.

May import NumPy.
"""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["describe_dtype"]

# Scalar types whose dtypes ``dtype.str`` describes completely. Not so: np.record, and types
# that other packages define.
_SAID_BY_STR = frozenset(
    {
        np.bool_,
        np.int8,
        np.int16,
        np.int32,
        np.int64,
        np.uint8,
        np.uint16,
        np.uint32,
        np.uint64,
        np.longlong,
        np.ulonglong,
        np.float16,
        np.float32,
        np.float64,
        np.longdouble,
        np.complex64,
        np.complex128,
        np.clongdouble,
        np.datetime64,
        np.timedelta64,
        np.bytes_,
        np.str_,
        np.void,
    }
)


def describe_dtype(dtype: np.dtype[Any]) -> str | np.dtype[Any]:
    """Return a short picklable object from which NumPy makes this dtype.

    Pickling a dtype takes longer than everything else in a small message. So it is sent as
    text if the text is exact, including byte order and unit.

    Examples
    --------
    >>> describe_dtype(np.dtype("f8"))
    'd'
    >>> describe_dtype(np.dtype(">f8"))
    '>f8'
    >>> describe_dtype(np.dtype([("x", "u1"), ("y", "<f8")], align=True))
    dtype([('x', 'u1'), ('y', '<f8')], align=True)
    """
    if dtype.isbuiltin == 1:
        # A built-in dtype, which its character names. That is the fastest.
        return dtype.char
    if dtype.type in _SAID_BY_STR and dtype.names is None and dtype.metadata is None:
        return dtype.str
    return dtype
