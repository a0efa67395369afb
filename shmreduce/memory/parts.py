"""Parts and pieces: many buffers of a message in one block.

May import errors and ``loading``.

A buffer with its own block costs a lease. A buffer in the pickle has its bytes copied three
times, into memory that is touched for the first time. For a list of thousands of arrays of
some ten KiB, either takes most of the time. Any buffer can be a part, which the receiver
rebuilds from the block. Pieces are alike: the receiver makes one object of all of a block, an
array say, and takes them out of that. So each takes less to describe and to rebuild.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

from shmreduce.errors import ShmreduceError
from shmreduce.memory.loading import import_block

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    _Allocate = Callable[[int], tuple[memoryview, bytes] | None]
    """:meth:`Message.allocate`."""

__all__ = [
    "IN_BLOCK",
    "IN_PIPE",
    "KEPT",
    "LARGEST_PART",
    "PARTS_FROM",
    "Batches",
    "Limits",
    "Pieces",
]

PARTS_FROM = 4 << 20
"""Bytes: a message's buffers are put together if it has more of them; fewer stay in caches."""
LARGEST_PART = 256 << 10
"""Bytes. Larger buffers have their own blocks, which can be sent on without a copy."""
_FEW = 4
"""Buffers with a key before there is a block for those with that key."""
_LARGEST_BLOCK = 4 << 20
"""Bytes. A part that is still in use keeps no more memory than this."""
_SMALLEST_BLOCK = 256 << 10
"""Bytes."""
_ALIGNMENT = 64
"""Bytes. Each part begins at a multiple of this, as a cache line does."""


class Limits(NamedTuple):
    """Up to which sizes buffers stay in a pickle.

    Buffers of ``smallest_part`` bytes or more take less time as parts. Of buffers below the
    inline limit, a message keeps at most ``most_small`` bytes in its pickle, even if it has
    fewer than :data:`PARTS_FROM` bytes of buffers. There are no pieces before reducers were
    asked for ``many`` objects: their block takes as long as two hundred arrays of 400 bytes
    gain, or forty of 4 KB, and it is assumed that as many are still to come as there were.
    ``in_pipe`` says which inline limit.
    """

    smallest_part: int
    most_small: int
    many: int
    in_pipe: bool


IN_BLOCK = Limits(8 << 10, sys.maxsize, 256, in_pipe=False)
"""For a pickle that is put into a block itself if it is large."""
KEPT = Limits(4 << 10, 128 << 10, 1024, in_pipe=False)
"""For a pickle that is kept, as that of a pool's task until there is an answer. It can be loaded
often if it has no pieces, so there are none in a short one."""
IN_PIPE = Limits(4 << 10, 128 << 10, 1024, in_pipe=True)
"""For a pickle that goes through a pipe, which takes some 4 ms per MiB, there and back."""


