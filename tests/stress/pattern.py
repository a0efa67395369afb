"""Arrays that carry their own checksum: every word follows from a seed and its place.

A slice of such an array is one too, of another seed.
"""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["WORD", "complaint", "fill", "seed_of_slice"]

WORD = 8
_STEP = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1
_places = np.arange(0, dtype=np.uint64)


def _expected(seed: int, length: int) -> Any:
    global _places
    if len(_places) < length:
        _places = np.arange(length, dtype=np.uint64)
    return _places[:length] * np.uint64(_STEP) + np.uint64(seed & _MASK)


def fill(array: Any, seed: int) -> None:
    """Write the pattern of a seed."""
    array[...] = _expected(seed, len(array))


def seed_of_slice(seed: int, start: int) -> int:
    """Return the seed of what begins ``start`` words into the pattern of ``seed``."""
    return (seed + start * _STEP) & _MASK


def complaint(array: Any, seed: int) -> str | None:
    """Return what is wrong with an array that should have the pattern of ``seed``."""
    wrong = np.flatnonzero(array != _expected(seed, len(array)))
    if len(wrong) == 0:
        return None
    place = int(wrong[0])
    found = int(array[place])
    other = (found - place * _STEP) & _MASK
    return (
        f"{len(wrong)} of {len(array)} words wrong, the first at {place}: "
        f"{found:#x}, which is the pattern of seed {other:#x} instead of {seed & _MASK:#x}"
    )
