"""One block of a message for many buffers.

May import ``loading``.

A block of its own costs a buffer a lease; in the pickle its bytes are copied
three times over, and memory for them is touched for the first time. Either is
most of the time for a list of thousands of arrays of some ten KiB.
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

from shmreduce.memory.loading import import_block

__all__ = ["IN_BLOCK", "IN_PIPE", "LARGEST_PART", "PARTS_FROM", "PartedBlock", "block_size"]

PARTS_FROM = 4 << 20
"""Bytes of such buffers in one message from which they are put together: less is in caches."""
LARGEST_PART = 256 << 10
"""Larger ones have blocks of their own, which can travel on without a copy."""
_LARGEST_BLOCK = 4 << 20
"""One part that is still in use keeps no more than this."""
_SMALLEST_BLOCK = 256 << 10
_ALIGNMENT = 64


class Limits(NamedTuple):
    """How large buffers, and how many bytes of them, are left in a pickle.

    A part takes less time from ``smallest_part`` bytes on. Of buffers of less than the
    inline limit ``most_small`` bytes are left there in one message, whatever
    :data:`PARTS_FROM` says.
    """

    smallest_part: int
    most_small: int


IN_BLOCK = Limits(8 << 10, sys.maxsize)
"""For a pickle that travels in a block itself where it is large."""
IN_PIPE = Limits(4 << 10, 128 << 10)
"""For one that goes through a pipe, which takes some 4 ms for a MiB there and back."""


def block_size(so_far: int) -> int:
    """Return how large the next block is to be in a message with so many bytes of buffers.

    Twice as many: so the blocks are few, and what they take in vain is less than twice what
    the message needs.
    """
    return max(_SMALLEST_BLOCK, min(_LARGEST_BLOCK, 2 * so_far))


class PartedBlock:
    """Gives out parts of a block that is being filled; pickles as the receiver's Block.

    Parameters
    ----------
    view : memoryview
        The bytes of the block.
    handle : bytes
        By which it travels, once: the pickler writes an object once and then
        refers to it.
    """

    __slots__ = ("_end", "_handle", "_view")

    def __init__(self, view: memoryview, handle: bytes) -> None:
        self._view: memoryview | None = view
        self._handle = handle
        self._end = 0

    def __reduce__(self) -> tuple[Any, ...]:
        return import_block, (self._handle,)

    def take(self, nbytes: int) -> tuple[memoryview, int] | None:
        """Return a part and where it begins; None if there is no room for it."""
        view = self._view
        start = -(-self._end // _ALIGNMENT) * _ALIGNMENT
        if view is None or start + nbytes > view.nbytes:
            return None
        self._end = start + nbytes
        return view[start : self._end], start

    def close(self) -> None:
        """Let go of the block: the message is complete, or is not going to be."""
        self._view = None
