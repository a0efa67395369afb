"""A buffer that is a message by itself, given out without detours.

May import errors, settings, copying, ``quick_blocks``, ``layout``, ``runtime``, ``message``
and, for types, ``record`` and ``lease``.

This is the usual case of :meth:`Message.carry`: the block is known and can travel, or a
warm block of the size is free. It is done whole. In every other case nothing is done,
and a :class:`Message` does it, who also knows what to raise.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

from shmreduce.copying import copy_run
from shmreduce.errors import OutOfSharedMemoryError
from shmreduce.memory import quick_blocks
from shmreduce.memory.layout import BY_VALUE
from shmreduce.memory.message import Message, can_travel, next_nonce, what_names
from shmreduce.memory.runtime import current
from shmreduce.settings import get_settings

if TYPE_CHECKING:
    from shmreduce.memory.lease import Lease
    from shmreduce.memory.record import Record, RootReference
    from shmreduce.memory.runtime import Runtime

__all__ = ["GivenBuffer", "copy_memory", "give_out"]


class GivenBuffer:
    """What :func:`give_out` has given out.

    Attributes
    ----------
    handle : bytes
        Names the block.
    lease : Lease
        Not committed yet.
    """

    __slots__ = ("_reference", "_runtime", "handle", "lease")

    handle: bytes
    lease: Lease

    def __init__(
        self,
        runtime: Runtime,
        handle: bytes,
        lease: Lease,
        reference: RootReference | None = None,
    ) -> None:
        self._runtime = runtime
        self.handle = handle
        self.lease = lease
        self._reference = reference

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
        if self._reference is None or not self.is_ours:
            return
        # While there is a reference here the hold does not end, see make_private().
        root = self._reference()
        record = self._reference.record
        if root is None or record.private or record.live.make_private(record):
            return
        message = Message()
        try:
            self.handle = copy_memory(message, record.address, record.nbytes)
            leases.extend(message.leases())
        except BaseException:
            message.rollback()
            raise
        self.lease.undo()
        del leases[0]
        self.lease = leases[0]


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
        :meth:`GivenBuffer.settle` is to be called before the message is complete. None if
        nothing was done.
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
    return _give_out_block(runtime, record, leases, reference)


def _give_out_block(
    runtime: Runtime,
    record: Record,
    leases: list[Lease],
    reference: RootReference | None = None,
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
    return None if quickly is None else GivenBuffer(runtime, *quickly, reference)


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
