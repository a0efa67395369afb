"""The tables of one open segment: the blocks, and the chain of lease slots of each.

May import errors, signals, ``locks``, ``block_locks``, ``mapping``, ``layout``,
``segment_file`` and ``quick_slots``.

A slot's word is 0 (free), a *message* or a *holder*; ``lease_transitions`` explains them. A
link is the number of a slot plus one; 0 ends a chain.

The stores are ordered so that a process that is killed between them leaves the block
held; it is never free too early. So a slot is unlinked before it is cleared, and only
the forward links are trusted.
"""

from __future__ import annotations

import os
from threading import get_ident
from typing import TYPE_CHECKING

from shmreduce.errors import OutOfLeasesError, OutOfSharedMemoryError
from shmreduce.memory import locks
from shmreduce.memory.block_locks import LOCK_PATIENCE, BlockLocks, closed_by_somebody
from shmreduce.memory.layout import (
    CHUNK_SLOTS,
    HAD_AS_BYTES,
    HANDED_OVER,
    IMPORTERS,
    LOCK_CHUNK,
    Layout,
    SegmentHeader,
)
from shmreduce.memory.mapping import Mapping
from shmreduce.memory.quick_slots import quick_slots
from shmreduce.memory.segment_file import reserve_pages
from shmreduce.signals import is_from_system

if TYPE_CHECKING:
    from shmreduce.contracts import SharingStrategy
    from shmreduce.memory.block_locks import Mark

__all__ = ["MESSAGE", "NONCE_MASK", "LeaseSlots"]

MESSAGE = 1 << 62
"""The bit that marks a slot's word as a message; the bits below it are the nonce."""
NONCE_MASK = MESSAGE - 1

# If a rescan finds fewer free slots than this, another chunk is taken.
_WORTH_A_RESCAN = 64


