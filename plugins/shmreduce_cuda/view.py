"""The array that a receiver gets if it lacks the sender's library.

May import ``layout`` of this plugin.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shmreduce_cuda.layout import Layout

__all__ = ["CudaArrayView"]


class CudaArrayView:
    """Memory of a device as an array that can be passed to a library.

    Every library that reads ``__cuda_array_interface__`` can use it without a copy:
    ``cupy.asarray(view)``, ``numba.cuda.as_cuda_array(view)``,
    ``torch.as_tensor(view, device="cuda")``.

    Attributes
    ----------
    layout : Layout
        Its layout, which has shape, strides, typestr and dtype_name.
    shape : tuple of int
        Length of each axis.
    strides : tuple of int or None
        In bytes; None for C order without gaps.
    typestr : str
        As in ``__array_interface__``.
    dtype_name : str
        The sender's name of a type that the typestr cannot express, such as
        ``bfloat16``; otherwise empty.
    device : int
        Ordinal in this process.
    nbytes : int
        Bytes of all elements.
    read_only : bool
        Whether the sender's array was read-only.
    owner : object
        Keeps the memory alive. Arrays made from the view must keep the view or the owner.

    Examples
    --------
    Receivers get such objects from messages. One without memory:

    >>> from shmreduce_cuda.layout import Layout
    >>> view = CudaArrayView(0, Layout((0, 3), None, "<f4"), device=0, owner=None)
    >>> view.shape, view.nbytes, view.__cuda_array_interface__["version"]
    ((0, 3), 0, 3)
    """

    __slots__ = ("__weakref__", "_pointer", "device", "layout", "owner", "read_only")

    def __init__(
        self, pointer: int, layout: Layout, device: int, owner: Any, *, read_only: bool = False
    ) -> None:
        self._pointer = pointer
        self.layout = layout
        self.device = device
        self.owner = owner
        self.read_only = read_only

    @property
    def shape(self) -> tuple[int, ...]:
        """Length of each axis."""
        return self.layout.shape

    @property
    def strides(self) -> tuple[int, ...] | None:
        """Bytes from one element of each axis to the next."""
        return self.layout.strides

    @property
    def typestr(self) -> str:
        """Type of the elements."""
        return self.layout.typestr

    @property
    def dtype_name(self) -> str:
        """Name of the type, if the typestr cannot express it."""
        return self.layout.dtype_name

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self.layout.nbytes

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """Version 3. No stream: everything that wrote the memory has been waited for."""
        layout = self.layout
        interface: dict[str, Any] = {
            "version": 3,
            "shape": layout.shape,
            "typestr": layout.typestr,
            "data": (self._pointer, self.read_only),
            "strides": layout.strides,
            "stream": None,
        }
        if layout.descr is not None:
            interface["descr"] = layout.descr
        return interface

    def __repr__(self) -> str:
        kind = self.dtype_name or self.typestr
        return f"<{type(self).__name__} {self.shape} of {kind} on device {self.device}>"
