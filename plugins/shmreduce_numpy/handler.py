"""Lets NumPy allocate the memory of arrays by other functions.

May import public names of :mod:`shmreduce`, and NumPy.

NumPy's interface for that is in C: https://numpy.org/neps/nep-0049.html. It is called
through NumPy's table of C functions, so nothing must be compiled for a version of NumPy
or of Python. The current handler belongs to the context of :mod:`contextvars`; a new
thread begins with NumPy's own handler.
"""

from __future__ import annotations

import ctypes
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from shmreduce import AllocatorFunctions

__all__ = ["NumpyMemoryHandlers", "memory_handlers"]

# Indexes in the table, which are the same in all versions of NumPy.
_SET_HANDLER, _GET_HANDLER = 304, 305
_CAPSULE_NAME = b"mem_handler"
_STRUCT_VERSION = 1
"""The version of ``PyDataMem_Handler`` that is laid out below."""


class _Allocator(ctypes.Structure):
    """``PyDataMemAllocator`` of NumPy."""

    _fields_ = (
        ("context", ctypes.c_void_p),
        ("malloc", ctypes.c_void_p),
        ("calloc", ctypes.c_void_p),
        ("realloc", ctypes.c_void_p),
        ("free", ctypes.c_void_p),
    )


class _Handler(ctypes.Structure):
    """``PyDataMem_Handler`` of NumPy."""

    _fields_ = (
        ("name", ctypes.c_char * 127),
        ("version", ctypes.c_uint8),
        ("allocator", _Allocator),
    )


class NumpyMemoryHandlers:
    """See :class:`shmreduce.MemoryHandlers`. NumPy's handlers are capsules."""

    def __init__(self) -> None:
        self._made: dict[AllocatorFunctions, Any] = {}
        table = _table()
        self._get = ctypes.PYFUNCTYPE(ctypes.py_object)(table[_GET_HANDLER])
        self._set = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.py_object)(table[_SET_HANDLER])

    def make(self, functions: AllocatorFunctions) -> Any:
        """Return a handler that allocates with these functions."""
        known = self._made.get(functions)
        if known is None:
            known = self._made.setdefault(functions, _new_handler(functions))
        return known

    def get(self) -> Any:
        """Return the current handler of this context."""
        return self._get()

    def set(self, handler: Any) -> None:
        """Make a handler the current one of this context."""
        self._set(handler)


def _table() -> Any:
    """Return NumPy's table of C functions."""
    # numpy.core before NumPy 2.0. import_module, since neither has type information.
    core = "numpy._core" if int(np.__version__.partition(".")[0]) > 1 else "numpy.core"
    extension = import_module(f"{core}._multiarray_umath")
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype = ctypes.c_void_p
    pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
    start = pointer(extension._ARRAY_API, None)
    return (ctypes.c_void_p * (_GET_HANDLER + 1)).from_address(start)


def _new_handler(functions: AllocatorFunctions) -> Any:
    allocator = _Allocator(*functions)
    handler = _Handler(b"shmreduce", _STRUCT_VERSION, allocator)
    make = ctypes.pythonapi.PyCapsule_New
    make.restype = ctypes.py_object
    make.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    made = make(ctypes.addressof(handler), _CAPSULE_NAME, None)
    # Never freed: all of it is needed until the last array is freed, which may be at the
    # very end of the interpreter.
    for kept in (handler, _CAPSULE_NAME, made):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))
    return made


memory_handlers = NumpyMemoryHandlers()
"""The only instance, since the hook returns the same object each time."""
