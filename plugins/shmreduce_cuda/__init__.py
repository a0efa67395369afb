"""CUDA arrays travel between processes without a copy.

Imports only public names of :mod:`shmreduce`. This module implements the hook and
names the public interface. Each name is imported when it is first used (PEP 562). The
driver is loaded by ctypes when the first array is sent or received. Nothing else is
needed; sending imports no array library.

From the bottom: ``errors``; ``driver`` calls the driver, and ``devices`` finds devices
and makes their contexts current; ``layout`` and ``sources`` read arrays; ``kinds``
tells kinds of memory apart; ``locks`` may be held while the driver is called;
``offers`` and ``descriptors`` pass descriptors of pools and of virtual memory;
``exports`` holds arrays that were sent, and ``keeper`` is the thread that frees them;
``mappings`` and ``imports`` hold the memory of arrays that were received; ``events``
orders streams; ``view`` and ``libraries`` make the arrays that receivers get;
``messages`` describes an array in a message; ``reducer`` and ``sending`` are the
sending side, ``rebuild`` is the receiving side, and ``sharing`` is the interface for
users.
"""

from __future__ import annotations

from shmreduce import hookimpl, import_late

TYPE_CHECKING = False

if TYPE_CHECKING:
    from collections.abc import Iterable

    from shmreduce import Reducer
    from shmreduce_cuda.errors import (
        CudaDeviceError,
        CudaDriverError,
        CudaExpiredError,
        CudaForkError,
        CudaMemoryError,
        CudaMessageError,
        CudaProducerDied,
        CudaSharingError,
        CudaUnavailableError,
    )
    from shmreduce_cuda.reducer import CudaReducer
    from shmreduce_cuda.sharing import SharedArray, Stats, collect, share, stats
    from shmreduce_cuda.torch_tensors import send_torch_tensors
    from shmreduce_cuda.view import CudaArrayView

__all__ = [
    "CudaArrayView",
    "CudaDeviceError",
    "CudaDriverError",
    "CudaExpiredError",
    "CudaForkError",
    "CudaMemoryError",
    "CudaMessageError",
    "CudaProducerDied",
    "CudaReducer",
    "CudaSharingError",
    "CudaUnavailableError",
    "SharedArray",
    "Stats",
    "collect",
    "send_torch_tensors",
    "share",
    "shmreduce_reducers",
    "stats",
]

_DEFINED_IN = {
    "CudaArrayView": "view",
    "CudaReducer": "reducer",
    "SharedArray": "sharing",
    "Stats": "sharing",
    "collect": "sharing",
    "send_torch_tensors": "torch_tensors",
    "share": "sharing",
    "stats": "sharing",
}


@hookimpl
def shmreduce_reducers() -> Iterable[Reducer]:
    """Provide the reducer of CUDA arrays.

    Returns
    -------
    list of Reducer

    Examples
    --------
    >>> [reducer] = shmreduce_reducers()
    >>> "cupy.ndarray" in reducer.types
    True
    """
    from shmreduce_cuda.reducer import CudaReducer

    return [CudaReducer()]


def __getattr__(name: str) -> object:
    """Import a public name from the module that defines it (PEP 562)."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = import_late(f"{__name__}.{_DEFINED_IN.get(name, 'errors')}")
    value: object = getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List the public names, imported or not."""
    return sorted(set(globals()) | set(__all__))