class LeaseSlots(BlockLocks):
    """Tables that several processes have mapped, and the slots that this process may take.

    Parameters
    ----------
    fd : int
        The segment's file; the caller owns it. Chunks of slots are locked through it.
    header : SegmentHeader
        The file's header, already checked.
    strategy : SharingStrategy
        The strategy that opened the file, for error messages.
    """

    def __init__(self, fd: int, header: SegmentHeader, strategy: SharingStrategy) -> None:
        self.fd = fd
        self.header = header
        self.strategy = strategy
        self.token = header.token
        self.layout = layout = Layout.of(header)
        self.tables = Mapping(fd, 0, layout.data_offset)
        everything = memoryview(self.tables.pages)
        blocks, slots = layout.blocks, layout.slots
        self.generations = _words(everything, layout.generations, blocks, "Q")
        self.offsets = _words(everything, layout.offsets, blocks, "Q")
        self.capacities = _words(everything, layout.capacities, blocks, "Q")
        self.heads = _words(everything, layout.heads, blocks, "I")
        self.hints = everything[layout.hints : layout.hints + blocks]
        self.words = _words(everything, layout.slot_words, slots, "Q")
        self._next = _words(everything, layout.slot_next, slots, "I")
        self._previous = _words(everything, layout.slot_previous, slots, "I")
        self._epochs = _words(everything, layout.importer_epochs, IMPORTERS, "Q")
        self.pids = _words(everything, layout.importer_pids, IMPORTERS, "Q")
        self._handed_over = _words(everything, HANDED_OVER, 1, "Q")
        self._had_as_bytes = _words(everything, HAD_AS_BYTES, 1, "Q")
        self._free_slots: list[int] = []
        self._listed: dict[int, object] = {}
        self._chunks: dict[int, object] = {}
        self._coming: dict[int, Mark] = {}
        """Chunks that a thread is about to take, with a mark of that thread's call."""
        # The blocks' locks have an open file description of their own, which forked children
        # close at once. Otherwise, if a parent is killed in the middle of a transition, its
        # lock would stay with a child that knows nothing of it.
        super().__init__(locks.reopen(fd))
        self._quick = quick_slots(self.tables.pages, layout, self._busy, self._identity)

    def give_up_locks(self) -> None:
        """Close the descriptor of the blocks' locks; a forked child closes its parent's."""
        fd, self.lock_fd = self.lock_fd, -1
        self._close(fd)

    def _close(self, fd: int) -> None:
        # The number may belong to another file by now; that one is not closed.
        if fd != -1 and locks.identity_of(fd) == self._identity:
            os.close(fd)

    @property
    def is_open(self) -> bool:
        """Whether the descriptor is still open and still the segment's."""
        return self.fd != -1 and locks.identity_of(self.fd) == self._identity

    @property
    def checked_fd(self) -> int:
        """The descriptor, for reading, mapping or freeing the file's pages.

        Raises
        ------
        SegmentError
            If other code has closed it. The number may belong to another file by now,
            which would be damaged.
        """
        if not self.is_open:
            raise closed_by_somebody(self.fd, self.token)
        return self.fd

    def leases(self, block: int) -> list[int]:
        """Return the words of the block's chain, newest first."""
        found: list[int] = []
        link = self.heads[block]
        while link and len(found) <= self.layout.slots:
            found.append(self.words[link - 1])
            link = self._next[link - 1]
        return found

    def is_alone(self, block: int, slot: int) -> bool:
        """Return whether this slot of the block's chain is the only one in it."""
        return self.heads[block] == slot + 1 and not self._next[slot]

    def messages(self, block: int) -> list[int]:
        """Return the slots of the block's unread messages. The caller has the block's lock."""
        found: list[int] = []
        link = self.heads[block]
        for _ in range(self.layout.slots):
            if not link:
                break
            slot = link - 1
            link = self._next[slot]
            if self.words[slot] & ~NONCE_MASK == MESSAGE:
                found.append(slot)
        return found

    def _link(self, block: int, slot: int, word: int) -> None:
        head = self.heads[block]
        self._next[slot] = head
        self._previous[slot] = 0
        self.words[slot] = word
        # The forward link is set first: a process that is killed in between leaves a wrong
        # backward link, which _unlink notices.
        self.heads[block] = slot + 1
        if head:
            self._previous[head - 1] = slot + 1
        self._listed.pop(slot, None)

    def _unlink(self, block: int, slot: int) -> None:
        following = self._next[slot]
        before = self._previous[slot]
        if before:
            if self._next[before - 1] != slot + 1:
                before = self._find_before(block, slot)
        elif self.heads[block] != slot + 1:
            before = self._find_before(block, slot)
        if before == -1:
            # A process was killed between unlinking this slot and clearing it.
            self.words[slot] = 0
            return
        # The backward link is set first, for the same reason as in _link. The slot is cleared
        # last, so that nobody takes it while it is still in the chain.
        if following:
            self._previous[following - 1] = before
        if before:
            self._next[before - 1] = following
        else:
            self.heads[block] = following
        self.words[slot] = 0
        if not self.heads[block]:
            self.hints[block] = 1

    def _find_before(self, block: int, slot: int) -> int:
        """Return the link before ``slot``: 0 if it is the first, -1 if it is not in the chain.

        Only the forward links are followed: a process that is killed while it links or
        unlinks a slot leaves a wrong backward link.
        """
        before, link = 0, self.heads[block]
        for _ in range(self.layout.slots):
            if link == slot + 1:
                return before
            if not link:
                break
            before, link = link, self._next[link - 1]
        return -1

    # Free slots. A process takes slots only from chunks whose byte it has locked, so taking
    # one needs no further lock. A slot is free again when its word is 0.

    def _take_slot(self) -> int:
        while True:
            try:
                slot = self._free_slots.pop()
            except IndexError:
                self._find_slots()
                continue
            if not self.words[slot]:
                return slot
            self._listed.pop(slot, None)

    def _take_slot_but(self, named: int) -> int:
        """Take a slot that is not the handle's, so that unclaim() can tell it from that one."""
        slot = self._take_slot()
        if slot != named:
            return slot
        try:
            return self._take_slot()
        finally:
            self._give_slot(slot)

    def _give_slot(self, slot: int) -> None:
        self._free_slots.append(slot)

    def _find_slots(self) -> None:
        mark = (get_ident(),)
        found = sum(self._list_chunk(chunk, mark) for chunk in list(self._chunks))
        if found >= _WORTH_A_RESCAN:
            return
        # If another file had this number, all chunks would look free, also those of others.
        fd = self.checked_fd
        for chunk in range(self.layout.slots // CHUNK_SLOTS):
            if self._take_chunk(chunk, fd, mark):
                self._list_chunk(chunk, mark)
                return
        if not (found or self._free_slots or self._others_have_taken(mark)):
            raise OutOfLeasesError(
                f"all {self.layout.slots} lease slots of segment {self.token.hex()} are in use "
                "by messages that nobody has read and by arrays in use, or kept by other "
                f"processes, each of which takes {CHUNK_SLOTS} at a time; read or drop some, or "
                "let processes end that have sent many",
                segment=self.token.hex(),
                slots=self.layout.slots,
            )

    def _take_chunk(self, chunk: int, fd: int, mark: Mark) -> bool:
        """Take a chunk that no process has; return whether that was possible."""
        try:
            if chunk in self._chunks or self._coming.setdefault(chunk, mark) is not mark:
                return False
            # Looked at again: another thread may have taken it before the mark was set.
            if chunk in self._chunks or not locks.try_lock(fd, LOCK_CHUNK + chunk, later=True):
                return False
            self._reserve_chunk(chunk)
            # Only now may other threads take slots from it. If there were no room for its
            # pages, the chunk would be given up, and another process could take its slots.
            self._chunks[chunk] = mark
            return True
        finally:
            if self._coming.get(chunk) is mark:
                self._coming.pop(chunk, None)

    def _others_have_taken(self, mark: Mark) -> bool:
        """Wait while other threads are about to take chunks; return False if none was."""
        if self._is_taken_alone(mark):
            return False
        return locks.keep_trying(lambda: self._is_taken_alone(mark), LOCK_PATIENCE) is None

    def _is_taken_alone(self, mark: Mark) -> bool:
        # This thread may itself be about to take a chunk, if a destructor or a signal handler
        # has interrupted it. Waiting for that would never end.
        return all(each[0] == mark[0] for each in list(self._coming.values()))

    def _list_chunk(self, chunk: int, mark: object) -> int:
        start = chunk * CHUNK_SLOTS
        found = 0
        for slot, word in enumerate(self.words[start : start + CHUNK_SLOTS].tolist(), start):
            # setdefault is atomic: if several threads do this, each slot is listed once.
            if not word and self._listed.setdefault(slot, mark) is mark:
                self._free_slots.append(slot)
                found += 1
        return found

    def _reserve_chunk(self, chunk: int) -> None:
        layout = self.layout
        start = chunk * CHUNK_SLOTS
        try:
            reserve_pages(self.fd, layout.slot_words + 8 * start, 8 * CHUNK_SLOTS)
            reserve_pages(self.fd, layout.slot_next + 4 * start, 4 * CHUNK_SLOTS)
            reserve_pages(self.fd, layout.slot_previous + 4 * start, 4 * CHUNK_SLOTS)
        except OSError as error:
            locks.unlock(self.fd, LOCK_CHUNK + chunk)
            if not is_from_system(error):
                raise
            raise OutOfSharedMemoryError(
                f"no room for lease slots in segment {self.token.hex()}: {error.strerror}. "
                "Free shared memory or give it more room (see 'shmreduce doctor')",
                operation="fallocate",
                errno=error.errno,
                requested=16 * CHUNK_SLOTS,
                available=None,
                strategy=self.strategy.name,
            ) from error


def _words(everything: memoryview, offset: int, count: int, code: str) -> memoryview:
    width = 8 if code == "Q" else 4
    return everything[offset : offset + width * count].cast(code)  # type: ignore[call-overload,no-any-return]
