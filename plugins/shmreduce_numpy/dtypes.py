"""Which dtypes can travel by shared memory, and how they are written down.

May import NumPy.
"""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["describe_dtype"]

# Scalar types whose dtype's ``str`` says all there is to say. Not there:
# np.record, and the types that other packages define.
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
    """Return something short that NumPy takes as this dtype, and that pickles.

    Pickling a dtype takes longer than all the rest of a small message, so a
    dtype goes as text where text is exact, byte order and unit included.

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
        # One of NumPy's own objects, which its character names, and the quickest to write.
        return dtype.char
    if dtype.type in _SAID_BY_STR and dtype.names is None and dtype.metadata is None:
        return dtype.str
    return dtype
