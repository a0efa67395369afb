"""Opens the memory of other processes, and closes it.

May import ``driver``, ``devices``, ``descriptors``, ``kinds`` and ``messages`` of this
plugin. ``imports`` calls these functions under its lock, and counts the users.
"""

from __future__ import annotations

import os
from ctypes import byref, c_uint64, c_void_p
from typing import TYPE_CHECKING, Any

from shmreduce_cuda.descriptors import fetch_descriptor
from shmreduce_cuda.devices import current_context
from shmreduce_cuda.driver import AccessDescription, Bytes64
from shmreduce_cuda.kinds import POSIX_FD
from shmreduce_cuda.messages import Legacy, Pooled, Virtual

if TYPE_CHECKING:
    from shmreduce_cuda.driver import Driver
    from shmreduce_cuda.messages import Description

__all__ = ["Mapping", "Opener", "mapping_key"]

_LAZY_PEER_ACCESS = 1
"""``CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS``"""
_DEVICE = 1
"""``CU_MEM_LOCATION_TYPE_DEVICE``"""
_READ_WRITE = 3
"""``CU_MEM_ACCESS_FLAGS_PROT_READWRITE``"""


class Mapping:
    """Memory of another process, open in this one.

    Attributes
    ----------
    key : tuple
        The result of :func:`mapping_key`.
    ordinal, base, size : int
        Its device, address and size in this process.
    users : int
        The number of arrays that lie in it.
    """

    __slots__ = ("__weakref__", "base", "key", "ordinal", "place", "size", "users")

    def __init__(self, description: Description, ordinal: int, base: int) -> None:
        self.key = mapping_key(description)
        self.place = description.place
        self.ordinal = ordinal
        self.base = base
        self.size = description.size
        self.users = 0


def mapping_key(description: Description) -> tuple[Any, ...]:
    """Return a key that identifies the memory of an array."""
    return description.token, description.uuid, *description.place.key


class Opener:
    """Opens and closes mappings, and the memory pools that some of them belong to."""

    def __init__(self) -> None:
        self._pools: dict[tuple[Any, ...], tuple[c_void_p, int]] = {}

    def open(self, description: Description, ordinal: int) -> Mapping:
        """Open the memory of an array.

        Raises
        ------
        CudaDriverError
            If the driver refuses.
        CudaProducerDied, CudaSharingError
            If its descriptor cannot be fetched.
        """
        place = description.place
        with current_context(ordinal) as driver:
            if isinstance(place, Legacy):
                base = _open_legacy(driver, place)
            elif isinstance(place, Pooled):
                base = self._open_pooled(driver, description, place)
            else:
                base = _open_virtual(driver, description, place, ordinal)
        return Mapping(description, ordinal, base)

    def close(self, mapping: Mapping) -> None:
        """Close a mapping. The caller has waited until the device's work on it is done."""
        place = mapping.place
        with current_context(mapping.ordinal) as driver:
            if isinstance(place, Legacy):
                driver.call("cuIpcCloseMemHandle", mapping.base)
            elif isinstance(place, Pooled):
                driver.call("cuMemFree_v2", mapping.base)
                self._release_pool(driver, mapping.key[:4])
            else:
                _close_virtual(driver, mapping.base, place)

    def _open_pooled(self, driver: Driver, description: Description, place: Pooled) -> int:
        key = mapping_key(description)[:4]
        pool, users = self._pools.get(key, (None, 0))
        if pool is None:
            pool = c_void_p()
            descriptor = fetch_descriptor(description.token, description.pid, place.offer)
            try:
                driver.call(
                    "cuMemPoolImportFromShareableHandle", byref(pool), descriptor, POSIX_FD, 0
                )
            finally:
                os.close(descriptor)
        self._pools[key] = (pool, users + 1)
        pointer, data = c_uint64(), Bytes64.from_buffer_copy(place.data)
        try:
            driver.call("cuMemPoolImportPointer", byref(pointer), pool, byref(data))
        except BaseException:
            self._release_pool(driver, key)
            raise
        return pointer.value

    def _release_pool(self, driver: Driver, key: tuple[Any, ...]) -> None:
        pool, users = self._pools.pop(key)
        if users > 1:
            self._pools[key] = (pool, users - 1)
        else:
            driver.call("cuMemPoolDestroy", pool)


def _open_legacy(driver: Driver, place: Legacy) -> int:
    pointer = c_uint64()
    handle = Bytes64.from_buffer_copy(place.handle)
    driver.call("cuIpcOpenMemHandle_v2", byref(pointer), handle, _LAZY_PEER_ACCESS)
    return pointer.value


def _open_virtual(driver: Driver, description: Description, place: Virtual, ordinal: int) -> int:
    handles: list[int] = []
    total = sum(place.sizes)
    start, mapped = c_uint64(), 0
    try:
        for offer in place.offers:
            # One by one, so that those already imported are released if one fails.
            handles += [_import_piece(driver, description, offer)]
        driver.call("cuMemAddressReserve", byref(start), total, 0, 0, 0)
        for handle, size in zip(handles, place.sizes, strict=True):
            driver.call("cuMemMap", start.value + mapped, size, 0, handle, 0)
            mapped += size
        access = AccessDescription((_DEVICE, ordinal), _READ_WRITE)
        driver.call("cuMemSetAccess", start.value, total, byref(access), 1)
    except BaseException:
        _undo_virtual(driver, start.value, place.sizes, mapped)
        raise
    finally:
        # The mapping keeps the memory, so the handles are not needed any more.
        for handle in handles:
            driver.attempt("cuMemRelease", handle)
    return start.value


def _import_piece(driver: Driver, description: Description, offer: int) -> int:
    handle = c_uint64()
    descriptor = fetch_descriptor(description.token, description.pid, offer)
    try:
        driver.call("cuMemImportFromShareableHandle", byref(handle), descriptor, POSIX_FD)
    finally:
        os.close(descriptor)
    return handle.value


def _undo_virtual(driver: Driver, start: int, sizes: tuple[int, ...], mapped: int) -> None:
    # Errors are ignored here, since the one that led here will be raised.
    done = 0
    for size in sizes:
        if done < mapped:
            driver.attempt("cuMemUnmap", start + done, size)
        done += size
    if start:
        driver.attempt("cuMemAddressFree", start, done)


def _close_virtual(driver: Driver, base: int, place: Virtual) -> None:
    done = 0
    for size in place.sizes:
        driver.call("cuMemUnmap", base + done, size)
        done += size
    driver.call("cuMemAddressFree", base, done)
