"""The sizes of blocks and segments.

May import ``mapping`` (for the page size) and ``layout``.

Blocks come in size classes, eight to a doubling. So at most an eighth of a block is unused, but
for small ones, which are rounded up to 64 bytes or to a page.
Segments are sparse files, so a large one costs only addresses until it is used. Large
segments are few, which keeps the numbers of descriptors and mappings low.
"""

from __future__ import annotations

from shmreduce.memory.layout import BY_VALUE, CHUNK_SLOTS, IMPORTERS
from shmreduce.memory.mapping import PAGE_SIZE

__all__ = [
    "FIRST_SEGMENT",
    "SLAB",
    "SMALLEST_BLOCK",
    "next_segment_size",
    "size_class",
    "table_sizes",
]

SMALLEST_BLOCK = 64
"""Bytes."""
SLAB = 256 << 10
"""Small blocks are carved, booked and reserved together, this many bytes at a time."""
FIRST_SEGMENT = 16 << 20
"""Bytes."""
_GROWTH = 8
"""How many times as large as the last segment the next one is, up to a limit."""
_LARGEST_STEP = 1 << 30
"""That limit, in bytes. A segment for one larger block is larger."""


def size_class(nbytes: int, *, whole_pages: bool) -> int:
    """Return the size of a block for ``nbytes``: ``nbytes``, rounded up.

    Examples
    --------
    >>> size_class(100, whole_pages=False), size_class(100, whole_pages=True)
    (128, 4096)
    >>> size_class(9 << 20, whole_pages=True) == 9 << 20
    True
    """
    unit = PAGE_SIZE if whole_pages else SMALLEST_BLOCK
    step = max(unit, 1 << max(0, (max(nbytes, 1) - 1).bit_length() - 4))
    return max(-(-nbytes // step) * step, unit)


def next_segment_size(last: int) -> int:
    """Return how many bytes of data the segment after one of ``last`` bytes gets.

    Examples
    --------
    >>> next_segment_size(FIRST_SEGMENT) >> 20, next_segment_size(1 << 40) >> 20
    (128, 1024)
    """
    return min(max(_GROWTH * last, FIRST_SEGMENT), _LARGEST_STEP)


def table_sizes(kind: int, data: int) -> tuple[int, int]:
    """Choose how many blocks and lease slots a segment of ``data`` bytes gets."""
    blocks = 256 + data // (16 * PAGE_SIZE) if kind == BY_VALUE else 4096 + data // PAGE_SIZE
    # A chunk for each process that may have the segment open and send its blocks on.
    chunks = max(-(-4 * blocks // CHUNK_SLOTS), IMPORTERS)
    return (blocks + 7) & -8, chunks * CHUNK_SLOTS
