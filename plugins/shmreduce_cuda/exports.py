"""The arrays that this process has sent, and when they may be freed.

May import public names of :mod:`shmreduce`, and ``errors``, ``driver``,
``devices``, ``kinds``, ``messages`` and ``offers`` of this plugin.

For each array that is sent there is an *export*. It holds the array, and a small shared
block of the core, the *lease*. The block's handle travels with the message, and a
receiver keeps the block for as long as it has the device's memory mapped. The core knows
who has the block, even if processes are killed; so it is also known who has the device's
memory. When :meth:`shmreduce.Block.reclaim` returns that nobody else has the block, the
array is dropped.
"""

from __future__ import annotations

import errno
import itertools
import os
import resource
import struct
import threading
from collections import deque
from contextlib import ExitStack
from ctypes import byref, c_int, c_uint64, c_void_p, cast
from typing import TYPE_CHECKING, Any

from shmreduce import allocate
from shmreduce_cuda.devices import current_context, primary_context, synchronise, uuid_of
from shmreduce_cuda.driver import Bytes64, get_driver
from shmreduce_cuda.errors import CudaDriverError, CudaSharingError
from shmreduce_cuda.kinds import (
    POSIX_FD,
    check_extent,
    facts_at,
    find_memory,
    pieces_of,
    refuse,
)
from shmreduce_cuda.messages import Legacy, Pooled, Virtual

if TYPE_CHECKING:
    import weakref

    from shmreduce import Block
    from shmreduce_cuda.driver import Driver
    from shmreduce_cuda.errors import CudaMemoryError
    from shmreduce_cuda.kinds import Memory
    from shmreduce_cuda.messages import Place
    from shmreduce_cuda.offers import Offer, Offers
    from shmreduce_cuda.sources import Source

__all__ = ["LEASE_BYTES", "Export", "Exports", "lease_text", "synchronise_export"]

_REFUSALS = frozenset((1, 201, 400, 800, 801))
"""Error codes that mean that the memory cannot be shared.

These are invalid value, context or handle, not permitted, and not supported. Others, such
as out of memory, may be temporary.
"""
_LOOKS = 2
"""How many exports are looked at with each send: more than one, so that they become fewer."""
_SPARE = 4
"""More descriptors than a driver needs at a time to make one."""
_LEASE = struct.Struct("<16sQ")
LEASE_BYTES = _LEASE.size


class Export:
    """One array that was sent.

    Attributes
    ----------
    number : int
        Its number in messages.
    source : object
        The array; None after it was dropped.
    ordinal : int
        The device's ordinal in this process.
    uuid : bytes
        The device's UUID, which messages have.
    base, size : int
        The allocation, or the range of virtual memory, that the array lies in.
    place : Legacy, Pooled or Virtual
        How a receiver opens that memory.
    lease : Block
        The block that each receiver holds while it has the memory open.
    """

    __slots__ = (
        "base",
        "context",
        "lease",
        "number",
        "offers",
        "ordinal",
        "place",
        "size",
        "source",
        "uuid",
        "wrapper",
    )

    def __init__(self, number: int, source: Source, ordinal: int, memory: Memory) -> None:
        self.number = number
        self.source: Any = source.owner
        self.ordinal = ordinal
        self.uuid = uuid_of(ordinal)
        self.base = memory.base
        self.size = memory.size
        self.context = memory.context
        self.place: Place
        self.offers: list[Offer] = []
        self.lease: Block
        self.wrapper: weakref.ref[Any] | None = None
        """The ``SharedArray``: while it lives, the export is kept even if nobody has the lease."""

    @property
    def kept(self) -> bool:
        """Whether this process may send it again."""
        return self.wrapper is not None and self.wrapper() is not None


