"""Devices by UUID, and their contexts.

May import ``errors`` and ``driver`` of this plugin.

Ordinals differ between processes (``CUDA_VISIBLE_DEVICES``), UUIDs do not. Messages are
pickled and loaded in threads that have no current context. So code that calls the driver
makes the device's primary context current for that time. A context is made only on
devices whose memory this process sends or receives, since it takes some hundred MiB of
the device's memory.
"""

from __future__ import annotations

import os
from ctypes import byref, c_int, c_uint, c_void_p, create_string_buffer
from typing import TYPE_CHECKING

from shmreduce_cuda.driver import Bytes16, get_driver
from shmreduce_cuda.errors import CudaDeviceError

if TYPE_CHECKING:
    from shmreduce_cuda.driver import Driver

__all__ = [
    "current_context",
    "device_name",
    "ordinal_of",
    "primary_context",
    "synchronise",
    "uuid_of",
    "uuid_text",
    "visible_uuids",
]

_uuids: dict[int, bytes] = {}
_contexts: dict[int, c_void_p] = {}
_visible = 0
"""How many devices this process sees; 0 before it was asked for."""


def _forget() -> None:
    global _visible
    _visible = 0
    _uuids.clear()
    _contexts.clear()


os.register_at_fork(after_in_child=_forget)


def uuid_text(uuid: bytes) -> str:
    """Return a UUID as ``nvidia-smi -L`` writes it.

    Examples
    --------
    >>> uuid_text(bytes(range(16)))
    'GPU-00010203-0405-0607-0809-0a0b0c0d0e0f'
    """
    digits = uuid.hex()
    parts = (digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:])
    return f"GPU-{'-'.join(parts)}"


def uuid_of(ordinal: int) -> bytes:
    """Return the UUID of a device or, if it is partitioned (MIG), of the instance."""
    known = _uuids.get(ordinal)
    if known is None:
        driver = get_driver()
        device = _device(driver, ordinal)
        uuid = Bytes16()
        newer = driver.has("cuDeviceGetUuid_v2")
        driver.call("cuDeviceGetUuid_v2" if newer else "cuDeviceGetUuid", byref(uuid), device)
        known = _uuids[ordinal] = bytes(uuid)
    return known


def visible_uuids() -> list[bytes]:
    """Return the UUIDs of the devices that this process sees, by ordinal."""
    return [uuid_of(ordinal) for ordinal in range(_count(get_driver()))]


def ordinal_of(uuid: bytes) -> int:
    """Return this process's ordinal of a device.

    Raises
    ------
    CudaDeviceError
        If this process does not see the device.
    """
    # A copy, since another thread may add to it.
    for ordinal, known in _uuids.copy().items():
        if known == uuid:
            return ordinal
    visible = visible_uuids()
    if uuid in visible:
        return visible.index(uuid)
    found = [uuid_text(each) for each in visible]
    raise CudaDeviceError(
        f"the array is on device {uuid_text(uuid)}, which process {os.getpid()} does not see; it "
        f"sees {found or 'none'}: start it with a CUDA_VISIBLE_DEVICES that has the device",
        uuid=uuid_text(uuid),
        visible=found,
    )


def device_name(ordinal: int) -> str:
    """Return the driver's name of a device."""
    name = create_string_buffer(256)
    driver = get_driver()
    driver.call("cuDeviceGetName", name, 256, _device(driver, ordinal))
    return name.value.decode(errors="replace")


class current_context:  # noqa: N801 - it is used like a function
    """Make a device's context current in this thread, by default its primary one.

    A context manager, whose value is the driver. It is a class because one of
    ``contextlib`` takes as long as the two calls of the driver.
    """

    __slots__ = ("_context", "_driver")

    def __init__(self, ordinal: int, context: c_void_p | None = None) -> None:
        self._driver = get_driver()
        self._context = primary_context(ordinal) if context is None else context

    def __enter__(self) -> Driver:
        self._driver.call("cuCtxPushCurrent_v2", self._context)
        return self._driver

    def __exit__(self, *_: object) -> None:
        self._driver.call("cuCtxPopCurrent_v2", byref(c_void_p()))


def primary_context(ordinal: int) -> c_void_p:
    """Return the primary context of a device, which this process keeps from now on."""
    context = _contexts.get(ordinal)
    if context is None:
        driver = get_driver()
        context = c_void_p()
        driver.call("cuDevicePrimaryCtxRetain", byref(context), _device(driver, ordinal))
        _contexts[ordinal] = context
    return context


def synchronise(ordinal: int) -> None:
    """Wait until all earlier work of this process is done, on all streams.

    That includes the other devices that this process uses, whose kernels can access the
    memory of a peer device. ``ordinal`` is waited for last.
    """
    driver = get_driver()
    for each in range(_count(driver)):
        if each != ordinal and _is_in_use(driver, each):
            _wait_for(each)
    _wait_for(ordinal)


def _wait_for(ordinal: int) -> None:
    with current_context(ordinal) as driver:
        driver.call("cuCtxSynchronize")


def _count(driver: Driver) -> int:
    """Return how many devices this process sees, which does not change."""
    global _visible
    if not _visible:
        count = c_int()
        driver.call("cuDeviceGetCount", byref(count))
        _visible = count.value
    return _visible


def _is_in_use(driver: Driver, ordinal: int) -> bool:
    """Return whether a device has an active primary context, without making one."""
    flags, active = c_uint(), c_int()
    driver.call(
        "cuDevicePrimaryCtxGetState", _device(driver, ordinal), byref(flags), byref(active)
    )
    return bool(active.value)


def _device(driver: Driver, ordinal: int) -> int:
    device = c_int()
    driver.call("cuDeviceGet", byref(device), ordinal)
    return device.value
