"""Tensors of torch, for those who ask for them.

May import ``errors``, ``rebuild`` and ``sharing`` of this plugin. torch is not
imported: it is there if there are tensors.

torch registers reducers of its own with ``ForkingPickler`` when it is imported.
So this one is registered there, too, around torch's.
"""

from __future__ import annotations

import sys
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any

from shmreduce_cuda.errors import CudaSharingError
from shmreduce_cuda.rebuild import unwrap
from shmreduce_cuda.sharing import share

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["send_torch_tensors"]


class _TensorReducer:
    """Sends CUDA tensors by shmreduce, and leaves others to torch."""

    def __init__(self, others: Callable[[Any], Any]) -> None:
        self.others = others

    def __call__(self, tensor: Any) -> Any:
        if tensor.device.type != "cuda":
            return self.others(tensor)
        return unwrap, (share(tensor),)


def send_torch_tensors(*, enable: bool = True) -> None:
    """Let CUDA tensors travel by shmreduce instead of by torch, in this process.

    Tensors of the host, and what else torch sends, stay torch's. Receivers need
    not call this. Call it after ``import torch``, and in each process that
    sends; ``enable=False`` gives everything back to torch.

    Parameters
    ----------
    enable : bool
        Whether shmreduce or torch sends CUDA tensors from now on. Calling it again
        with the same value changes nothing.

    Raises
    ------
    CudaSharingError
        If torch has not been imported, or has registered no reducer for tensors.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        raise CudaSharingError("torch has not been imported: import it before this call")
    for cls in (torch.Tensor, torch.nn.Parameter):
        # Not public; there is no other way to learn what torch has registered.
        registered: dict[type, Any] = ForkingPickler._extra_reducers  # type: ignore[attr-defined]
        present = registered.get(cls)
        if present is None:
            raise CudaSharingError(
                f"torch has registered no reducer for {cls.__name__}: import torch.multiprocessing"
            )
        if enable and not isinstance(present, _TensorReducer):
            ForkingPickler.register(cls, _TensorReducer(present))
        elif not enable and isinstance(present, _TensorReducer):
            ForkingPickler.register(cls, present.others)
