"""Lends the blocks of dropped results to the processes that make the next results.

May import errors, signals, settings, ``segment_file``, ``runtime``, ``message`` and, for types,
``segment``, ``record`` and ``blocks``.

A worker of a pool that returned three of four large results keeps memory for three, and
another worker may keep as much: together they have more than is alive. So the block of a
dropped result goes to whichever worker makes the next one, not back to its owner.

Protocol
--------
Take a by-value block that was received here, has no view here any more, and has no lease
but this process's. Nobody else can name it or see it, so its owner could use it again once
that lease has ended. Instead of ending the lease, the *lender* keeps it. Later it sends a
message with a lease of its own to the borrower, and ends its hold. The borrower takes over
the message's lease, writes to the block (:mod:`shmreduce.memory.borrowing`) and sends it
back as the block of its answer. The block has a lease all the time, so its owner leaves it
alone, and at most one of the processes with a lease looks at the bytes.

- The lender dies: its hold ends like any hold of a dead process, and its unread message like
  any message that nobody is going to read.
- The borrower dies: blocks of messages that it had read have a dead holder. The lender takes
  back those that it had not read, see :meth:`shmreduce.packets.Packet.discard`.
- The owner dies: the memory is freed when nobody has the segment open any more. So its blocks
  are not kept.
- A child is forked while there are views: the parent lends no block that the child may see.
"""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING

from shmreduce.errors import SegmentError
from shmreduce.memory.message import Message
from shmreduce.memory.runtime import current
from shmreduce.memory.segment_file import room_left
from shmreduce.settings import get_settings
from shmreduce.signals import is_from_system

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from shmreduce.memory.blocks import Block
    from shmreduce.memory.record import Record
    from shmreduce.memory.segment import Segment

__all__ = ["Lender"]

_SMALLEST = 16 << 20
"""Bytes of the smallest block that is lent: lending takes a twentieth of the time to fill it."""
_LEAST_SECONDS = 1.0
"""How long a block is kept for the next result, however soon idle memory is to be given back."""
_ROOMY_SECONDS = 0.1
"""How long the result of a check for free memory is taken to hold."""
_FREE_FACTOR = 2
"""Blocks are kept only if this many times their bytes are free: not all processes can borrow."""


