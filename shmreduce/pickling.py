"""One run of a pickler: reducers by type, and what becomes of the message.

May import errors, settings, registry, process_registry, :mod:`shmreduce.memory`,
``copying``, ``pickled_calls``, ``plain_objects`` and ``presized_pickle``.
Changes nothing outside itself: :mod:`shmreduce.forking` puts these functions
into ``ForkingPickler``, the channels of shmreduce use :class:`Pickler`.

While it dumps, a pickler keeps its :class:`Message` among its attributes. It is
made when a reducer first needs it, committed when the dump succeeds and rolled
back when it fails.
"""

from __future__ import annotations

import copyreg
import io
import os
import pickle
from _thread import allocate_lock, start_new_thread
from contextlib import suppress

# The reducers of the standard library import it when they need it; a child that
# is forked in the middle of that waits for the import lock for ever.
from multiprocessing import resource_sharer  # noqa: F401
from multiprocessing.reduction import ForkingPickler
from types import BuiltinFunctionType, FunctionType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

from shmreduce.copying import copy_bytes
from shmreduce.errors import (
    AlreadyLoadedError,
    AttachError,
    ForeignSegmentError,
    LeaseTimeoutError,
    OutOfLeasesError,
    ProducerDied,
    ReducerError,
    SegmentError,
    SegmentGoneError,
    ShmreduceError,
    WrongHostError,
)
from shmreduce.memory.attachments import EXHAUSTED
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
from shmreduce.pickled_calls import CallOnLoad, pickle_of_call
from shmreduce.plain_objects import is_plain, override_of_others, says_all
from shmreduce.presized_pickle import PresizedBuffer, expected_size, remember_size
from shmreduce.process_registry import get_registry
from shmreduce.registry import describe, qualified_name
from shmreduce.settings import get_settings

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from shmreduce.memory.lending import Lender
    from shmreduce.memory.mover import Mover
    from shmreduce.registry import ReducerClaim

__all__ = [
    "Begun",
    "Pickled",
    "Pickler",
    "ask_reducer",
    "dump_message",
    "dumps",
    "is_exhausted",
    "load_message",
    "loads",
    "loads_again",
    "reducer_claim",
    "unloaded",
]

_MESSAGE = "_shmreduce_message"
"""Where a pickler keeps the message of the run under way; None until it is needed."""
_MOVER = "_shmreduce_mover"
"""Where a pickler keeps who moves the arrays of that message, if anybody."""
_PROTOCOL = 5
"""The first with buffers out of band: https://peps.python.org/pep-0574/"""
_REDUCED = (tuple, str)
"""What ``__reduce__`` may return; a union would be made anew at each look."""
_ALIGNMENT = 64
"""Of the buffers in a block, as Arrow asks for:
https://arrow.apache.org/docs/format/Columnar.html#buffer-alignment-and-padding"""


# What any pickler does


def ask_reducer(
    pickler: Any,
    obj: Any,
    claim: ReducerClaim,
    *,
    outranked: Mapping[type, object],
    shared_memory: Callable[[], bool],
    in_pipe: bool,
) -> Any:
    """Return what a reducer makes of an object, for ``reducer_override``.

    Parameters
    ----------
    pickler : pickle.Pickler
        In a dump by :func:`dump_message`.
    obj : object
        What is being pickled.
    claim : ReducerClaim
        Whom the registry named for its type.
    outranked : mapping of type to callable
        Reducers of the pickler's own that the registry goes before; any other
        that is registered for this very class wins.
    shared_memory : callable
        Whether a message that is begun now may use shared memory.
    in_pipe : bool
        As for :class:`Message`.

    Returns
    -------
    tuple, str or NotImplemented
        As of ``__reduce__``; NotImplemented for the ordinary way.

    Raises
    ------
    ReducerError
        If the reducer returns anything else.
    """
    state = pickler.__dict__
    if _MESSAGE not in state or _is_outranked(pickler, type(obj), outranked):
        return NotImplemented
    message = state[_MESSAGE]
    if message is None:
        message = state[_MESSAGE] = Message(shared_memory(), state[_MOVER], in_pipe=in_pipe)
    result = claim.reducer.reduce(obj, message)
    if not isinstance(result, _REDUCED) and result is not NotImplemented:
        _reject_result(claim, obj, result)
    return result


