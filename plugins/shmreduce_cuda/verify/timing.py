"""Cases that measure latencies, beside those of torch if it is installed.

May import public names of :mod:`shmreduce`, the plugin, and ``lab``, ``libraries``,
``outcomes`` and ``partner`` of this package.
"""

from __future__ import annotations

import multiprocessing
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from shmreduce_cuda.verify import partner as far
from shmreduce_cuda.verify.lab import DeviceArray, Memory
from shmreduce_cuda.verify.libraries import torch_with_device
from shmreduce_cuda.verify.outcomes import Case, Scale, UnexpectedResultError
from shmreduce_cuda.verify.partner import installed

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
    torch = torch_with_device()
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


CASES = [Case("latency", "microseconds from sending to the answer", _latency, 600.0)]
