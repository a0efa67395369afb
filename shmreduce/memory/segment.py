"""A segment that this process has open: its importers and its lease transitions.

May import errors, contracts, ``standard_streams``, ``locks``, ``block_locks``, ``mapping``,
``handle``, ``processes``, ``layout``, ``segment_file``, ``quick_blocks`` and ``lease_slots``.

Each block has a generation, which its owner raises when the block becomes free,
and a chain of lease slots. A slot's word is 0 (free), a *message* (a nonce: a process
may still load the handle with this nonce) or a *holder* (an importer's index and epoch:
that process has views). A block may be reused only when its chain is empty and its owner
has no view.

Every transition of a block's chain, and every decision to free the block, is made under
the block's lock, with the exceptions that ``start_message`` and ``try_free`` explain.
The stores are ordered so that a process that is killed between them leaves the block
held; it is never free too early. So one store turns a message into a holder, and a slot
is unlinked before it is cleared.

A holder is alive while its importer byte is locked. The importer locks the byte through
its own open file description, which its forked children inherit together with its views.
"""

from __future__ import annotations

import os
import time
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any, NamedTuple

from shmreduce.contracts import SegmentFile
from shmreduce.errors import (
    AlreadyLoadedError,
    InvalidHandleError,
    OutOfLeasesError,
    StaleHandleError,
)
from shmreduce.memory import locks
from shmreduce.memory.block_locks import if_unlocked, under_lock
from shmreduce.memory.handle import LONGEST_LOCATOR
from shmreduce.memory.layout import (
    IMPORTERS,
    LOCK_IMPORTER,
    LOCK_OWNER,
    LOCK_TRANSFER,
    SHARED,
    SegmentHeader,
)
from shmreduce.memory.lease_slots import MESSAGE, LeaseSlots
from shmreduce.memory.processes import is_closing
from shmreduce.memory.quick_blocks import block_tables
from shmreduce.memory.segment_file import check_file, contract_broken
from shmreduce.memory.standard_streams import clear_of_streams

if TYPE_CHECKING:
    import weakref
    from collections.abc import Iterable

    from shmreduce.contracts import SharingStrategy
    from shmreduce.memory.mapping import Mapping

__all__ = ["Segment", "Sent"]

# The word of a holder: this bit, the importer's index, and the epoch of that index.
_HOLDER = 1 << 63
_EPOCH_BITS = 48
_EPOCH_MASK = (1 << _EPOCH_BITS) - 1

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
        return sentinel is not None and bool(wait([sentinel], 0))


