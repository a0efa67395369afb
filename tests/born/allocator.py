"""What the tests of born arrays share: the allocator, and what can be seen of it."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

import pytest

from shmreduce.born.library import LIVE, load
from shmreduce.errors import AllocatorUnavailableError

if TYPE_CHECKING:
    import numpy as np

__all__ = [
    "LARGE",
    "address_of",
    "counters",
    "entry_of",
    "is_born",
    "live_arrays",
    "needs_allocator",
]

LARGE = 1 << 20
"""Bytes: more than any threshold, few enough to be made often."""


def needs_allocator() -> None:
    """Skip the test where the allocator was not built."""
    try:
        load()
    except AllocatorUnavailableError as error:
        pytest.skip(f"no compiled allocator here: {error.reason}")


def counters() -> Any:
    """Return the allocator's counters, which stay up to date."""
    return load().counters


def address_of(array: np.ndarray[Any, Any]) -> int:
    """Return where an array's memory begins."""
    address: int = array.__array_interface__["data"][0]
    return address


def entry_of(array: np.ndarray[Any, Any]) -> Any:
    """Return a copy of the allocator's entry for an array's memory, None if it has none."""
    address = address_of(array)
    for entry in load().table:
        if entry.address == address and entry.state >= LIVE:
            return type(entry).from_buffer_copy(entry)
    return None


def is_born(array: np.ndarray[Any, Any]) -> bool:
    """Return whether an array was born in shared memory."""
    return entry_of(array) is not None


def live_arrays() -> int:
    """Return how many born arrays are alive in this process."""
    gc.collect()
    return sum(entry.state == LIVE for entry in load().table)
