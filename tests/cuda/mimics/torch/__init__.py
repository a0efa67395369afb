"""Looks like torch 2, as far as tensors of a device go."""

from __future__ import annotations

from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace
from typing import Any


class dtype:
    def __init__(self, name: str, size: int, *, is_floating_point: bool = False) -> None:
        self.name, self.size = name, size
        self.is_floating_point, self.is_complex = is_floating_point, False

    def __repr__(self) -> str:
        return f"torch.{self.name}"

    def __reduce__(self) -> str:
        return self.name


bfloat16 = dtype("bfloat16", 2, is_floating_point=True)
float32 = dtype("float32", 4, is_floating_point=True)
int16 = dtype("int16", 2)
int32 = dtype("int32", 4)
uint8 = dtype("uint8", 1)
_BY_TYPESTR = {"|u1": uint8, "<i2": int16, "<i4": int32}


class Tensor:
    def __init__(
        self, shape: Any, steps: Any, kind: dtype, pointer: int, owner: Any, device: str = "cuda:0"
    ) -> None:
        self.shape, self._steps, self.dtype = tuple(shape), tuple(steps), kind
        self._pointer, self.owner = pointer, owner
        kind_of_device, _, index = device.partition(":")
        self.device = SimpleNamespace(type=kind_of_device, index=int(index or 0), name=device)
        self.layout, self.is_nested = "torch.strided", False
        self.requires_grad, self.is_leaf = False, True

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, self.device.index

    def data_ptr(self) -> int:
        return self._pointer

    def element_size(self) -> int:
        return self.dtype.size

    def stride(self) -> Any:
        return self._steps

    def is_conj(self) -> bool:
        return False

    def is_neg(self) -> bool:
        return False

    def view(self, kind: dtype) -> Tensor:
        assert kind.size == self.dtype.size
        return Tensor(self.shape, self._steps, kind, self._pointer, self.owner, self.device.name)

    def detach(self) -> Tensor:
        return self.view(self.dtype)

    @property
    def data(self) -> Tensor:
        return self.detach()

    @data.setter
    def data(self, new: Tensor) -> None:
        Tensor.__init__(
            self, new.shape, new.stride(), new.dtype, new.data_ptr(), new.owner, new.device.name
        )

    def requires_grad_(self, wanted: bool) -> Tensor:
        self.requires_grad = wanted
        return self


class Parameter(Tensor):
    def __init__(self, data: Tensor, requires_grad: bool = True) -> None:
        super().__init__(
            data.shape, data.stride(), data.dtype, data.data_ptr(), data.owner, data.device.name
        )
        self.requires_grad = requires_grad


nn = SimpleNamespace(Parameter=Parameter)


def as_tensor(data: Any, device: str) -> Tensor:
    interface = data.__cuda_array_interface__
    kind = _BY_TYPESTR[interface["typestr"]]
    shape = interface["shape"]
    strides = interface["strides"]
    steps: list[int] = []
    step = 1
    for length in reversed(shape):
        steps.insert(0, step)
        step *= length
    if strides is not None:
        steps = [each // kind.size for each in strides]
    return Tensor(shape, steps, kind, interface["data"][0], data, device)


def empty(shape: Any, dtype: dtype, device: str) -> Tensor:
    return Tensor(shape, [1] * len(shape), dtype, 0, None, device)


def rebuild_tensor(*state: Any) -> Tensor:
    shape, steps, kind = state
    return Tensor(shape, steps, kind, 0, "rebuilt by torch", "cpu")


def reduce_tensor(tensor: Tensor) -> Any:
    return rebuild_tensor, (tensor.shape, tensor.stride(), tensor.dtype)


ForkingPickler.register(Tensor, reduce_tensor)
ForkingPickler.register(Parameter, reduce_tensor)
