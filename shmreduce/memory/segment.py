"""A segment that this process has open: its descriptors, and the messages sent about it.

May import contracts, ``standard_streams``, ``locks``, ``mapping``, ``handle``, ``layout``,
``segment_file``, ``quick_blocks``, ``lease_slots`` and ``lease_transitions``.
"""

from __future__ import annotations

import os
import select
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from shmreduce.contracts import SegmentFile
from shmreduce.memory import locks
from shmreduce.memory.handle import join_locators
from shmreduce.memory.layout import LOCK_OWNER, LOCK_TRANSFER, SHARED, SegmentHeader
from shmreduce.memory.lease_slots import MESSAGE
from shmreduce.memory.lease_transitions import LeaseTransitions
from shmreduce.memory.quick_blocks import block_tables
from shmreduce.memory.segment_file import check_file, locator_of
from shmreduce.memory.standard_streams import clear_of_streams

if TYPE_CHECKING:
    import weakref
    from collections.abc import Iterable

    from shmreduce.contracts import SharingStrategy
    from shmreduce.memory.mapping import Mapping

__all__ = ["Segment", "Sent"]

_PRUNE_FROM = 1024
"""If the outbox has more messages than this, those that were read are looked for."""


class Sent(NamedTuple):
    """One message that this process sent.

    ``child`` refers to the Popen object of the child for whose start the message was
    pickled, if it was. ``when`` is in monotonic seconds.
    """

    slot: int
    nonce: int
    block: int
    generation: int
    when: float
    child: weakref.ref[Any] | None

    def lost(self, now: float, timeout: float | None) -> bool:
        """Return whether no process can be expected to read the message any more."""
        if timeout is not None and now - self.when > timeout:
            return True
        if self.child is None:
            return False
        # multiprocessing keeps the Popen object until the child has been waited for.
        child = self.child()
        if child is None:
            return True
        # The fork server writes the pid of a new child to the sentinel. Until multiprocessing
        # has read the pid, which it does after it has written the child's data, the sentinel
        # is readable although the child lives.
        if getattr(child, "pid", None) is None:
            return False
        sentinel = getattr(child, "sentinel", None)
        return sentinel is not None and _is_readable(sentinel)


def _is_readable(fd: int) -> bool:
    # As multiprocessing.connection.wait(). A process that is given no channel need not import
    # that module, which imports tempfile, random and, for compressed archives, much more.
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(0))


