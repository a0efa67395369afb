"""A buffer that is a whole message, given out by a short way.

May import errors, settings, copying, ``quick_blocks``, ``layout``, ``runtime``, ``message``
and, for types, ``record`` and ``lease``.

This is the usual case of :meth:`Message.carry`: the block is known and can be sent, or the bytes
are copied. That case is done completely. In every other case nothing is done, and the object
goes the long way.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from shmreduce.copying import copy_run
from shmreduce.errors import OutOfSharedMemoryError
from shmreduce.memory import quick_blocks
from shmreduce.memory.layout import BY_VALUE
from shmreduce.memory.message import (
    Message,
    can_travel,
    constant_of_block,
    constant_of_record,
    lend,
    next_nonce,
)
from shmreduce.memory.runtime import current
from shmreduce.settings import get_settings

if TYPE_CHECKING:
    import weakref
    from collections.abc import Callable

    from shmreduce.memory.lease import Lease
    from shmreduce.memory.record import Record
    from shmreduce.memory.runtime import Runtime
    from shmreduce.memory.segment import Segment

__all__ = [
    "GivenBuffer",
    "ReceivedBlock",
    "Trial",
    "copy_memory",
    "give_out",
    "lend_by_value",
]


_Handle = TypeVar("_Handle", bytes, bytes | None)


class Trial(Protocol):
    """The attempt to send a buffer without a copy, if its sender is the last to have it."""

    def is_apart(self) -> bool:
        """Return whether no later write in this process can reach the receiver.

        Either nothing here refers to the buffer, or its owner has private pages.
        """

    def memory(self) -> tuple[int, int]:
        """Return address and size of the buffer's memory, which the lease keeps."""

    def stay(self) -> None:
        """Undo it: the buffer is as if it had never been in a message."""

    def end(self) -> Callable[[], object] | None:
        """Finish it: the message is complete. Return what can be done after it was sent."""


class ReceivedBlock:
    """A by-value block that this process received and now sends on.

    Parameters
    ----------
    record : Record
        This process's hold of the block.
    root : weak reference
        Refers to the object that all its views refer to.
    """

    __slots__ = ("_record", "_root")

    def __init__(self, record: Record, root: weakref.ref[Any]) -> None:
        self._record = record
        self._root = root

    def is_apart(self) -> bool:
        """See :class:`Trial`. If views are left here, their pages are made private."""
        # The local reference keeps the block held: if the hold ended before
        # make_private(), the pages might belong to another block by then.
        root = self._root()
        record = self._record
        return root is None or record.private or bool(record.live.make_private(record))

    def memory(self) -> tuple[int, int]:
        """See :class:`Trial`."""
        return self._record.address, self._record.nbytes

    def stay(self) -> None:
        """See :class:`Trial`; nothing was changed."""

    def end(self) -> None:
        """See :class:`Trial`."""


class GivenBuffer:
    """A buffer that :func:`give_out` has given out.

    Call either :meth:`settle` or :meth:`give_up`.

    Attributes
    ----------
    handle : bytes
        The block's handle.
    lease : Lease
        Its lease, not committed yet.
    afterwards : callable or None
        What can be done after the message was sent; set by :meth:`settle`.
    """

    __slots__ = ("_runtime", "_trial", "afterwards", "handle", "lease")

    handle: bytes
    lease: Lease

    def __init__(
        self,
        runtime: Runtime,
        handle: bytes,
        lease: Lease,
        trial: Trial | None = None,
    ) -> None:
        self._runtime = runtime
        self.handle = handle
        self.lease = lease
        self.afterwards: Callable[[], object] | None = None
        self._trial = trial

    @property
    def is_ours(self) -> bool:
        """Whether this process gave it out. In a forked child it is the parent's."""
        return current() is self._runtime

    def settle(self, leases: list[Lease]) -> None:
        """Make sure that only the receiver has the block, or replace it by a copy.

        Call it when the sender has dropped the object. Views that are left get private pages.
        If that is not possible, a copy is made: then ``handle`` and the list have the copy's
        handle and lease.

        Raises
        ------
        OutOfSharedMemoryError, BudgetExceededError
            If there is no room for the copy.
        """
        trial = self._trial
        if trial is None or not self.is_ours:
            return
        if not trial.is_apart():
            self.handle = _by_message(
                leases, lambda message: copy_memory(message, *trial.memory())
            )
            self.lease.undo()
            del leases[0]
            self.lease = leases[0]
        self.afterwards = trial.end()
        self._trial = None

    def give_up(self) -> None:
        """Undo it: the leases were taken back, and nothing will be sent."""
        if self._trial is not None and self.is_ours:
            self._trial.stay()


