"""The blocks of dropped results, lent to who makes the next ones.

May import errors, signals, ``segment_file``, ``runtime``, ``message`` and, for types, ``segment``,
``record`` and ``blocks``.

A worker of a pool that returned three of four large results keeps memory for three, and
another one for as many: together they have more than is alive. So what a result has lain in
goes to whoever makes the next one, instead of back to its owner.

Protocol
--------
A received block by value that nobody here has a view of any more, and that has no lease but
this process's, could be used again by its owner once that lease has ended: nobody else
can name it, or look at it. Instead of ending the lease the *lender* keeps it, gives a
message with one of its own to the borrower, and ends its hold then. The borrower holds
the block by the message, writes to it (:mod:`shmreduce.memory.borrowing`) and gives it
back as the block of its answer. At each moment the block has a lease, so its owner leaves it
alone, and of those who have one at most one looks at the bytes.

- The lender dies: its hold ends as any hold of a dead process, its unread message as any
  message that nobody is going to read.
- The borrower dies: what it had read is held by the dead; what it had not is taken back by
  the lender, see :meth:`shmreduce.packets.Packet.discard`.
- The owner dies: the memory goes when nobody has it open any more. So it is not kept.
- A child is forked while there are views: its parent lends nothing that the child may see.
"""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING

from shmreduce.errors import SegmentError
from shmreduce.memory.message import Message
from shmreduce.memory.runtime import current
from shmreduce.memory.segment_file import room_left
from shmreduce.signals import is_from_system

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from shmreduce.memory.blocks import Block
    from shmreduce.memory.record import Record
    from shmreduce.memory.segment import Segment

__all__ = ["Lender"]

_SMALLEST = 16 << 20
"""Bytes of blocks that are worth it: to lend one takes a twentieth of the time to fill it."""
_KEPT_SECONDS = 1.0
"""For how long a block waits for the next result."""
_ROOMY_SECONDS = 0.1
_FREE_SHARE = 2
"""How many times as much as is kept must be free: who cannot borrow it needs other memory."""


class Lender:
    """Keeps the blocks of dropped results, and lends them.

    One thread calls all methods but :meth:`on_kept`.

    Parameters
    ----------
    wake : callable
        Has that thread call :meth:`look_after` soon; called in any thread, also by a
        destructor.
    """

    def __init__(self, wake: Callable[[], object]) -> None:
        self.holds: deque[Record] = deque()
        self.closed = False
        self._wake = wake
        self._awake = False
        """Whether the thread is going to look."""
        self._kept: dict[Record, float] = {}
        """Holds, and since when they have been waiting (monotonic seconds)."""
        self._roomy_for = 0
        """Bytes for which there was room when that was last asked,"""
        self._roomy_until = 0.0
        """which is believed so long."""
        self._usual = 1
        """Large blocks of an answer, the last time that there were some."""

    def watch(self, blocks: Iterable[Block]) -> None:
        """Keep those of some blocks, which an answer has brought, that are large, once dropped."""
        found = [block._record for block in blocks if _is_worth_it(block._record)]
        if found:
            self._usual = len(found)
            if self._is_roomy(found):
                for record in found:
                    record.keep = self

    def on_kept(self) -> None:
        """Take note that a hold was added to ``holds``."""
        if not self._awake:
            self._awake = True
            self._wake()
        if self.closed:
            # That has come in between, and nobody looks any more.
            self._release(self._take_in())

    @property
    def has_some(self) -> bool:
        """Whether there is anything to be lent."""
        return bool(self.holds or self._kept)

    def lend(self, borrower: int | None) -> tuple[Message, list[bytes]] | None:
        """Give out blocks for an answer of one process.

        Returns
        -------
        (Message, list of bytes) or None
            What gives them out, to be committed or rolled back, and their handles. None if
            there are none.

        Raises
        ------
        ShmreduceError
            If no lease is free, say. Nothing was given out then.
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
                    # Its owner's again, if there is no lease for the message, say.
                    record.live.end_kept(record)
        except BaseException:
            message.rollback()
            raise
        return message, handles

    def look_after(self) -> float | None:
        """Give back what has been kept for long; return in how many seconds to look again."""
        # First: who keeps one from here on wakes the thread.
        self._awake = False
        if not self.has_some:
            return None
        self._keep(self._take_in())
        now = time.monotonic()
        self._release([each for each in self._kept if now - self._kept[each] >= _KEPT_SECONDS])
        self._awake = bool(self._kept)
        if not self._kept:
            return None
        return max(0.0, min(self._kept.values()) + _KEPT_SECONDS - now)

    def give_back_ownerless(self) -> None:
        """Let go of what was made by processes that have ended.

        While anything of a segment is open all of its pages are there, and nobody else
        than its owner frees some.
        """
        self._keep(self._take_in())
        self._release_ownerless(self._kept)

    def close(self) -> None:
        """Give back everything, what is dropped later at once."""
        self.closed = True
        self._release([*self._take_in(), *self._kept])
        # Arrays that somebody has know this object.
        self._wake = _nobody

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
        """Return which blocks one process gets: its own if there are some, it has them mapped."""
        own_first = sorted(self._kept, key=lambda each: each.segment.header.owner_pid != borrower)
        return own_first[: self._usual]

    def _is_roomy(self, records: list[Record]) -> bool:
        """Return whether there is memory enough for those who cannot use what is kept."""
        nbytes = sum(map(_size, (*records, *self._kept, *list(self.holds))))
        now = time.monotonic()
        if nbytes <= self._roomy_for and now < self._roomy_until:
            return True
        if not _is_free(_FREE_SHARE * nbytes, records[0].segment):
            return False
        self._roomy_for, self._roomy_until = nbytes, now + _ROOMY_SECONDS
        return True


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
    """Return whether a block is large, another process's, and by value."""
    return (
        record.slot is not None
        and not record.shared
        and not record.private
        and not record.segment.owner
        and record.slot not in record.segment.passing
        and _size(record) >= _SMALLEST
    )


def _nobody() -> None:
    """Wake nobody."""
