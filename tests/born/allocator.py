"""What the tests of born arrays share: the allocator, and what can be seen of it."""

from __future__ import annotations

import gc
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from shmreduce.born.heap import _heaps, get_heap
from shmreduce.born.library import LIVE, load
from shmreduce.errors import AllocatorUnavailableError

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = [
    "LARGE",
    "PATIENCE",
    "address_of",
    "counters",
    "entry_of",
    "filled",
    "handler_name",
    "in_fresh_interpreter",
    "is_born",
    "live_arrays",
    "needs_allocator",
    "reason_without_allocator",
    "received_in_place",
]

LARGE = 1 << 20
"""Bytes: more than any threshold, few enough to be made often."""
PATIENCE = 60


def reason_without_allocator() -> str | None:
    """Return why the allocator cannot be used here, None if it can."""
    try:
        load()
    except AllocatorUnavailableError as error:
        return f"no compiled allocator here: {error.reason}"
    return None


def needs_allocator() -> None:
    """Skip the test where the allocator was not built."""
    reason = reason_without_allocator()
    if reason is not None:
        pytest.skip(reason)


def handler_name() -> str:
    """Return what NumPy calls that which new arrays are allocated with."""
    core = "numpy._core" if int(np.__version__.partition(".")[0]) > 1 else "numpy.core"
    name: str = import_module(f"{core}.multiarray").get_handler_name()
    return name


def filled(value: int, nbytes: int = LARGE) -> np.ndarray[Any, Any]:
    """Return an array of one value, in every byte."""
    return np.full(nbytes, value % 256, np.uint8)


def counters() -> Any:
    """Return the allocator's counters, which stay up to date."""
    return load().counters


def address_of(array: np.ndarray[Any, Any]) -> int:
    """Return where an array's memory begins."""
    address: int = array.__array_interface__["data"][0]
    return address


def _entries() -> Iterator[Any]:
    for entry in load().table:
        if entry.state >= LIVE:
            yield entry


def entry_of(array: np.ndarray[Any, Any]) -> Any:
    """Return a copy of the allocator's entry for an array's memory, None if it has none."""
    address = address_of(array)
    for entry in _entries():
        if entry.address == address:
            return type(entry).from_buffer_copy(entry)
    return None


def is_born(array: np.ndarray[Any, Any]) -> bool:
    """Return whether an array was born in shared memory."""
    address = address_of(array)
    return any(
        0 <= address - segment.data.address < segment.data.size
        for heap in {*_heaps.values()}
        for segment in heap._ranges.values()
    )


def live_arrays() -> int:
    """Return how many born arrays are alive in this process."""
    gc.collect()
    return sum(entry.state == LIVE for entry in _entries())


def received_in_place(array: np.ndarray[Any, Any]) -> bool:
    """Return whether a received array lies in a segment in which arrays are born here."""
    from shmreduce import find_block

    bottom: Any = array
    while isinstance(bottom, np.ndarray):
        bottom = bottom.base
    block = find_block(bottom)
    return block is not None and block._record.segment in get_heap().segments


def in_fresh_interpreter(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a program in a new interpreter, with warnings as errors; return what became of it."""
    root = Path(__file__).parent.parent.parent
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", program, *arguments],
        check=False,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        cwd=root,
    )
