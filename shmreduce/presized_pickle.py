"""Large pickles that are written straight into the block that they travel in.

May import errors and :mod:`shmreduce.memory`.

A large pickle travels in a block. Its length is not known beforehand, so it would have to
be made in ordinary memory, and then copied. The first access to that memory's pages takes
longer than the copy. But messages are alike: a list with as many items as the last one
takes about as many bytes. So the block can be allocated first; its memory is warm from
the last message.
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
"""The block is larger than the expected size by 1/16."""
_MOST_KINDS = 64
"""How many kinds of objects are remembered. With more, all are forgotten."""
_CONTAINERS = frozenset((list, tuple, dict, set, frozenset))

_sizes: dict[object, int] = {}
"""Bytes of the last pickle in a block, by kind of object."""


def _kind_of(obj: object) -> object:
    kind = type(obj)
    # Of other types len() may take long.
    length = len(cast("Sized", obj)) if kind in _CONTAINERS else 0
    return kind.__module__, kind.__qualname__, length


def expected_size(obj: object) -> int:
    """Return the size of the last large pickle of an object of this type and length, or 0.

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
    """Note the size of an object's pickle; 0 for one that needed no block."""
    if not nbytes:
        _sizes.pop(_kind_of(obj), None)
        return
    if len(_sizes) >= _MOST_KINDS:
        _sizes.clear()
    _sizes[_kind_of(obj)] = nbytes


class PresizedBuffer:
    """The file that a pickler writes to: a block, and ordinary memory for what does not fit.

    Parameters
    ----------
    message : Message
        Allocates the block. It keeps the block if the pickle is left there.
    nbytes : int
        The expected size of the pickle.
    least : int
        A smaller pickle is not left in the block.
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
            # Not enough memory, descriptors or leases. The pickle may turn out to be smaller.
            given = None
        self._view = None if given is None else given[0]

    def write(self, data: Any) -> int:
        """Write what the pickler passes, as a file does."""
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
        """Return the pickle: in the block, or in ordinary memory if its size does not suit it."""
        self._leave_parents_block()
        view, end = self._view, self._end
        if view is not None and self._rest is None and end > max(self._least, len(view) // 2):
            return view[:end]
        return self._leave_block()

    def getvalue(self) -> bytes:
        """Return the pickle as bytes, and give the block back."""
        self._leave_parents_block()
        return bytes(self._leave_block())

    def _leave_parents_block(self) -> None:
        """Go on in ordinary memory if this is a child that was forked during pickling."""
        if self._view is not None and os.getpid() != self._process:
            # The block is the parent's, so only read what was written before the fork.
            self._gather()

    def _leave_block(self) -> memoryview:
        view = self._view
        if view is not None:
            self._gather()
            self._message.take_back(view)
        return (self._rest or io.BytesIO()).getbuffer()

    def _gather(self) -> None:
        """Copy what is in the block to ordinary memory."""
        view, rest = self._view, self._rest
        if view is not None:
            whole = io.BytesIO()
            whole.write(view[: self._end - (0 if rest is None else rest.tell())])
            if rest is not None:
                whole.write(rest.getbuffer())
            self._view, self._rest = None, whole
