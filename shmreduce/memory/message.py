"""The sender's side of one pickled message: the shared memory that it gives out.

May import errors, settings, strategies, contracts, copying, ``quick_blocks``, ``mapping``,
``layout``, ``handle``, ``lease_slots``, ``size_classes``, ``segment``, ``reservation``, ``heap``,
``attachments``, ``record``, ``blocks``, ``filling``, ``borrowing``, ``lease``, ``parts``,
``runtime``, ``fork_hooks`` and, for types, ``mover`` and ``owned_segment``.
"""

from __future__ import annotations

import itertools
import os
import time
import weakref
from typing import TYPE_CHECKING, Any, TypeVar, overload

from shmreduce.contracts import check_nbytes
from shmreduce.copying import copy_run
from shmreduce.errors import ConfigurationError, SegmentError, ShmreduceError
from shmreduce.fork_hooks import renew_in_children
from shmreduce.memory import quick_blocks
from shmreduce.memory.attachments import FEW
from shmreduce.memory.blocks import Block
from shmreduce.memory.borrowing import Borrowed, can_be_filled
from shmreduce.memory.filling import Filling
from shmreduce.memory.handle import (
    ROOM_FOR_ANOTHER,
    block_key,
    pack_constant,
    pack_handle,
    rest_of,
)
from shmreduce.memory.heap import HeapBusyError
from shmreduce.memory.layout import BY_VALUE
from shmreduce.memory.lease import Lease
from shmreduce.memory.lease_slots import NONCE_MASK
from shmreduce.memory.mapping import PAGE_SIZE
from shmreduce.memory.parts import (
    IN_BLOCK,
    LARGEST_PART,
    Batches,
    Limits,
)
from shmreduce.memory.record import Record, RootReference
from shmreduce.memory.reservation import Contents
from shmreduce.memory.runtime import Runtime, current
from shmreduce.memory.segment import Segment, Sent
from shmreduce.memory.size_classes import size_class
from shmreduce.settings import get_settings, inline_limit
from shmreduce.strategies import current_strategy

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from shmreduce.contracts import Mode
    from shmreduce.memory.heap import Heap
    from shmreduce.memory.mover import Mover
    from shmreduce.memory.owned_segment import OwnedSegment
    from shmreduce.memory.parts import Pieces

    _Pieces = TypeVar("_Pieces", bound=Pieces)

__all__ = [
    "Message",
    "can_travel",
    "constant_of_block",
    "constant_of_record",
    "keep_leases",
    "lend",
    "next_nonce",
]

_LONGEST_PATH = 4096
"""Bytes of PATH_MAX: how long a locator may be of which nothing is known yet."""
_PRIVATE_FROM = 256 << 10
"""A received array of this many bytes or more is sent on by private pages, not by a copy."""


def _any_number() -> int:
    # os.urandom, because importing secrets takes longer than sending a message.
    return int.from_bytes(os.urandom(7), "little")


_nonces = itertools.count(_any_number())


def _new_nonces() -> None:
    # A forked child must not continue with its parent's numbers.
    global _nonces
    _nonces = itertools.count(_any_number())


renew_in_children(_new_nonces)


def next_nonce() -> int:
    """Return a number that tells a message from all others that use the same slot."""
    return next(_nonces) & NONCE_MASK


