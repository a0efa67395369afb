"""Parts and rows: many buffers of a message in one block.

May import ``loading``.

A buffer with its own block costs a lease. A buffer in the pickle has its bytes copied three
times, into memory that is touched for the first time. For a list of thousands of arrays of
some ten KiB, either takes most of the time. Buffers of any size can be parts. Those of one
size are rows: where such a row is follows from its number, so it takes less to say so.
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple, Protocol

from shmreduce.memory.loading import import_block

__all__ = [
    "IN_BLOCK",
    "IN_PIPE",
    "KEPT",
    "LARGEST_PART",
    "MOST_SERIES",
    "PARTS_FROM",
    "ROWS_AFTER",
    "Limits",
    "PartedBlock",
    "Rows",
    "Series",
    "block_size",
]

PARTS_FROM = 4 << 20
"""Bytes: a message's buffers are put together if it has more of them; fewer stay in caches."""
LARGEST_PART = 256 << 10
"""Bytes. Larger buffers have their own blocks, which can be sent on without a copy."""
ROWS_AFTER = 32
"""So many buffers with one key are pickled, or parts, before there is a block for rows.

The block takes as long as some ten buffers in the pickle. It is assumed that as many buffers
are still to come as there were.
"""
MOST_SERIES = 64
"""How many keys are looked for in one message: in a list of many shapes hardly any comes often."""
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
    fewer than :data:`PARTS_FROM` bytes of buffers; and at least ``before_rows`` bytes, however
    many buffers that are. ``in_pipe`` says which inline limit.
    """

    smallest_part: int
    most_small: int
    before_rows: int
    in_pipe: bool


IN_BLOCK = Limits(8 << 10, sys.maxsize, 0, in_pipe=False)
"""For a pickle that is put into a block itself if it is large."""
KEPT = Limits(4 << 10, 128 << 10, 128 << 10, in_pipe=False)
"""For a pickle that is kept, as that of a pool's task until there is an answer."""
IN_PIPE = Limits(4 << 10, 128 << 10, 128 << 10, in_pipe=True)
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


class Rows(Protocol):
    """A block of rows, as a reducer puts it into the pickle; see :meth:`Message.add_row`."""

    def close(self) -> None:
        """Drop the bytes of the block: no row is added any more."""


class Series:
    """The buffers of a message that have one key, and the block that the next one goes into."""

    __slots__ = ("_block", "count", "end", "following", "nbytes", "rows")

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        """Bytes of each."""
        self.count = 0
        """How many buffers there were, with the rows of the current block."""
        self.following = self.end = 0
        """The row for the next buffer, and the number of rows in the block."""
        self.rows: Any = None
        """What the reducer has made of the block."""
        self._block: PartedBlock | None = None

    def open(self, block: PartedBlock, rows: Rows, length: int) -> None:
        """Go on with another block; the one before is closed."""
        self._block, self.rows, self.following, self.end = block, rows, 0, length
        self.count += length

    def close(self) -> None:
        """Release the block, as :meth:`PartedBlock.close` does."""
        self.end = 0
        if self._block is not None:
            self.rows.close()
            self._block.close()
            self._block = self.rows = None
