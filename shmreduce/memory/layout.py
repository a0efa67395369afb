"""Where the tables and the data lie in a segment's file.

May import :mod:`shmreduce.errors` and ``mapping`` (for the page size).

::

    header page | importer table | block table | hints | lease slots | data

Each table entry has one writer at a time, see ``lease_transitions``. Words are read and written as
items of a cast ``memoryview``, each by one aligned access. ``struct.pack_into`` would clear
a word before it writes it, and other processes could see the cleared word.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from shmreduce.errors import InvalidHandleError
from shmreduce.memory.mapping import PAGE_SIZE, huge_ceil, page_ceil

__all__ = [
    "BY_VALUE",
    "CHUNK_SLOTS",
    "HAD_AS_BYTES",
    "HANDED_OVER",
    "IMPORTERS",
    "LOCK_BLOCK",
    "LOCK_CHUNK",
    "LOCK_IMPORTER",
    "LOCK_OWNER",
    "LOCK_TRANSFER",
    "MAGIC",
    "SHARED",
    "Layout",
    "SegmentHeader",
]

MAGIC = b"shmreduc"
VERSION = 2
"""Of the layout. A segment of another version is refused."""
BY_VALUE = 1
"""Kind of a segment whose blocks carry one message each, and are whole pages."""
SHARED = 2
"""Kind of a segment whose blocks are mapped and written by every process that has them."""

IMPORTERS = 1024
"""How many processes can have one segment open at a time."""
CHUNK_SLOTS = 512
"""A process takes lease slots for its own use in chunks of this many."""
HANDED_OVER = PAGE_SIZE - 8
"""Offset of a word of the header page. It is not 0 once the mailbox may have the segment."""
HAD_AS_BYTES = PAGE_SIZE - 16
"""Offset of another word. It is not 0 once a program has got a message's bytes, which it may pass
on without a descriptor of the segment, or load later."""

# Byte locks: the locked bytes lie far beyond the end of any file.
LOCK_OWNER = 1 << 40
LOCK_IMPORTER = 1 << 41
LOCK_BLOCK = 1 << 42
LOCK_CHUNK = 1 << 43
LOCK_TRANSFER = 1 << 44
"""Locked for reading by each open file description that is passed on in messages. So it is
locked as long as a packet with such a descriptor exists."""

# magic, version, kind, token, boot, family, owner pid, created (ns since the epoch),
# size, blocks, slots, strategy name, length of the locator, which follows
_HEADER = struct.Struct("<8sII16s16s16sQQQII32sH")
_LONGEST_LOCATOR = 2048
"""Bytes: half of the smallest page. A longer locator is left out."""


class SegmentHeader(NamedTuple):
    """The constant part of a segment's first page.

    ``locator`` leads to the file at the process that made it. Whoever sends one of its blocks on
    writes it into the handle, since the maker may outlive the sender. It is empty if it is too
    long.
    """

    kind: int
    token: bytes
    boot: bytes
    family: bytes
    owner_pid: int
    created_ns: int
    size: int
    blocks: int
    slots: int
    strategy: str
    locator: str = ""

    def pack(self) -> bytes:
        """Return the bytes with which the file begins."""
        locator = self.locator.encode(errors="surrogateescape")
        if len(locator) > _LONGEST_LOCATOR:
            locator = b""
        fixed = _HEADER.pack(
            MAGIC,
            VERSION,
            self.kind,
            self.token,
            self.boot,
            self.family,
            self.owner_pid,
            self.created_ns,
            self.size,
            self.blocks,
            self.slots,
            self.strategy.encode()[:32],
            len(locator),
        )
        return fixed + locator

    @classmethod
    def unpack(cls, data: bytes) -> SegmentHeader:
        """Read a header from a file that any process may have written.

        Raises
        ------
        InvalidHandleError
            If the bytes are not a header of this version, or contradict each other.
        """
        if len(data) < _HEADER.size:
            raise _no_segment("its header is truncated")
        magic, version, *fields, strategy, length = _HEADER.unpack_from(data)
        if magic != MAGIC:
            raise _no_segment("it does not begin with shmreduce's mark")
        if version != VERSION:
            raise _no_segment(f"its format is version {version}, this is version {VERSION}")
        name = strategy.rstrip(b"\0").decode(errors="replace")
        located = data[_HEADER.size : _HEADER.size + length]
        # A file name may have bytes that are not text (os.fsencode).
        locator = located.decode(errors="surrogateescape")
        header = cls._make([*fields, name, locator])
        empty = not (header.blocks and header.slots)
        unknown = header.kind not in (BY_VALUE, SHARED)
        damaged = length > _LONGEST_LOCATOR or len(located) < length or "\0" in locator
        if empty or unknown or damaged or Layout.of(header).data_offset > header.size:
            raise _no_segment("its fields contradict each other")
        return header


def _no_segment(reason: str) -> InvalidHandleError:
    return InvalidHandleError(
        f"the file is not a segment of shmreduce: {reason}. Send the array again, by the same "
        "version of shmreduce",
        reason=reason,
    )


class Layout(NamedTuple):
    """Byte offsets of the tables, for given numbers of blocks and lease slots."""

    blocks: int
    slots: int
    importer_epochs: int
    importer_pids: int
    generations: int
    offsets: int
    capacities: int
    heads: int
    hints: int
    slot_words: int
    slot_next: int
    slot_previous: int
    data_offset: int

    @classmethod
    def of(cls, header: SegmentHeader) -> Layout:
        """Return the layout for a header."""
        return cls.plan(header.blocks, header.slots)

    @classmethod
    def plan(cls, blocks: int, slots: int) -> Layout:
        """Compute the offsets of the tables, which follow each other.

        The slot tables begin on a new page, because their pages are reserved chunk by
        chunk when a process takes the chunk. The data begin at a multiple of the size of
        a huge page.
        """
        epochs = PAGE_SIZE
        pids = epochs + 8 * IMPORTERS
        generations = pids + 8 * IMPORTERS
        offsets = generations + 8 * blocks
        capacities = offsets + 8 * blocks
        heads = capacities + 8 * blocks
        hints = heads + 4 * blocks
        words = page_ceil(hints + blocks)
        following = words + 8 * slots
        previous = following + 4 * slots
        data = huge_ceil(previous + 4 * slots)
        return cls(
            blocks,
            slots,
            epochs,
            pids,
            generations,
            offsets,
            capacities,
            heads,
            hints,
            words,
            following,
            previous,
            data,
        )
