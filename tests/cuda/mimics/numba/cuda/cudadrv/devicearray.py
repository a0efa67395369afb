"""The classes of arrays."""

from __future__ import annotations

from typing import Any

import numpy as np


class DeviceNDArrayBase:
    def __init__(self, shape: Any, strides: Any, dtype: Any, pointer: int, owner: Any) -> None:
        self.shape, self.strides, self.dtype = tuple(shape), strides, dtype
        self.pointer, self.owner = pointer, owner

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "version": 3,
            "shape": self.shape,
            "typestr": self.dtype.str,
            "data": (self.pointer, False),
            "strides": self.strides,
            "stream": None,
        }


class DeviceNDArray(DeviceNDArrayBase):
    """An array of a device."""

    def view(self, dtype: Any) -> DeviceNDArray:
        assert np.dtype(dtype).itemsize == self.dtype.itemsize
        return DeviceNDArray(self.shape, self.strides, np.dtype(dtype), self.pointer, self.owner)


class ManagedNDArray(DeviceNDArrayBase, np.ndarray):
    """An array of managed memory, which is an array of NumPy, too."""

    def __new__(cls, shape: Any, *_: Any) -> Any:
        return np.ndarray.__new__(cls, shape)

    def __init__(self, _shape: Any, pointer: int, owner: Any) -> None:
        self.pointer, self.owner = pointer, owner

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        plain = {"version": 3, "shape": self.shape, "typestr": self.dtype.str}
        return {**plain, "data": (self.pointer, False), "strides": None, "stream": None}
