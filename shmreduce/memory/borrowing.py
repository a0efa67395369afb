"""A block of another process while the bytes of a message are being written to it.

May import errors, signals, ``segment`` and ``blocks``.

The lender has no view of the block any more, and nobody else can name it. So nobody sees
what is written before the message is complete, as with a block that this process made. But
the block is held by a lease, like any received block, and a fork treats it like one.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from shmreduce.errors import SegmentError
from shmreduce.signals import is_from_system

if TYPE_CHECKING:
    from shmreduce.memory.blocks import Block, LiveBlocks

__all__ = ["Borrowed", "can_be_filled"]

_WRITTEN_AT_ONCE = 1 << 30
"""Bytes; Linux writes at most 2 GiB in one call (write(2))."""


def can_be_filled(block: Block, live: LiveBlocks) -> bool:
    """Return whether what this process writes to a received block gets into the block.

    It does not if a child was forked since the block was received: the child may see the
    block, so the pages here were made private.
    """
    record = block._record
    ledger = live.ledger
    return (
        record.live is live
        and not record.cutting
        and not record.private
        and not ledger.visible(record.birth, ledger.death)
    )


class Borrowed:
    """A received block that this process fills until its message is complete.

    Parameters
    ----------
    block : Block
        A block that nobody else has or can get; see :func:`can_be_filled`.
    nbytes : int
        How many of its bytes are filled.
    """

    __slots__ = ("_block", "_nbytes", "root")

    def __init__(self, block: Block, nbytes: int) -> None:
        self._block: Block | None = block
        self._nbytes = nbytes
        self.root: Any = block._root

    def view(self) -> memoryview:
        """Return the bytes to fill."""
        return memoryview(self.root).cast("B")[: self._nbytes]

    def finish(self) -> None:
        """Make sure that the block has the bytes, and release it: its message has a lease.

        Raises
        ------
        SegmentError
            If the block cannot be written to. Then the message must not be sent.
        """
        if self._block is not None and self._block._record.cutting:
            # Another thread has forked, or is about to, and the pages were made private. What
            # was written since is not in the block.
            self._write()
        self.end()

    def end(self) -> None:
        """Release the block; a second call does nothing."""
        self._block = self.root = None

    def _write(self) -> None:
        if self._block is None:
            return
        record = self._block._record
        segment, data = record.segment, self.view()
        start, place = segment.offsets[record.block], 0
        try:
            while place < data.nbytes:
                part = data[place : place + _WRITTEN_AT_ONCE]
                place += os.pwrite(segment.checked_fd, part, start + place)
        except OSError as error:
            if not is_from_system(error):
                raise
            raise SegmentError(
                f"block {record.block} of segment {segment.token.hex()} cannot be written to: "
                f"{error}. Send the message again",
                operation="write",
                errno=error.errno,
                segment=segment.token.hex(),
            ) from error