def dump_message(
    pickler: Any,
    obj: Any,
    dump: Callable[[Any, Any], None],
    begun: Message | None = None,
    mover: Mover | None = None,
) -> Message | None:
    """Pickle an object by ``dump(pickler, obj)``, the pickler's own method.

    Returns the message, to be committed or rolled back, or None if no reducer
    needed one; it is ``begun`` if that is given. If pickling fails nothing is
    held afterwards. ``mover`` is what :func:`take_mover` has said of the object,
    if that was asked before.
    """
    state = pickler.__dict__
    state[_MESSAGE] = begun
    state[_MOVER] = mover or take_mover(obj)
    try:
        dump(pickler, obj)
    except BaseException:
        if state[_MESSAGE] is not None:
            state[_MESSAGE].rollback()
        raise
    else:
        message: Message | None = state[_MESSAGE]
        return message
    finally:
        del state[_MESSAGE], state[_MOVER]


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
        Descriptors of segments that came with it, by token; the caller's.
    lender : Lender, optional
        Who keeps the blocks that it brings once they are dropped.
    **options
        Of ``load``.

    Notes
    -----
    If that fails, what the message holds is given back. An error that may pass
    has the message in ``message_bytes`` instead, which can be loaded again.
    """
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
            # Unless this is another try already.
            if error.message_bytes != data:
                error.message_bytes = loads_again(bytes(data))
        elif isinstance(error, RecursionError):
            # There may be too little stack left to discard it. Another thread has its own,
            # and no function of Python is needed to start that.
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
            # What another loader has begun is that loader's, whole.
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
            # Ctrl-C, maybe before anything was ended.
            loading.close()
            raise
        # Connection.recv() passes a view of a BytesIO. In a traceback it would
        # be collected together with it, and CPython 3.13 complains of a BytesIO
        # that dies with views.
        del data


def _discard_apart(arrived: Mapping[bytes, int], data: bytes, tell: Callable[[], object]) -> None:
    try:
        with_arrived(arrived, discard_message, data)
    finally:
        tell()


def loads_again(data: bytes) -> bytes:
    """Return a pickle of what a message brings, which can be tried any number of times.

    What a try that fails has claimed is given back, as by :func:`load_message`.
    """
    return pickle.dumps(CallOnLoad(_load_again, data), _PROTOCOL)


def _load_again(data: bytes) -> Any:
    return load_message(pickle.loads, data)


def is_exhausted(error: BaseException) -> TypeGuard[OSError]:
    """Return whether no descriptor was free, as to import what is needed to unpickle."""
    return isinstance(error, OSError) and error.errno in EXHAUSTED


def unloaded(error: OSError, data: Any) -> AttachError:
    """Return what to raise for a message that loads once a descriptor is free."""
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


def _is_outranked(pickler: Any, cls: type, outranked: Mapping[type, object]) -> bool:
    """Whether somebody has registered this very class with the pickler itself."""
    reduce = pickler.dispatch_table.get(cls)
    return (
        reduce is not None
        # How the class is pickled anywhere: what reducers are there to replace.
        and reduce is not copyreg.dispatch_table.get(cls)
        and reduce is not outranked.get(cls)
    )


def _clear_frames(error: BaseException) -> None:
    """Drop the local variables of what has failed: views there would count as somebody's."""
    seen: list[BaseException | None] = [None]
    left = [error]
    while left:
        each = left.pop()
        seen.append(each)
        left += [one for one in (each.__cause__, each.__context__) if one and one not in seen]
        trace = each.__traceback__
        while trace is not None:
            # Frames that are running, as that of load_message, refuse.
            with suppress(RuntimeError):
                trace.tb_frame.clear()
            trace = trace.tb_next


