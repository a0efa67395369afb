"""What the channels of shmreduce send for an object, and how a message is unpickled.

May import errors, settings, :mod:`shmreduce.memory`, ``copying``,
``free_descriptors``, ``pickled_calls``, ``pickler``, ``plain_objects``, ``presized_pickle``,
``process_registry`` and, for a type, ``registry``.
"""

from __future__ import annotations

import io
import os
import pickle
from _thread import allocate_lock, start_new_thread
from contextlib import suppress

# Imported early. The reducers of the standard library import it when they first need
# it, and a child that is forked during that import waits for the import lock for ever.
from multiprocessing import resource_sharer  # noqa: F401
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

from shmreduce.copying import copy_bytes
from shmreduce.errors import (
    AlreadyLoadedError,
    AttachError,
    ForeignSegmentError,
    LeaseTimeoutError,
    OutOfLeasesError,
    ProducerDied,
    SegmentError,
    SegmentGoneError,
    ShmreduceError,
    WrongHostError,
)
from shmreduce.free_descriptors import EXHAUSTED
from shmreduce.memory.handle import MARK
from shmreduce.memory.loading import (
    Loading,
    discard_message,
    here,
    import_block,
    with_arrived,
)
from shmreduce.memory.mapping import make_root
from shmreduce.memory.message import Message
from shmreduce.memory.mover import take_mover
from shmreduce.memory.parts import IN_BLOCK, KEPT
from shmreduce.pickled_calls import CallOnLoad, pickle_of_call
from shmreduce.pickler import PROTOCOL, Begun, Run, claim_in, pickle_into
from shmreduce.plain_objects import is_plain, only_atoms
from shmreduce.presized_pickle import PresizedBuffer, expected_size, remember_size
from shmreduce.process_registry import get_registry
from shmreduce.settings import inline_limit

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from shmreduce.memory.lending import Lender
    from shmreduce.memory.mover import Mover
    from shmreduce.memory.parts import Limits
    from shmreduce.registry import Registry

    _Reduce = Callable[[Any, Message], Any]

__all__ = [
    "Pickled",
    "dump_parts",
    "dumps",
    "is_exhausted",
    "load_message",
    "load_whole",
    "loads",
    "loads_again",
    "unloaded",
]

_ALIGNMENT = 64
"""Alignment in bytes of the buffers in a block, as Arrow recommends:
https://arrow.apache.org/docs/format/Columnar.html#buffer-alignment-and-padding"""
_SMALL = 4 << 10
"""Bytes. A pickler that has made a larger pickle is not used again: it keeps larger tables."""
_SEARCHED = 32 << 10
"""Bytes. Up to this size, to look for handles takes less time than to prepare for some."""
_BYTES = frozenset((bytes, memoryview))
"""What channels pass on."""
_MOST_SPARE = 4
"""As many threads may pickle at once, or objects that send others while they are pickled."""


def load_message(
    load: Callable[..., Any],
    data: Any,
    arrived: Mapping[bytes, int] | None = None,
    lender: Lender | None = None,
    **options: Any,
) -> Any:
    """Unpickle a message by ``load(data, **options)``.

    Parameters
    ----------
    load : callable
        ``pickle.loads`` or the like.
    data : bytes-like
        The pickle.
    arrived : mapping of bytes to int, optional
        Descriptors of segments that came with it, by token. They stay the caller's.
    lender : Lender, optional
        Keeps the message's blocks once the program has dropped them.
    **options
        Passed on to ``load``.

    Returns
    -------
    object

    Raises
    ------
    AttachError
        If no descriptor is free, whoever needed one: a block, or the import of a module.
    Exception
        What ``load`` raises.

    Notes
    -----
    If unpickling fails, the memory of the message is given back. But if the error is
    temporary, such as a lack of descriptors, its ``message_bytes`` has the message,
    which can be loaded again.
    """
    if not arrived and lender is None and _names_no_memory(data):
        return load_whole(load, data, **options)
    loading, outer = Loading(arrived), here.loading
    try:
        here.loading = loading
        loaded = load(data, **options)
    except BaseException as error:
        if is_exhausted(error):
            _clear_frames(error)
            loading.undo()
            failed = unloaded(error, data)
            failed.message_bytes = loads_again(bytes(data))
            raise failed from error
        if _may_pass(error):
            _clear_frames(error)
            loading.undo()
            # Equal if this is a repeated try: then it is wrapped already.
            if error.message_bytes != data:
                error.message_bytes = loads_again(bytes(data))
        elif isinstance(error, RecursionError):
            # There may be too little stack left here to discard the message, so a new
            # thread does it. Starting one with _thread calls no Python function.
            done = allocate_lock()
            done.acquire()
            try:
                start_new_thread(_discard_apart, (arrived or {}, bytes(data), done.release))
            except RuntimeError:
                # No thread can be had. The message stays as if nobody had received it, and the
                # caller is told what has happened to the load.
                done.release()
            done.acquire()
        elif not isinstance(error, AlreadyLoadedError):
            # AlreadyLoadedError: somebody else is loading this message, and owns all of it.
            discard_message(data)
        raise
    else:
        if lender is not None:
            lender.watch(loading.blocks())
        return loaded
    finally:
        here.loading = outer
        try:
            loading.close()
        except BaseException:
            # Ctrl-C may have come before the first call did anything.
            loading.close()
            raise
        # Connection.recv() passes a view of a BytesIO. If a traceback kept the view, the
        # cycle collector could free both together, and CPython 3.13 complains if a
        # BytesIO is freed while views of it exist.
        del data


