"""Cases that measure latencies, beside those of torch if it is installed.

May import public names of :mod:`shmreduce`, the plugin, and ``lab``,
``outcomes`` and ``partner`` of this package.
"""

from __future__ import annotations

import importlib
import multiprocessing
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

import shmreduce_cuda
from shmreduce_cuda.verify import partner as far
from shmreduce_cuda.verify.lab import DeviceArray, Memory
from shmreduce_cuda.verify.outcomes import (
    Case,
    Scale,
    SkippedCaseError,
    UnexpectedResultError,
    expect,
)
from shmreduce_cuda.verify.partner import installed, partner

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["CASES"]

_WARM_UP = 10


def _echo(inbox: Any, outbox: Any, count: int) -> None:
    receive = inbox.recv if hasattr(inbox, "recv") else inbox.get
    for _ in range(count):
        array = receive()
        # Dropped before the answer, so that closing its mapping is part of the time.
        del array
        outbox.send(None)


def _measure(make: Callable[[], Any], way: str, count: int) -> dict[str, float]:
    """Return microseconds from sending an array to the answer that it was dropped."""
    context = multiprocessing.get_context("spawn")
    answers, theirs = context.Pipe(duplex=False)
    if way == "pipe":
        reader, writer = context.Pipe(duplex=False)
        inbox: Any = reader
        send: Callable[[Any], None] = writer.send
    else:
        inbox = context.Queue()
        send = inbox.put
    child = context.Process(target=_echo, args=(inbox, theirs, count + _WARM_UP), daemon=True)
    child.start()
    # So that recv() raises EOFError if the child dies.
    theirs.close()
    array, taken = make(), []
    for _ in range(count + _WARM_UP):
        began = time.perf_counter()
        send(array)
        if not answers.poll(far.PATIENCE):
            raise UnexpectedResultError(f"no answer within {far.PATIENCE:.0f} s")
        try:
            answers.recv()
        except EOFError:
            child.join(far.PATIENCE)
            raise UnexpectedResultError(
                f"the receiver died with exit code {child.exitcode}"
            ) from None
        taken.append(1e6 * (time.perf_counter() - began))
    child.join(far.PATIENCE)
    ours = taken[_WARM_UP:]
    return {
        "p50_us": round(float(np.percentile(ours, 50)), 1),
        "p99_us": round(float(np.percentile(ours, 99)), 1),
    }


def _of_size(nbytes: int) -> DeviceArray:
    # The template has only one byte, since device memory may be larger than host memory.
    template = np.lib.stride_tricks.as_strided(np.zeros(1, "u1"), (nbytes,), (1,))
    return DeviceArray(Memory(nbytes), template)


def _latency(scale: Scale) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    torch = _torch_with_device()
    for nbytes in (4096, 1 << 20, scale.largest):
        for way in ("pipe", "queue"):
            row: dict[str, Any] = {}
            with installed():
                row["shmreduce"] = _measure(partial(_of_size, nbytes), way, scale.messages)
            if torch is not None:
                make = partial(torch.empty, nbytes, dtype=torch.uint8, device="cuda")
                row["torch"] = _measure(make, way, scale.messages)
            figures[f"{nbytes} bytes by {way}"] = row
    return figures


def _torch_with_device() -> Any:
    try:
        torch = importlib.import_module("torch")
    except ImportError:
        return None
    return torch if torch.cuda.is_available() else None


def _library(name: str, make: Callable[[Any, Any], Any]) -> dict[str, Any]:
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        raise SkippedCaseError(f"{name} is not installed: {error}") from error
    host = np.arange(24, dtype="f4").reshape(4, 6)
    with installed(), partner() as other:
        try:
            array = make(module, host)
        except Exception as error:
            raise SkippedCaseError(f"{name} does not work with this driver: {error}") from error
        told = other.ask(far.keep, "x", shmreduce_cuda.share(array))
        expect(told == type(array).__name__, f"the receiver gets a {told}")
        found = other.ask(_values_of, name)
        expect(np.array_equal(found, host), "the values are others")
        other.ask(far.drop)
        del array
    return {"version": str(module.__version__), "class": told}


def _values_of(name: str) -> Any:
    array = far.received["x"]
    if name == "cupy":
        return array.get()
    return array.copy_to_host() if name == "numba" else array.cpu().numpy()


def _cupy(_: Scale) -> dict[str, Any]:
    return _library("cupy", lambda cupy, host: cupy.asarray(host))


def _numba(_: Scale) -> dict[str, Any]:
    return _library(
        "numba", lambda _numba, host: importlib.import_module("numba.cuda").to_device(host)
    )


def _torch(_: Scale) -> dict[str, Any]:
    return _library("torch", lambda torch, host: torch.as_tensor(host, device="cuda"))


def _bfloat16(_: Scale) -> dict[str, Any]:
    torch = _torch_with_device()
    if torch is None:
        raise SkippedCaseError("torch is not installed, or has no device")
    tensor = torch.arange(8, device="cuda").to(torch.bfloat16)
    with installed(), partner() as other:
        other.ask(far.keep, "x", shmreduce_cuda.share(tensor))
        found = other.ask(_floats)
        other.ask(far.drop)
    expect(found == list(range(8)), f"the values are {found}")
    return {}


def _floats() -> list[float]:
    found: list[float] = far.received["x"].float().tolist()
    return found


CASES = [
    Case("cupy", "an array of CuPy arrives as one", _cupy, 120.0),
    Case("numba", "an array of numba arrives as one", _numba, 120.0),
    Case("torch", "a tensor arrives as one", _torch, 120.0),
    Case("bfloat16", "a tensor of bfloat16 arrives as one", _bfloat16, 120.0),
    Case("latency", "microseconds from sending to the answer", _latency, 600.0),
]
