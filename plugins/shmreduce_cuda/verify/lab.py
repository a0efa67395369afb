"""Arrays in device memory of every kind, made by the driver without an array library.

May import ``devices`` and ``driver`` of this plugin, and NumPy. For the verification and
for tests.
"""

from __future__ import annotations

import ctypes
from ctypes import byref, c_int, c_size_t, c_uint64, c_void_p
from typing import TYPE_CHECKING, Any

import numpy as np

from shmreduce_cuda.devices import current_context
from shmreduce_cuda.driver import AccessDescription, AllocationProperties, Location

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shmreduce_cuda.driver import Driver

__all__ = ["KINDS", "DeviceArray", "Memory", "Pool", "Stream", "read", "write"]

KINDS = ("legacy", "managed", "host", "pool", "default pool", "virtual", "private virtual")
_POSIX_FD = 1
_PINNED = 1
_DEVICE = 1
_GLOBAL = 1
_NON_BLOCKING = 1
_POISON = 0xDDDDDDDD


class PoolProperties(ctypes.Structure):
    """``CUmemPoolProps``."""

    _fields_ = (
        ("type", c_int),
        ("handle_types", c_int),
        ("location", Location),
        ("security", c_void_p),
        ("most", c_size_t),
        ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 54),
    )


class Pool:
    """An exportable memory pool, or a device's default pool.

    Parameters
    ----------
    ordinal : int
        The device.
    exportable : bool
        Whether to make an exportable pool; if False, this is the default pool.
    """

    def __init__(self, ordinal: int, *, exportable: bool = True) -> None:
        self.ordinal = ordinal
        self.handle = c_void_p()
        self._owned = exportable
        with current_context(ordinal) as driver:
            if exportable:
                properties = PoolProperties(_PINNED, _POSIX_FD, Location(_DEVICE, ordinal))
                driver.call("cuMemPoolCreate", byref(self.handle), byref(properties))
            else:
                driver.call("cuDeviceGetDefaultMemPool", byref(self.handle), ordinal)

    def __del__(self) -> None:
        if self._owned and self.handle.value:
            with current_context(self.ordinal) as driver:
                driver.attempt("cuMemPoolDestroy", self.handle)


class Stream:
    """A non-blocking stream: it does not wait for the default stream."""

    def __init__(self, ordinal: int) -> None:
        self.ordinal = ordinal
        self.handle = c_void_p()
        with current_context(ordinal) as driver:
            driver.call("cuStreamCreate", byref(self.handle), _NON_BLOCKING)

    def fill(self, memory: Memory, value: int, *, times: int = 1) -> None:
        """Set all 32-bit words of a memory, once or several times, without waiting for it."""
        with current_context(self.ordinal) as driver:
            for _ in range(times):
                driver.call(
                    "cuMemsetD32Async", memory.pointer, value, memory.nbytes // 4, self.handle
                )

    def wait(self) -> None:
        """Wait until the stream has done its work."""
        with current_context(self.ordinal) as driver:
            driver.call("cuStreamSynchronize", self.handle)

    def __del__(self) -> None:
        if self.handle.value:
            with current_context(self.ordinal) as driver:
                driver.attempt("cuStreamDestroy_v2", self.handle)


