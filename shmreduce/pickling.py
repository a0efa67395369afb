"""What the channels of shmreduce send for an object.

May import errors, settings, :mod:`shmreduce.memory`, ``copying``, ``pickled_calls``,
``pickler``, ``plain_objects``, ``presized_pickle``, ``process_registry``, ``unpickling`` and,
for a type, ``registry``.
"""

from __future__ import annotations

import io
import pickle
from typing import TYPE_CHECKING, Any, NamedTuple

from shmreduce.copying import copy_bytes
from shmreduce.memory.message import Message
from shmreduce.memory.mover import take_mover
from shmreduce.memory.parts import IN_BLOCK, KEPT
from shmreduce.pickled_calls import PROTOCOL, CallOnLoad, pickle_of_call
from shmreduce.pickler import Begun, Run, claim_in, pickle_into
from shmreduce.plain_objects import is_plain, only_atoms
from shmreduce.presized_pickle import PresizedBuffer, expected_size, remember_size
from shmreduce.process_registry import get_registry
from shmreduce.settings import inline_limit
from shmreduce.unpickling import load_with_buffers

if TYPE_CHECKING:
    from shmreduce.memory.mover import Mover
    from shmreduce.memory.parts import Limits
    from shmreduce.registry import Registry

__all__ = ["Pickled", "dump_parts", "dumps"]

_ALIGNMENT = 64
"""Alignment in bytes of the buffers in a block, as Arrow recommends:
https://arrow.apache.org/docs/format/Columnar.html#buffer-alignment-and-padding"""
_SMALL = 4 << 10
"""Bytes. A pickler that has made a larger pickle is not used again: it keeps larger tables."""
_MOST_SPARE = 4
"""As many threads may pickle at once, or objects that send others while they are pickled."""


class Pickled(NamedTuple):
    """A pickle, and its message, if there is one, to be committed or rolled back."""

    data: memoryview
    message: Message | None


class _Buffers:
    """The out-of-band buffers of one message, in order."""

    __slots__ = ("kept",)

    def __init__(self) -> None:
        self.kept: list[memoryview] = []

    def keep(self, buffer: pickle.PickleBuffer) -> bool:
        """Keep a large contiguous buffer and return False; True for any other."""
        try:
            raw = buffer.raw()
        except BufferError:
            # Not contiguous: pickle raises the error.
            return True
        if raw.nbytes < inline_limit():
            return True
        self.kept.append(raw)
        return False

    def copy(self, message: Message) -> tuple[bytes, list[tuple[int, int, bool]]] | None:
        """Copy them into a block; return its handle and each (offset, size, read-only).

        Returns None if the message does not get a block.
        """
        places = []
        end = 0
        for raw in self.kept:
            start = -(-end // _ALIGNMENT) * _ALIGNMENT
            end = start + raw.nbytes
            places.append((start, raw.nbytes, raw.readonly))
        given = message.allocate(end)
        if given is None:
            return None
        view, handle = given
        for raw, (start, size, _) in zip(self.kept, places, strict=True):
            copy_bytes(view[start : start + size], raw)
        return handle, places


def dumps(obj: Any, block_from: int | None = None, mover: Mover | None = None) -> Pickled:
    """Pickle an object for a channel of shmreduce.

    Parameters
    ----------
    obj : object
        The object to pickle.
    block_from : int, optional
        A pickle of at least this many bytes may be in a block of the message, see
        :meth:`Message.handle_of`. By default it never is, and it is kept short.
    mover : Mover, optional
        Moves the arrays of the object; by default the result of :func:`take_mover`.

    Returns
    -------
    Pickled
        The caller commits the message, or rolls it back. The data is an ordinary pickle:
        any process can unpickle it, once.

    Raises
    ------
    OutOfSharedMemoryError, BudgetExceededError
        If there is no room. After any error, all memory is given back.

    Examples
    --------
    >>> data, message = dumps({"a": 1})
    >>> pickle.loads(data)
    {'a': 1}
    >>> message is None
    True
    """
    if is_plain(obj):
        return Pickled(memoryview(pickle.dumps(obj, PROTOCOL)), None)
    return dump_parts(obj, block_from, mover or take_mover(obj))


def dump_parts(obj: Any, block_from: int | None, mover: Mover | None) -> Pickled:
    """Pickle an object that is not plain; see :func:`dumps`."""
    registry = get_registry()
    claim = claim_in(registry, type(obj))
    if claim is None:
        return _dump_whole(obj, registry, mover, None, block_from)
    message = Message(mover=mover, limits=_limits(block_from))
    try:
        reduced = claim.reducer.reduce(obj, message)
        if type(reduced) is tuple and len(reduced) == 2 and only_atoms(reduced[1]):
            # No reducer claims any part of it, so the fast path can pickle it.
            return Pickled(memoryview(pickle_of_call(*reduced)), message)
    except BaseException:
        message.rollback()
        raise
    if type(reduced) is tuple:
        return _dump_whole(obj, registry, mover, Begun(obj, reduced, message), block_from)
    # NotImplemented; or an invalid result, for which the pickler below raises.
    message.rollback()
    return _dump_whole(obj, registry, mover, None, block_from)


def _limits(block_from: int | None) -> Limits:
    return KEPT if block_from is None else IN_BLOCK


class _Pickling:
    """A pickler, with the file that it writes to and the buffers that it keeps out of it."""

    __slots__ = ("buffers", "file", "run")

    def __init__(self, file: io.BytesIO | PresizedBuffer, registry: Registry) -> None:
        self.file = file
        self.buffers = _Buffers()
        self.run = Run(file, self.buffers.keep, registry)


_spare: list[_Pickling] = []
"""Those that have pickled small objects, and are not in use."""


def _dump_whole(
    obj: Any,
    registry: Registry,
    mover: Mover | None,
    begun: Begun | None,
    block_from: int | None,
) -> Pickled:
    message = None if begun is None else begun.message
    expected = 0 if block_from is None else expected_size(obj)
    if block_from is not None and expected:
        message = message or Message(mover=mover)
        used = _Pickling(PresizedBuffer(message, expected, block_from), registry)
    else:
        try:
            used = _spare.pop()
        except IndexError:
            used = _Pickling(io.BytesIO(), registry)
        if not used.run.is_current(registry):
            used = _Pickling(io.BytesIO(), registry)
    file, buffers = used.file, used.buffers
    message = used.run.dump(obj, begun, message, mover, _limits(block_from))
    try:
        if buffers.kept:
            message = message or Message(mover=mover)
            copied = buffers.copy(message)
            if copied is not None:
                handle, places = copied
                whole = CallOnLoad(load_with_buffers, handle, places, file.getvalue())
                return Pickled(memoryview(pickle.dumps(whole, PROTOCOL)), message)
        elif type(file) is io.BytesIO and file.tell() <= _SMALL:
            # A copy, so that the file can be used again.
            data = memoryview(file.getvalue())
            file.seek(0)
            file.truncate()
            if len(_spare) < _MOST_SPARE:
                _spare.append(used)
            return Pickled(data, message)
        else:
            data = file.getbuffer()
            if block_from is not None and (expected or data.nbytes > block_from):
                remember_size(obj, data.nbytes if data.nbytes > block_from else 0)
            return Pickled(data, message)
    except BaseException:
        if message is not None:
            message.rollback()
        raise
    message.rollback()
    whole_file = io.BytesIO()
    message = pickle_into(whole_file, obj)
    return Pickled(whole_file.getbuffer(), message)
