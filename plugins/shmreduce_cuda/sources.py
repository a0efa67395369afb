"""Reads arrays: their memory and their layout.

May import ``errors`` and ``layout`` of this plugin. No array library is imported. Arrays
are read by one of two protocols: ``__cuda_array_interface__`` (version 3,
https://numba.readthedocs.io/en/stable/cuda/cuda_array_interface.html) or DLPack
(https://dmlc.github.io/dlpack/latest/). A torch tensor is read by its methods, since its
``__cuda_array_interface__`` does not work for ``bfloat16`` and for tensors with a gradient.

The array object need not keep its memory: ``tensor.data = other`` and ``array.delete()`` of
JAX give it back while the object lives. So what is kept is a second tensor of the same
memory, or a DLPack capsule.
"""

from __future__ import annotations

import ctypes
from contextlib import suppress
from typing import Any, NamedTuple

from shmreduce_cuda.errors import CudaMemoryError
from shmreduce_cuda.layout import Layout

__all__ = ["Source", "is_plain", "library_of", "read_array"]

LIBRARIES = {"cupy": "cupy", "numba": "numba", "numba_cuda": "numba", "torch": "torch"}
"""From the package of a class to its library: those whose arrays a receiver can make."""

_DLPACK_CUDA, _DLPACK_HOST, _DLPACK_MANAGED = 2, (1, 3), 13
"""Device types of DLPack (``DLDeviceType``); the host's memory is either pageable or pinned."""
_DLPACK_KINDS = {0: "<i", 1: "<u", 2: "<f", 5: "<c", 6: "|b"}
"""The beginning of a typestr, by DLPack's code of the type (``DLDataTypeCode``)."""
# DLPack's codes of types that have no typestr.
_DLPACK_NAMES = {
    4: "bfloat16",
    7: "float8_e3m4",
    8: "float8_e4m3",
    9: "float8_e4m3b11fnuz",
    10: "float8_e4m3fn",
    11: "float8_e4m3fnuz",
    12: "float8_e5m2",
    13: "float8_e5m2fnuz",
    14: "float8_e8m0fnu",
}


class Source(NamedTuple):
    """An array to be sent.

    Parameters
    ----------
    pointer : int
        Device address of the first element; 0 for an array without elements.
    layout : Layout
        Its layout.
    read_only : bool
        Whether the array is marked as read-only.
    library : str
        One of ``LIBRARIES``, or empty.
    extras : dict
        Further facts that the library needs to make the array at the receiver.
    owner : object
        Keeps the memory alive, whatever becomes of the array that was sent.
    device : int or None
        The ordinal of the device of an array without elements, if the array says it. That of
        others is found by the pointer.
    """

    pointer: int
    layout: Layout
    read_only: bool
    library: str
    extras: dict[str, Any]
    owner: Any
    device: int | None = None


def library_of(obj: Any) -> str:
    """Return the known library that an array's class derives from, or ''."""
    for cls in type(obj).__mro__:
        found = LIBRARIES.get(cls.__module__.partition(".")[0])
        if found is not None:
            return found
    return ""


def read_array(obj: Any) -> Source:
    """Read an array.

    Raises
    ------
    CudaMemoryError
        If it has neither protocol, or is not plain memory of a device.
    """
    source = _read(obj, library_of(obj))
    return source if source.layout.nbytes else source._replace(device=_device_of(obj))


def _device_of(obj: Any) -> int | None:
    if hasattr(obj, "__dlpack_device__"):
        return int(obj.__dlpack_device__()[1])
    device = getattr(obj, "device", None)
    return device if isinstance(device, int) else None


def _read(obj: Any, library: str) -> Source:
    if library == "torch":
        return _read_tensor(obj)
    if getattr(obj, "__cuda_array_interface__", None) is not None:
        return _read_interface(obj, library)
    if hasattr(obj, "__dlpack__") and hasattr(obj, "__dlpack_device__"):
        return _read_dlpack(obj, library)
    raise _refusal(
        obj,
        "an object without __cuda_array_interface__ and __dlpack__",
        "send an array of CuPy, numba, torch or another library that has one of them",
    )


def _refusal(obj: Any, kind: str, remedy: str) -> CudaMemoryError:
    cls = type(obj)
    return CudaMemoryError(
        f"{cls.__module__}.{cls.__qualname__} cannot be sent: it is {kind}; {remedy}",
        kind=kind,
        remedy=remedy,
    )


def _read_interface(obj: Any, library: str) -> Source:
    # Held first, and then read.
    owner = obj if library else (obj, _capsule_of(obj))
    interface = obj.__cuda_array_interface__
    if interface.get("mask") is not None:
        raise _refusal(obj, "a masked array", "send data and mask as two arrays")
    pointer, read_only = interface["data"]
    strides = interface.get("strides")
    typestr = interface["typestr"]
    # Any typestr but that of void describes its type completely.
    descr, name = _read_void(obj, interface) if typestr[1:2] == "V" else (None, "")
    layout = Layout(
        tuple(interface["shape"]),
        None if strides is None else tuple(strides),
        typestr,
        descr,
        name,
    )
    return Source(pointer or 0, layout, bool(read_only), library, {}, owner)