class Exports:
    """The exports of one process.

    Parameters
    ----------
    token : bytes
        This process's token.
    offers : Offers
        Keeps descriptors for receivers.
    """

    def __init__(self, token: bytes, offers: Offers) -> None:
        self._token = token
        self._offers = offers
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._live: dict[int, Export] = {}
        self._turn: deque[int] = deque()
        self.given_up = 0
        """How many exports were dropped."""

    def __len__(self) -> int:
        return len(self._live)

    @property
    def nbytes(self) -> int:
        """Bytes of the allocations that the exports hold, each counted once."""
        live = list(self._live.values())
        return sum({(each.ordinal, each.base): each.size for each in live}.values())

    def find(self, number: int) -> Export | None:
        """Return the live export with this number, or None."""
        return self._live.get(number)

    def make(self, source: Source) -> Export:
        """Return a new export of an array, which is not live until :meth:`hold`.

        Raises
        ------
        CudaMemoryError
            If its memory is of a kind that cannot be sent.
        """
        low, high = (source.pointer + offset for offset in source.layout.extent)
        facts = facts_at(get_driver(), low)
        ordinal = facts.ordinal
        with current_context(ordinal) as driver:
            memory = find_memory(driver, low, facts)
            pieces = [(memory.base, memory.size)]
            if memory.kind == "virtual":
                pieces = pieces_of(driver, memory, high)
                memory = memory._replace(size=sum(size for _, size in pieces))
            check_extent(memory.base, memory.size, low, high)
            export = Export(next(self._numbers), source, ordinal, memory)
            try:
                self._place(export, driver, memory, pieces)
                export.lease = allocate(LEASE_BYTES)
                export.lease.buffer[:] = lease_text(self._token, export.number)
            except BaseException as error:
                self._drop_offers(export)
                if isinstance(error, CudaDriverError) and error.code in _REFUSALS:
                    raise _without_handle(memory, error) from error
                raise
        return export

    def hold(self, export: Export) -> None:
        """Keep an export, which is in a message, until nobody has its lease."""
        self._live[export.number] = export
        self._turn.append(export.number)

    def reclaim(self) -> int:
        """Drop the arrays that no other process has any more; return how many."""
        if not self._lock.acquire(blocking=False):
            # Another thread is doing it; or this thread is, and the destructor of an array
            # that it drops has called this.
            return 0
        before = self.given_up
        try:
            for each in list(self._live.values()):
                if not each.kept and each.lease.reclaim():
                    self._let_go(each)
        finally:
            self._lock.release()
        return self.given_up - before

    def reclaim_some(self) -> None:
        """Do so for a few exports, in turn, for the price of a few looks.

        Each array that is sent calls it. So a process that sends without a pause holds
        little more than what its receivers have, though the thread looks only now and then.
        """
        if not self._lock.acquire(blocking=False):
            return
        try:
            for _ in range(min(_LOOKS, len(self._turn))):
                number = self._turn.popleft()
                export = self._live.get(number)
                if export is None:
                    continue
                if not export.kept and export.lease.reclaim():
                    self._let_go(export)
                else:
                    self._turn.append(number)
        finally:
            self._lock.release()

    def _let_go(self, export: Export) -> None:
        try:
            self.discard(export)
        finally:
            del self._live[export.number]
            self.given_up += 1

    def discard(self, export: Export) -> None:
        """Drop the array of an export that is not live."""
        self._drop_offers(export)
        # With a current context, since the array's library may free the memory now.
        try:
            with current_context(export.ordinal):
                export.source = None
        finally:
            # Even if the device has failed, so that the context cannot be made current.
            export.source = None

    def _drop_offers(self, export: Export) -> None:
        while export.offers:
            self._offers.release(export.offers.pop())

    def _place(
        self, export: Export, driver: Driver, memory: Memory, pieces: list[tuple[int, int]]
    ) -> None:
        handle = Bytes64()
        if memory.kind == "legacy":
            driver.call("cuIpcGetMemHandle", byref(handle), memory.base)
            export.place = Legacy(bytes(handle))
            return
        if memory.kind == "pool":
            # The pool first: a driver refuses to export the pointers of a pool that was never
            # exported itself (CUDA_ERROR_INVALID_VALUE, seen with driver 580).
            offer = self._offers.take(
                ("pool", memory.pool), lambda: _descriptor_of_pool(driver, memory.pool)
            )
            export.offers.append(offer)
            driver.call("cuMemPoolExportPointer", byref(handle), memory.base)
            export.place = Pooled(offer.number, memory.base, bytes(handle))
            return
        for base, size in pieces:
            # Each for itself: arrays that have only some pieces in common share those.
            export.offers.append(self._take_piece(driver, export.ordinal, base, size))
        numbers = tuple(offer.number for offer in export.offers)
        export.place = Virtual(numbers, tuple(size for _, size in pieces))

    def _take_piece(self, driver: Driver, ordinal: int, base: int, size: int) -> Offer:
        return self._offers.take(
            ("piece", ordinal, base, size), lambda: _descriptor_of_piece(driver, base)
        )


def _without_handle(memory: Memory, error: CudaDriverError) -> CudaMemoryError:
    return refuse(
        f"{memory.kind} memory for which the driver makes no handle ({error.name} from "
        f"{error.function})",
        "perhaps it belongs to another process, and another library has opened it here: copy it",
    )


def lease_text(token: bytes, number: int) -> bytes:
    """Return the contents of a lease's block.

    Examples
    --------
    >>> len(lease_text(bytes(16), 1)) == LEASE_BYTES
    True
    """
    return _LEASE.pack(token, number)


def synchronise_export(export: Export) -> None:
    """Wait until all earlier work is done, on all streams.

    A queue's feeder thread cannot know on which stream the array was written, since the
    current stream is a property of the thread that wrote it.
    """
    synchronise(export.ordinal)
    if export.context not in (0, primary_context(export.ordinal).value):
        # The library uses another context than the primary one.
        with current_context(export.ordinal, c_void_p(export.context)) as driver:
            driver.call("cuCtxSynchronize")


def _descriptor_of_pool(driver: Driver, pool: int) -> int:
    return _make_descriptor(driver, "cuMemPoolExportToShareableHandle", pool)


def _descriptor_of_piece(driver: Driver, base: int) -> int:
    handle = c_uint64()
    driver.call("cuMemRetainAllocationHandle", byref(handle), base)
    try:
        return _make_descriptor(driver, "cuMemExportToShareableHandle", handle.value)
    finally:
        driver.call("cuMemRelease", handle.value)


def _make_descriptor(driver: Driver, function: str, handle: int) -> int:
    descriptor = c_int(-1)
    try:
        driver.call(function, cast(byref(descriptor), c_void_p), handle, POSIX_FD, 0)
    except CudaDriverError as error:
        if not _lacks_descriptors():
            raise
        raise CudaSharingError(
            f"process {os.getpid()} has no descriptor left for its device memory: it may have "
            f"{resource.getrlimit(resource.RLIMIT_NOFILE)[0]} files open (RLIMIT_NOFILE), and "
            "each pool that it sends arrays of, and each piece of virtual memory, takes one (of "
            "torch's expandable segments one for 20 MiB): raise the limit (ulimit -n), or "
            "allocate by cudaMalloc (torch: PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False)"
        ) from error
    # Close-on-exec: a program that inherited it would keep the memory.
    os.set_inheritable(descriptor.value, False)
    return descriptor.value


def _lacks_descriptors() -> bool:
    with ExitStack() as spare:
        try:
            for _ in range(_SPARE):
                spare.callback(os.close, os.open("/", os.O_PATH | os.O_CLOEXEC))
        except OSError as error:
            return error.errno in (errno.EMFILE, errno.ENFILE)
    return False
