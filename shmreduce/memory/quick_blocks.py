"""The compiled short way of a message's blocks: each step is one call, where it was compiled.

May import :mod:`shmreduce.compiled` and, for a type, ``segment``.

The long way of these steps is in ``message``, ``loading`` and ``blocks``. It takes some dozens
of functions, and most of them make sure that Ctrl-C, another thread or a fork between two
steps does no harm. In ``_quick_blocks.c`` nothing can come in between. It does the usual
case completely, and does nothing in any other case.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shmreduce.compiled import BLOCKS, find_module

if TYPE_CHECKING:
    from shmreduce.memory.segment import Segment

__all__ = [
    "COMPILED",
    "block_tables",
    "commit",
    "configure",
    "give_shared",
    "import_block",
    "lend_block",
    "make_root",
    "root_died",
    "take_block",
]


def _decline(*_: object) -> Any:
    """Return None, as a compiled function does that has done nothing."""
    return None


_module: Any = find_module(BLOCKS)[0]
COMPILED = _module is not None
"""Whether the module was compiled. If not, the functions below do nothing."""

configure: Any = getattr(_module, "configure", _decline)
"""``(Block, Filling, Lease, Record, RootReference, Sent, page_size, few)``: sets the classes.

Until it was called, all functions but :func:`make_root` do nothing. With at most ``few`` open
segments, none is one too many.
"""
import_block: Any = getattr(_module, "import_block", _decline)
"""``(handle, live, attachments, loading)``: the Block of :func:`loading.import_block`, or None."""
take_block: Any = getattr(_module, "take_block", _decline)
"""``(heap, live, nbytes, nonce, taken)``: what :meth:`Message.allocate` returns, or None.

The lease is added to ``taken``.
"""
lend_block: Any = getattr(_module, "lend_block", _decline)
"""``(segment, block, generation, nonce, constant, taken)``: handle and lease, or None.

``constant`` is from :func:`handle.pack_constant`. The lease is added to ``taken``.
"""
give_shared: Any = getattr(_module, "give_shared", _decline)
"""``(live, root, nbytes, nonce, taken)``: as :data:`lend_block`, for the block of a root.

None also if the block is not shared, has other than ``nbytes`` bytes, or is a ``cow`` block.
"""
commit: Any = getattr(_module, "commit", _decline)
"""``(taken, child)``: keeps leases, as :meth:`Message.commit`; returns how many, or None."""
make_root: Any = getattr(_module, "make_root", None)
"""As :func:`mapping.make_root`; None if it was not compiled."""
root_died: Any = getattr(_module, "root_died", None)
"""``(reference)``: ends the hold of a root that has died; None if it was not compiled."""


def block_tables(segment: Segment) -> Any:
    """Return an object by which these functions use a segment's tables; None if not compiled."""
    if _module is None:
        return None
    layout = segment.layout
    return _module.BlockTables(
        segment.tables.pages,
        shared=segment.is_shared,
        size=segment.header.size,
        data_offset=layout.data_offset,
        blocks=layout.blocks,
        slots=layout.slots,
        generations=layout.generations,
        offsets=layout.offsets,
        capacities=layout.capacities,
        words=layout.slot_words,
        heads=layout.heads,
        hints=layout.hints,
        importer=segment.importer,
        holds=segment.holds,
        passing=segment.passing,
        pins=segment.pins,
        outbox=segment.outbox,
        records=segment.records,
        free_slots=segment._free_slots,
        listed=segment._listed,
    )
