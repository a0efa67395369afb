"""One block of a message for many buffers.

May import ``loading``.

A block of its own costs a buffer a lease; in the pickle its bytes are copied
three times over, and memory for them is touched for the first time. Either is
most of the time for a list of thousands of arrays of some ten KiB.
"""

from __future__ import annotations

from typing import Any

from shmreduce.memory.loading import import_block

__all__ = ["BLOCK_SIZE", "LARGEST_PART", "PARTS_FROM", "PartedBlock"]

PARTS_FROM = 4 << 20
"""Bytes of such buffers in one message from which they are put together: less is in caches."""
LARGEST_PART = 256 << 10
"""Larger ones have blocks of their own, which can travel on without a copy."""
BLOCK_SIZE = 4 << 20
"""One part that is still in use keeps no more than this."""
_ALIGNMENT = 64


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