def load_whole(load: Callable[..., Any], data: Any, **options: Any) -> Any:
    """Unpickle a message that refers to no shared memory; see :func:`load_message`."""
    try:
        return load(data, **options)
    except Exception as error:
        if is_exhausted(error):
            raise unloaded(error, data) from error
        # A rebuild function may open other memory, such as a device's.
        if _may_pass(error) and error.message_bytes != data:
            error.message_bytes = loads_again(bytes(data))
        raise
    finally:
        # For the reason given in load_message().
        del data


def _names_no_memory(data: Any) -> bool:
    """Return whether a message is small and has no handle."""
    return type(data) in _BYTES and len(data) <= _SEARCHED and MARK not in bytes(data)


def _discard_apart(arrived: Mapping[bytes, int], data: bytes, tell: Callable[[], object]) -> None:
    try:
        with_arrived(arrived, discard_message, data)
    finally:
        tell()


def loads_again(data: bytes) -> bytes:
    """Return a pickle that loads the message ``data``, and can be loaded again if that fails.

    A failed try gives back what it has claimed, as :func:`load_message` does.
    """
    return pickle.dumps(CallOnLoad(_load_again, data), PROTOCOL)


def _load_again(data: bytes) -> Any:
    return load_message(pickle.loads, data)


def is_exhausted(error: BaseException) -> TypeGuard[OSError]:
    """Return whether an error means that no descriptor is free.

    Not only segments need one: so does the import of a module that is needed to unpickle.
    """
    return isinstance(error, OSError) and error.errno in EXHAUSTED


def unloaded(error: OSError, data: Any) -> AttachError:
    """Return the error for a message that can be loaded once a descriptor is free."""
    found = AttachError(
        f"no descriptor is free to load the message: {error}. Close files or raise the limit "
        "(ulimit -n), then give message_bytes of this error to pickle.loads",
        segment=None,
        locator=None,
        reason=error.strerror or str(error),
        errno=error.errno,
        pid=os.getpid(),
    )
    found.message_bytes = bytes(data)
    return found


def _clear_frames(error: BaseException) -> None:
    """Clear the frames of an error's traceback: views in them would keep blocks in use."""
    seen: list[BaseException | None] = [None]
    left = [error]
    while left:
        each = left.pop()
        seen.append(each)
        left += [one for one in (each.__cause__, each.__context__) if one and one not in seen]
        trace = each.__traceback__
        while trace is not None:
            # A frame that is still running, as that of load_message, cannot be cleared.
            with suppress(RuntimeError):
                trace.tb_frame.clear()
            trace = trace.tb_next


def _may_pass(error: BaseException) -> TypeGuard[ShmreduceError]:
    """Return whether an error is temporary: the message may load later, and all of it is left."""
    passing = AttachError | SegmentError | LeaseTimeoutError | OutOfLeasesError
    return isinstance(error, passing) and not isinstance(
        error, ProducerDied | SegmentGoneError | WrongHostError | ForeignSegmentError
    )


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
    >>> loads(data)
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
                whole = CallOnLoad(_load_with_buffers, handle, places, file.getvalue())
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


def loads(data: Any) -> Any:
    """Unpickle a message; see :func:`load_message`.

    Examples
    --------
    >>> loads(b"N.") is None
    True
    """
    try:
        return load_message(pickle.loads, data)
    finally:
        del data


def _load_with_buffers(handle: bytes, places: list[tuple[int, int, bool]], data: bytes) -> Any:
    """Unpickle an object whose buffers are in a block."""
    everything = import_block(handle).buffer
    views = []
    for start, size, readonly in places:
        # Not a slice of the block: an object may look at ``obj`` of its view, and must find
        # only its own bytes there.
        view = memoryview(make_root(everything, start, size)).cast("B")
        views.append(view.toreadonly() if readonly else view)
    return pickle.loads(data, buffers=views)
