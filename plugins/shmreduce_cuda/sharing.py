"""What users call, and what the reducer does.

May import public names of :mod:`shmreduce`, and ``errors``, ``events``,
``runtime``, ``sending`` and ``sources`` of this plugin.
"""

from __future__ import annotations

import weakref
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

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
    """An array that was prepared to be sent; :func:`share` makes it.

    It is put into messages, and what comes out of them is the array. While it
    is kept, messages of it can be loaded any number of times.

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
    """Prepare an array to be sent, in the thread that knows its stream.

    Parameters
    ----------
    array : object
        With ``__cuda_array_interface__`` or ``__dlpack__``, or a tensor of
        torch. It is not copied.
    stream : optional
        What was asked of this stream before is waited for by the receivers,
        and nothing else is: a handle, or a stream of CuPy, numba or torch.
        Where not given, all devices in use are waited for when the array is
        pickled, as for an array that is sent as it is.

    Returns
    -------
    SharedArray
        To be put into messages.

    Raises
    ------
    CudaMemoryError
        If its memory is of a kind that cannot be sent.
    CudaUnavailableError
        If there is no driver.

    Examples
    --------
    What is no array of a device is refused:

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
    """Leave nothing behind if the block fails."""
    try:
        yield
    except BaseException:
        if isinstance(outgoing, OwnArray):
            current().exports.discard(outgoing.export)
        raise


def _hold(outgoing: OwnArray) -> None:
    runtime = current()
    runtime.exports.hold(outgoing.export)
    if len(runtime.offers):
        runtime.keeper.listen()
    runtime.keeper.look_after()


def collect() -> int:
    """Free now what the receivers of sent arrays have dropped; return how many arrays.

    Not needed for correctness: a thread does it some times a second. Received
    arrays that could not be closed are tried again, too.

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
        Arrays that were sent and are held for receivers or messages.
    exported_bytes : int
        Bytes of the allocations that hold them.
    given_up : int
        Arrays that were sent and let go of since.
    arrays : int
        Received arrays that are alive.
    mappings : int
        Allocations of other processes that are open.
    opened, closed : int
        How many were opened and closed so far.
    offers : int
        Pools and ranges of virtual memory whose descriptors are kept.
    events : int
        Events that were made or opened.
    stuck : int
        Dead arrays that could not be closed so far: the device has failed, or was
        recording a graph.
    fault : str
        What went wrong in the thread the last time; empty if nothing did.
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