class Message:
    """The shared memory that travels with one message.

    Each run of a pickler makes one and passes it to :meth:`Reducer.reduce`. What the Message
    gives out is kept when the message is complete, and taken back if pickling fails.

    Parameters
    ----------
    shared_memory : bool
        False for a message to another host: then nothing is given out.
    mover : Mover, optional
        Lets arrays travel in the message without a copy. For the core only.
    limits : Limits
        Up to which sizes buffers stay in the pickle: where it goes makes a difference. For
        the core only.

    Attributes
    ----------
    shared_memory : bool
        As above. A message to another host may also lack plugins at its receiver.
    inline_limit : int
        Bytes: a by-value buffer of fewer should be pickled in the ordinary way.
    smallest_part : int
        Bytes: for a by-value buffer of fewer, :meth:`allocate_part` is not worth a call.
    has_many : bool
        Whether reducers were asked for many objects of the message. Before that,
        :meth:`add_piece` is not worth a call.

    Examples
    --------
    You must commit or roll back a message that you make by hand:

    >>> from shmreduce import Message, import_block
    >>> message = Message()
    >>> view, handle = message.allocate(5)
    >>> view[:] = b"hello"
    >>> message.commit()
    >>> bytes(import_block(handle).buffer)
    b'hello'
    """

    __slots__ = (
        "_batches",
        "_borrowed",
        "_limits",
        "_mover",
        "_runtime",
        "_taken",
        "before_many",
        "has_many",
        "inline_limit",
        "shared_memory",
        "smallest_part",
    )

    def __init__(
        self,
        shared_memory: bool = True,
        mover: Mover | None = None,
        *,
        limits: Limits = IN_BLOCK,
    ) -> None:
        self.shared_memory = shared_memory
        """False if nothing can be given out: for another host, which may lack plugins, too."""
        self.inline_limit = inline_limit(limits.in_pipe)
        """Bytes below which a by-value buffer should be pickled in the ordinary way."""
        self.smallest_part = limits.smallest_part
        """Bytes: :meth:`allocate_part` may be worth a call for buffers of this size and more."""
        self._limits = limits
        self._mover = mover
        self._runtime: Runtime | None = None
        self._taken: list[Lease] = []
        self._borrowed: list[tuple[Lease, Borrowed]] = []
        self._batches: Batches | None = None
        """The blocks that carry several buffers each; made when there may be one."""
        self.before_many = limits.many
        """How often reducers must still be asked until the message has many objects; the pickler
        counts."""
        self.has_many = False
        """Whether it has: :meth:`add_piece` may be worth a call."""

    def carry(self, memory: Any) -> bytes | None:
        """Return a handle that carries the bytes of a buffer.

        A block is sent as by :meth:`refer`; all other bytes are copied.

        Parameters
        ----------
        memory : bytes-like
            A C-contiguous buffer: all the bytes of the object that is being pickled, and
            no others. They are sent as they are now.

        Returns
        -------
        bytes or None
            The handle, to be put into the pickle unchanged. None if the object is better
            pickled in the ordinary way: because the bytes are few, or because the message
            must not use shared memory or cannot at the moment. Also None if the memory is
            a part of a shared block; see :meth:`refer`.

        Raises
        ------
        OutOfSharedMemoryError, BudgetExceededError, SegmentError
            As :meth:`allocate`.
        OutOfLeasesError, LeaseTimeoutError
            As :meth:`refer`.
        ConfigurationError
            If ``memory`` is not such a buffer.

        Examples
        --------
        >>> from shmreduce import Message, import_block
        >>> message = Message()
        >>> handle = message.carry(bytes(100_000))
        >>> message.commit()
        >>> import_block(handle).nbytes
        100000
        """
        if not self.shared_memory:
            return None
        view = _contiguous(memory)
        live = self._current().live
        block = live.find_below(view)
        if block is not None:
            fills = block.nbytes == view.nbytes
            if block.shared and not fills:
                return None
            if fills and (block.shared or block.nbytes >= self.inline_limit):
                handle = self.refer(block, block.nbytes)
                if handle is not None:
                    return handle
        if view.nbytes < self.inline_limit or not view.nbytes:
            return None
        given = self.allocate(view.nbytes, lambda: view)
        if given is None:
            return None
        target, handle = given
        if target is not None:
            copy_run(target, view)
        return handle

    @overload
    def allocate(self, nbytes: int) -> tuple[memoryview, bytes] | None: ...

    @overload
    def allocate(
        self, nbytes: int, contents: Callable[[], Any]
    ) -> tuple[memoryview | None, bytes] | None: ...

    def allocate(
        self, nbytes: int, contents: Callable[[], Any] | None = None
    ) -> tuple[memoryview | None, bytes] | None:
        """Give out a block that carries ``nbytes`` by value.

        Parameters
        ----------
        nbytes : int
            Number of bytes, which may be 0.
        contents : callable, optional
            Returns the bytes for the block, as an object that exports ``nbytes`` contiguous
            bytes, or None if they are not contiguous. If the block is new and large, it is
            filled with them at once, which is faster. Only then ``contents`` is called,
            while the heap is locked: it must not wait for other threads.

        Returns
        -------
        (memoryview, bytes) or None
            The bytes, which are not set, and the handle. Fill the bytes before ``reduce``
            returns. If the block already has its ``contents``, None takes the place of the
            bytes. The result itself is None if the message must not use shared memory, or
            cannot at the moment: then pickle in the ordinary way.

        Raises
        ------
        OutOfSharedMemoryError, BudgetExceededError, SegmentError
            If there is no room, or the system refuses a segment, unless the settings say
            to pickle instead.
        OutOfLeasesError
            If too many messages that name blocks of the segment are unread.
        ConfigurationError
            If ``nbytes`` is impossible, or ``contents()`` has another number of bytes.
        """
        nbytes = check_nbytes(nbytes)
        if not self.shared_memory:
            return None
        runtime = self._current()
        runtime.live.settle()
        if self._mover is not None and self._mover.lent:
            borrowed = self._borrow(runtime, self._mover.lent, nbytes)
            if borrowed is not None:
                return borrowed
        heap = runtime.heap(BY_VALUE)
        nonce = next_nonce()
        quickly: tuple[memoryview, bytes] | None = quick_blocks.take_block(
            heap, runtime.live, nbytes, nonce, self._taken
        )
        if quickly is not None:
            return quickly
        filled = None if contents is None else Contents(contents, nbytes)
        try:
            segment, block = self._take_from(heap, nbytes, filled)
        except HeapBusyError:
            return None
        except SegmentError:
            # A full file system and a limit on this process are treated alike.
            if get_settings().on_exhausted == "pickle":
                return None
            raise
        taken = Lease(segment, block, segment.generations[block], nonce)
        try:
            taken.filling = Filling(runtime.live, heap, segment, block, nbytes)
            taken.slot = segment.start_message(block, taken.nonce)
        except BaseException:
            if taken.filling is None:
                # For example, the recursion limit was reached. Nobody else knows of the block.
                heap.untake(segment, block)
            taken.drop()
            raise
        self._taken.append(taken)
        view = None if filled is not None and filled.written else taken.filling.view()
        constant = constant_of_block(
            segment, block, taken.generation, nbytes, shared=False, mode="rw"
        )
        if segment.block_tables is not None:
            segment.block_tables.rest = rest_of(constant)
        return view, pack_handle(taken.slot, taken.nonce, constant)

    def _take_from(
        self, heap: Heap, nbytes: int, contents: Contents | None
    ) -> tuple[OwnedSegment, int]:
        try:
            return heap.allocate(nbytes, contents=contents)
        except SegmentError:
            if self._mover is None or not self._mover.lent:
                raise
            # The lent blocks may be the memory that this process needs.
            self._mover.lent.clear()
            return heap.allocate(nbytes, contents=contents)

    def _borrow(
        self, runtime: Runtime, lent: list[Block], nbytes: int
    ) -> tuple[memoryview, bytes] | None:
        """Give out a block that was lent to this process, if there is one of that size."""
        size = size_class(nbytes, whole_pages=True)
        fitting = [each for each in lent if each.nbytes == size]
        if not fitting:
            return None
        lent.remove(fitting[0])
        if not can_be_filled(fitting[0], runtime.live):
            return None
        record = fitting[0]._record
        segment, block = record.segment, record.block
        constant = constant_of_block(
            segment, block, record.generation, nbytes, shared=False, mode="rw"
        )
        try:
            handle, taken = self._add(segment, block, record.generation, constant)
        except ShmreduceError:
            # For example, no lease of that segment is free. A block of this process will do.
            return None
        taken.filling = borrowed = Borrowed(fitting[0], nbytes)
        self._borrowed.append((taken, borrowed))
        return borrowed.view(), handle

    def name_kept(self, record: Record) -> bytes:
        """Return a handle to a block that only this process holds, and of which it has no view."""
        segment, block = record.segment, record.block
        # Sets whose message it is; see _is_ours().
        self._current()
        size = segment.capacities[block]
        constant = constant_of_block(
            segment, block, record.generation, size, shared=False, mode="rw"
        )
        return self._add(segment, block, record.generation, constant)[0]

    def allocate_part(self, nbytes: int) -> tuple[memoryview, object, int] | None:
        """Give out a part of a block that also carries other buffers of the message.

        This is for by-value buffers of ``smallest_part`` bytes and more, if a message may
        have many. A block has 4 MiB at most, and at most twice what the message has of such
        buffers so far, or 256 KiB. At the receiver it is freed when the last of the buffers
        that share it has gone.

        Parameters
        ----------
        nbytes : int
            Number of bytes.

        Returns
        -------
        (memoryview, object, int) or None
            The bytes, which are not set, to be filled before ``reduce`` returns; an object
            that unpickles as the receiver's :class:`Block`, to be put among the arguments
            of the rebuild function; and the offset of the bytes in that block. None if it
            is not worth it, because the message has too few such buffers so far or this one
            is large, or if there is no room: then go on as if there were no
            :meth:`allocate_part`.

        Examples
        --------
        >>> from shmreduce import Message
        >>> message = Message()
        >>> message.allocate_part(100_000) is None
        True
        >>> parts = [message.allocate_part(100_000) for _ in range(50)]
        >>> view, block, offset = parts[-1]
        >>> view.nbytes, offset % 64, block is parts[-2][1]
        (100000, 0, True)
        >>> del parts, view
        >>> message.rollback()
        """
        nbytes = check_nbytes(nbytes)
        if not self.shared_memory or nbytes > LARGEST_PART:
            return None
        # Larger buffers have blocks of their own, and do not make the pickle longer. In a pipe
        # those between the two limits have, too; but many of them take less time as parts.
        small = nbytes < self.inline_limit or nbytes < inline_limit()
        return self._current_batches().part(nbytes, small, self.allocate)

    def add_piece(
        self,
        key: Hashable,
        nbytes: int,
        make: Callable[[Any, memoryview, object, bool], _Pieces],
    ) -> tuple[_Pieces, int] | None:
        """Give out a piece of a block that carries many buffers that are alike.

        This is for by-value buffers in messages that consist of many, such as a list of
        thousands of arrays of one dtype. At the receiver the block becomes one object, from
        which the pieces are taken. That takes less time than parts, and than buffers in the
        pickle.

        Parameters
        ----------
        key : hashable
            What the buffers have in common: whatever decides what is made of the block. Keys
            of calls with another ``make`` are other keys.
        nbytes : int
            Bytes of the buffer, not 0.
        make : callable
            Called for each new block as ``make(key, view, block, short)``. It returns an
            object that stands for the block in the pickle. ``view`` has the bytes of the
            block, which are not set. ``block`` is an object that unpickles as the receiver's
            :class:`Block`. ``short`` says that the message has few bytes so far. Then the
            receiver should copy each piece, or else a single one would keep a block that is
            much larger; and always if it has fewer than ``smallest_part`` bytes. The object's
            method ``close()`` is called when no more pieces are added; it must drop ``view``
            and all that was derived from it.

        Returns
        -------
        (object, int) or None
            What ``make`` returned, and the offset of the piece in the block in bytes, where
            the piece before it ends. Fill the piece before ``reduce`` returns. None if it is
            not worth it, because the message has too few such buffers so far or this one is
            large, or if there is no room: then go on as if there were no :meth:`add_piece`.

        Raises
        ------
        ConfigurationError
            If ``nbytes`` is impossible.

        Examples
        --------
        >>> from shmreduce import Message
        >>> class Pieces:
        ...     def __init__(self, key, view, block, short):
        ...         self.view, self.block = view, block
        ...     def close(self):
        ...         self.view = None
        >>> message = Message()
        >>> message.add_piece("bytes", 100, Pieces) is None
        True
        >>> found = [message.add_piece("bytes", 100, Pieces) for _ in range(100)]
        >>> pieces, offset = found[-1]
        >>> pieces.view[offset : offset + 100] = bytes(100)
        >>> message.rollback()
        """
        batches = self._batches
        if batches is not None:
            series = batches.series.get((make, key))
            # The usual case first. In a forked child the current block belongs to the parent.
            if series is not None and type(nbytes) is int and self._runtime is current():
                offset = series.following
                if 0 < nbytes <= series.end - offset:
                    series.following = offset + nbytes
                    return series.pieces, offset
        nbytes = check_nbytes(nbytes)
        if not (self.shared_memory and 0 < nbytes <= LARGEST_PART):
            return None
        small = nbytes < self.inline_limit
        return self._current_batches().piece(key, nbytes, make, small, self.allocate)

    def _current_batches(self) -> Batches:
        self._current()
        if self._batches is None:
            self._batches = Batches(self._limits)
        return self._batches

    def refer(self, block: Block, used: int) -> bytes | None:
        """Return a handle that sends ``block`` without a copy, if that is possible.

        Parameters
        ----------
        block : Block
            From :func:`shmreduce.find_block`.
        used : int
            The number of its bytes that the object being pickled covers.

        Returns
        -------
        bytes or None
            A handle to the whole block, to be put into the pickle unchanged. If None,
            copy with :meth:`allocate`.

        Raises
        ------
        OutOfLeasesError
            If too many messages that name blocks of the segment are unread.
        LeaseTimeoutError
            If a stopped process has the block locked.
        ConfigurationError
            If ``block`` is not a block.

        Notes
        -----
        A shared block can always be sent like this, except a ``cow`` block at a receiver,
        which has its own pages. A block received by value can be sent if this process is
        its only user: its pages here become copy-on-write, so that the receiver gets the
        bytes of this moment. A channel of shmreduce puts that off until the message is
        complete; it is not needed if nothing here refers to the block any more by then.
        """
        if not self.shared_memory:
            return None
        runtime = self._current()
        try:
            record = block._record
        except AttributeError:
            raise ConfigurationError(
                f"block must be a Block, as find_block() returns, not {block!r}",
                setting="block",
                value=block,
            ) from None
        inherited = record.live is not runtime.live
        if not can_travel(record, used, inherited):
            return None
        mover, room = None, 0
        if not record.shared:
            mover, room = self._mover_for(runtime, record)
            if mover is None and not runtime.live.make_private(record):
                return None
        if inherited:
            handle, taken = self._add_inherited(runtime, record, room)
        else:
            segment = record.segment
            constant = constant_of_record(record, segment, room)
            handle, taken = self._add(segment, record.block, record.generation, constant)
        if mover is not None:
            mover.pass_on(self, block, taken, handle)
        return handle

    @property
    def moves(self) -> bool:
        """Whether it can be worth calling :meth:`move`."""
        return self._mover is not None and self._mover.takes_born

    def move(self, address: int, used: int) -> bytes | None:
        """Return a handle that sends memory from ``shared_allocations`` without a copy.

        The receiver gets the bytes that the array has when the message is complete. The
        array is still sent by value: if anything refers to it then, the bytes are copied.

        Parameters
        ----------
        address : int
            The first address of the memory, as the allocator returned it.
        used : int
            The number of its bytes that the object being pickled covers.

        Returns
        -------
        bytes or None
            A handle to all of the memory, to be put into the pickle unchanged. If None,
            copy with :meth:`allocate`.
        """
        return None if self._mover is None else self._mover.move(self, address, used)

    def add_lease(self, segment: Segment, block: int, nbytes: int) -> tuple[bytes, Lease]:
        """Add a lease on a by-value block, which the caller keeps from being reused.

        Returns the handle, with room for a longer one in its place, and the lease, for
        :meth:`end_lease`.
        """
        # Sets whose message it is; see _is_ours().
        self._current()
        generation = segment.generations[block]
        constant = constant_of_block(
            segment, block, generation, nbytes, shared=False, mode="rw", room=ROOM_FOR_ANOTHER
        )
        return self._add(segment, block, generation, constant)

    def end_lease(self, lease: Lease) -> None:
        """Take back a lease from :meth:`add_lease`, even if the message was committed."""
        lease.undo()
        if lease in self._taken:
            self._taken.remove(lease)

    def handle_of(self, view: memoryview) -> bytes | None:
        """Return a handle to the first bytes of a block that is being filled.

        It covers as many bytes as the view. None if the view does not begin a block of this
        message.
        """
        for taken in self._taken:
            if taken.is_filled_by(view):
                segment, block = taken.segment, taken.block
                constant = constant_of_block(
                    segment, block, taken.generation, view.nbytes, shared=False, mode="rw"
                )
                return pack_handle(taken.slot, taken.nonce, constant)
        return None

    def take_back(self, view: memoryview) -> None:
        """Take back only the block whose bytes :meth:`allocate` returned."""
        for taken in self._taken:
            if taken.is_filled_by(view):
                self._taken.remove(taken)
                taken.undo()
                return

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing that was given out and neither kept nor taken back."""
        return not self._taken

    def segments(self) -> list[Segment]:
        """Return the segments that the message refers to, until it is committed."""
        if len(self._taken) == 1:
            # The usual case.
            return [self._taken[0].segment]
        return list(dict.fromkeys([taken.segment for taken in self._taken]))

    def leases(self) -> list[Lease]:
        """Return the leases that were given out, and neither kept nor taken back so far."""
        return list(self._taken)

    def commit(self, *, carried: bool = False, child: object | None = None) -> None:
        """Keep everything that was given out: the message is complete.

        Parameters
        ----------
        carried : bool
            Whether a descriptor of each segment travels with the message. For the core only.
        child : Popen, optional
            The child that is being started, if the message is for it: when the child has ended,
            nobody is going to read it. For the core only.
        """
        if not self._is_ours():
            return
        self._close_batches()
        while self._borrowed:
            lease, borrowed = self._borrowed[-1]
            borrowed.finish()
            lease.filling = None
            self._borrowed.pop()
        alone = () if carried else self.leases()
        reference = None if child is None else weakref.ref(child)
        keep_leases(self._taken, reference)
        self._taken.clear()
        for taken in alone:
            taken.segment.sent_alone(taken.nonce)
        if self._runtime is not None and self._runtime.has_left:
            self._runtime.leave()

    def rollback(self) -> None:
        """Take back everything that was given out: the message will not be sent."""
        self._close_batches()
        while self._is_ours():
            self._taken.pop().undo()

    def _mover_for(self, runtime: Runtime, record: Record) -> tuple[Mover | None, int]:
        """Return the mover that sends a received block on, if that can wait until commit.

        At that time something may still refer to the block, and the kernel may refuse private
        pages. Then the block is copied, so there must be memory for the copy, and the copy's
        handle must have the same length. The second result is the room that it needs for that.
        """
        if (
            self._mover is None
            or not self._mover.passes_on
            or get_settings().on_exhausted == "pickle"
            or current_strategy() is not record.segment.strategy
        ):
            return None, 0
        made = list(runtime.heap(BY_VALUE).segments)
        if not made:
            return self._mover, _LONGEST_PATH
        # A segment that came with its descriptor has no path here, but the copy's may have one.
        longest = max(map(_size_of_locators, made))
        room = max(longest - _size_of_locators(record.segment), 0)
        return self._mover, room + ROOM_FOR_ANOTHER

    def _close_batches(self) -> None:
        if self._batches is not None:
            self._batches.close()
            self._batches = None

    def _add(
        self, segment: Segment, block: int, generation: int, constant: bytes
    ) -> tuple[bytes, Lease]:
        """Give out one more lease on a block; return its handle and itself."""
        return lend(segment, block, generation, constant, self._taken)

    def _add_inherited(self, runtime: Runtime, record: Record, room: int) -> tuple[bytes, Lease]:
        """Give out a lease on a block that this process inherited from its parent."""
        mark = object()
        segment = runtime.attachments.own_view_of(record.segment, mark)
        try:
            constant = constant_of_record(record, segment, room)
            return self._add(segment, record.block, record.generation, constant)
        finally:
            segment.unpin(mark)

    def _is_ours(self) -> bool:
        """Return whether this process gave out anything here that is still open."""
        if self._taken:
            self._current()
        return bool(self._taken)

    def _current(self) -> Runtime:
        runtime = current()
        if self._runtime is not runtime:
            # This is a child that was forked during the pickling: what was given out before
            # belongs to the parent.
            self._taken.clear()
            self._borrowed.clear()
            self._batches = None
            self._runtime = runtime
        return runtime


def _size_of_locators(segment: Segment) -> int:
    return len(segment.locators.encode(errors="surrogateescape"))


def _contiguous(memory: Any) -> memoryview:
    reason = "it has gaps, or is in another order"
    try:
        view = memoryview(memory)
    except TypeError as error:
        reason = str(error)
    else:
        if view.c_contiguous:
            return view
    raise ConfigurationError(
        f"memory must be a C-contiguous buffer, not {type(memory).__qualname__}: {reason}",
        setting="memory",
        value=type(memory).__qualname__,
    )


def lend(
    segment: Segment, block: int, generation: int, constant: bytes, leases: list[Lease]
) -> tuple[bytes, Lease]:
    """Add a message's lease on a block that this process has; return its handle and itself.

    Parameters
    ----------
    constant : bytes
        The constant part of this process's handles for the block.
    leases : list
        It gets the lease.

    Raises
    ------
    OutOfLeasesError, LeaseTimeoutError
        As :meth:`Message.refer`.
    """
    nonce = next_nonce()
    quickly: tuple[bytes, Lease] | None = quick_blocks.lend_block(
        segment, block, generation, nonce, constant, leases
    )
    if quickly is not None:
        return quickly
    taken = Lease(segment, block, generation, nonce)
    try:
        taken.slot = segment.add_message(block, generation, taken.nonce)
    except BaseException:
        taken.drop()
        raise
    leases.append(taken)
    return pack_handle(taken.slot, nonce, constant), taken


def keep_leases(leases: list[Lease], child: weakref.ref[Any] | None = None) -> None:
    """Keep leases, since their message is complete; it is for ``child``, if that is starting."""
    kept = quick_blocks.commit(leases, child)
    for each in leases[kept:]:
        now = time.monotonic()
        each.segment.sent(Sent(each.slot, each.nonce, each.block, each.generation, now, child))
        # From here on the unread message keeps the segment open.
        each.drop()


def can_travel(record: Record, used: int, inherited: bool) -> bool:
    """Return whether a block can be sent without a copy, once a by-value one is made private."""
    if record.shared:
        # A receiver of a `cow` block has its own pages.
        return record.mode != "cow" or record.slot is None
    return not (
        record.slot is None
        or record.private
        # For example, another thread is about to fork. Between the moment when the pages are
        # private and the moment when the record says so, writes here already miss the block.
        or record.cutting
        or inherited
        or record.segment.capacities[record.block] < _PRIVATE_FROM
        or 2 * used < record.nbytes
    )


def constant_of_record(record: Record, segment: Segment, room: int = 0) -> bytes:
    """Return the constant part of this process's handles for a block that it holds."""
    # A forked child that sends an inherited block is another sender, with its own handles.
    usual = segment is record.segment and not room
    if usual and record.written is not None:
        return record.written
    constant = constant_of_block(
        segment,
        record.block,
        record.generation,
        record.nbytes,
        shared=record.shared,
        mode=record.mode,
        room=room,
    )
    if usual:
        record.written = constant
    return constant


def constant_of_block(
    segment: Segment,
    block: int,
    generation: int,
    nbytes: int,
    *,
    shared: bool,
    mode: Mode,
    room: int = 0,
) -> bytes:
    """Return the constant part of this process's handles for a block.

    With ``room``, it is that many bytes longer, as by :func:`padded`.
    """
    return pack_constant(
        block_key(segment.token, block, generation),
        segment.header.boot,
        nbytes,
        os.getpid(),
        shared,
        mode,
        segment.strategy.name,
        segment.locators + "\0" * room,
    )


quick_blocks.configure(Block, Filling, Lease, Record, RootReference, Sent, PAGE_SIZE, FEW)
