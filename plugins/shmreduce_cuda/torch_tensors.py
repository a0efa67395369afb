"""Sends tensors of torch by shmreduce, for programs that ask for it.

May import ``errors``, ``rebuild``, ``sharing`` and ``sources`` of this plugin. It does not import
torch: whoever has a tensor has done so.

When torch is imported, it registers its own reducers with ``ForkingPickler``. So this
reducer is registered there too, and calls torch's.
"""

from __future__ import annotations

import sys
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any

from shmreduce_cuda.errors import CudaSharingError
from shmreduce_cuda.rebuild import unwrap
from shmreduce_cuda.sharing import share
from shmreduce_cuda.sources import is_plain

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["send_torch_tensors"]


class _TensorReducer:
    """Sends plain CUDA tensors by shmreduce, and leaves others to torch."""

    def __init__(self, others: Callable[[Any], Any]) -> None:
        self.others = others

    def __call__(self, tensor: Any) -> Any:
        if tensor.device.type != "cuda" or not is_plain(tensor):
            return self.others(tensor)
        return unwrap, (share(tensor),)


def send_torch_tensors(*, enable: bool = True) -> None:
    """Let CUDA tensors travel by shmreduce instead of by torch, in this process.

    Torch still sends sparse and nested tensors, those in host memory, and its other objects.
    Call this after ``import torch`` in each process that sends; receivers need not call it.
    With ``enable=False`` torch sends everything again.

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
        # A private name: there is no public way to find what torch has registered.
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
