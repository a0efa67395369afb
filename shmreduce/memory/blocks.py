"""The live blocks of this process, and what happens when the last view of one dies.

May import errors, contracts, ``mapping``, ``handle``, ``layout``, ``segment``,
``ledger``, ``heap``, ``owned_segment``, ``record``, ``visible_records`` and ``quick_blocks``.

Every block that this process can see has one *root*: the object that all its views refer
to. A weak reference to the root tells when the last view has died. Its callback may run in
any thread, inside the garbage collector, and in the middle of any function of this package,
so releasing never waits. If something cannot be done at once (the block's lock is busy, or a
forked child may still see the block), it is put on a queue, and :meth:`LiveBlocks.settle`
tries it again.
"""

from __future__ import annotations

import _thread
import sys
import time
import warnings
from collections import deque
from threading import get_ident
from typing import TYPE_CHECKING, Any, Protocol

from shmreduce.errors import SegmentError, ShmreduceWarning
from shmreduce.memory import quick_blocks
from shmreduce.memory.handle import block_key
from shmreduce.memory.layout import SHARED
from shmreduce.memory.mapping import make_root
from shmreduce.memory.owned_segment import OwnedSegment
from shmreduce.memory.record import Record, RootReference
from shmreduce.memory.visible_records import VisibleRecords

if TYPE_CHECKING:
    from collections.abc import Callable

    from shmreduce.contracts import Mode
    from shmreduce.memory.heap import Heap
    from shmreduce.memory.ledger import Fork, ForkLedger
    from shmreduce.memory.segment import Segment

__all__ = ["UNSHARED", "Block", "Keeper", "LiveBlocks", "owner_record", "warn_of_exposed"]

_CUTTING_SECONDS = 10.0
"""How long a fork waits for another thread that makes a block's pages private.

That takes microseconds, but the thread may wait long for a processor.
"""
_UNDOING_SECONDS = 0.05
"""How long a fork waits for a thread that undoes a load. It may be the forking thread."""
_REAP_SECONDS = 0.3
"""Seconds: :meth:`Block.reclaim` looks for killed processes at most this often."""


def _base_of(exporter: Any) -> Any:
    """Return what an array of NumPy is a view of; None for one with its own memory."""
    # Not imported for the question: without NumPy there are no arrays.
    numpy = sys.modules.get("numpy")
    if numpy is None or not isinstance(exporter, numpy.ndarray) or exporter.flags.owndata:
        return None
    return exporter.base


class _Sample:
    """Refers to an object as a Block or a Filling refers to its root."""

    __slots__ = ("root",)

    def __init__(self) -> None:
        self.root = object()


_sample = _Sample()
# Measured, because versions of CPython differ in how many references an expression adds.
UNSHARED = sys.getrefcount(_sample.root)
"""The result of ``sys.getrefcount`` for a root to which nothing else refers."""