def _may_pass(error: BaseException) -> TypeGuard[ShmreduceError]:
    """Whether the same message may load later: nothing of the block was claimed."""
    passing = AttachError | SegmentError | LeaseTimeoutError | OutOfLeasesError
    return isinstance(error, passing) and not isinstance(
        error, ProducerDied | SegmentGoneError | WrongHostError | ForeignSegmentError
    )


def _reject_result(claim: ReducerClaim, obj: Any, result: Any) -> None:
    type_name = qualified_name(type(obj))
    raise ReducerError(
        f"reducer {describe(claim.reducer)} ({claim.origin}) returned "
        f"{type(result).__name__} for {type_name}: reduce() must return a tuple "
        "(rebuild, args) or NotImplemented",
        reducer=describe(claim.reducer),
        type_name=type_name,
        reason=f"returned {type(result).__name__}",
    )


# The pickler of our own channels


class Pickled(NamedTuple):
    """A pickle, and the message to be committed or rolled back if there is one."""

    data: memoryview
    message: Message | None


class Begun(NamedTuple):
    """An object, what its reducer returned, and the message that this is part of."""

    obj: object
    reduced: tuple[Any, ...]
    message: Message


class Pickler(ForkingPickler):
    """Pickles for the channels of shmreduce.

    What was registered by ``ForkingPickler.register``, or is done by a
    ``reducer_override`` that somebody has given to that class, holds here too.
    Large buffers that objects offer out of band go into one block per message.

    Parameters
    ----------
    file : binary file
        Where to write; the caller's.
    keep_buffer : callable, optional
        Takes a buffer offered out of band and returns False, or returns True
        for one that is to be pickled like anything else.
    begun : Begun, optional
        What a reducer has made already of the object to be dumped.
    message : Message, optional
        What the object is a part of; ``begun`` has the same.
    mover : Mover, optional
        Who moves the arrays of the object.
    in_pipe : bool
        As for :class:`Message`, where none is given.
    """

    def __init__(
        self,
        file: io.BytesIO | PresizedBuffer,
        keep_buffer: Callable[[pickle.PickleBuffer], bool] | None = None,
        begun: Begun | None = None,
        message: Message | None = None,
        mover: Mover | None = None,
        *,
        in_pipe: bool = False,
    ) -> None:
        super().__init__(file, _PROTOCOL, True, keep_buffer)
        self._find = get_registry().find
        self._begun = begun
        self._message = message
        self._mover = mover
        self._in_pipe = in_pipe

    def reducer_override(self, obj: Any) -> Any:
        """Return how to pickle an object, or NotImplemented for the ordinary way."""
        if self._begun is not None and obj is self._begun.obj:
            return self._begun.reduced
        claim = self._find(type(obj))
        result = NotImplemented
        if claim is not None:
            result = ask_reducer(
                self,
                obj,
                claim,
                outranked=_NOBODY,
                shared_memory=_always,
                in_pipe=self._in_pipe,
            )
        if result is NotImplemented:
            if self._mover is not None and not isinstance(obj, _NAMED):
                # Its own methods are called now, and may write to arrays.
                self._mover.cut_off()
            others = override_of_others()
            if others is not None:
                return others(self, obj)
        return result

    def dump(self, obj: Any) -> Message | None:  # type: ignore[override]
        """Pickle an object; return the message, not committed yet, if there is one."""
        return dump_message(self, obj, pickle.Pickler.dump, self._message, self._mover)


_NOBODY: Mapping[type, object] = {}
_NAMED = (type, FunctionType, BuiltinFunctionType)
"""What is pickled as a name, by no methods of its own."""


def _always() -> bool:
    return True


