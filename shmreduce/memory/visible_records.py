"""Dead views that forked children may still see, until those children have ended.

May import ``ledger`` and ``record``, both for types alone.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from shmreduce.memory.ledger import ForkLedger
    from shmreduce.memory.record import Record

__all__ = ["VisibleRecords"]


class VisibleRecords:
    """Records of dead views, grouped by the forks through which the views have lived.

    There may be many: all arrays that a process had when it forked, and has dropped since. One
    question to the kernel is enough for a group. Any thread, destructor or signal handler may
    add records at any instant, so nothing here waits for a lock.

    Parameters
    ----------
    ledger : ForkLedger
        Says what children may see.
    """

    def __init__(self, ledger: ForkLedger) -> None:
        self._ledger = ledger
        self.groups: dict[tuple[int, int], deque[Record]] = {}
        """By birth and death. If there are none, there are no records."""

    def __len__(self) -> int:
        return sum(map(len, list(self.groups.values())))

    def add(self, record: Record) -> None:
        """Keep a record whose ``birth`` and ``death`` are final."""
        when = record.birth, record.death
        while True:
            group = self.groups.setdefault(when, deque())
            group.append(record)
            if self.groups.get(when) is group:
                return
            # An emptied group has been dropped meanwhile, after or before this record came in.
            try:
                group.remove(record)
            except ValueError:
                return

    def release_unseen(self, release: Callable[[Record], object]) -> None:
        """Call ``release`` with each record that no child can see any more.

        It may add the record again. If an exception comes, all but that record stay here.
        """
        for when in list(self.groups):
            if self._ledger.visible(*when):
                continue
            group = self.groups.get(when, deque())
            self._empty(group, release)
            if group:
                continue
            # Perhaps another one by now, and what another thread has added to it before it could
            # see that it is dropped.
            dropped = self.groups.pop(when, deque())
            try:
                self._empty(dropped, release)
            finally:
                while dropped:
                    self.add(dropped.popleft())

    @staticmethod
    def _empty(group: deque[Record], release: Callable[[Record], object]) -> None:
        # Not until it is empty: a record that is added again may be at its end.
        for _ in range(len(group)):
            try:
                record = group.popleft()
            except IndexError:
                return
            release(record)
