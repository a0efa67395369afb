"""A lease that a message gives out, until the message is complete.

May import, for types alone, ``filling``, ``borrowing`` and ``segment``.
"""

from __future__ import annotations

from _thread import start_new_thread
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shmreduce.memory.borrowing import Borrowed
    from shmreduce.memory.filling import Filling
    from shmreduce.memory.segment import Segment

__all__ = ["Lease"]


class Lease:
    """A lease that a message gives out.

    It keeps the segment open until the message is complete. The last view may die before
    that, and if the segment were closed then, this process could not pass it on.
    """

    __slots__ = ("block", "ended", "filling", "generation", "nonce", "segment", "slot")

    def __init__(self, segment: Segment, block: int, generation: int, nonce: int) -> None:
        self.segment = segment
        self.block = block
        self.generation = generation
        self.nonce = nonce
        self.slot = -1
        self.filling: Filling | Borrowed | None = None
        self.ended = False
        """Whether the lease was taken back."""
        segment.pins[self] = None

    def is_filled_by(self, view: memoryview) -> bool:
        """Return whether a view is of this block while the block is being filled."""
        return self.filling is not None and view.obj is self.filling.root

    def undo(self) -> None:
        """Take the lease back, unless a process has loaded the message by now.

        It may be called again if it was interrupted. If there is too little stack left for it,
        as after a RecursionError, a new thread does it, which has a stack of its own.
        """
        self.ended = True
        try:
            self._take_back()
        except RecursionError:
            try:
                # Not waited for: this thread may hold a lock that it needs.
                start_new_thread(self._take_back, ())
            except RuntimeError:
                # No thread can be had: the block stays out of use as long as this process lives.
                return

    def _take_back(self) -> None:
        # Pinned again, since the message may be complete already. Then another thread may end
        # it first, if it was unread for too long, and nothing else would keep the segment open.
        self.segment.pins[self] = None
        self.segment.consume(self.block, self.generation, self.slot, self.nonce)
        self.drop()

    def drop(self) -> None:
        """Release the block's filling and the segment; the message is complete or failed."""
        if self.filling is not None:
            self.filling.end()
        self.segment.unpin(self)