class Lender:
    """Keeps the blocks of dropped results and lends them.

    All methods but :meth:`on_kept` must be called in one thread.

    Parameters
    ----------
    wake : callable
        Makes that thread call :meth:`look_after` soon. It may be called in any thread, even
        by a destructor.
    """

    def __init__(self, wake: Callable[[], object]) -> None:
        self.holds: deque[Record] = deque()
        self.closed = False
        self._wake = wake
        self._awake = False
        """Whether the thread is already going to call :meth:`look_after`."""
        self._kept: dict[Record, float] = {}
        """The kept holds, with the time since when they have been waiting (monotonic seconds)."""
        self._roomy_for = 0
        """The number of bytes for which the last check found room."""
        self._roomy_until = 0.0
        """Until when that is assumed to be still so (monotonic seconds)."""
        self._usual = 1
        """How many large blocks there were in the last answer that had any."""
        self.large_answers = 0
        """How many answers had any."""

    def watch(self, blocks: Iterable[Block]) -> None:
        """Keep the large ones of an answer's blocks when they are dropped."""
        found = [block._record for block in blocks if _is_worth_it(block._record)]
        if found:
            self.large_answers += 1
            self._usual = len(found)
            if self._is_roomy(found):
                for record in found:
                    record.keep = self

    def on_kept(self) -> None:
        """Note that a hold was added to ``holds``."""
        if not self._awake:
            self._awake = True
            self._wake()
        if self.closed:
            # It was closed meanwhile, so no thread looks at the holds any more.
            self._release(self._take_in())

    @property
    def has_some(self) -> bool:
        """Whether there is any block to lend."""
        return bool(self.holds or self._kept)

    def lend(self, borrower: int | None) -> tuple[Message, list[bytes]] | None:
        """Give out blocks for one answer of a process.

        Returns
        -------
        (Message, list of bytes) or None
            The message, to be committed or rolled back, and the handles of the blocks. None
            if there are none.

        Raises
        ------
        ShmreduceError
            For example, if no lease is free. Then nothing was given out.
        """
        self._keep(self._take_in())
        if not self._kept:
            return None
        message, handles = Message(), []
        try:
            for record in self._chosen(borrower):
                del self._kept[record]
                try:
                    handles.append(message.name_kept(record))
                finally:
                    # If there is no lease for the message, the block goes back to its owner.
                    record.live.end_kept(record)
        except BaseException:
            message.rollback()
            raise
        return message, handles

    def look_after(self) -> float | None:
        """Give back blocks that were kept for long; return in how many seconds to call again."""
        # Cleared first: a hold that is added from here on wakes the thread.
        self._awake = False
        if not self.has_some:
            return None
        self._keep(self._take_in())
        now, limit = time.monotonic(), _kept_seconds()
        self._release([each for each in self._kept if now - self._kept[each] >= limit])
        self._awake = bool(self._kept)
        if not self._kept:
            return None
        return max(0.0, min(self._kept.values()) + limit - now)

    def give_back_ownerless(self) -> None:
        """Release the blocks of owners that have ended.

        While a process has a segment open, all its pages stay allocated, and only the owner
        frees some of them.
        """
        self._keep(self._take_in())
        self._release_ownerless(self._kept)

    def close(self) -> None:
        """Give back everything; blocks that are dropped later are given back at once."""
        self.closed = True
        self._release([*self._take_in(), *self._kept])
        # Arrays that are still in use refer to this object, and so would keep what `wake` keeps.
        self._wake = _wake_nobody

    def _take_in(self) -> list[Record]:
        found = []
        while self.holds:
            try:
                found.append(self.holds.popleft())
            except IndexError:
                break
        return found

    def _keep(self, records: list[Record]) -> None:
        now = time.monotonic()
        for record in records:
            self._kept[record] = now
        self._release_ownerless(records)

    def _release_ownerless(self, records: Iterable[Record]) -> None:
        self._release([each for each in records if not each.segment.owner_alive()])

    def _release(self, records: list[Record]) -> None:
        for record in records:
            self._kept.pop(record, None)
            record.live.end_kept(record)

    def _chosen(self, borrower: int | None) -> list[Record]:
        """Return the blocks for a process: first those that it made, since it has them mapped."""
        own_first = sorted(self._kept, key=lambda each: each.segment.header.owner_pid != borrower)
        return own_first[: self._usual]

    def _is_roomy(self, records: list[Record]) -> bool:
        """Return whether there is enough memory for processes that cannot use the kept blocks."""
        nbytes = sum(map(_size, (*records, *self._kept, *list(self.holds))))
        now = time.monotonic()
        if nbytes <= self._roomy_for and now < self._roomy_until:
            return True
        if not _is_free(_FREE_FACTOR * nbytes, records[0].segment):
            return False
        self._roomy_for, self._roomy_until = nbytes, now + _ROOMY_SECONDS
        return True


def _kept_seconds() -> float:
    """Return how long a block is kept for the next result.

    As long as idle memory: a worker to which its blocks are given back keeps some of them,
    though another may need them next.
    """
    return max(_LEAST_SECONDS, get_settings().idle_seconds)


def _is_free(nbytes: int, segment: Segment) -> bool:
    runtime = current()
    try:
        runtime.family.check(nbytes, runtime.budget())
        left = room_left(segment.checked_fd)
    except SegmentError:
        return False
    except OSError as error:
        if not is_from_system(error):
            raise
        return False
    return left is None or left >= nbytes


def _size(record: Record) -> int:
    return int(record.segment.capacities[record.block])


def _is_worth_it(record: Record) -> bool:
    """Return whether a block is by value, large, and another process's."""
    return (
        record.slot is not None
        and not record.shared
        and not record.private
        and not record.segment.owner
        and record.slot not in record.segment.passing
        and _size(record) >= _SMALLEST
    )


def _wake_nobody() -> None:
    """Do nothing."""
