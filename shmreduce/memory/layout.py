"""What stands where in a segment's file.

May import :mod:`shmreduce.errors` and ``mapping`` (for the page size).

::

    header page | importer table | block table | hints | lease slots | data

All tables have one writer at a time, see ``segment``. Words are read and
written as items of a cast ``memoryview``, one aligned store each;
``struct.pack_into`` would clear them first, and others would see that.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

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
VERSION = 1
BY_VALUE = 1
"""Segments of blocks that carry one message each, whole pages."""
SHARED = 2
"""Segments of blocks that everybody maps and writes."""

IMPORTERS = 1024
"""How many processes may hold leases in one segment at a time."""
CHUNK_SLOTS = 512
"""Lease slots that one process takes for its own allocation at a time."""
HANDED_OVER = PAGE_SIZE - 8
"""Where the header page has a word that is not 0 once the mailbox may have the segment."""
HAD_AS_BYTES = PAGE_SIZE - 16
"""Where it has one that is not 0 once somebody has had the bytes of a message, who may pass
them on without a descriptor, or load them later."""

# Byte locks, far beyond the end of any file.
LOCK_OWNER = 1 << 40
LOCK_IMPORTER = 1 << 41
LOCK_BLOCK = 1 << 42
LOCK_CHUNK = 1 << 43
LOCK_TRANSFER = 1 << 44
"""Held, for reading, by each description that travels in messages: so by their packets."""

# magic, version, kind, token, boot, family, owner pid, created (ns since the epoch),
# size, blocks, slots, strategy name
_HEADER = struct.Struct("<8sII16s16s16sQQQII32s")


@dataclass(frozen=True)
class SegmentHeader:
    """The constant part of a segment's first page."""

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

    def pack(self) -> bytes:
        """Return the bytes that open the file."""
        return _HEADER.pack(
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
        )

    @classmethod
    def unpack(cls, data: bytes) -> SegmentHeader:
        """Read a header written by anybody.

        Raises
        ------
        InvalidHandleError
            If the bytes are not a header of this version, or do not fit together.
        """
        if len(data) < _HEADER.size:
            raise _no_segment("its header is truncated")
        magic, version, *fields, strategy = _HEADER.unpack_from(data)
        if magic != MAGIC:
            raise _no_segment("it does not begin with shmreduce's mark")
        if version != VERSION:
            raise _no_segment(f"its format is version {version}, this is version {VERSION}")
        name = strategy.rstrip(b"\0").decode(errors="replace")
        kind, token, boot, family, owner_pid, created_ns, size, blocks, slots = fields
        header = cls(kind, token, boot, family, owner_pid, created_ns, size, blocks, slots, name)
        empty = not (header.blocks and header.slots)
        unknown = header.kind not in (BY_VALUE, SHARED)
        if empty or unknown or Layout.of(header).data_offset > header.size:
            raise _no_segment("its fields contradict each other")
        return header


def _no_segment(reason: str) -> InvalidHandleError:
    return InvalidHandleError(
        f"the file is not a segment of shmreduce: {reason}. Send the array again, by the same "
        "version of shmreduce",
        reason=reason,
    )


@dataclass(frozen=True)
class Layout:
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
        """Return the layout that a header implies."""
        return cls.plan(header.blocks, header.slots)

    @classmethod
    def plan(cls, blocks: int, slots: int) -> Layout:
        """Lay the tables out one after the other.

        The slot tables begin on a page of their own, since their pages are
        reserved chunk by chunk as they come into use. The data begin where a
        huge page can.
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