class Block:
    """A contiguous piece of shared memory that holds one array, or several buffers.

    :func:`shmreduce.allocate`, :func:`shmreduce.find_block` and
    :func:`shmreduce.import_block` return one. The memory stays as long as the Block, its
    ``buffer``, or anything derived from the buffer lives, and is then reused.

    Attributes
    ----------
    address : int
        Address of the first byte in this process.
    nbytes : int
        Length in bytes.
    mode : {"rw", "ro", "cow"}
        How receivers see the block.
    shared : bool
        True for a shared block, False for one that carried an array by value.
    buffer : memoryview
        The bytes, with format ``B``. It is read-only at receivers of a ``ro`` block.

    Examples
    --------
    >>> from shmreduce import allocate
    >>> block = allocate(5, mode="ro")
    >>> view = block.buffer
    >>> view[:] = b"hello"
    >>> del block
    >>> bytes(view)
    b'hello'
    """

    __slots__ = ("_read_only", "_record", "_root", "address", "mode", "nbytes", "shared")

    def __init__(self, record: Record, root: Any, *, read_only: bool = False) -> None:
        self._record = record
        self._root = root
        self._read_only = read_only or record.read_only
        self.nbytes = record.nbytes
        self.mode: Mode = record.mode
        self.shared = record.shared
        self.address = record.address

    @property
    def buffer(self) -> memoryview:
        """The bytes, format ``B``; read-only at receivers of a ``ro`` block."""
        # Most buffers are the whole root, which has this format. Each of these steps would
        # take as long as making the view.
        view = memoryview(self._root)
        if view.format != "B":
            view = view.cast("B")
        if view.nbytes != self.nbytes:
            view = view[: self.nbytes]
        return view.toreadonly() if self._read_only else view

    def reclaim(self) -> bool:
        """Make sure that nobody else has the block, if that is possible now.

        Use it for memory that a block stands for, such as memory of a device: free that
        memory when this returns True, never before. Call it from time to time; then killed
        processes are noticed within a second.

        Returns
        -------
        bool
            True if no unread message and no other process has the block. Then no handle
            made before can be loaded any more; the block itself can be sent again. False
            if a process has it or may be about to get it, and always in processes other
            than the one that made it. What a forked child inherited does not count: the
            child can read the block, but not send it.

        Examples
        --------
        >>> from shmreduce import Message, allocate, import_block
        >>> block = allocate(8)
        >>> message = Message()
        >>> handle = message.refer(block, 8)
        >>> block.reclaim()
        False
        >>> message.rollback()
        >>> block.reclaim()
        True
        """
        record = self._record
        segment, heap = record.segment, record.heap
        if heap is None or not isinstance(segment, OwnedSegment) or not record.live.current:
            return False
        if segment.heads[record.block]:
            heap.reap_after(_REAP_SECONDS)
        generation = segment.recall(record.block)
        if generation is None:
            return False
        record.live.rename(record, generation)
        return True

    def __repr__(self) -> str:
        kind = "shared" if self.shared else "by value"
        return f"<Block {self.nbytes} bytes, {kind}, {self.mode}>"


class Keeper(Protocol):
    """Takes over holds of received blocks whose views have died; see ``Record.keep``."""

    holds: deque[Record]
    """Holds for the keeper. It takes them out one by one and passes them to ``end_kept``."""
    closed: bool
    """Whether the keeper takes no more."""

    def on_kept(self) -> None:
        """Note that a hold was added. It is called as destructors are: in any thread."""


