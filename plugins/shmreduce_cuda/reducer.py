"""The reducer of CUDA arrays that is registered, which does not load the driver.

May import public names of :mod:`shmreduce`; the rest of the plugin only inside
functions, since it is not needed before the first array is sent.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from shmreduce import NotShareableError, Reducer, import_late

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shmreduce import Message, Mode

__all__ = ["CudaReducer"]

_NUMBA = "numba.cuda.cudadrv.devicearray"


class CudaReducer(Reducer):
    """Lets arrays in the memory of a CUDA device travel without a copy.

    Sender and receivers use the same memory, and see each other's writes. It is kept until
    every receiver has dropped its array, or has ended.

    Parameters
    ----------
    types : sequence of class or str, optional
        Classes with ``__cuda_array_interface__`` or ``__dlpack__``. By default those of
        CuPy and numba, ``CudaArrayView`` and ``SharedArray``.

    Examples
    --------
    For a class of another library:

    >>> import shmreduce
    >>> reducer = CudaReducer(["signals.DeviceSignal"])
    >>> shmreduce.register_reducer(reducer)
    >>> shmreduce.unregister_reducer(reducer)
    """

    types: Sequence[type | str] = (
        "cupy.ndarray",
        f"{_NUMBA}.DeviceNDArrayBase",
        "shmreduce_cuda.view.CudaArrayView",
        "shmreduce_cuda.sharing.SharedArray",
    )
    subclasses = True

    def __init__(self, types: Sequence[type | str] | None = None) -> None:
        if types is not None:
            self.types = types

    def prepare(self) -> None:
        """Import what :meth:`reduce` needs; that does not load the driver."""
        import_module("shmreduce_cuda.sharing")

    def reduce(self, obj: Any, message: Message) -> Any:
        """Return how to rebuild the array; NotImplemented for a message to another host."""
        if not message.shared_memory:
            return NotImplemented
        from shmreduce_cuda.sharing import reduce_array

        return reduce_array(obj, message)

    def share(self, obj: Any, mode: Mode) -> Any:  # noqa: ARG002 - there is no mode here
        """Raise NotShareableError, since these arrays are not in host memory."""
        raise NotShareableError(
            f"{type(obj).__qualname__} objects are in the memory of a device, and sending one "
            "shares it; to prepare one for sending, call shmreduce_cuda.share()",
            type_name=type(obj).__qualname__,
            reason="memory of a device",
        )

    def unusable_reason(self) -> str | None:
        """Return why CUDA cannot be used here, or None if it can."""
        import_late("shmreduce_cuda.driver")
        from shmreduce_cuda.driver import unusable_reason

        return unusable_reason()