class _Buffers:
    """The buffers of one message that were offered out of band, in order."""

    __slots__ = ("kept",)

    def __init__(self) -> None:
        self.kept: list[memoryview] = []

    def keep(self, buffer: pickle.PickleBuffer) -> bool:
        """Keep a large contiguous buffer and return False; True for any other."""
        try:
            raw = buffer.raw()
        except BufferError:
            # Not contiguous: pickle says so.
            return True
        if raw.nbytes < get_settings().inline_limit:
            return True
        self.kept.append(raw)
        return False

    def copy(self, message: Message) -> tuple[bytes, list[tuple[int, int, bool]]] | None:
        """Copy them into a block; return its handle and (offset, size, read-only) of each.

        Returns None if the message gets no block.
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
        What to pickle.
    block_from : int, optional
        Bytes from which the pickle may be in a block of the message, for which
        see :meth:`Message.handle_of`. If not given it never is, and is kept short, as one
        for a pipe.
    mover : Mover, optional
        Who moves the arrays of the object; else whom :func:`take_mover` names.

    Returns
    -------
    Pickled
        The caller commits the message, or rolls it back. The data can be
        unpickled by anybody, once, as any pickle.

    Raises
    ------
    OutOfSharedMemoryError, BudgetExceededError
        If there is no room; nothing is held then, as after any other error.

    Examples
    --------
    >>> data, message = dumps({"a": 1})
    >>> loads(data)
    {'a': 1}
    >>> message is None
    True
    """
    if is_plain(obj):
        return Pickled(memoryview(pickle.dumps(obj, _PROTOCOL)), None)
    kind = type(obj)
    mover = mover or take_mover(obj)
    claim = reducer_claim(kind)
    if claim is None:
        return _dump_whole(obj, mover, block_from=block_from)
    message = Message(mover=mover, in_pipe=block_from is None)
    try:
        reduced = claim.reducer.reduce(obj, message)
        if type(reduced) is tuple and len(reduced) == 2 and says_all(reduced[1]):
            # Nobody has to be asked about any part of it: the quick pickler will do.
            return Pickled(memoryview(pickle_of_call(*reduced)), message)
    except BaseException:
        message.rollback()
        raise
    if type(reduced) is tuple:
        return _dump_whole(obj, mover, Begun(obj, reduced, message), block_from)
    # In the ordinary way; or the reducer is at fault, and is told so there.
    message.rollback()
    return _dump_whole(obj, mover, block_from=block_from)


def reducer_claim(cls: type) -> ReducerClaim | None:
    """Return who reduces objects of a class in our channels; the registry, unless overruled."""
    claim = get_registry().find(cls)
    if claim is None or cls in ForkingPickler._extra_reducers:  # type: ignore[attr-defined]
        return None
    return claim


def _dump_whole(
    obj: Any, mover: Mover | None, begun: Begun | None = None, block_from: int | None = None
) -> Pickled:
    message = None if begun is None else begun.message
    file: io.BytesIO | PresizedBuffer = io.BytesIO()
    expected = 0 if block_from is None else expected_size(obj)
    if block_from is not None and expected:
        message = message or Message(mover=mover)
        file = PresizedBuffer(message, expected, block_from)
    buffers = _Buffers()
    in_pipe = block_from is None
    message = Pickler(file, buffers.keep, begun, message, mover, in_pipe=in_pipe).dump(obj)
    try:
        if buffers.kept:
            message = message or Message(mover=mover)
            copied = buffers.copy(message)
            if copied is not None:
                handle, places = copied
                whole = CallOnLoad(_load_with_buffers, handle, places, file.getvalue())
                return Pickled(memoryview(pickle.dumps(whole, _PROTOCOL)), message)
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
    file = io.BytesIO()
    message = Pickler(file).dump(obj)
    return Pickled(file.getbuffer(), message)


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
        # Not a slice: the ``obj`` of a view, which an object may ask for, is its bytes alone.
        view = memoryview(make_root(everything, start, size)).cast("B")
        views.append(view.toreadonly() if readonly else view)
    return pickle.loads(data, buffers=views)