class Segment(LeaseTransitions):
    """An open segment.

    It owns ``file.fd`` from construction on. :meth:`close` closes that descriptor, which
    releases every byte lock: then the leases of this process count as ended.

    Parameters
    ----------
    file : SegmentFile
        Opened under an open file description through which nobody else locks.
    header : SegmentHeader
        The file's header, already checked.
    strategy : SharingStrategy
        The strategy that opened the file; it makes locators.
    owner : bool
        Whether this process made the segment and allocates from it.
    """

    def __init__(
        self, file: SegmentFile, header: SegmentHeader, strategy: SharingStrategy, *, owner: bool
    ) -> None:
        super().__init__(file.fd, header, strategy)
        self.file = file
        self.owner = owner
        self.records: dict[int, object] = {}
        """Blocks made here of which this process still has a view, or is about to have one."""
        self.holds: dict[int, object] = {}
        """The lease slots by which this process holds blocks."""
        self.passing: dict[int, None] = {}
        """Slots whose hold lasts only until the load has copied the block."""
        self.pins: dict[object, None] = {}
        """Calls that need the segment to stay open."""
        self.idle_since = 0.0
        """When the last hold in another process's segment ended, by :func:`time.monotonic`."""
        self.outbox: dict[int, Sent] = {}
        """Messages that this process sent, by nonce; messages that were read are pruned."""
        self._uncarried: dict[int, None] = {}
        """Nonces of messages that were sent without a descriptor of the segment."""
        self._prune_at = self._prune_alone_at = _PRUNE_FROM
        self.is_shared = header.kind == SHARED
        """Whether its blocks are shared. If not, each carries one message."""
        self.import_mapping: Mapping | None = None
        self._locators: str | None = None
        self._transfer: dict[str, int] = {}
        self._transfer_is_seen = True
        self.block_tables = block_tables(self)

    @classmethod
    def adopt(cls, file: SegmentFile, token: bytes | None, strategy: SharingStrategy) -> Segment:
        """Check that ``file`` is the segment called ``token`` and open it.

        Takes over ``file.fd``, even when it raises.

        Raises
        ------
        ForeignSegmentError
            If the file belongs to another user.
        FileNotFoundError
            If the file is another segment, since descriptor numbers are reused.
        InvalidHandleError
            If the file is not a segment.
        """
        fd = clear_of_streams(file.fd)
        try:
            return cls(SegmentFile(fd, file.name), check_file(fd, token), strategy, owner=False)
        except BaseException:
            os.close(fd)
            raise

    def __repr__(self) -> str:
        role = "owner" if self.owner else "importer"
        return f"<Segment {self.token.hex()[:8]} {role} fd={self.fd} size={self.header.size}>"

    @property
    def locators(self) -> str:
        """What a handle says of where the segment is: here and, if this is another, at its maker.

        Raises
        ------
        PluginError
            As :func:`locator_of`.
        """
        if self._locators is None:
            here = locator_of(self.strategy, self.file)
            makers = self.header.locator
            self._locators = join_locators(here, "" if here == makers else makers)
        return self._locators

    @property
    def transfer_fd(self) -> int:
        """A descriptor of the segment for passing on in messages. The segment owns it.

        It has an open file description of its own, without this process's locks: a message
        may outlive the process, and would keep the locks. The description has a lock for
        reading, by which other processes see that such a message may exist.

        Raises
        ------
        OSError
            If no descriptor is free (``EMFILE``), or the segment is closed.
        SegmentError
            If other code has closed the segment's descriptors.
        """
        known = self._transfer.get("fd")
        if known is not None and locks.identity_of(known) != self._identity:
            # Other code has closed it, and the number may be another file's by now.
            self._transfer.clear()
            known = None
        if known is None:
            made = locks.reopen(self.fd if self.fd == -1 else self.checked_fd)
            self._transfer_is_seen = locks.try_share(made, LOCK_TRANSFER)
            # Another thread may have been first.
            known = self._transfer.setdefault("fd", made)
            if known != made:
                os.close(made)
        return known

    def descriptors(self) -> tuple[int, ...]:
        """Return all descriptors that the segment has open."""
        every = (self.fd, self.lock_fd, *self._transfer.values())
        return tuple(fd for fd in every if fd != -1)

    def owner_alive(self) -> bool:
        """Return whether the process that made the segment, or a fork of it, lives.

        It returns False for another process's segment that was closed here meanwhile.
        """
        if self.owner:
            return True
        try:
            return locks.first_locked(self.fd, LOCK_OWNER) is not None
        except (OSError, ValueError):
            # The caller saw that the segment is unused. Another thread may have seen it, too,
            # and closed the segment meanwhile: then fd is -1, or a number that is not open.
            if self.is_open:
                raise
            return False

    @property
    def handed_over(self) -> bool:
        """Whether the mailbox may have the segment. If so, who ends a message looks there."""
        return self._handed_over[0] != 0

    def hand_over(self) -> None:
        """Tell all processes that the mailbox is about to get the segment."""
        self._handed_over[0] = 1

    def note_bytes(self) -> None:
        """Tell all processes that a program has the bytes of a message about the segment."""
        self._had_as_bytes[0] = 1

    @property
    def idle(self) -> bool:
        """Whether this process may close it: it is another's, and nothing of it is used here."""
        if self.owner or self.holds or self.pins:
            return False
        return not self.outbox or not self.unread()

    @property
    def needed(self) -> int:
        """How many blocks this process holds for longer than a load takes."""
        return len(self.holds) - len(self.passing)

    def unpin(self, mark: object) -> None:
        """End a call that needed the segment to stay open."""
        self.pins.pop(mark, None)

    def sent(self, message: Sent) -> None:
        """Remember a message that this process sent."""
        self.outbox[message.nonce] = message
        if len(self.outbox) > self._prune_at:
            self.prune()

    def sent_alone(self, nonce: int) -> None:
        """Note that a message, which :meth:`sent` has noted, goes without a descriptor."""
        self._uncarried[nonce] = None
        if len(self._uncarried) > self._prune_alone_at:
            # Before unread(): nonces that other threads add from now on are not looked at,
            # since unread() may not have seen their messages.
            known = list(self._uncarried)
            unread = {sent.nonce for sent in self.unread()}
            for each in known:
                if each not in unread:
                    self._uncarried.pop(each, None)
            self._prune_alone_at = max(_PRUNE_FROM, 2 * len(self._uncarried))

    def are_carried(self, nonces: Iterable[int]) -> bool:
        """Return whether each of these messages carries a descriptor that others can see.

        If so, a receiver needs no other process that has the segment open. And when nobody
        can receive the messages any more, no description has LOCK_TRANSFER locked.
        """
        return self._transfer_is_seen and self._uncarried.keys().isdisjoint(nonces)

    def prune(self) -> None:
        """Forget messages that have been read."""
        self._prune_at = max(_PRUNE_FROM, 2 * len(self.unread()))

    def unread(self) -> list[Sent]:
        """Return the messages of this process that nobody has read."""
        found = []
        # Copied to a list, because other threads send meanwhile. values(), not items(): before
        # CPython 3.12 each pair that items() makes may start the garbage collector, and with
        # it other threads. Only messages that were read are removed, so that another thread
        # that calls this at the same time still finds the others.
        for sent in list(self.outbox.values()):
            if self.words[sent.slot] == MESSAGE | sent.nonce:
                found.append(sent)
            else:
                self.outbox.pop(sent.nonce, None)
        return found

    def give_up(self, timeout: float | None) -> None:
        """End the messages of this process that nobody is going to read."""
        now = time.monotonic()
        mark = object()
        # Otherwise another thread could find the segment unused and close it meanwhile.
        self.pins[mark] = None
        try:
            for sent in self.unread():
                if sent.lost(now, timeout):
                    self.consume(sent.block, sent.generation, sent.slot, sent.nonce)
        finally:
            self.unpin(mark)

    def close(self) -> None:
        """Close the descriptors. The caller has no views and no leases left."""
        self.give_up_locks()
        fd, self.fd = self.fd, -1
        for number in (fd, self._transfer.pop("fd", -1)):
            self._close(number)
