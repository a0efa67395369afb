"""How a message is unpickled: with what it refers to, completely, or not at all.

May import errors, :mod:`shmreduce.memory`, ``free_descriptors`` and ``pickled_calls``.

Apart from :mod:`shmreduce.pickling`, since a child that only receives imports half as much.
"""

from __future__ import annotations

import os
import pickle
from _thread import allocate_lock, start_new_thread
from contextlib import suppress

# Imported early. Connections and the like need it when they are pickled or unpickled for the
# first time, and a child that is forked during that import waits for the import lock for ever.
from multiprocessing import resource_sharer  # noqa: F401
from typing import TYPE_CHECKING, Any, TypeGuard

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
from shmreduce.memory.handle import has_mark
from shmreduce.memory.loading import (
    Loading,
    discard_message,
    here,
    import_block,
    with_arrived,
)
from shmreduce.memory.mapping import make_root
from shmreduce.pickled_calls import PROTOCOL, CallOnLoad

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from shmreduce.memory.lending import Lender

__all__ = [
    "discard_apart",
    "load_message",
    "load_whole",
    "load_with_buffers",
    "loads",
    "loads_again",
]

_SEARCHED = 32 << 10
"""Bytes. Up to this size, to look for handles takes less time than to prepare for some."""
_BYTES = frozenset((bytes, memoryview))
"""What channels pass on."""


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
        if isinstance(error, RecursionError):
            # Asked first: there may be too little stack left for the other questions.
            discard_apart(discard_message, arrived or {}, data)
        elif _is_exhausted(error):
            _clear_frames(error)
            loading.undo()
            failed = _unloaded(error, data)
            failed.message_bytes = loads_again(bytes(data))
            raise failed from error
        elif _may_pass(error):
            _clear_frames(error)
            loading.undo()
            # Equal if this is a repeated try: then it is wrapped already.
            if error.message_bytes != data:
                error.message_bytes = loads_again(bytes(data))
        elif not isinstance(error, AlreadyLoadedError):
            # AlreadyLoadedError: somebody else is loading this message, and owns all of it.
            try:
                discard_message(data)
            except RecursionError:
                # ctypes may have made another error of the first one.
                discard_apart(discard_message, arrived or {}, data)
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
        if _is_exhausted(error):
            raise _unloaded(error, data) from error
        # A rebuild function may open other memory, such as a device's.
        if _may_pass(error) and error.message_bytes != data:
            error.message_bytes = loads_again(bytes(data))
        raise
    finally:
        # For the reason given in load_message().
        del data


def _names_no_memory(data: Any) -> bool:
    """Return whether a message is small and has no handle."""
    return type(data) in _BYTES and len(data) <= _SEARCHED and not has_mark(bytes(data))


def discard_apart(
    discard: Callable[[bytes], None], arrived: Mapping[bytes, int], data: Any
) -> None:
    """Discard a message whose load has used up the stack, in a new thread, which has its own.

    If no thread can be had, the message stays as if nobody had received it.

    Parameters
    ----------
    discard : callable
        Called with the bytes of ``data``.
    arrived, data
        As for :func:`load_message`. It may be called wherever a Python function has been
        called that did return.
    """
    # No Python function is called here: there may be no stack left for one.
    done = allocate_lock()
    done.acquire()
    try:
        start_new_thread(_discard, (discard, arrived, bytes(data), done.release))
    except RuntimeError:
        return
    done.acquire()


def _discard(
    discard: Callable[[bytes], None],
    arrived: Mapping[bytes, int],
    data: bytes,
    tell: Callable[[], object],
) -> None:
    try:
        with_arrived(arrived, discard, data)
    finally:
        tell()


def loads_again(data: bytes) -> bytes:
    """Return a pickle that loads the message ``data``, and can be loaded again if that fails.

    A failed try gives back what it has claimed, as :func:`load_message` does.
    """
    return pickle.dumps(CallOnLoad(_load_again, data), PROTOCOL)


def _load_again(data: bytes) -> Any:
    return load_message(pickle.loads, data)


def _is_exhausted(error: BaseException) -> TypeGuard[OSError]:
    """Return whether an error means that no descriptor is free.

    Not only segments need one: so does the import of a module that is needed to unpickle.
    """
    return isinstance(error, OSError) and error.errno in EXHAUSTED


def _unloaded(error: OSError, data: Any) -> AttachError:
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


def load_with_buffers(handle: bytes, places: list[tuple[int, int, bool]], data: bytes) -> Any:
    """Unpickle an object whose buffers are in a block."""
    everything = import_block(handle).buffer
    views = []
    for start, size, readonly in places:
        # Not a slice of the block: an object may look at ``obj`` of its view, and must find
        # only its own bytes there.
        view = memoryview(make_root(everything, start, size)).cast("B")
        views.append(view.toreadonly() if readonly else view)
    return pickle.loads(data, buffers=views)
