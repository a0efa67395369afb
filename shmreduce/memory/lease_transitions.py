"""The importers of a segment, and the transitions of its leases.

May import errors, contracts, ``locks``, ``block_locks``, ``processes``, ``layout`` and
``lease_slots``.

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
from typing import TYPE_CHECKING

from shmreduce.errors import (
    AlreadyLoadedError,
    InvalidHandleError,
    OutOfLeasesError,
    StaleHandleError,
)
from shmreduce.memory import locks
from shmreduce.memory.block_locks import if_unlocked, under_lock
from shmreduce.memory.layout import IMPORTERS, LOCK_IMPORTER, SegmentHeader
from shmreduce.memory.lease_slots import MESSAGE, LeaseSlots
from shmreduce.memory.processes import is_closing

if TYPE_CHECKING:
    from shmreduce.contracts import SharingStrategy

__all__ = ["LeaseTransitions"]

# The word of a holder: this bit, the importer's index, and the epoch of that index.
_HOLDER = 1 << 63
_EPOCH_BITS = 48
_EPOCH_MASK = (1 << _EPOCH_BITS) - 1


class LeaseTransitions(LeaseSlots):
    """The leases of one open segment, of which this process is an importer.

    Parameters
    ----------
    fd : int
        The segment's file, opened under an open file description through which nobody else
        locks. The caller owns it.
    header : SegmentHeader
        The file's header, already checked.
    strategy : SharingStrategy
        The strategy that opened the file, for error messages.
    """

    def __init__(self, fd: int, header: SegmentHeader, strategy: SharingStrategy) -> None:
        super().__init__(fd, header, strategy)
        try:
            self.importer = self._register()
        except BaseException:
            self.give_up_locks()
            raise

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
        if not self.is_open:
            # Other code has closed the descriptor. The number may be another file's by now, in
            # which nothing is locked, so it is not known who lives.
            return True
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
