"""Cases that send the arrays of real libraries, which are skipped where they are not installed.

May import public names of :mod:`shmreduce`, the plugin, and ``outcomes`` and ``partner`` of
this package.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

import numpy as np

import shmreduce
import shmreduce_cuda
from shmreduce_cuda.verify import partner as far
from shmreduce_cuda.verify.outcomes import Case, Scale, SkippedCaseError, expect
from shmreduce_cuda.verify.partner import eventually, installed, partner

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["CASES", "torch_with_device"]

_TORCH_KINDS = ("float32", "float16", "bfloat16", "float8_e4m3fn", "int64", "uint8", "bool")
_GRAPHS = 10
_MANY = 1 << 20


def torch_with_device() -> Any:
    """Return torch, or None if it is not installed or has no device."""
    try:
        torch = importlib.import_module("torch")
    except ImportError:
        return None
    return torch if torch.cuda.is_available() else None


def _need(name: str) -> Any:
    """Return a library; skip the case if it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise SkippedCaseError(f"{name} is not installed: {error}") from error


def _need_torch() -> Any:
    torch = torch_with_device()
    if torch is None:
        raise SkippedCaseError("torch is not installed, or has no device")
    return torch


# What a partner is asked to do


def _values_of(name: str) -> Any:
    """Return the values of a kept array of any library."""
    array = far.received[name]
    if hasattr(array, "copy_to_host"):
        return array.copy_to_host()
    if hasattr(array, "detach"):
        return array.detach().float().cpu().numpy()
    return importlib.import_module("cupy").asarray(array).get()


def _make_tensor(value: float) -> Any:
    far.received["tensor"] = tensor = _need_torch().full((1 << 20,), value, device="cuda")
    return shmreduce_cuda.share(tensor)


# The cases


def _library(name: str, make: Callable[[Any, Any], Any]) -> dict[str, Any]:
    module = _need(name)
    host = np.arange(24, dtype="f4").reshape(4, 6)
    with installed(), partner() as other:
        try:
            array = make(module, host)
        except Exception as error:
            raise SkippedCaseError(f"{name} does not work with this driver: {error}") from error
        told = other.ask(far.keep, "x", shmreduce_cuda.share(array))
        expect(told == type(array).__name__, f"the receiver gets a {told}")
        found = other.ask(_values_of, "x")
        expect(np.array_equal(found, host), "the values are others")
        other.ask(far.drop)
        del array
    return {"version": str(module.__version__), "class": told}


def _cupy(_: Scale) -> dict[str, Any]:
    return _library("cupy", lambda cupy, host: cupy.asarray(host))


def _numba(_: Scale) -> dict[str, Any]:
    return _library(
        "numba", lambda _numba, host: importlib.import_module("numba.cuda").to_device(host)
    )


def _torch(_: Scale) -> dict[str, Any]:
    return _library("torch", lambda torch, host: torch.as_tensor(host, device="cuda"))


def _structured(_: Scale) -> dict[str, Any]:
    _need("numba")
    host = np.zeros(10, np.dtype([("small", "i1"), ("large", "f8")], align=True))
    host["large"] = np.arange(10)
    with installed(), partner() as other:
        other.ask(far.keep, "x", importlib.import_module("numba.cuda").to_device(host))
        found = other.ask(_values_of, "x")
        other.ask(far.drop)
    expect(found.dtype == host.dtype, f"the dtype is {found.dtype}")
    expect(found["large"].tolist() == host["large"].tolist(), "the values are others")
    return {}


