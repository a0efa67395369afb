"""Looks like CuPy 14."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Self

import numpy as np


class UnownedMemory:
    def __init__(self, ptr: int, size: int, owner: Any, device_id: int = -1) -> None:
        self.ptr, self.size, self.owner, self.device_id = ptr, size, owner, device_id


class MemoryPointer:
    def __init__(self, mem: UnownedMemory, offset: int) -> None:
        self.mem, self.ptr = mem, mem.ptr + offset


class Device:
    current = 0

    def __init__(self, device: int) -> None:
        self.id = device

    def __enter__(self) -> Self:
        self.before, Device.current = Device.current, self.id
        return self

    def __exit__(self, *_: object) -> None:
        Device.current = self.before


cuda = SimpleNamespace(UnownedMemory=UnownedMemory, MemoryPointer=MemoryPointer, Device=Device)


class _ndarray_base:
    def __init__(
        self,
        shape: Any,
        dtype: Any = float,
        memptr: Any = None,
        strides: Any = None,
        order: str = "C",
    ) -> None:
        self.shape, self.dtype, self.data = tuple(shape), np.dtype(dtype), memptr
        self.strides = strides
        self.device = Device(Device.current if memptr is None else memptr.mem.device_id)

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, self.device.id

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "version": 3,
            "shape": self.shape,
            "typestr": self.dtype.str,
            "descr": self.dtype.descr,
            "data": (0 if self.data is None else self.data.ptr, False),
            "strides": self.strides,
            "stream": 1,
        }


class ndarray(_ndarray_base):
    __module__ = "cupy"


def empty(shape: Any, dtype: Any = float) -> ndarray:
    return ndarray(shape, dtype)
