"""Finds which kind of memory an address belongs to, and so how it can be shared.

May import ``errors`` and ``driver`` of this plugin. The attributes are described in
https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__UNIFIED.html
"""

from __future__ import annotations

from ctypes import addressof, byref, c_int, c_size_t, c_uint64, c_void_p, sizeof
from typing import TYPE_CHECKING, NamedTuple

from shmreduce_cuda.errors import CudaMemoryError

if TYPE_CHECKING:
    from shmreduce_cuda.driver import Driver

__all__ = [
    "POSIX_FD",
    "Facts",
    "Memory",
    "check_extent",
    "facts_at",
    "find_memory",
    "pieces_of",
    "refuse",
]

_ATTRIBUTES = (2, 9, 1, 8, 10, 14, 17)
"""Attributes of a pointer (``CUpointer_attribute``), in the order of ``Facts``."""
_UNKNOWN, _HOST = 0, 1
"""``CU_MEMORYTYPE_HOST``; the driver says 0 of an address that it does not know."""
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


class Facts(NamedTuple):
    """What the driver tells of an address in memory of a device.

    Parameters
    ----------
    memory_type : int
        2 for memory of a device.
    ordinal : int
        The device's ordinal in this process.
    context, pool : int
        The context and the pool that the memory belongs to, or 0.
    managed, legacy : int
        Whether it is managed memory, and whether it can have a legacy IPC handle.
    handle_types : int
        The types of handle that it can be exported as.
    """

    memory_type: int
    ordinal: int
    context: int
    managed: int
    legacy: int
    handle_types: int
    pool: int


_Values = c_uint64 * len(_ATTRIBUTES)
_asked = (c_int * len(_ATTRIBUTES))(*_ATTRIBUTES)


def facts_at(driver: Driver, pointer: int) -> Facts:
    """Return what the driver tells of an address, in one call, for which no context is needed.

    Raises
    ------
    CudaMemoryError
        If the driver does not know the address, or it is in host memory.
    """
    # The driver writes as many bytes as each attribute has, from one to eight.
    values = _Values()
    first, step = addressof(values), sizeof(c_uint64)
    places = (c_void_p * len(values))(*range(first, first + sizeof(values), step))
    code = driver.attempt("cuPointerGetAttributes", len(values), _asked, places, pointer)
    found = Facts(*values)
    if code or found.memory_type == _UNKNOWN:
        raise refuse(
            f"memory at {pointer:#x}, which CUDA does not know",
            "it was freed, or is memory of the host: send a NumPy array",
        )
    if found.memory_type == _HOST and not found.managed:
        raise refuse(
            "pinned memory of the host", "copy it to a device, or send it as a NumPy array"
        )
    return found


def refuse(kind: str, remedy: str) -> CudaMemoryError:
    """Return the error for memory that cannot be sent."""
    return CudaMemoryError(f"{kind} cannot be sent: {remedy}", kind=kind, remedy=remedy)


def find_memory(driver: Driver, pointer: int, facts: Facts) -> Memory:
    """Return the allocation that has an address. The device's context must be current.

    Raises
    ------
    CudaMemoryError
        If it is of a kind that cannot be shared.
    """
    if facts.managed:
        raise refuse(
            "managed memory",
            "CUDA cannot share it between processes; copy it to memory of a device",
        )
    base, size = c_uint64(), c_size_t()
    driver.call("cuMemGetAddressRange_v2", byref(base), byref(size), pointer)
    if facts.legacy:
        return Memory("legacy", base.value, size.value, 0, facts.context)
    exportable = bool(facts.handle_types & POSIX_FD)
    if facts.pool:
        if not exportable:
            raise refuse(
                "memory of a pool that is not exportable (cudaMallocAsync)",
                "make the pool with handle type POSIX file descriptor, or allocate by cudaMalloc "
                "(CuPy: set_allocator(cupy.cuda.MemoryPool().malloc); torch: "
                "PYTORCH_CUDA_ALLOC_CONF=backend:native)",
            )
        return Memory("pool", base.value, size.value, facts.pool, facts.context)
    if _is_virtual(driver, pointer):
        if not exportable:
            raise refuse(
                "virtual memory that is not exportable (cuMemCreate, expandable segments)",
                "make it with handle type POSIX file descriptor, or allocate by cudaMalloc "
                "(torch: PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False)",
            )
        return Memory("virtual", base.value, size.value, 0, facts.context)
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
        following = find_memory(driver, end, facts_at(driver, end))
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
