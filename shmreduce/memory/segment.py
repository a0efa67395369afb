"""One segment as one process has it open: its importers and its lease transitions.

May import errors, contracts, ``standard_streams``, ``locks``, ``block_locks``, ``mapping``,
``handle``, ``processes``, ``layout``, ``segment_file``, ``quick_blocks`` and ``lease_slots``.

Each block has a generation, which its owner raises when the block becomes free,
and a chain of lease slots. A slot's word is 0 (free), a *message* (a nonce:
somebody may still load this handle) or a *holder* (an importer's index and
epoch: that process has views). A block may be reused only when its chain is
empty and its owner has no view.

Every transition of a block's chain, and every decision to free it, is made
under the block's lock. Stores are ordered so that a process killed in
the middle leaves the block held, never free too early: a message becomes a
holder by one store, a slot is unlinked before it is cleared.

A holder is alive while somebody holds its importer byte. The byte is locked
through the importer's own open file description, which its forked children
inherit together with its views.
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

# The word of a holder: this bit, the importer's index, and the epoch of its index.
_HOLDER = 1 << 63
_EPOCH_BITS = 48
_EPOCH_MASK = (1 << _EPOCH_BITS) - 1

_PRUNE_FROM = 1024
"""Messages in the outbox from which those that have been read are looked for."""


class Sent(NamedTuple):
    """One message that this process sent.

    ``child`` refers to the Popen of the child for whose start it was pickled,
    ``when`` is in monotonic seconds.
    """

    slot: int
    nonce: int
    block: int
    generation: int
    when: float
    child: weakref.ref[Any] | None

    def lost(self, now: float, timeout: float | None) -> bool:
        """Return whether nobody can be expected to read the message any more."""
        if timeout is not None and now - self.when > timeout:
            return True
        if self.child is None:
            return False
        # multiprocessing keeps the Popen until the child has been waited for.
        child = self.child()
        if child is None:
            return True
        # A child of the fork server tells its pid by the sentinel: until that was read from
        # there, which takes as long as to write what it is to do, it is ready though it lives.
        if getattr(child, "pid", None) is None:
            return False
        sentinel = getattr(child, "sentinel", None)
        return sentinel is not None and bool(wait([sentinel], 0))


class Segment(LeaseSlots):
    """An open segment.

    Owns ``file.fd`` from construction on; :meth:`close` gives it back, and with
    it every byte lock, so that leases of this process count as ended.

    Parameters
    ----------
    file : SegmentFile
        Open under an open file description that nobody else locks through.
    header : SegmentHeader
        The file's header, already checked.
    strategy : SharingStrategy
        Who opened it; makes locators.
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
        """Blocks of its own that the owner still has a view of, or is about to have."""
        self.holds: dict[int, object] = {}
        """Lease slots by which this process holds blocks."""
        self.passing: dict[int, None] = {}
        """Those that last as long as the load that has copied the block."""
        self.pins: dict[object, None] = {}
        """Calls under way that need the segment to stay open."""
        self.outbox: dict[int, Sent] = {}
        """Messages sent by this process, by nonce; read ones are pruned."""
        self._uncarried: dict[int, None] = {}
        """Nonces of those that went without a descriptor of the segment."""
        self._prune_at = self._prune_alone_at = _PRUNE_FROM
        self.is_shared = header.kind == SHARED
        """Whether its blocks are shared, as against those that carry one message each."""
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

        Takes over ``file.fd``, also when it raises.

        Raises
        ------
        ForeignSegmentError
            If the file belongs to another user.
        FileNotFoundError
            If the file is another segment: descriptor numbers are reused.
        InvalidHandleError
            If the file is no segment at all.
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
        """How another process opens the segment while this one has it open.

        Raises
        ------
        PluginError
            If what the strategy says is no text.
        """
        if self._locator is None:
            said = self.strategy.locator(self.file)
            if not isinstance(said, str):
                raise contract_broken(
                    self.strategy,
                    "locator()",
                    f"returned {said!r} for {self.file}: it must return text, also where the "
                    "file's name is None",
                )
            size = len(said.encode(errors="surrogateescape"))
            if size > LONGEST_LOCATOR:
                raise contract_broken(
                    self.strategy,
                    "locator()",
                    f"returned text of {size} bytes: there is room for {LONGEST_LOCATOR}",
                )
            self._locator = said
        return self._locator

    @property
    def transfer_fd(self) -> int:
        """A descriptor to be passed on in messages; the segment's.

        Its open file description has none of this process's locks: it lives in
        a message, which may outlive the process. It has one of its own, by which
        others see that there may be such messages.

        Raises
        ------
        OSError
            If no descriptor is free (``EMFILE``), or the segment is closed.
        """
        known = self._transfer.get("fd")
        if known is None:
            made = locks.reopen(self.fd)
            self._transfer_is_seen = locks.try_share(made, LOCK_TRANSFER)
            # Another thread may have been faster.
            known = self._transfer.setdefault("fd", made)
            if known != made:
                os.close(made)
        return known

    def descriptors(self) -> tuple[int, ...]:
        """Return all that the segment has open."""
        every = (self.fd, self.lock_fd, *self._transfer.values())
        return tuple(fd for fd in every if fd != -1)

    def owner_alive(self) -> bool:
        """Return whether the process that made the segment, or a fork of it, lives.

        Not of one that was closed here: of that nobody needs to know.
        """
        if self.owner:
            return True
        try:
            return locks.first_locked(self.fd, LOCK_OWNER) is not None
        except (OSError, ValueError):
            # Who asks has found it unused. So may another thread, which closes it, while this
            # one waits for the interpreter: by now the number is -1, or no descriptor's.
            if self.is_open:
                raise
            return False

    @property
    def handed_over(self) -> bool:
        """Whether the mailbox may have the segment: whoever ends a message looks there, too."""
        return self._handed_over[0] != 0

    def hand_over(self) -> None:
        """Take note, for everybody, that the mailbox is about to have the segment."""
        self._handed_over[0] = 1

    def note_bytes(self) -> None:
        """Take note, for everybody, that somebody has the bytes of a message about it."""
        self._had_as_bytes[0] = 1

    @property
    def idle(self) -> bool:
        """Whether nothing of another process's segment is in use here."""
        if self.owner or self.holds or self.pins:
            return False
        return not self.outbox or not self.unread()

    @property
    def needed(self) -> int:
        """How many blocks of another process's segment are held for longer than a load."""
        return len(self.holds) - len(self.passing)

    def unpin(self, mark: object) -> None:
        """End a call that needed the segment to stay open."""
        self.pins.pop(mark, None)

    def sent(self, message: Sent) -> None:
        """Remember a message that was sent by this process."""
        self.outbox[message.nonce] = message
        if len(self.outbox) > self._prune_at:
            self.prune()

    def sent_alone(self, nonce: int) -> None:
        """Note that a message that :meth:`sent` knows has no descriptor of the segment with it."""
        self._uncarried[nonce] = None
        if len(self._uncarried) > self._prune_alone_at:
            # First: other threads send meanwhile, and what they add now is not looked at.
            known = list(self._uncarried)
            unread = {sent.nonce for sent in self.unread()}
            for each in known:
                if each not in unread:
                    self._uncarried.pop(each, None)
            self._prune_alone_at = max(_PRUNE_FROM, 2 * len(self._uncarried))

    def are_carried(self, nonces: Iterable[int]) -> bool:
        """Return whether messages of this process have the segment with them, for all to see.

        Who receives them needs nobody else to have it open; and when nobody can receive
        them any more, no description has the lock of those that travel.
        """
        return self._transfer_is_seen and self._uncarried.keys().isdisjoint(nonces)

    def prune(self) -> None:
        """Forget messages that have been read."""
        self._prune_at = max(_PRUNE_FROM, 2 * len(self.unread()))

    def unread(self) -> list[Sent]:
        """Return this process's messages that nobody has read."""
        found = []
        # A list first, since other threads send meanwhile. Not of items: before CPython 3.12
        # each pair that is made may set off the garbage collector, and that other threads.
        # Only what has been read is taken out: another thread that asks at the same time
        # must see the others.
        for sent in list(self.outbox.values()):
            if self.words[sent.slot] == MESSAGE | sent.nonce:
                found.append(sent)
            else:
                self.outbox.pop(sent.nonce, None)
        return found

    def give_up(self, timeout: float | None) -> None:
        """End this process's messages that nobody is going to read."""
        now = time.monotonic()
        mark = object()
        # Another thread may find the segment unused meanwhile, and close it.
        self.pins[mark] = None
        try:
            for sent in self.unread():
                if sent.lost(now, timeout):
                    self.consume(sent.block, sent.generation, sent.slot, sent.nonce)
        finally:
            self.unpin(mark)

    def close(self) -> None:
        """Give the descriptor back. The caller has no views and no leases left."""
        self.give_up_locks()
        fd, self.fd = self.fd, -1
        for number in (fd, self._transfer.pop("fd", -1)):
            self._close(number)

    def give_up_locks(self) -> None:
        """Let go of the blocks' locks, also those of a parent in its forked child."""
        fd, self.lock_fd = self.lock_fd, -1
        self._close(fd)

    def _close(self, fd: int) -> None:
        # Not what has become another file's.
        if fd != -1 and locks.identity_of(fd) == self._identity:
            os.close(fd)

    # Importers

    def _register(self) -> int:
        """Take an importer index; return the word that marks this process's holds."""
        for index in range(IMPORTERS):
            if locks.try_lock(self.fd, LOCK_IMPORTER + index):
                # Holds of the index's last user end with its epoch.
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
        """Return whether the holder behind a slot's word, or a fork of it, lives."""
        if word == self.importer:
            return True
        index = word >> _EPOCH_BITS & (IMPORTERS - 1)
        if self._epochs[index] != word & _EPOCH_MASK:
            return False
        if locks.first_locked(self.fd, LOCK_IMPORTER + index) is not None:
            return True
        # The lock goes with the first of its descriptors. What the process
        # reached by the lease (memory of a device, say) may go with the last.
        return is_closing(self.pids[index])

    # Lease transitions

    def check(self, block: int, generation: int) -> None:
        """Raise unless the block is of this generation. Meaningful under its lock."""
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
        """Give a block that nobody else can name yet its first message; return the slot.

        Needs no lock: the block's generation is not in any handle so far, and
        stale handles do not change a chain.
        """
        slot = self._take_slot()
        if self._quick.start(block, slot, MESSAGE | nonce):
            self._listed.pop(slot, None)
        else:
            self._link(block, slot, MESSAGE | nonce)
        return slot

    def add_message(self, block: int, generation: int, nonce: int) -> int:
        """Add a message to a block that somebody holds; return its slot."""
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
            If the block is not of this generation any more.
        AlreadyLoadedError
            If the message of a by-value block was loaded before: its array is
            that loader's alone.
        """
        word = MESSAGE | nonce
        if self._quick.claim_alone(self.lock_fd, block, slot, word, generation, self.importer):
            return slot, True
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
            # The one store that makes the lease ours.
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
        """Turn a hold that was just claimed back into what it was.

        That is the message, if the hold lies in the slot that the handle has
        ``named``. If not, somebody else had loaded the message before, and no
        handle leads to this slot: a message there could never be loaded.
        """
        if self.words[slot] == self.importer:
            if slot == named:
                self.words[slot] = MESSAGE | nonce
            else:
                self._unlink(block, slot)

    def consume(self, block: int, generation: int, slot: int, nonce: int) -> bool:
        """End a message without taking a hold; return False if it was ended before."""
        word = MESSAGE | nonce
        if self._quick.consume(self.lock_fd, block, slot, word, generation, self.importer):
            return True
        if block >= self.layout.blocks or slot >= self.layout.slots:
            return False
        if self.words[slot] != word:
            # Nor will it ever be again: no two messages have the same nonce.
            return False
        return self._consume(block, generation, slot, word)

    @under_lock
    def _consume(self, block: int, generation: int, slot: int, word: int) -> bool:
        if self.generations[block] != generation or self.words[slot] != word:
            return False
        # Nobody's message any more, before it leaves the chain: if this
        # process is killed in between, nobody shall load what holds nothing.
        self.words[slot] = self.importer
        self._unlink(block, slot)
        return True

    def try_release(self, block: int, slot: int) -> bool | None:
        """End this process's hold without waiting; return None to be asked again.

        Called when the last view has died, in any thread and at any instant,
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
        """Return whether :meth:`drop_dead_holders` may find anything; without the block's lock.

        A chain that changes meanwhile may be misread: then what is there is found
        the next time.

        Parameters
        ----------
        block : int
            Of this segment.
        known : dict of int to bool
            Which holders were alive when they were first met with; is added to.
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