def _capsule_of(obj: Any) -> Any:
    """Return a DLPack capsule of an array, or None if it has none."""
    if hasattr(obj, "__dlpack__"):
        # DLPack has fewer types than the interface. What an array raises then is not defined.
        with suppress(BufferError, TypeError, ValueError, RuntimeError):
            return _export(obj)
    return None


def _read_void(obj: Any, interface: dict[str, Any]) -> tuple[list[tuple[str, ...]] | None, str]:
    """Return the fields, or the name, of a type whose typestr is void."""
    dtype: Any = getattr(obj, "dtype", None)
    try:
        # numba has the fields only in the dtype.
        descr: list[Any] = list(interface.get("descr") or getattr(dtype, "descr", None) or ())
    except ValueError as error:
        raise _refusal(
            obj, f"of a type with fields that overlap ({error})", "send its fields one by one"
        ) from error
    if any(field[0] for field in descr):
        return descr, ""
    name: str = getattr(obj, "dtype_name", "") or getattr(dtype, "name", "")
    return None, "" if name.startswith("void") else name


def is_plain(tensor: Any) -> bool:
    """Return whether a tensor of torch is one run of memory, and so not sparse or nested."""
    return str(tensor.layout) == "torch.strided" and not tensor.is_nested


def _read_tensor(tensor: Any) -> Source:
    if tensor.device.type != "cuda" or not is_plain(tensor):
        nested = "nested, " if tensor.is_nested else ""
        raise _refusal(
            tensor,
            f"a tensor of device {tensor.device.type!r}, {nested}layout {tensor.layout}",
            "send tensors of the host by torch, and sparse and nested ones by their parts",
        )
    if tensor.is_conj() or tensor.is_neg():
        raise _refusal(tensor, "a lazy view", "send tensor.resolve_conj().resolve_neg()")
    if tensor.requires_grad and not tensor.is_leaf:
        raise _refusal(tensor, "a part of an autograd graph", "send tensor.detach()")
    alias = tensor.detach()
    size = alias.element_size()
    name = str(alias.dtype).removeprefix("torch.")
    kind = "c" if alias.dtype.is_complex else "f" if alias.dtype.is_floating_point else "i"
    typestr = f"<{kind}{size}"
    if name.startswith("uint"):
        typestr = f"<u{size}"
    elif name == "bool":
        typestr = "|b1"
    elif name.startswith(("bfloat", "float8", "float4")):
        typestr = f"|V{size}"
    layout = Layout(
        tuple(alias.shape), tuple(step * size for step in alias.stride()), typestr, None, name
    )
    extras = {"requires_grad": bool(tensor.requires_grad)}
    if type(tensor).__name__ == "Parameter":
        extras["parameter"] = True
    return Source(alias.data_ptr(), layout, False, "torch", extras, alias)


class _Device(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int32), ("id", ctypes.c_int32))


class _Type(ctypes.Structure):
    _fields_ = (
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
    )


class _Tensor(ctypes.Structure):
    """``DLTensor``, with which ``DLManagedTensor`` begins."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("ndim", ctypes.c_int32),
        ("dtype", _Type),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


_get_pointer: Any = ctypes.pythonapi.PyCapsule_GetPointer
_get_pointer.argtypes = (ctypes.py_object, ctypes.c_char_p)
_get_pointer.restype = ctypes.c_void_p


def _export(obj: Any) -> Any:
    """Return a DLPack capsule, which holds the memory until it is dropped.

    That is so because it is not marked as used. No stream is named: sending waits for the
    whole device, but -1, which says that no stream need wait, is a stream like any other
    for JAX.
    """
    return obj.__dlpack__()


def _read_dlpack(obj: Any, library: str) -> Source:
    device_type = int(obj.__dlpack_device__()[0])
    if device_type == _DLPACK_MANAGED:
        raise _refusal(obj, "managed memory", "copy it to memory of a device")
    if device_type != _DLPACK_CUDA:
        where = "host memory" if device_type in _DLPACK_HOST else f"DLPack device {device_type}"
        raise _refusal(obj, where, "send it as a NumPy array")
    capsule = _export(obj)
    tensor = _Tensor.from_address(_get_pointer(capsule, b"dltensor"))
    bits, code = tensor.dtype.bits, tensor.dtype.code
    if tensor.dtype.lanes != 1 or bits % 8 or code not in {**_DLPACK_KINDS, **_DLPACK_NAMES}:
        raise _refusal(
            obj, f"of DLPack type {code} with {bits} bits", "convert it to a type of whole bytes"
        )
    size = bits // 8
    name = _DLPACK_NAMES.get(code, "")
    typestr = f"{_DLPACK_KINDS.get(code, '|V')}{size}"
    shape = tuple(tensor.shape[axis] for axis in range(tensor.ndim))
    strides = (
        tuple(tensor.strides[axis] * size for axis in range(tensor.ndim))
        if tensor.strides
        else None
    )
    pointer = (tensor.data or 0) + tensor.byte_offset
    layout = Layout(shape, strides, typestr, None, name)
    return Source(pointer, layout, False, library, {}, (obj, capsule))
