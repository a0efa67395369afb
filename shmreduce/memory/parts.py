"""Parts: many buffers of a message in one block.

May import ``loading``.

A buffer with its own block costs a lease. A buffer in the pickle has its bytes copied three
times, into memory that is touched for the first time. For a list of thousands of arrays of
some ten KiB, either takes most of the time.
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

from shmreduce.memory.loading import import_block

__all__ = [
    "IN_BLOCK",
    "IN_PIPE",
    "KEPT",
    "LARGEST_PART",
    "PARTS_FROM",
    "Limits",
    "PartedBlock",
    "block_size",
]

PARTS_FROM = 4 << 20
"""Bytes: a message's buffers are put together if it has more of them; fewer stay in caches."""
LARGEST_PART = 256 << 10
"""Bytes. Larger buffers have their own blocks, which can be sent on without a copy."""
_LARGEST_BLOCK = 4 << 20
"""Bytes. A part that is still in use keeps no more memory than this."""
_SMALLEST_BLOCK = 256 << 10
"""Bytes."""
_ALIGNMENT = 64
"""Bytes. Each part begins at a multiple of this, as a cache line does."""


class Limits(NamedTuple):
    """Up to which sizes buffers stay in a pickle.

    Buffers of ``smallest_part`` bytes or more take less time as parts. Of buffers below the
    inline limit, a message keeps at most ``most_small`` bytes in its pickle, even if it has
    fewer than :data:`PARTS_FROM` bytes of buffers. ``in_pipe`` says which inline limit.
    """

    smallest_part: int
    most_small: int
    in_pipe: bool


IN_BLOCK = Limits(8 << 10, sys.maxsize, in_pipe=False)
"""For a pickle that is put into a block itself if it is large."""
KEPT = Limits(4 << 10, 128 << 10, in_pipe=False)
"""For a pickle that is kept, as that of a pool's task until there is an answer."""
IN_PIPE = Limits(4 << 10, 128 << 10, in_pipe=True)
"""For a pickle that goes through a pipe, which takes some 4 ms per MiB, there and back."""


def block_size(so_far: int) -> int:
    """Return the size of the next block for a message that has ``so_far`` bytes of buffers.

    It is twice ``so_far``, between the two limits. So there are few blocks, and the unused
    bytes are less than twice what the message needs.
    """
    return max(_SMALLEST_BLOCK, min(_LARGEST_BLOCK, 2 * so_far))


class PartedBlock:
    """Gives out parts of a block that is being filled. It unpickles as the receiver's Block.

    Parameters
    ----------
    view : memoryview
        The bytes of the block.
    handle : bytes
        The block's handle. It is pickled once, since the pickler writes an object once and
        refers to it afterwards.
    """

    __slots__ = ("_end", "_handle", "_view")

    def __init__(self, view: memoryview, handle: bytes) -> None:
        self._view: memoryview | None = view
        self._handle = handle
        self._end = 0

    def __reduce__(self) -> tuple[Any, ...]:
        return import_block, (self._handle,)

    def take(self, nbytes: int) -> tuple[memoryview, int] | None:
        """Return a part and its offset in the block; None if there is no room for it."""
        view = self._view
        start = -(-self._end // _ALIGNMENT) * _ALIGNMENT
        if view is None or start + nbytes > view.nbytes:
            return None
        self._end = start + nbytes
        return view[start : self._end], start

    def close(self) -> None:
        """Release the block, when the message is complete or has failed."""
        self._view = None
