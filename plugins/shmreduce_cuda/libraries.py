"""Makes arrays of the sender's library at the receiver.

May import ``layout`` and ``view`` of this plugin. A library is imported here when the
first of its arrays is received, as pickle imports the modules of what it loads. If it is
not installed, or has no such arrays, the result is the view. Nothing is copied.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from shmreduce import import_late
from shmreduce_cuda.layout import itemsize_of
from shmreduce_cuda.view import CudaArrayView

if TYPE_CHECKING:
    from collections.abc import Callable

    from shmreduce_cuda.layout import Layout

__all__ = ["make_array", "make_empty"]


def _import(name: str) -> Any:
    """Return a library, or None if it is not installed here."""
    try:
        return import_late(name)
    except ImportError:
        return None


def make_array(
    library: str, view: CudaArrayView, base: int, size: int, extras: dict[str, Any]
) -> Any:
    """Return an array of a library over the memory of a view.

    Parameters
    ----------
    library : str
        As in ``Source``.
    view : CudaArrayView
        The memory of the array.
    base, size : int
        The allocation that the view lies in.
    extras : dict
        As in ``Source``.
    """
    make = _MAKERS.get(library)
    module = None if make is None else _import(library)
    return view if make is None or module is None else make(module, view, base, size, extras)


def make_empty(library: str, layout: Layout, extras: dict[str, Any], ordinal: int | None) -> Any:
    """Return an array without elements, on the current device if ``ordinal`` is None."""
    module = _import(library) if library else None
    view = CudaArrayView(0, layout, ordinal or 0, None)
    if module is None:
        return view
    if library == "torch":
        wanted = _torch_dtype(module, layout)
        if wanted is None:
            return view
        device = "cuda" if ordinal is None else f"cuda:{ordinal}"
        return _finish_tensor(
            module, module.empty(layout.shape, dtype=wanted, device=device), extras
        )
    dtype = _dtype(layout)
    if library == "cupy":
        with nullcontext() if ordinal is None else module.cuda.Device(ordinal):
            return module.empty(layout.shape, dtype)
    cuda = import_late("numba.cuda")
    with nullcontext() if ordinal is None else cuda.gpus[ordinal]:
        return cuda.device_array(layout.shape, dtype)


def _dtype(layout: Layout) -> Any:
    np = import_late("numpy")
    descr: Any = layout.descr
    if descr is not None:
        # np.dtype(descr) would make fields of the gaps between fields.
        return np.lib.format.descr_to_dtype(descr)
    # NumPy itself has no types such as bfloat16.
    extension = _import("ml_dtypes") if layout.dtype_name else None
    return np.dtype(getattr(extension, layout.dtype_name, layout.typestr))


def _make_cupy(
    cupy: Any, view: CudaArrayView, base: int, size: int, _extras: dict[str, Any]
) -> Any:
    pointer: int = view.__cuda_array_interface__["data"][0]
    memory = cupy.cuda.UnownedMemory(base, size, view, view.device)
    place = cupy.cuda.MemoryPointer(memory, pointer - base)
    return cupy.ndarray(view.shape, _dtype(view.layout), memptr=place, strides=view.strides)


def _make_numba(
    _numba: Any, view: CudaArrayView, _base: int, _size: int, _extras: dict[str, Any]
) -> Any:
    cuda = import_late("numba.cuda")
    # numba looks up the address in the context of the current device.
    with cuda.gpus[view.device]:
        array = cuda.from_cuda_array_interface(
            view.__cuda_array_interface__, owner=view, sync=False
        )
        # numba reads only the typestr, which does not have the fields.
        dtype = _dtype(view.layout)
        return array if array.dtype == dtype else array.view(dtype)


def _make_torch(
    torch: Any, view: CudaArrayView, _base: int, _size: int, extras: dict[str, Any]
) -> Any:
    layout = view.layout
    wanted = _torch_dtype(torch, layout)
    if wanted is None:
        return view
    # First as numbers of the same size, which every version of torch can read, and then
    # viewed as their own type.
    plain = CudaArrayView(
        view.__cuda_array_interface__["data"][0],
        layout._replace(typestr=_TORCH_TYPESTRS[itemsize_of(layout.typestr)]),
        view.device,
        view,
    )
    tensor = torch.as_tensor(plain, device=f"cuda:{view.device}")
    return _finish_tensor(torch, tensor.view(wanted), extras)


_TORCH_TYPESTRS = {1: "|u1", 2: "<i2", 4: "<i4", 8: "<i8", 16: "<c16"}
"""A type that every version of torch can read, by the bytes of an element."""
_TORCH_KINDS = {"b": "bool", "i": "int", "u": "uint", "f": "float", "c": "complex"}
"""The beginning of the name of a dtype of torch, by the kind in a typestr."""


def _torch_dtype(torch: Any, layout: Layout) -> Any:
    """Return the dtype of a layout, or None if this torch cannot have such a tensor.

    A process without torch that sends an array on knows only the typestr, and may send any
    part of the array, as any type.
    """
    size, kind = itemsize_of(layout.typestr), layout.typestr[1]
    strides = layout.strides or ()
    odd = any(step < 0 or step % size for step in strides if size)
    if size not in _TORCH_TYPESTRS or odd or layout.typestr.startswith(">"):
        return None
    bits = "" if kind == "b" else str(8 * size)
    found = getattr(torch, layout.dtype_name or f"{_TORCH_KINDS.get(kind, '')}{bits}", None)
    return found if isinstance(found, torch.dtype) else None


def _finish_tensor(torch: Any, tensor: Any, extras: dict[str, Any]) -> Any:
    if extras.get("parameter"):
        return torch.nn.Parameter(tensor, requires_grad=extras["requires_grad"])
    if extras.get("requires_grad"):
        tensor.requires_grad_(True)
    return tensor


_MAKERS: dict[str, Callable[[Any, CudaArrayView, int, int, dict[str, Any]], Any]] = {
    "cupy": _make_cupy,
    "numba": _make_numba,
    "torch": _make_torch,
}