class LiveBlocks:
    """All blocks that are alive in one process.

    After a fork the child has a new one. It inherits the parent's, which still finds the
    parent's roots, but releases nothing, because only the parent may.
    """

    def __init__(self, ledger: ForkLedger, inherited: LiveBlocks | None = None) -> None:
        self.ledger = ledger
        self.current = True
        self.on_unused: Callable[[Segment], None] = _keep
        """Called with another process's segment when the last hold in it has ended."""
        self.guards_forks = False
        """Whether forked children may see memory of this process that has no root here."""
        self._inherited = inherited
        self.exposed = 0
        """Received arrays that the last forked child shares: their pages could not be private."""
        self.fillings: dict[object, None] = {}
        """Blocks that are being filled for messages; no reference to their roots is kept here."""
        self._roots: dict[int, RootReference] = {}
        self._shared: dict[bytes, RootReference] = {}
        self._waiting: deque[Record] = deque()
        self._seen_by_children = VisibleRecords(self.ledger)

    def __len__(self) -> int:
        return len(self._roots)

    def places(self) -> list[tuple[Segment, int]]:
        """Return segment and number of each block that has views in this process."""
        records = [reference.record for reference in list(self._roots.values())]
        return [(record.segment, record.block) for record in records]

    def expose(self, record: Record, *, read_only: bool = False) -> Block:
        """Make the root of a record and return a Block over it."""
        segment, block = record.segment, record.block
        mapping = record.mapping
        root = make_root(
            mapping.pages, segment.offsets[block] - mapping.offset, segment.capacities[block]
        )
        self.watch(record, root)
        return Block(record, root, read_only=read_only)

    def watch(self, record: Record, root: Any) -> None:
        """Start watching a root: its record is kept as long as the root lives."""
        segment, block = record.segment, record.block
        identity = id(root)
        # From here until the root is in the table there is no other call, after which Ctrl-C might
        # come: who catches it tells by the table who ends the hold.
        reference = RootReference(root, quick_blocks.root_died or _root_died)
        reference.record = record
        reference.identity = identity
        if record.slot is None:
            segment.records[block] = record
        self._roots[identity] = reference
        if record.slot is not None:
            segment.holds[record.slot] = record
        if self.ledger.pending and not record.shared and record.slot is not None:
            # Another thread is about to fork, and may not have seen this one.
            self.make_private(record)
        if record.shared and record.mode != "cow":
            record.key = block_key(segment.token, block, record.generation)
            self._shared[record.key] = reference

    def find(self, exporter: Any) -> Block | None:
        """Return the block whose root ``exporter`` is, or is a memoryview of."""
        root = exporter.obj if isinstance(exporter, memoryview) else exporter
        live: LiveBlocks | None = self
        while live is not None:
            reference = live._roots.get(id(root))
            # An inherited table is not updated any more, so the identity may belong to
            # another object by now.
            if reference is not None and reference() is root:
                return Block(reference.record, root)
            live = live._inherited
        return None

    def find_below(self, exporter: Any) -> Block | None:
        """Return the block over which ``exporter`` is, through any arrays and memoryviews."""
        while exporter is not None:
            found = self.find(exporter)
            if found is not None:
                return found
            exporter = exporter.obj if isinstance(exporter, memoryview) else _base_of(exporter)
        return None

    def find_shared(self, key: bytes) -> Block | None:
        """Return a shared block that is alive here, by the key in its handles."""
        reference = self._shared.get(key)
        root = reference() if reference is not None else None
        # Read after the reference to the root was taken: see take_back().
        if reference is None or root is None or reference.record.ended:
            return None
        return Block(reference.record, root, read_only=reference.record.mode == "ro")

    def rename(self, record: Record, generation: int) -> None:
        """Give a block a new generation, after its handles were made stale."""
        record.generation = generation
        record.written = None
        if record.key is not None:
            reference = self._shared.pop(record.key)
            record.key = block_key(record.segment.token, record.block, generation)
            self._shared[record.key] = reference

    def make_private(self, record: Record) -> bool | None:
        """Make this process's pages of a by-value block private, in place.

        Afterwards writes here stay in this process, and the block keeps its current bytes
        for every process that is given a lease on it. The hold must last as long as the
        views, because pages that are not written still show the block. The caller keeps a
        reference to the root. Otherwise the hold could end before the pages are covered,
        and the next block here would have private pages: where this process writes to them,
        they would never again show what other processes write.

        Returns
        -------
        bool or None
            Whether that was possible. None if another call has done it or is doing it, or
            if the hold has ended.
        """
        segment, block = record.segment, record.block
        mark = (get_ident(),)
        try:
            # Covering the pages twice would discard what was written in between.
            if record.private or record.ended or record.cutting.setdefault(None, mark) is not mark:
                return None
            # Set before covering: whatever fails from now on, the pages will be made to show
            # the file again before the next block is here.
            record.in_place = True
            record.mapping.cover(
                segment.checked_fd, segment.offsets[block], segment.capacities[block], private=True
            )
            record.private = True
        except SegmentError:
            # For example, vm.max_map_count is reached. The caller copies instead.
            record.in_place = False
            record.cutting.clear()
            return False
        except BaseException:
            # Ctrl-C, before or after the pages were covered.
            if record.cutting.get(None) is mark:
                record.private = record.mapping.is_private(segment.offsets[block])
                if not record.private:
                    record.in_place = False
                    record.cutting.clear()
            raise
        return True

    def take_back(self, block: Block) -> bool:
        """Forget a received block that only the caller has seen. Its lease is then the caller's.

        Returns
        -------
        bool
            False if others may have seen it; then nothing changes.
        """
        record = block._record
        slot = record.slot
        if slot is None:
            return False
        # Set first: from now on, find_shared() and a thread that prepares a fork leave the
        # block alone. If they found it before, the reference count tells.
        record.ended = True
        taken = False
        try:
            unseen = sys.getrefcount(block._root) == UNSHARED and not self.ledger.visible(
                record.birth, self.ledger.death
            )
            taken = unseen and self._show_file(record)
        finally:
            # Also after Ctrl-C: then the record ends when its root dies.
            record.ended = taken
        if taken:
            reference = self._roots.get(id(block._root))
            if reference is not None:
                self._strike_off(reference)
            record.segment.holds.pop(slot, None)
            record.segment.passing.pop(slot, None)
        return taken

    def is_watched(self, record: Record) -> bool:
        """Return whether a root is watched whose death will end the record."""
        return any(reference.record is record for reference in list(self._roots.values()))

    def _died(self, reference: RootReference) -> None:
        record = reference.record
        try:
            self._strike_off(reference)
            record.death = self.ledger.death
            self._release(record)
        except BaseException:
            # Ctrl-C, which Python only prints here. The rest is done later. Without `death`
            # the record would count as one that no forked child has seen.
            record.death = self.ledger.death
            # If the hold was handed over, its keeper ends it.
            if not record.ended:
                self._seen_by_children.add(record)
            self._strike_off(reference)
            raise

    def _strike_off(self, reference: RootReference) -> None:
        key = reference.record.key
        if self._roots.get(reference.identity) is reference:
            del self._roots[reference.identity]
        if key is not None and self._shared.get(key) is reference:
            self._shared.pop(key, None)

    def _release(self, record: Record) -> None:
        if self.ledger.visible(record.birth, record.death):
            self._seen_by_children.add(record)
        elif not (record.keep and self._hand_over(record, record.keep)) and not self._end(record):
            self._waiting.append(record)

    def _hand_over(self, record: Record, keeper: Keeper) -> bool:
        """Leave a hold to its keeper if nobody else has the block; return whether it was."""
        slot = record.slot
        # Nobody else can name a by-value block whose only lease is this one.
        if slot is None or record.cutting or not record.segment.is_alone(record.block, slot):
            return False
        # The hold must be ended only once. From here to append(), which is C code, no Python
        # function is called. So neither another thread with the same record nor a signal
        # handler can run in between.
        if record.ended or keeper.closed:
            return False
        record.ended = True
        keeper.holds.append(record)
        keeper.on_kept()
        return True

    def end_kept(self, record: Record) -> None:
        """End a hold that the keeper has taken out of its ``holds``."""
        record.ended = False
        if not self._end(record):
            self._waiting.append(record)

    def _end(self, record: Record) -> bool:
        """End a record; return False if it must be tried again. After the end it does nothing."""
        segment, block = record.segment, record.block
        if record.ended:
            return True
        if record.slot is None:
            # The block may have another record by now.
            if segment.records.get(block) is record:
                del segment.records[block]
            if record.heap is not None and isinstance(segment, OwnedSegment):
                record.heap.give_back(segment, block)
            return True
        # Set first, so that the hold is ended only once, even if Ctrl-C or another thread with
        # the same record comes in between: as soon as the slot is free, another hold may take
        # it. There is no call between the check and this line, so no other thread runs.
        record.ended = True
        shown = False
        try:
            shown = self._show_file(record)
        finally:
            record.ended = shown
        if not shown:
            return False
        try:
            released = segment.try_release(block, record.slot)
        except SegmentError:
            # Other code has closed the segment's descriptors: the hold ends with this process.
            return True
        if not released:
            record.ended = False
            return False
        # Again there is no call in between, so that the table stays right in any case.
        if record.slot in segment.holds and segment.holds[record.slot] is record:
            del segment.holds[record.slot]
            segment.passing.pop(record.slot, None)
        if not segment.holds:
            self.on_unused(segment)
        return True

    def _show_file(self, record: Record) -> bool:
        """Make private pages show the file again; return whether they do."""
        if record.in_place:
            segment, block = record.segment, record.block
            # The next block here must show the file. Until it does, the hold keeps this block
            # from being reused.
            try:
                record.mapping.cover(
                    segment.checked_fd,
                    segment.offsets[block],
                    segment.capacities[block],
                    private=False,
                )
            except SegmentError:
                return False
            record.in_place = False
        return True

    def settle(self) -> None:
        """Try again to release the blocks that could not be released at once."""
        if not self._waiting and not self._seen_by_children.groups:
            return
        for _ in range(len(self._waiting)):
            try:
                record = self._waiting.popleft()
            except IndexError:
                break
            if not self._end(record):
                self._waiting.append(record)
        self._seen_by_children.release_unseen(self._release)

    @property
    def unsettled(self) -> int:
        """How many dead blocks wait to be released."""
        return len(self._waiting) + len(self._seen_by_children)

    # Fork

    def before_fork(self, fork: Fork) -> None:
        """Make received by-value arrays private, and note what the child is going to see.

        A received array is private memory to its user, and a forked child must not see
        what the parent writes later. So its pages become copy-on-write in place, and the
        fork treats them like any private page. If the kernel refuses, a warning tells so
        after the fork, because a hook cannot stop the fork.
        """
        try:
            self.ledger.announce(fork)
            self._prepare(fork)
        except BaseException:
            # The step is tried again, or the fork happens without it.
            self.ledger.withdraw(fork)
            raise

    def _prepare(self, fork: Fork) -> None:
        # A list, because other threads continue until the fork.
        references = list(self._roots.values())
        self._keep_apart(references)
        # Other threads may make more arrays before the fork happens. threading.active_count()
        # would wait for a lock, so it is not used.
        guarded = bool(references or self.fillings) or self.guards_forks or _thread._count() > 0
        self.ledger.before_fork(fork, guarded=guarded)

    def after_fork_in_parent(self, over: list[Fork]) -> None:
        """Finish after a fork. A second call with the same list continues where this ended."""
        if self.ledger.after_fork_in_parent(over):
            # This is late, but what this process writes from now on stays private.
            self._keep_apart(list(self._roots.values()))

    def _keep_apart(self, references: list[RootReference]) -> None:
        exposed = 0
        for reference in references:
            record = reference.record
            if record.slot is None or record.shared:
                continue
            # The root is kept meanwhile, since another thread may drop the last view.
            root = reference()
            if root is not None:
                exposed += not self._is_apart(reference)
            del root
        self.exposed = exposed

    def _is_apart(self, reference: RootReference) -> bool:
        """Make a received by-value block private, or wait for the thread that does."""
        record = reference.record
        began = time.monotonic()
        while not record.private:
            cut = self.make_private(record)
            if cut is not None:
                return cut
            if record.ended and self._roots.get(reference.identity) is not reference:
                # The block was taken back.
                return True
            (cutter,) = record.cutting.get(None, (None,))
            if cutter == get_ident():
                # This very thread was interrupted while it made the pages private.
                return record.ended
            # A forked child has no other thread.
            elsewhere = cutter is not None and self.current
            if time.monotonic() - began > (_CUTTING_SECONDS if elsewhere else _UNDOING_SECONDS):
                return record.ended
            time.sleep(0)
        return True

    def warn_of_exposed(self) -> None:
        """Warn if the child that was just forked shares received arrays."""
        exposed, self.exposed = self.exposed, 0
        if exposed:
            warn_of_exposed(exposed)

    def in_child(self) -> LiveBlocks:
        """Retire the inherited table; return the child's own."""
        self.current = False
        if self.ledger.has_unnoted_fork:
            # The parent did not do so before the fork.
            self._keep_apart(list(self._roots.values()))
        return LiveBlocks(self.ledger.after_fork_in_child(), inherited=self)


def _keep(segment: Segment) -> None:
    """Do nothing: the segment stays open."""


def warn_of_exposed(count: int) -> None:
    """Warn of arrays that a forked child shares, although they are private to their user."""
    warnings.warn(
        f"{count} arrays that were alive at a fork are shared with the child: the kernel has no "
        "room for private pages, or the program has closed the descriptors of their memory. Raise "
        "vm.max_map_count, or fork before there are such arrays",
        ShmreduceWarning,
        stacklevel=3,
    )


def _root_died(reference: RootReference) -> None:
    live = reference.record.live
    if live.current:
        live._died(reference)


def owner_record(
    live: LiveBlocks,
    heap: Heap,
    segment: OwnedSegment,
    block: int,
    nbytes: int,
    mode: Mode,
) -> Record:
    """Return the record of a block that was just allocated here."""
    return Record(
        live,
        segment,
        block,
        nbytes,
        segment.data,
        shared=segment.header.kind == SHARED,
        mode=mode,
        heap=heap,
    )