class Memory:
    """Memory of one kind. When it is dropped, it is overwritten and then freed.

    Parameters
    ----------
    nbytes : int
        The size in bytes, a multiple of four.
    kind : str
        One of ``KINDS``.
    ordinal : int
        The device.
    pool : Pool, optional
        The pool to allocate from; by default a new one for the kind ``pool``.
    pieces : int
        The number of pieces of virtual memory.
    """

    def __init__(
        self,
        nbytes: int,
        kind: str = "legacy",
        ordinal: int = 0,
        *,
        pool: Pool | None = None,
        pieces: int = 1,
    ) -> None:
        self.nbytes = nbytes
        self.kind = kind
        self.ordinal = ordinal
        self.pointer = 0
        self._pool = pool
        self._sizes: list[int] = []
        with current_context(ordinal) as driver:
            self.pointer = self._allocate(driver, pieces)

    def _allocate(self, driver: Driver, pieces: int) -> int:
        pointer = c_uint64()
        if self.kind == "legacy":
            driver.call("cuMemAlloc_v2", byref(pointer), self.nbytes)
        elif self.kind == "managed":
            driver.call("cuMemAllocManaged", byref(pointer), self.nbytes, _GLOBAL)
        elif self.kind == "host":
            host = c_void_p()
            driver.call("cuMemHostAlloc", byref(host), self.nbytes, 0)
            pointer.value = host.value or 0
        elif self.kind in ("pool", "default pool"):
            if self._pool is None:
                self._pool = Pool(self.ordinal, exportable=self.kind == "pool")
            driver.call(
                "cuMemAllocFromPoolAsync", byref(pointer), self.nbytes, self._pool.handle, None
            )
            driver.call("cuStreamSynchronize", None)
        else:
            pointer.value = self._map(driver, pieces)
        return pointer.value

    def _map(self, driver: Driver, pieces: int) -> int:
        types = 0 if self.kind == "private virtual" else _POSIX_FD
        properties = AllocationProperties(_PINNED, types, Location(_DEVICE, self.ordinal))
        unit = c_size_t()
        driver.call("cuMemGetAllocationGranularity", byref(unit), byref(properties), 0)
        size = -(-self.nbytes // (unit.value * pieces)) * unit.value
        start = c_uint64()
        driver.call("cuMemAddressReserve", byref(start), size * pieces, 0, 0, 0)
        for number in range(pieces):
            handle = c_uint64()
            driver.call("cuMemCreate", byref(handle), size, byref(properties), 0)
            driver.call("cuMemMap", start.value + number * size, size, 0, handle.value, 0)
            driver.call("cuMemRelease", handle.value)
            self._sizes.append(size)
        _allow_access(driver, start.value, size * pieces, self.ordinal)
        return start.value

    def fill(self, value: int) -> None:
        """Set all 32-bit words."""
        with current_context(self.ordinal) as driver:
            driver.call("cuMemsetD32Async", self.pointer, value, self.nbytes // 4, None)
            driver.call("cuStreamSynchronize", None)

    def free(self) -> None:
        """Overwrite the memory and free it."""
        if not self.pointer:
            return
        self.fill(_POISON)
        pointer, self.pointer = self.pointer, 0
        with current_context(self.ordinal) as driver:
            if self.kind == "host":
                driver.call("cuMemFreeHost", pointer)
            elif not self._sizes:
                driver.call("cuMemFree_v2", pointer)
            else:
                end = pointer
                for size in self._sizes:
                    driver.call("cuMemUnmap", end, size)
                    end += size
                driver.call("cuMemAddressFree", pointer, end - pointer)

    def __del__(self) -> None:
        self.free()


def _allow_access(driver: Driver, start: int, size: int, ordinal: int) -> None:
    access = AccessDescription(Location(_DEVICE, ordinal), 3)
    driver.call("cuMemSetAccess", start, size, byref(access), 1)


class DeviceArray:
    """An array in device memory, with ``__cuda_array_interface__`` and slices.

    Parameters
    ----------
    memory : Memory
        Its memory.
    template : numpy.ndarray
        An array in host memory with the same layout. Its values are not used.
    start : int
        Bytes from the beginning of the memory to the first element.
    """

    def __init__(self, memory: Memory, template: np.ndarray[Any, Any], start: int = 0) -> None:
        self.memory = memory
        self.template = template
        self.start = start

    @classmethod
    def of(
        cls, values: Any, kind: str = "legacy", ordinal: int = 0, **options: Any
    ) -> DeviceArray:
        """Return an array in new memory with the values of an array in host memory."""
        host = np.asarray(values, order="C")
        memory = Memory(max(4, -(-host.nbytes // 4) * 4), kind, ordinal, **options)
        array = cls(memory, np.empty_like(host))
        if host.nbytes:
            write(array, host)
        return array

    def __getitem__(self, key: Any) -> DeviceArray:
        # With the ellipsis, a single element is an array too.
        part = self.template[(*key, ...) if isinstance(key, tuple) else (key, ...)]
        return DeviceArray(
            self.memory, part, self.start + _address(part) - _address(self.template)
        )

    @property
    def T(self) -> DeviceArray:  # noqa: N802 - as NumPy calls it
        """The transposed array."""
        return DeviceArray(self.memory, self.template.T, self.start)

    @property
    def pointer(self) -> int:
        """Device address of the first element."""
        return self.memory.pointer + self.start

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """Version 3."""
        template = self.template
        return {
            "version": 3,
            "shape": template.shape,
            "typestr": template.dtype.str,
            "descr": template.dtype.descr,
            "data": (self.pointer if template.size else 0, False),
            "strides": None if template.flags.c_contiguous else template.strides,
            "stream": 1,
        }


def _address(array: np.ndarray[Any, Any]) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


def _span(interface: dict[str, Any]) -> tuple[int, int, Sequence[int] | None, Any]:
    """Return lowest address, bytes from there, strides, dtype of an array interface."""
    descr = interface.get("descr")
    dtype = np.dtype(interface["typestr"])
    if descr and dtype.kind == "V" and any(field[0] for field in descr):
        # np.dtype(descr) would make fields of the gaps between fields.
        dtype = np.lib.format.descr_to_dtype(descr)
    strides = interface.get("strides")
    shape = interface["shape"]
    low = high = 0
    if strides is None:
        high = int(np.prod(shape, dtype=int)) * dtype.itemsize - dtype.itemsize
    else:
        for length, stride in zip(shape, strides, strict=True):
            low += min(0, stride * (length - 1))
            high += max(0, stride * (length - 1))
    return interface["data"][0] + low, high + dtype.itemsize - low, strides, dtype


def read(array: Any, ordinal: int = 0) -> np.ndarray[Any, Any]:
    """Return the values of any array with ``__cuda_array_interface__``, copied to the host."""
    interface = array.__cuda_array_interface__
    shape = interface["shape"]
    address, nbytes, strides, dtype = _span(interface)
    if 0 in shape:
        return np.empty(shape, dtype)
    raw = np.empty(nbytes, np.uint8)
    with current_context(ordinal) as driver:
        driver.call("cuMemcpyDtoH_v2", raw.ctypes.data, address, nbytes)
    offset = interface["data"][0] - address
    found: np.ndarray[Any, Any] = np.ndarray(shape, dtype, raw.data, offset, strides)
    return found.copy()


def write(array: Any, values: Any, ordinal: int = 0) -> None:
    """Set the values of an array without gaps, and wait until they are there.

    From pageable memory of the host, ``cuMemcpyHtoD`` may return while the last bytes are
    on their way to the device, which another process would notice
    (https://docs.nvidia.com/cuda/cuda-driver-api/api-sync-behavior.html).
    """
    interface = array.__cuda_array_interface__
    host = np.asarray(values, order="C")
    with current_context(getattr(getattr(array, "memory", None), "ordinal", ordinal)) as driver:
        driver.call("cuMemcpyHtoD_v2", interface["data"][0], host.ctypes.data, host.nbytes)
        driver.call("cuStreamSynchronize", None)
