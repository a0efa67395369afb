"""The functions that users call, and the one that the reducer calls.

May import public names of :mod:`shmreduce`, and ``errors``, ``events``,
``runtime``, ``sending`` and ``sources`` of this plugin.
"""

from __future__ import annotations

import weakref
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from shmreduce import ShmreduceError
from shmreduce_cuda.errors import CudaSharingError
from shmreduce_cuda.events import stream_handle
from shmreduce_cuda.runtime import current
from shmreduce_cuda.sending import OwnArray, prepare
from shmreduce_cuda.sources import read_array

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shmreduce import Message
    from shmreduce_cuda.sending import Outgoing

__all__ = ["SharedArray", "Stats", "collect", "reduce_array", "share", "stats"]


class SharedArray:
    """An array that was prepared for sending; :func:`share` makes it.

    Put it into messages; receivers get the array. While it is kept, its messages can be
    loaded any number of times.

    Attributes
    ----------
    array : object
        The array.
    """

    __slots__ = ("__weakref__", "_event", "_outgoing", "_waits", "array")

    def __init__(
        self, array: Any, outgoing: Outgoing, event: tuple[bytes, bytes] | None, *, waits: bool
    ) -> None:
        self.array = array
        self._outgoing = outgoing
        self._event = event
        self._waits = waits

    def __reduce__(self) -> NoReturn:
        raise CudaSharingError(
            "a SharedArray is pickled by shmreduce only, for a process on this host: call "
            "shmreduce.install(), or use the channels of shmreduce"
        )

    def __repr__(self) -> str:
        layout = self._outgoing.source.layout
        return f"<{type(self).__name__} {layout.shape} of {layout.dtype_name or layout.typestr}>"


def share(array: Any, stream: Any = None) -> SharedArray:
    """Prepare an array for sending, in the thread that knows its stream.

    Parameters
    ----------
    array : object
        An object with ``__cuda_array_interface__`` or ``__dlpack__``, or a tensor of
        torch. It is not copied.
    stream : optional
        A handle, or a stream of CuPy, numba or torch. Receivers wait until this stream has
        done its earlier work, and for nothing else. By default, all devices in use are
        waited for when the array is pickled, as for an array that is sent directly.

    Returns
    -------
    SharedArray
        An object to put into messages.

    Raises
    ------
    CudaMemoryError
        If its memory is of a kind that cannot be sent.
    CudaUnavailableError
        If there is no driver.

    Examples
    --------
    An array that is not on a device raises an error:

    >>> import numpy as np
    >>> share(np.zeros(3))
    Traceback (most recent call last):
        ...
    shmreduce_cuda.errors.CudaMemoryError: numpy.ndarray cannot be sent: it is host memory; ...
    """
    handle = None if stream is None else stream_handle(stream)
    outgoing = prepare(read_array(array))
    with _discarding(outgoing):
        event = None if handle is None else outgoing.record(handle)
    shared = SharedArray(array, outgoing, event, waits=stream is None)
    if isinstance(outgoing, OwnArray):
        outgoing.export.wrapper = weakref.ref(shared)
        _hold(outgoing)
    return shared


def reduce_array(obj: Any, message: Message) -> tuple[Any, ...]:
    """Return how to rebuild an array, with a lease for the message."""
    if isinstance(obj, SharedArray):
        if obj._waits:
            obj._outgoing.wait()
        return obj._outgoing.reduce(message, obj._event)
    outgoing = prepare(read_array(obj))
    with _discarding(outgoing):
        outgoing.wait()
        reduced = outgoing.reduce(message, None)
    if isinstance(outgoing, OwnArray):
        _hold(outgoing)
    return reduced


@contextmanager
def _discarding(outgoing: Outgoing) -> Iterator[None]:
    """Discard the export if the block raises."""
    try:
        yield
    except BaseException:
        if isinstance(outgoing, OwnArray):
            current().exports.discard(outgoing.export)
        raise


def _hold(outgoing: OwnArray) -> None:
    runtime = current()
    runtime.exports.hold(outgoing.export)
    # What is wrong with an earlier array must not keep this one from being sent; the thread
    # finds it, too, and stats() reports it.
    with suppress(ShmreduceError, OSError):
        runtime.exports.reclaim_some()
    if len(runtime.offers):
        runtime.keeper.listen()
    runtime.keeper.look_after()


def collect() -> int:
    """Free the sent arrays that their receivers have dropped; return how many.

    It need not be called, since a thread does this several times a second. It also closes
    the memory of received arrays that were dropped, and tries again where that failed.

    Examples
    --------
    >>> collect()
    0
    """
    return current().collect()


@dataclass(frozen=True)
class Stats:
    """What this process has sent and received; :func:`stats` returns it.

    Parameters
    ----------
    exports : int
        Sent arrays that are kept for receivers or messages.
    exported_bytes : int
        Bytes of the allocations that they lie in.
    given_up : int
        Sent arrays that were freed.
    arrays : int
        Received arrays that are alive.
    mappings : int
        Allocations of other processes that are open, also those that nobody uses any more
        and that will be closed in a moment.
    opened, closed : int
        How many such allocations were opened and closed so far.
    offers : int
        Pools and pieces of virtual memory whose descriptors are kept.
    events : int
        Events that were made or opened.
    stuck : int
        Received arrays that were dropped, but could not be closed so far, because the
        device has failed or was capturing a graph.
    fault : str
        The last error of the thread that frees arrays; empty if there was none.
    """

    exports: int
    exported_bytes: int
    given_up: int
    arrays: int
    mappings: int
    opened: int
    closed: int
    offers: int
    events: int
    stuck: int
    fault: str


def stats() -> Stats:
    """Return what this process has sent and received.

    Examples
    --------
    >>> stats().mappings
    0
    """
    runtime = current()
    fault = runtime.keeper.fault
    return Stats(
        exports=len(runtime.exports),
        exported_bytes=runtime.exports.nbytes,
        given_up=runtime.exports.given_up,
        arrays=runtime.imports.arrays,
        mappings=runtime.imports.mappings,
        opened=runtime.imports.opened,
        closed=runtime.imports.closed,
        offers=len(runtime.offers),
        events=len(runtime.events),
        stuck=runtime.imports.stuck,
        fault="" if fault is None else f"{type(fault).__name__}: {fault}",
    )
