"""A block of another process while the bytes of a message are being written to it.

May import errors, signals, ``segment`` and ``blocks``.

Whoever has lent it has no view of it any more, and nobody else can name it: as with a
block of one's own nobody sees what is written before the message is complete. Unlike
those it is held by a lease, as any block that was received, and treated as one by a fork.
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
"""Bytes; Linux writes 2 GiB at most (write(2))."""


def can_be_filled(block: Block, live: LiveBlocks) -> bool:
    """Return whether what this process writes to a received block is the block's alone.

    It is not where a child was forked since: the child may look at the block, and what is
    written here went to private pages.
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
    """A received block that is this process's to fill until its message is complete.

    Parameters
    ----------
    block : Block
        Nobody else has it, or will; see :func:`can_be_filled`.
    nbytes : int
        How many bytes of it are filled.
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
        """See to it that the block has the bytes, and let go of it: its message has a lease.

        Raises
        ------
        SegmentError
            If it cannot be written to. The message must not be sent.
        """
        if self._block is not None and self._block._record.cutting:
            # Another thread has forked, or is about to, and had the pages made private:
            # what was written since is not in the block.
            self._write()
        self.end()

    def end(self) -> None:
        """Let go of it; once more changes nothing."""
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