def _streams(scale: Scale) -> dict[str, Any]:
    cupy = _need("cupy")
    trials, stale = max(10, scale.trials // 5), 0
    with installed(), partner() as other:
        stream = cupy.cuda.Stream(non_blocking=True)
        array = cupy.zeros(scale.busy // 4, "u4")
        for number in range(1, trials + 1):
            with stream:
                for _ in range(60):
                    array.fill(number - 1)
                array.fill(number)
                shared = shmreduce_cuda.share(array[-4:], stream)
            other.ask(far.keep, "x", shared)
            del shared
            stale += set(other.ask(_values_of, "x")) != {number}
            other.ask(far.drop)
    expect(not stale, f"{stale} stale reads")
    return {"trials": trials}


def _tensors(_: Scale) -> dict[str, Any]:
    torch = _need_torch()
    whole = torch.arange(1.0, 13.0, device="cuda").reshape(3, 4)
    sent = {name: whole.to(getattr(torch, name)) for name in _TORCH_KINDS if hasattr(torch, name)}
    sent |= {
        "slice": whole[1:, ::2],
        "transposed": whole.t(),
        "gradient": whole.clone().requires_grad_(True),
        "parameter": torch.nn.Parameter(whole.clone()),
        "of the host": torch.ones(3),
    }
    importlib.import_module("torch.multiprocessing")
    shmreduce_cuda.send_torch_tensors()
    with installed(), partner() as other:
        for name, tensor in sent.items():
            told = other.ask(far.keep, name, tensor)
            expect(told == type(tensor).__name__, f"{name}: the receiver gets a {told}")
            expect(
                np.array_equal(other.ask(_values_of, name), tensor.detach().float().cpu().numpy()),
                f"{name}: the values are others",
            )
        mappings = other.ask(far.own_stats).mappings
        parameter = torch.nn.Parameter(torch.ones(_MANY, device="cuda"))
        other.ask(far.keep, "swapped", parameter)
        parameter.data = torch.zeros(1)
        # This would get the memory if torch had it back.
        following = torch.full((_MANY,), 7.0, device="cuda")
        expect(bool((other.ask(_values_of, "swapped") == 1).all()), "the memory was used again")
        del following
        other.ask(far.drop)
    return {"kinds": list(sent), "mappings": mappings}


def _graphs(_: Scale) -> dict[str, Any]:
    """Capture graphs while the keeper's thread closes what this process has received."""
    torch = _need_torch()
    ones = torch.ones(1000, device="cuda")
    with installed(), partner() as other:
        for number in range(_GRAPHS):
            # Dropped at once, and so about to be closed.
            expect(float(other.ask(_make_tensor, number)[0]) == number, "the value is another")
            expect(shmreduce_cuda.stats().mappings == 1, "it was closed too early")
            graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
            with torch.cuda.stream(stream):
                graph.capture_begin()
                once = ones + 1
                eventually(lambda: not shmreduce_cuda.stats().mappings, "it is closed meanwhile")
                twice = once + 1
                graph.capture_end()
            graph.replay()
            expect(float(twice.sum()) == 3 * ones.numel(), "the graph gives something else")
    return {"graphs": _GRAPHS}


def _jax(_: Scale) -> dict[str, Any]:
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    jax = _need("jax")
    _need("cupy")
    if jax.default_backend() != "gpu":
        raise SkippedCaseError("jax has no device")
    array = jax.numpy.arange(1000.0).block_until_ready()
    with installed(), partner() as other:
        values = np.array(array)
        told = other.ask(far.keep, "x", shmreduce_cuda.share(array))
        expect(np.array_equal(other.ask(_values_of, "x"), values), "other values")
        array.delete()
        following = jax.numpy.full(1000, 7.0).block_until_ready()
        expect(np.array_equal(other.ask(_values_of, "x"), values), "the memory was used again")
        del following
        other.ask(far.drop)
    return {"version": str(jax.__version__), "class": told}


def _double(array: Any) -> Any:
    array *= 2
    importlib.import_module("cupy").cuda.Device().synchronize()
    return array


def _pool(_: Scale) -> dict[str, Any]:
    cupy = _need("cupy")
    arrays = [cupy.full(1000, float(number)) for number in range(20)]
    with shmreduce.get_context("spawn").Pool(2) as pool:
        back = pool.map(_double, arrays)
    expect(
        all(mine.data.ptr == same.data.ptr for mine, same in zip(arrays, back, strict=True)),
        "what comes back is elsewhere",
    )
    expect(all(float(each[0]) == 2 * n for n, each in enumerate(arrays)), "the values are others")
    return {"arrays": len(arrays)}


CASES = [
    Case("cupy", "an array of CuPy arrives as one", _cupy, 120.0),
    Case("numba", "an array of numba arrives as one", _numba, 120.0),
    Case("torch", "a tensor arrives as one", _torch, 120.0),
    Case("structured", "a structured array of numba arrives with its fields", _structured, 120.0),
    Case("streams", "streams of CuPy are waited for: no stale read", _streams, 300.0),
    Case("tensors", "tensors of all kinds arrive, once torch's are switched on", _tensors, 120.0),
    Case("graphs", "graphs can be captured while received memory is closed", _graphs, 120.0),
    Case("jax", "an array of JAX arrives", _jax, 120.0),
    Case("pool", "a pool's workers change arrays in place and return them", _pool, 120.0),
]
