"""Finds which kind of memory an address belongs to, and so how it can be shared.

May import ``errors`` and ``driver`` of this plugin. The attributes are described in
https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__UNIFIED.html
"""

from __future__ import annotations

from ctypes import byref, c_size_t, c_uint64
from typing import TYPE_CHECKING, NamedTuple

from shmreduce_cuda.errors import CudaMemoryError

if TYPE_CHECKING:
    from shmreduce_cuda.driver import Driver

__all__ = [
    "POSIX_FD",
    "Memory",
    "check_extent",
    "find_memory",
    "ordinal_at",
    "pieces_of",
    "refuse",
]

_CONTEXT = 1
_MEMORY_TYPE = 2
_IS_MANAGED = 8
_DEVICE_ORDINAL = 9
_IS_LEGACY_CAPABLE = 10
_HANDLE_TYPES = 14
_POOL = 17
"""Attributes of a pointer (``CUpointer_attribute``)."""
_HOST = 1
"""``CU_MEMORYTYPE_HOST``"""
POSIX_FD = 1
"""``CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR``"""


class Memory(NamedTuple):
    """The allocation that an address lies in.

    Parameters
    ----------
    kind : {"legacy", "pool", "virtual"}
        How it can be shared.
    base, size : int
        Its address and size in bytes. For virtual memory, those of the piece.
    pool : int
        The pool that it is from, or 0.
    context : int
        The context that it belongs to, or 0.
    """

    kind: str
    base: int
    size: int
    pool: int
    context: int


def _attribute(driver: Driver, which: int, pointer: int) -> int:
    # Booleans are written as one byte, handles as eight.
    value = c_uint64()
    return (
        0 if driver.attempt("cuPointerGetAttribute", byref(value), which, pointer) else value.value
    )


def refuse(kind: str, remedy: str) -> CudaMemoryError:
    """Return the error for memory that cannot be sent."""
    return CudaMemoryError(f"{kind} cannot be sent: {remedy}", kind=kind, remedy=remedy)


def ordinal_at(driver: Driver, pointer: int) -> int:
    """Return the ordinal of the device whose memory is at an address.

    Raises
    ------
    CudaMemoryError
        If the driver does not know the address, or it is in host memory.
    """
    value = c_uint64()
    if driver.attempt("cuPointerGetAttribute", byref(value), _MEMORY_TYPE, pointer):
        raise refuse(
            f"memory at {pointer:#x}, which CUDA does not know",
            "it was freed, or is memory of the host: send a NumPy array",
        )
    if value.value == _HOST and not _attribute(driver, _IS_MANAGED, pointer):
        raise refuse(
            "pinned memory of the host", "copy it to a device, or send it as a NumPy array"
        )
    return _attribute(driver, _DEVICE_ORDINAL, pointer)


def find_memory(driver: Driver, pointer: int) -> Memory:
    """Return the allocation that has an address. The device's context must be current.

    Raises
    ------
    CudaMemoryError
        If it is of a kind that cannot be shared.
    """
    if _attribute(driver, _IS_MANAGED, pointer):
        raise refuse(
            "managed memory",
            "CUDA cannot share it between processes; copy it to memory of a device",
        )
    base, size = c_uint64(), c_size_t()
    driver.call("cuMemGetAddressRange_v2", byref(base), byref(size), pointer)
    context = _attribute(driver, _CONTEXT, pointer)
    pool = _attribute(driver, _POOL, pointer)
    if _attribute(driver, _IS_LEGACY_CAPABLE, pointer):
        return Memory("legacy", base.value, size.value, 0, context)
    exportable = bool(_attribute(driver, _HANDLE_TYPES, pointer) & POSIX_FD)
    if pool:
        if not exportable:
            raise refuse(
                "memory of a pool that is not exportable (cudaMallocAsync)",
                "make the pool with handle type POSIX file descriptor, or allocate by cudaMalloc "
                "(CuPy: set_allocator(cupy.cuda.MemoryPool().malloc); torch: "
                "PYTORCH_CUDA_ALLOC_CONF=backend:native)",
            )
        return Memory("pool", base.value, size.value, pool, context)
    if _is_virtual(driver, pointer):
        if not exportable:
            raise refuse(
                "virtual memory that is not exportable (cuMemCreate, expandable segments)",
                "make it with handle type POSIX file descriptor, or allocate by cudaMalloc "
                "(torch: PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False)",
            )
        return Memory("virtual", base.value, size.value, 0, context)
    raise refuse(
        f"memory at {pointer:#x}, for which the driver offers no way of sharing,",
        "copy it to memory from cudaMalloc",
    )


def check_extent(base: int, size: int, low: int, high: int) -> None:
    """Raise unless the bytes from ``low`` to ``high`` lie in an allocation.

    Raises
    ------
    CudaMemoryError
        If they do not: the array's description is wrong, or it was freed.
    """
    if not base <= low <= high <= base + size:
        raise refuse(
            f"an array of bytes {low:#x} to {high:#x} in an allocation of {base:#x} to "
            f"{base + size:#x}",
            "it reaches beyond its memory; was it freed?",
        )


def pieces_of(driver: Driver, memory: Memory, high: int) -> list[tuple[int, int]]:
    """Return address and size of the pieces of virtual memory from ``memory`` up to ``high``."""
    pieces = [(memory.base, memory.size)]
    end = memory.base + memory.size
    while end < high:
        following = find_memory(driver, end)
        if following.kind != "virtual" or following.base != end:
            break
        pieces.append((following.base, following.size))
        end += following.size
    return pieces


def _is_virtual(driver: Driver, pointer: int) -> bool:
    handle = c_uint64()
    if driver.attempt("cuMemRetainAllocationHandle", byref(handle), pointer):
        return False
    driver.call("cuMemRelease", handle.value)
    return True
