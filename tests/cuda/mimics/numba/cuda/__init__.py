"""The functions that are called."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from .cudadrv.devicearray import DeviceNDArray

if TYPE_CHECKING:
    from collections.abc import Iterator

entered: list[int] = []


class _Devices:
    @contextmanager
    def _enter(self, ordinal: int) -> Iterator[None]:
        entered.append(ordinal)
        yield

    def __getitem__(self, ordinal: int) -> Any:
        return self._enter(ordinal)


gpus = _Devices()


def from_cuda_array_interface(desc: dict[str, Any], owner: Any = None, sync: bool = True) -> Any:
    assert not sync
    dtype = np.dtype(desc["typestr"])
    return DeviceNDArray(desc["shape"], desc["strides"], dtype, desc["data"][0], owner)


def device_array(shape: Any, dtype: Any = float) -> Any:
    return DeviceNDArray(shape, None, np.dtype(dtype), 0, None)
