"""Examines a memoryview: its format, its layout and its memory.

May import the standard library only.
"""

from __future__ import annotations

import ctypes
import struct
import sys
from dataclasses import dataclass
from typing import Any

__all__ = ["Elements", "Rows", "address_of", "bottom_of", "is_castable", "rows_of", "structure_of"]

# The formats that memoryview.cast() accepts in every supported version of Python.
_CASTABLE = frozenset("bBhHiIlLqQnNfd?cP")


class _Buffer(ctypes.Structure):
    """``Py_buffer``: https://docs.python.org/3/c-api/buffer.html#buffer-structure."""

    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.c_void_p),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.POINTER(ctypes.c_ssize_t)),
        ("strides", ctypes.POINTER(ctypes.c_ssize_t)),
        ("suboffsets", ctypes.POINTER(ctypes.c_ssize_t)),
        ("internal", ctypes.c_void_p),
    )


_DEEPEST = 64
"""Limit for following views of views: the ``base`` of other objects may form a cycle."""
_PYBUF_FULL_RO = 0x011C
"""``PyBUF_FULL_RO`` of CPython: a buffer with shape, strides and format, writable or not."""
_get_buffer: Any = ctypes.pythonapi.PyObject_GetBuffer
_get_buffer.argtypes = (ctypes.py_object, ctypes.POINTER(_Buffer), ctypes.c_int)
_get_buffer.restype = ctypes.c_int
_release_buffer: Any = ctypes.pythonapi.PyBuffer_Release
_release_buffer.argtypes = (ctypes.POINTER(_Buffer),)
_release_buffer.restype = None


def address_of(view: memoryview) -> int:
    """Return the address of the view's first element, which may be 0 for an empty buffer.

    By the C interface, since ``from_buffer`` of ctypes refuses read-only and strided views.
    """
    buffer = _Buffer()
    _get_buffer(view, ctypes.byref(buffer), _PYBUF_FULL_RO)
    try:
        return buffer.buf or 0
    finally:
        _release_buffer(ctypes.byref(buffer))


def bottom_of(view: memoryview) -> Any:
    """Return the object that owns the view's memory.

    That is the view's exporter; or, if the exporter has a ``base`` from which it borrows
    its memory, that object, and so on.
    """
    bottom: Any = view.obj
    for _ in range(_DEEPEST):
        below = _below(bottom)
        if below is None:
            break
        bottom = below
    return bottom


def _below(exporter: Any) -> Any:
    if isinstance(exporter, memoryview):
        return exporter.obj
    # If there is an array, NumPy has been imported. Not exporter.base, since a subclass may
    # redefine it.
    array_type: Any = getattr(sys.modules.get("numpy"), "ndarray", None)
    if array_type is not None and isinstance(exporter, array_type):
        return array_type.base.__get__(exporter)
    return getattr(exporter, "base", None)


def is_castable(view: memoryview) -> bool:
    """Return whether :meth:`memoryview.cast` can make a view of this format from bytes.

    Examples
    --------
    >>> is_castable(memoryview(b"abc"))
    True
    >>> import ctypes
    >>> is_castable(memoryview((ctypes.c_int * 3)()))
    False
    """
    element = view.format.removeprefix("@")
    # ctypes gives packed structures and unions the format "B", but they are longer.
    return element in _CASTABLE and struct.calcsize(element) == view.itemsize


def structure_of(view: memoryview) -> type | None:
    """Return the ctypes structure or union that the view's elements are instances of, or None.

    The format of such a view may be wrong, see :func:`is_castable`.
    """
    kind: Any = type(view.obj)
    while issubclass(kind, ctypes.Array):
        kind = kind._type_
    if not issubclass(kind, ctypes.Structure | ctypes.Union):
        return None
    return kind if ctypes.sizeof(kind) == view.itemsize else None


class Elements:
    """Lets NumPy see the elements of a view of any format as opaque bytes."""

    def __init__(self, view: memoryview) -> None:
        self._view = view
        self.__array_interface__ = {
            "version": 3,
            "data": (address_of(view), view.readonly),
            "shape": view.shape,
            "strides": view.strides,
            "typestr": f"|V{view.itemsize}",
        }


@dataclass(frozen=True)
class Rows:
    """Pieces of memory of the same size, each gapless, at equal distances.

    Parameters
    ----------
    size : int
        Bytes of one row.
    step : int
        The distance from one row to the next, in rows; negative if they run backwards.
    """

    size: int
    step: int


def rows_of(view: memoryview) -> Rows | None:
    """Return the rows of a view that slicing along the first dimension can make, else None.

    Examples
    --------
    >>> rows_of(memoryview(bytes(24)).cast("B", (4, 6))[::-2])
    Rows(size=6, step=-2)
    """
    shape, strides = view.shape, view.strides
    if not shape or not strides or 0 in shape[1:] or view.suboffsets:
        return None
    size = view.itemsize
    for length, stride in zip(reversed(shape[1:]), reversed(strides[1:]), strict=True):
        if stride != size and length != 1:
            return None
        size *= length
    if shape[0] <= 1:
        return Rows(size, 1)
    if strides[0] == 0 or strides[0] % size:
        return None
    return Rows(size, strides[0] // size)