class Segment(LeaseSlots):
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
        self.outbox: dict[int, Sent] = {}
        """Messages that this process sent, by nonce; messages that were read are pruned."""
        self._uncarried: dict[int, None] = {}
        """Nonces of messages that were sent without a descriptor of the segment."""
        self._prune_at = self._prune_alone_at = _PRUNE_FROM
        self.is_shared = header.kind == SHARED
        """Whether its blocks are shared. If not, each carries one message."""
        self.import_mapping: Mapping | None = None
        self._locator: str | None = None
        self._transfer: dict[str, int] = {}
        self._transfer_is_seen = True
        try:
            self.importer = self._register()
        except BaseException:
            self.give_up_locks()
            raise
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
    def locator(self) -> str:
        """The text by which another process opens the segment while this one has it open.

        Raises
        ------
        PluginError
            If the strategy returns something that is not text, or is too long.
        """
        if self._locator is None:
            said = self.strategy.locator(self.file)
            if not isinstance(said, str):
                raise contract_broken(
                    self.strategy,
                    "locator()",
                    f"returned {said!r} for {self.file}: it must return text, even if the "
                    "file's name is None",
                )
            size = len(said.encode(errors="surrogateescape"))
            if size > LONGEST_LOCATOR:
                raise contract_broken(
                    self.strategy,
                    "locator()",
                    f"returned text of {size} bytes: {LONGEST_LOCATOR} are the most",
                )
            self._locator = said
        return self._locator

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
        """
        known = self._transfer.get("fd")
        if known is None:
            made = locks.reopen(self.fd)
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

    def give_up_locks(self) -> None:
        """Close the descriptor of the blocks' locks; a forked child closes its parent's."""
        fd, self.lock_fd = self.lock_fd, -1
        self._close(fd)

    def _close(self, fd: int) -> None:
        # The number may belong to another file by now; that one is not closed.
        if fd != -1 and locks.identity_of(fd) == self._identity:
            os.close(fd)

    # Importers

    def _register(self) -> int:
        """Take an importer index; return the word that marks this process's holds."""
        for index in range(IMPORTERS):
            if locks.try_lock(self.fd, LOCK_IMPORTER + index):
                # The new epoch ends all holds of the index's previous user.
                epoch = (self._epochs[index] + 1) & _EPOCH_MASK
                self._epochs[index] = epoch
                self.pids[index] = os.getpid()
                return _HOLDER | index << _EPOCH_BITS | epoch
        raise OutOfLeasesError(
            f"segment {self.token.hex()} is open in {IMPORTERS} processes already, the most it "
            "has room for; let some of them end",
            segment=self.token.hex(),
            slots=IMPORTERS,
        )

    def holder_alive(self, word: int) -> bool:
        """Return whether the holder that a slot's word names, or a fork of it, lives."""
        if word == self.importer:
            return True
        index = word >> _EPOCH_BITS & (IMPORTERS - 1)
        if self._epochs[index] != word & _EPOCH_MASK:
            return False
        if locks.first_locked(self.fd, LOCK_IMPORTER + index) is not None:
            return True
        # A process that ends closes its descriptors one after another. Its lock may go with the
        # first, and what it uses by the lease, such as a device's memory, with the last.
        return is_closing(self.pids[index])

    # Lease transitions

    def check(self, block: int, generation: int) -> None:
        """Check that a block has this generation. The caller should have its lock.

        Raises
        ------
        InvalidHandleError
            If the segment has no such block.
        StaleHandleError
            If the block has another generation by now.
        """
        if block >= self.layout.blocks:
            raise InvalidHandleError(
                f"the handle names block {block}, segment {self.token.hex()} has "
                f"{self.layout.blocks}; it is damaged or made up: pickle the array again",
                reason="block out of range",
            )
        if self.generations[block] != generation:
            raise StaleHandleError(
                f"block {block} of segment {self.token.hex()} has been released since this "
                "message was pickled; pickle the array again",
                segment=self.token.hex(),
                block=block,
            )

    def start_message(self, block: int, nonce: int) -> int:
        """Put the first message into the chain of a block; return the slot.

        No other process can name the block yet, so this needs no lock: no handle has the
        block's generation, and operations with a stale handle do not change a chain.
        """
        slot = self._take_slot()
        if self._quick.start(block, slot, MESSAGE | nonce):
            self._listed.pop(slot, None)
        else:
            self._link(block, slot, MESSAGE | nonce)
        return slot

    def add_message(self, block: int, generation: int, nonce: int) -> int:
        """Add a message to a block that a process holds; return its slot."""
        slot = self._take_slot()
        word = MESSAGE | nonce
        try:
            if self._quick.add(self.lock_fd, block, slot, word, generation):
                self._listed.pop(slot, None)
            else:
                self._add_message(block, generation, slot, word)
        except BaseException:
            if not self.words[slot]:
                self._give_slot(slot)
            raise
        return slot

    @under_lock
    def _add_message(self, block: int, generation: int, slot: int, word: int) -> None:
        self.check(block, generation)
        self._link(block, slot, word)

    def claim(
        self, block: int, generation: int, slot: int, nonce: int, *, shared: bool
    ) -> tuple[int, bool]:
        """Turn a message into a hold of this process.

        Returns
        -------
        slot : int
            The slot that now holds the block.
        alone : bool
            Whether the chain has no other entry.

        Raises
        ------
        StaleHandleError
            If the block has another generation by now.
        AlreadyLoadedError
            If the message of a by-value block was loaded before: the array belongs to
            that loader alone.
        InvalidHandleError
            If the segment has no such block or slot.
        """
        word = MESSAGE | nonce
        quick = self._quick.claim_shared if shared else self._quick.claim_alone
        if quick(self.lock_fd, block, slot, word, generation, self.importer):
            return slot, not shared or self.is_alone(block, slot)
        if slot >= self.layout.slots:
            raise InvalidHandleError(
                f"the handle names lease slot {slot}, segment {self.token.hex()} has "
                f"{self.layout.slots}; it is damaged or made up: pickle the array again",
                reason="slot out of range",
            )
        if block >= self.layout.blocks:
            self.check(block, 0)
        return self._claim(block, generation, slot, word, shared)

    @under_lock
    def _claim(
        self, block: int, generation: int, slot: int, word: int, shared: bool
    ) -> tuple[int, bool]:
        self.check(block, generation)
        if self.words[slot] == word:
            # By this one store the message becomes a hold of this process.
            self.words[slot] = self.importer
        elif shared:
            slot = self._take_slot_but(slot)
            self._link(block, slot, self.importer)
        else:
            raise AlreadyLoadedError(
                f"the array in block {block} of segment {self.token.hex()} was loaded from "
                "this message before and belongs to its loader; pickle it once for each "
                "receiver, or make it shared with shmreduce.share()",
                segment=self.token.hex(),
                block=block,
            )
        alone = self.is_alone(block, slot)
        if not alone and not shared:
            self._drop_dead(block)
            alone = self.is_alone(block, slot)
        return slot, alone

    @under_lock
    def unclaim(self, block: int, slot: int, nonce: int, named: int) -> None:
        """Undo a :meth:`claim` that this process has just made.

        If the hold lies in the slot that the handle has ``named``, it becomes the message
        again. If not, another process had loaded the message before this one, and no handle
        leads to this slot: a message in it could never be loaded, so the slot is unlinked.
        """
        if self.words[slot] == self.importer:
            if slot == named:
                self.words[slot] = MESSAGE | nonce
            else:
                self._unlink(block, slot)

    def consume(self, block: int, generation: int, slot: int, nonce: int) -> bool:
        """End a message without taking a hold; return False if it had ended before."""
        word = MESSAGE | nonce
        if self._quick.consume(self.lock_fd, block, slot, word, generation, self.importer):
            return True
        if block >= self.layout.blocks or slot >= self.layout.slots:
            return False
        if self.words[slot] != word:
            # It never will be: no two messages have the same nonce.
            return False
        return self._consume(block, generation, slot, word)

    @under_lock
    def _consume(self, block: int, generation: int, slot: int, word: int) -> bool:
        if self.generations[block] != generation or self.words[slot] != word:
            return False
        # The word stops being a message before the slot leaves the chain. Otherwise, if this
        # process is killed in between, another could load a message that holds nothing.
        self.words[slot] = self.importer
        self._unlink(block, slot)
        return True

    def try_release(self, block: int, slot: int) -> bool | None:
        """End this process's hold without waiting; return None to be called again later.

        It is called when the last view has died, in any thread and at any instant,
        so it must not block.
        """
        if self._quick.release(self.lock_fd, block, slot, self.importer):
            return True
        return self._try_release(block, slot)

    @if_unlocked
    def _try_release(self, block: int, slot: int) -> bool:
        if self.words[slot] == self.importer:
            self._unlink(block, slot)
        return True

    def seems_held_by_dead(self, block: int, known: dict[int, bool]) -> bool:
        """Return whether :meth:`drop_dead_holders` may find something; takes no lock.

        A chain that changes meanwhile may be misread. Then the dead holder is found by the
        next call.

        Parameters
        ----------
        block : int
            A block of this segment.
        known : dict of int to bool
            Which holders were alive when they were first looked at. This call adds to it.
        """
        for word in self.leases(block):
            if word & _HOLDER:
                if word not in known:
                    known[word] = self.holder_alive(word)
                if not known[word]:
                    return True
        return False

    @if_unlocked
    def drop_dead_holders(self, block: int) -> bool:
        """End the holds of killed processes; return whether the chain is empty now."""
        self._drop_dead(block)
        return not self.heads[block]

    def _drop_dead(self, block: int) -> None:
        link = self.heads[block]
        for _ in range(self.layout.slots):
            if not link:
                return
            slot = link - 1
            link = self._next[slot]
            word = self.words[slot]
            if word & _HOLDER and not self.holder_alive(word):
                self._unlink(block, slot)
