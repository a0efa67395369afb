"""A buffer that is a message by itself, given out without detours.

May import errors, settings, copying, ``quick_blocks``, ``layout``, ``runtime``, ``message``
and, for types, ``record`` and ``lease``.

This is the usual case of :meth:`Message.carry`: the block is known and can travel, or a
warm block of the size is free. It is done whole. In every other case nothing is done,
and a :class:`Message` does it, who also knows what to raise.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any, Protocol

from shmreduce.copying import copy_run
from shmreduce.errors import OutOfSharedMemoryError
from shmreduce.memory import quick_blocks
from shmreduce.memory.layout import BY_VALUE
from shmreduce.memory.message import (
    Message,
    can_travel,
    next_nonce,
    what_names,
    what_names_block,
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

__all__ = ["GivenBuffer", "Received", "Trial", "copy_memory", "give_out", "lend_by_value"]


class Trial(Protocol):
    """Of one buffer in a message: whether its sender is the last to have it."""

    def is_apart(self) -> bool:
        """Return whether no later write in this process can reach the receiver.

        Either nobody here has the buffer, or its owner has private pages.
        """

    def memory(self) -> tuple[int, int]:
        """Return the address and size of the buffer's memory, which the lease keeps."""

    def stay(self) -> None:
        """Undo it: the buffer is as if it had never been in a message."""

    def end(self) -> Callable[[], object] | None:
        """Finish it: the message is complete. Return what can be done once it was sent."""


class Received:
    """A by-value block that this process received, and now passes on.

    Parameters
    ----------
    record : Record
        The hold that this process has on it.
    root : weak reference
        To the object at the bottom of all its views.
    """

    __slots__ = ("_record", "_root")

    def __init__(self, record: Record, root: weakref.ref[Any]) -> None:
        self._record = record
        self._root = root

    def is_apart(self) -> bool:
        """See :class:`Trial`; who has it still is cut off from the block."""
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
    """What :func:`give_out` has given out.

    One of :meth:`settle` and :meth:`give_up` is to be called.

    Attributes
    ----------
    handle : bytes
        Names the block.
    lease : Lease
        Not committed yet.
    afterwards : callable or None
        What can be done once the message was sent; not until it is settled.
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
        """Whether this process has given it out, and not one that has forked this since."""
        return current() is self._runtime

    def settle(self, leases: list[Lease]) -> None:
        """Let the block be the receiver's alone, or name a copy of it.

        To be called when the sender has dropped the object. Who has it still is cut off
        from the block. Where that cannot be, there is another handle afterwards, and
        another lease in the list.

        Raises
        ------
        OutOfSharedMemoryError, BudgetExceededError
            If there is no room for the copy.
        """
        trial = self._trial
        if trial is None or not self.is_ours:
            return
        if not trial.is_apart():
            message = Message()
            try:
                self.handle = copy_memory(message, *trial.memory())
                leases.extend(message.leases())
            except BaseException:
                message.rollback()
                raise
            self.lease.undo()
            del leases[0]
            self.lease = leases[0]
        self.afterwards = trial.end()
        self._trial = None

    def give_up(self) -> None:
        """Let the buffer be as before; the leases were taken back, nothing will be sent."""
        if self._trial is not None and self.is_ours:
            self._trial.stay()


def copy_memory(message: Message, address: int, size: int) -> bytes:
    """Copy memory of which there is no view into a block of a message; return its handle."""
    given = message.allocate(size)
    if given is None:
        raise OutOfSharedMemoryError(
            f"no room for a copy of {size} bytes; the message was sent from within another "
            "that is being made. Send it again",
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
    """Give out the block that a buffer is, or a copy of the buffer.

    Parameters
    ----------
    view : memoryview
        The buffer, C-contiguous.
    leases : list
        Empty. It gets the lease, so that who is interrupted can take it back.
    copies : bool
        Whether a copy will do.

    Returns
    -------
    GivenBuffer or None
        None if nothing was done.
    """
    runtime = current()
    if runtime.has_left:
        # What is unread has to get into the mailbox, of which a Message takes care.
        return None
    live = runtime.live
    exporter: Any = view.obj
    reference = live._roots.get(id(exporter))
    if reference is None or reference() is not exporter:
        # A forked child looks into its parent's table, too.
        if copies and live.find(exporter) is None:
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
        # It may have to be copied, when it is too late to pickle.
        return None
    return _give_out_block(runtime, record, leases, Received(record, reference))


def _give_out_block(
    runtime: Runtime,
    record: Record,
    leases: list[Lease],
    trial: Trial | None = None,
) -> GivenBuffer | None:
    segment = record.segment
    quickly: tuple[bytes, Lease] | None = quick_blocks.lend_block(
        segment,
        record.block,
        record.generation,
        next_nonce(),
        what_names(record, segment),
        leases,
    )
    return None if quickly is None else GivenBuffer(runtime, *quickly, trial)


def _give_out_copy(runtime: Runtime, view: memoryview, leases: list[Lease]) -> GivenBuffer | None:
    live = runtime.live
    live.settle()
    quickly: tuple[memoryview, bytes] | None = quick_blocks.take_block(
        runtime.heap(BY_VALUE), live, view.nbytes, next_nonce(), leases
    )
    if quickly is None:
        return None
    copy_run(quickly[0], view)
    return GivenBuffer(runtime, quickly[1], leases[0])


def lend_by_value(
    segment: Segment, block: int, nbytes: int, leases: list[Lease]
) -> tuple[bytes, Lease] | None:
    """Name a by-value block that the caller keeps from being reused; None if nothing was done."""
    generation = segment.generations[block]
    constant = what_names_block(segment, block, generation, nbytes, shared=False, mode="rw")
    lent: tuple[bytes, Lease] | None = quick_blocks.lend_block(
        segment, block, generation, next_nonce(), constant, leases
    )
    return lent