def _by_message(leases: list[Lease], give: Callable[[Message], _Handle]) -> _Handle:
    """Let a message give something out; add its leases to a list, and return the handle."""
    message = Message()
    try:
        handle = give(message)
        leases.extend(message.leases())
    except BaseException:
        message.rollback()
        raise
    return handle


def copy_memory(message: Message, address: int, size: int) -> bytes:
    """Copy memory that has no view into a block of a message; return its handle.

    Raises
    ------
    OutOfSharedMemoryError
        If there is no room for it, or if this call has interrupted the thread while that was
        taking memory for another message.
    """
    given = message.allocate(size)
    if given is None:
        raise OutOfSharedMemoryError(
            f"no room for a copy of {size} bytes: the message was sent while this thread was "
            "taking memory for another, by a signal handler for example. Send it again",
            operation="copy",
            errno=0,
            requested=size,
            available=None,
            strategy=None,
        )
    memory, handle = given
    ctypes.memmove(ctypes.addressof(ctypes.c_char.from_buffer(memory)), address, size)
    return handle


def give_out(view: memoryview, leases: list[Lease], copies: bool) -> GivenBuffer | None:
    """Give out a buffer's own block, or a copy of the buffer.

    Parameters
    ----------
    view : memoryview
        The buffer, C-contiguous.
    leases : list
        Empty. It gets the lease, so that a caller that is interrupted can take it back.
    copies : bool
        Whether a copy may be made.

    Returns
    -------
    GivenBuffer or None
        None if nothing was done.
    """
    runtime = current()
    live = runtime.live
    exporter: Any = view.obj
    reference = live._roots.get(id(exporter))
    if reference is None or reference() is not exporter:
        # Otherwise it is a view of a block, or a block that a forked child has from its parent.
        if copies and live.find_below(exporter) is None:
            return _give_out_copy(runtime, view, leases)
        return None
    record = reference.record
    if record.nbytes != view.nbytes:
        return None
    if not can_travel(record, view.nbytes, False):
        return _give_out_copy(runtime, view, leases) if copies else None
    if record.shared:
        return _give_out_block(runtime, record, leases)
    if get_settings().on_exhausted == "pickle":
        # The buffer may have to be copied later, when it is too late to pickle it.
        return None
    return _give_out_block(runtime, record, leases, ReceivedBlock(record, reference))


def _give_out_block(
    runtime: Runtime,
    record: Record,
    leases: list[Lease],
    trial: Trial | None = None,
) -> GivenBuffer:
    segment = record.segment
    constant = constant_of_record(record, segment)
    given = lend(segment, record.block, record.generation, constant, leases)
    return GivenBuffer(runtime, *given, trial)


def _give_out_copy(runtime: Runtime, view: memoryview, leases: list[Lease]) -> GivenBuffer | None:
    live = runtime.live
    live.settle()
    quickly: tuple[memoryview, bytes] | None = quick_blocks.take_block(
        runtime.heap(BY_VALUE), live, view.nbytes, next_nonce(), leases
    )
    if quickly is None:
        # The heap must make room first.
        handle = _by_message(leases, lambda message: message.carry(view))
        return None if handle is None else GivenBuffer(runtime, handle, leases[0])
    copy_run(quickly[0], view)
    return GivenBuffer(runtime, quickly[1], leases[0])


def lend_by_value(
    segment: Segment, block: int, nbytes: int, leases: list[Lease]
) -> tuple[bytes, Lease]:
    """Add a lease on a by-value block, which the caller keeps from reuse."""
    generation = segment.generations[block]
    constant = constant_of_block(segment, block, generation, nbytes, shared=False, mode="rw")
    return lend(segment, block, generation, constant, leases)