class _PartedBlock:
    """Gives out parts of a block that is being filled. It unpickles as the receiver's Block.

    Parameters
    ----------
    view : memoryview
        The bytes of the block.
    handle : bytes
        The block's handle. It is pickled once, since the pickler writes an object once and
        refers to it afterwards.
    """

    __slots__ = ("_end", "_handle", "_view")

    def __init__(self, view: memoryview, handle: bytes) -> None:
        self._view: memoryview | None = view
        self._handle = handle
        self._end = 0

    def __reduce__(self) -> tuple[Any, ...]:
        return import_block, (self._handle,)

    def take(self, nbytes: int) -> tuple[memoryview, int] | None:
        """Return a part and its offset in the block; None if there is no room for it."""
        view = self._view
        start = -(-self._end // _ALIGNMENT) * _ALIGNMENT
        if view is None or start + nbytes > view.nbytes:
            return None
        self._end = start + nbytes
        return view[start : self._end], start

    def close(self) -> None:
        """Release the block, when the message is complete or has failed."""
        self._view = None


class Pieces(Protocol):
    """A block of pieces, as a reducer puts it into the pickle; see :meth:`Message.add_piece`."""

    def close(self) -> None:
        """Drop the bytes of the block: no piece is added any more."""


class _Series:
    """The buffers of a message that have one key, and the block that the next one goes into."""

    __slots__ = ("_block", "count", "end", "following", "nbytes", "pieces")

    def __init__(self) -> None:
        self.count = 0
        """How many buffers there were before the first block."""
        self.nbytes = 0
        """Their bytes, and those of the blocks."""
        self.following = self.end = 0
        """Where in the block the next buffer begins, and where the block ends."""
        self.pieces: Any = None
        """What the reducer has made of the block."""
        self._block: _PartedBlock | None = None

    def open(self, block: _PartedBlock, pieces: Pieces, size: int) -> None:
        """Go on with another block; the one before is closed."""
        self._block, self.pieces, self.following, self.end = block, pieces, 0, size
        self.nbytes += size

    def close(self) -> None:
        """Release the block, as :meth:`_PartedBlock.close` does."""
        self.end = 0
        if self._block is not None:
            self.pieces.close()
            self._block.close()
            self._block = self.pieces = None


_Made = TypeVar("_Made", bound=Pieces)


class Batches:
    """The blocks of one message that carry several buffers each.

    Parameters
    ----------
    limits : Limits
        Those of the message.

    Attributes
    ----------
    series : dict
        The buffers that may be pieces, by what makes an object of their blocks and their key.
    """

    __slots__ = ("_bytes", "_lacks_room", "_limits", "_parted", "_small", "series")

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._bytes = self._small = 0
        """Bytes of buffers that may be parts; of these, in buffers that are pickled in the
        ordinary way otherwise."""
        self._parted: _PartedBlock | None = None
        self._lacks_room = False
        self.series: dict[Hashable, _Series] = {}

    def part(
        self, nbytes: int, small: bool, allocate: _Allocate
    ) -> tuple[memoryview, object, int] | None:
        """See :meth:`Message.allocate_part`. ``small`` ones would be pickled otherwise."""
        self._bytes += nbytes
        if small:
            self._small += nbytes
        if not self._has_much(small):
            return None
        parted = self._parted
        taken = None if parted is None else parted.take(nbytes)
        if taken is None:
            if parted is not None:
                parted.close()
            given = self._new_block(_block_size(self._bytes), allocate)
            parted = self._parted = None if given is None else given[1]
            taken = None if parted is None else parted.take(nbytes)
        return None if taken is None else (taken[0], parted, taken[1])

    def piece(
        self,
        key: Hashable,
        nbytes: int,
        make: Callable[[Any, memoryview, object, bool], _Made],
        small: bool,
        allocate: _Allocate,
    ) -> tuple[_Made, int] | None:
        """See :meth:`Message.add_piece`. ``small`` ones would be pickled otherwise."""
        if not (small or self._has_much(small)):
            # Its own block can be sent on without a copy.
            return None
        series = self.series.get((make, key))
        if series is None:
            series = self.series[make, key] = _Series()
        if nbytes > series.end - series.following and not self._open(
            series, key, nbytes, make, allocate
        ):
            return None
        offset = series.following
        series.following = offset + nbytes
        return series.pieces, offset

    def _open(
        self,
        series: _Series,
        key: Hashable,
        nbytes: int,
        make: Callable[[Any, memoryview, object, bool], Pieces],
        allocate: _Allocate,
    ) -> bool:
        """Give a series its next block; return whether it has one."""
        if series.count < _FEW or self._lacks_room:
            series.count += 1
            series.nbytes += nbytes
            return False
        series.close()
        size = _block_size(series.nbytes)
        given = self._new_block(size, allocate)
        if given is None:
            return False
        view, block = given
        series.open(block, make(key, view, block, not self._has_much(small=True)), size)
        if nbytes >= self._limits.smallest_part:
            self._bytes += size
            self._small += size
        return True

    def close(self) -> None:
        """Release the blocks, when the message is complete or has failed."""
        if self._parted is not None:
            self._parted.close()
            self._parted = None
        while self.series:
            self.series.popitem()[1].close()

    def _has_much(self, small: bool) -> bool:
        """Return whether the message has so many bytes of buffers that they are better parts."""
        return self._bytes > PARTS_FROM or (small and self._small > self._limits.most_small)

    def _new_block(self, size: int, allocate: _Allocate) -> tuple[memoryview, _PartedBlock] | None:
        try:
            given = allocate(size)
        except ShmreduceError:
            # No memory, no descriptor or no lease is free. The buffer can do without them.
            given = None
        if given is None:
            # So that the other buffers of this message do not try again.
            self._bytes = self._small = -sys.maxsize
            self._lacks_room = True
            return None
        return given[0], _PartedBlock(*given)


def _block_size(so_far: int) -> int:
    """Return the size of the next block for a message that has ``so_far`` bytes of buffers.

    It is twice ``so_far``, between the two limits. So there are few blocks, and the unused
    bytes are less than twice what the message needs.
    """
    return max(_SMALLEST_BLOCK, min(_LARGEST_BLOCK, 2 * so_far))
