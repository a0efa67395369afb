"""Large pickles that are written straight into the block that they travel in.

May import errors and :mod:`shmreduce.memory`.

A large pickle travels in a block. As its length is not known beforehand, it would have
to be made in ordinary memory and copied; its pages would be touched for the first time,
which takes longer than the copy. But messages are alike: a list of as many items as last
time takes about as many bytes as last time. So the block can be allocated before, warm
from the last message.
"""

from __future__ import annotations

import io
import os
import pickle
from typing import TYPE_CHECKING, Any, cast

from shmreduce.errors import ShmreduceError

if TYPE_CHECKING:
    from collections.abc import Sized

    from shmreduce.memory.message import Message

__all__ = ["PresizedBuffer", "expected_size", "remember_size"]

_SPARE = 16
"""A block is larger by this part of what is expected."""
_MOST_KINDS = 64
_CONTAINERS = frozenset((list, tuple, dict, set, frozenset))

_sizes: dict[object, int] = {}


def _kind_of(obj: object) -> object:
    kind = type(obj)
    # Of others, to ask for the length may take long.
    length = len(cast("Sized", obj)) if kind in _CONTAINERS else 0
    return kind.__module__, kind.__qualname__, length


def expected_size(obj: object) -> int:
    """Return how many bytes the last large pickle of such an object had, 0 if there was none.

    Examples
    --------
    >>> expected_size([[1], [2]])
    0
    >>> remember_size([[1], [2]], 300_000)
    >>> expected_size([[3], [4]])
    300000
    >>> remember_size([[3], [4]], 0)
    """
    return _sizes.get(_kind_of(obj), 0) if _sizes else 0


def remember_size(obj: object, nbytes: int) -> None:
    """Note how many bytes a pickle had; 0 for one that needed no block."""
    if not nbytes:
        _sizes.pop(_kind_of(obj), None)
        return
    if len(_sizes) >= _MOST_KINDS:
        _sizes.clear()
    _sizes[_kind_of(obj)] = nbytes


class PresizedBuffer:
    """What a pickler writes to: a block, and ordinary memory for what it has no room for.

    Parameters
    ----------
    message : Message
        Which gives the block, and keeps it if it is still there when the
        message is complete.
    nbytes : int
        How long the pickle is expected to be.
    least : int
        Bytes that are worth a block.
    """

    __slots__ = ("_end", "_least", "_message", "_process", "_rest", "_view")

    def __init__(self, message: Message, nbytes: int, least: int) -> None:
        self._message = message
        self._least = least
        self._process = os.getpid()
        self._end = 0
        self._rest: io.BytesIO | None = None
        try:
            given = message.allocate(nbytes + nbytes // _SPARE)
        except ShmreduceError:
            # No memory, no descriptor, no lease. What is really needed may be less, or nothing.
            given = None
        self._view = None if given is None else given[0]

    def write(self, data: Any) -> int:
        """Take what the pickler has written, as a file does."""
        self._leave_parents_block()
        raw = data if type(data) is bytes else pickle.PickleBuffer(data).raw()
        end = self._end + len(raw)
        if self._rest is None and self._view is not None and end <= len(self._view):
            self._view[self._end : end] = raw
        else:
            if self._rest is None:
                self._rest = io.BytesIO()
            self._rest.write(raw)
        self._end = end
        return len(raw)

    def getbuffer(self) -> memoryview:
        """Return the pickle: in the block, or in ordinary memory if it does not suit the block."""
        self._leave_parents_block()
        view, end = self._view, self._end
        if view is not None and self._rest is None and end > max(self._least, len(view) // 2):
            return view[:end]
        return self._leave_block()

    def getvalue(self) -> bytes:
        """Return the pickle, which leaves the block, as bytes."""
        self._leave_parents_block()
        return bytes(self._leave_block())

    def _leave_parents_block(self) -> None:
        """Go on in ordinary memory, in a child that was forked in the middle of the pickling."""
        if self._view is not None and os.getpid() != self._process:
            # What the parent had written before the fork stays as it is.
            self._gather()

    def _leave_block(self) -> memoryview:
        view = self._view
        if view is not None:
            self._gather()
            self._message.take_back(view)
        return (self._rest or io.BytesIO()).getbuffer()

    def _gather(self) -> None:
        """Have in ordinary memory what is in the block."""
        view, rest = self._view, self._rest
        if view is not None:
            whole = io.BytesIO()
            whole.write(view[: self._end - (0 if rest is None else rest.tell())])
            if rest is not None:
                whole.write(rest.getbuffer())
            self._view, self._rest = None, whole
