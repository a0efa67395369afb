"""The CUDA driver, called by ctypes.

May import ``errors`` of this plugin. Function names are those of the library's
symbols, versions included: https://docs.nvidia.com/cuda/cuda-driver-api/

The library is loaded, and initialised, when the first function is called.
ctypes releases the GIL for the time of a call.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p
from typing import Any

from shmreduce_cuda.errors import CudaDriverError, CudaForkError, CudaUnavailableError

__all__ = [
    "LIBRARY",
    "AccessDescription",
    "AllocationProperties",
    "Bytes16",
    "Bytes64",
    "Driver",
    "Location",
    "get_driver",
    "unusable_reason",
]

LIBRARY = "libcuda.so.1"

NOT_INITIALIZED = 3
"""``CUDA_ERROR_NOT_INITIALIZED``"""
NO_DEVICE = 100
"""``CUDA_ERROR_NO_DEVICE``"""


class Bytes16(ctypes.Structure):
    """``CUuuid``."""

    _fields_ = (("bytes", ctypes.c_ubyte * 16),)


class Bytes64(ctypes.Structure):
    """``CUipcMemHandle``, ``CUipcEventHandle``, ``CUmemPoolPtrExportData``.

    The first two are passed by value.
    """

    _fields_ = (("bytes", ctypes.c_ubyte * 64),)


class Location(ctypes.Structure):
    """``CUmemLocation``; type 1 is a device."""

    _fields_ = (("type", c_int), ("id", c_int))


class AllocationProperties(ctypes.Structure):
    """``CUmemAllocationProp``."""

    _fields_ = (
        ("type", c_int),
        ("handle_types", c_int),
        ("location", Location),
        ("security", c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class AccessDescription(ctypes.Structure):
    """``CUmemAccessDesc``; flags 3 is reading and writing."""

    _fields_ = (("location", Location), ("flags", c_int))


_PROTOTYPES: dict[str, tuple[Any, ...]] = {
    "cuInit": (c_uint,),
    "cuDriverGetVersion": (POINTER(c_int),),
    "cuDeviceGetCount": (POINTER(c_int),),
    "cuDeviceGet": (POINTER(c_int), c_int),
    "cuDeviceGetName": (c_char_p, c_int, c_int),
    "cuDeviceGetUuid_v2": (POINTER(Bytes16), c_int),
    "cuDeviceGetUuid": (POINTER(Bytes16), c_int),
    "cuDevicePrimaryCtxRetain": (POINTER(c_void_p), c_int),
    "cuDevicePrimaryCtxGetState": (c_int, POINTER(c_uint), POINTER(c_int)),
    "cuCtxPushCurrent_v2": (c_void_p,),
    "cuCtxPopCurrent_v2": (POINTER(c_void_p),),
    "cuCtxSynchronize": (),
    "cuPointerGetAttributes": (c_uint, c_void_p, c_void_p, c_uint64),
    "cuMemGetAddressRange_v2": (POINTER(c_uint64), POINTER(c_size_t), c_uint64),
    "cuIpcGetMemHandle": (POINTER(Bytes64), c_uint64),
    "cuIpcOpenMemHandle_v2": (POINTER(c_uint64), Bytes64, c_uint),
    "cuIpcCloseMemHandle": (c_uint64,),
    "cuStreamSynchronize": (c_void_p,),
    "cuStreamWaitEvent": (c_void_p, c_void_p, c_uint),
    "cuEventCreate": (POINTER(c_void_p), c_uint),
    "cuEventDestroy_v2": (c_void_p,),
    "cuEventRecord": (c_void_p, c_void_p),
    "cuEventSynchronize": (c_void_p,),
    "cuEventQuery": (c_void_p,),
    "cuIpcGetEventHandle": (POINTER(Bytes64), c_void_p),
    "cuIpcOpenEventHandle": (POINTER(c_void_p), Bytes64),
    "cuMemPoolExportToShareableHandle": (c_void_p, c_void_p, c_int, c_uint64),
    "cuMemPoolImportFromShareableHandle": (POINTER(c_void_p), c_void_p, c_int, c_uint64),
    "cuMemPoolExportPointer": (POINTER(Bytes64), c_uint64),
    "cuMemPoolImportPointer": (POINTER(c_uint64), c_void_p, POINTER(Bytes64)),
    "cuMemPoolDestroy": (c_void_p,),
    "cuMemFree_v2": (c_uint64,),
    "cuMemRetainAllocationHandle": (POINTER(c_uint64), c_void_p),
    "cuMemExportToShareableHandle": (c_void_p, c_uint64, c_int, c_uint64),
    "cuMemImportFromShareableHandle": (POINTER(c_uint64), c_void_p, c_int),
    "cuMemAddressReserve": (POINTER(c_uint64), c_size_t, c_size_t, c_uint64, c_uint64),
    "cuMemAddressFree": (c_uint64, c_size_t),
    "cuMemMap": (c_uint64, c_size_t, c_size_t, c_uint64, c_uint64),
    "cuMemUnmap": (c_uint64, c_size_t),
    "cuMemSetAccess": (c_uint64, c_size_t, POINTER(AccessDescription), c_size_t),
    "cuMemRelease": (c_uint64,),
    "cuGetErrorName": (c_int, POINTER(c_char_p)),
    # Those that only the verification needs.
    "cuMemAlloc_v2": (POINTER(c_uint64), c_size_t),
    "cuMemAllocManaged": (POINTER(c_uint64), c_size_t, c_uint),
    "cuMemHostAlloc": (POINTER(c_void_p), c_size_t, c_uint),
    "cuMemFreeHost": (c_void_p,),
    "cuMemGetInfo_v2": (POINTER(c_size_t), POINTER(c_size_t)),
    "cuMemcpyDtoH_v2": (c_void_p, c_uint64, c_size_t),
    "cuMemcpyHtoD_v2": (c_uint64, c_void_p, c_size_t),
    "cuMemsetD32Async": (c_uint64, c_uint, c_size_t, c_void_p),
    "cuStreamCreate": (POINTER(c_void_p), c_uint),
    "cuStreamDestroy_v2": (c_void_p,),
    "cuMemPoolCreate": (POINTER(c_void_p), c_void_p),
    "cuDeviceGetDefaultMemPool": (POINTER(c_void_p), c_int),
    "cuMemAllocFromPoolAsync": (POINTER(c_uint64), c_size_t, c_void_p, c_void_p),
    "cuMemCreate": (POINTER(c_uint64), c_size_t, POINTER(AllocationProperties), c_uint64),
    "cuMemGetAllocationGranularity": (
        POINTER(c_size_t),
        POINTER(AllocationProperties),
        c_int,
    ),
}


class Driver:
    """The initialised driver of one process.

    Parameters
    ----------
    library : ctypes.CDLL
        The loaded library.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self.pid = os.getpid()
        self._library = library
        self._functions: dict[str, Any] = {}

    def function(self, name: str) -> Any:
        """Return a function by its symbol.

        Raises
        ------
        CudaUnavailableError
            If the driver is too old to have it.
        """
        found = self._functions.get(name)
        if found is None:
            found = getattr(self._library, name, None)
            if found is None:
                raise CudaUnavailableError(
                    f"the CUDA driver ({LIBRARY}) has no function {name}; install a driver for "
                    "CUDA 11.4 or later",
                    reason=f"no function {name}",
                )
            found.argtypes = _PROTOTYPES[name]
            found.restype = c_int
            self._functions[name] = found
        return found

    def has(self, name: str) -> bool:
        """Return whether the driver has a function."""
        return hasattr(self._library, name)

    def attempt(self, name: str, *arguments: Any) -> int:
        """Call a function; return its error code, 0 for success."""
        code: int = self.function(name)(*arguments)
        return code

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function.

        Raises
        ------
        CudaDriverError
            If it fails.
        """
        code = self.attempt(name, *arguments)
        if code:
            raise self.failure(name, code)

    def failure(self, name: str, code: int, advice: str = "") -> CudaDriverError:
        """Return the error for a call that failed."""
        said = self.name_of(code)
        return CudaDriverError(
            f"{name} failed with {said} ({code}) in process {os.getpid()}"
            + (f"; {advice}" if advice else ""),
            function=name,
            code=code,
            name=said,
        )

    def name_of(self, code: int) -> str:
        """Return the name of an error code."""
        name = c_char_p()
        if self.attempt("cuGetErrorName", code, byref(name)) or name.value is None:
            return "an unknown error"
        return name.value.decode(errors="replace")


_lock = threading.Lock()
_driver: Driver | None = None


def _renew_lock() -> None:
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_renew_lock)


def get_driver() -> Driver:
    """Return the driver; the first call loads and initialises it.

    Raises
    ------
    CudaUnavailableError
        If there is no driver, or it finds no device.
    CudaForkError
        If this process was forked from one that uses CUDA.
    """
    global _driver
    driver = _driver
    if driver is None:
        with _lock:
            driver = _driver
            if driver is None:
                driver = _driver = _load()
    if driver.pid != os.getpid():
        raise _forked(driver.pid)
    return driver


def unusable_reason() -> str | None:
    """Return why CUDA cannot be used here, or None if it can."""
    try:
        get_driver()
    except (CudaUnavailableError, CudaForkError) as error:
        return str(error)
    return None


def _load() -> Driver:
    if sys.platform != "linux":
        raise CudaUnavailableError(
            f"CUDA arrays can be sent on Linux only, and this is {sys.platform}; copy them to the "
            "host first",
            reason="not Linux",
        )
    try:
        library = ctypes.CDLL(LIBRARY)
    except OSError as error:
        raise CudaUnavailableError(
            f"there is no CUDA driver: {error}; install NVIDIA's driver, or start the container "
            "with the GPU (docker run --gpus all)",
            reason=str(error),
        ) from error
    driver = Driver(library)
    code = driver.attempt("cuInit", 0)
    if code == NOT_INITIALIZED:
        raise _forked(None)
    if code:
        advice = (
            "it finds no device: look at nvidia-smi and CUDA_VISIBLE_DEVICES"
            if code == NO_DEVICE
            else "look at nvidia-smi"
        )
        raise CudaUnavailableError(
            f"the CUDA driver cannot be used: cuInit says {driver.name_of(code)} ({code}); "
            f"{advice}",
            reason=driver.name_of(code),
        )
    return driver


def _forked(parent: int | None) -> CudaForkError:
    whom = "a process" if parent is None else f"process {parent}"
    return CudaForkError(
        f"process {os.getpid()} was forked from {whom} that used CUDA before, and CUDA does not "
        "work in forked children; start workers by 'spawn' or 'forkserver'",
        pid=parent,
    )
