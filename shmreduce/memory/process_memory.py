"""What one process has: its heaps, open segments, live blocks and its family.

May import errors, signals, settings, strategies, ``family``, ``headroom``, ``heap``, ``ledger``,
``attachments``, ``blocks``, ``idle``, ``sweep``, ``handover``, and ``segment`` for types alone.
``runtime`` says which of these states is that of this process.
"""

from __future__ import annotations

import functools
import os
import warnings
from contextlib import suppress
from typing import TYPE_CHECKING

from shmreduce.errors import SegmentError, ShmreduceWarning
from shmreduce.memory.attachments import Attachments
from shmreduce.memory.blocks import LiveBlocks
from shmreduce.memory.family import Family, cannot_join
from shmreduce.memory.handover import Handover
from shmreduce.memory.headroom import headroom
from shmreduce.memory.heap import Heap, HeapBusyError
from shmreduce.memory.idle import IdleReturn
from shmreduce.memory.ledger import ForkLedger
from shmreduce.memory.sweep import sweep
from shmreduce.settings import get_settings
from shmreduce.signals import is_from_system
from shmreduce.strategies import current_strategy

if TYPE_CHECKING:
    from collections.abc import Callable

    from shmreduce.contracts import SharingStrategy
    from shmreduce.memory.ledger import Fork
    from shmreduce.memory.segment import Segment

__all__ = ["Runtime"]

_BUDGET_SHARE = 0.8
"""If no budget is set, a family gets this part of the memory available when it begins."""
_BUDGET_UNKNOWN = 1 << 40
"""Bytes: the budget if it is unknown how much memory is available."""


class Runtime:
    """The state of one process.

    Parameters
    ----------
    parent : Runtime or None
        In a forked child, the inherited state of its parent.
    """

    def __init__(self, parent: Runtime | None = None) -> None:
        self.live: LiveBlocks = (
            LiveBlocks(ForkLedger()) if parent is None else parent.live.in_child()
        )
        lineage: dict[bytes, Segment] = {} if parent is None else parent.attachments.lineage()
        self.attachments: Attachments = Attachments(
            self._get_family, lineage, boot=None if parent is None else parent.boot
        )
        self.live.on_unused = self.attachments.close_ownerless
        self.attachments.on_open = self._look_after_idle
        self.idle_return = IdleReturn(
            self.live, lambda: self.heaps, self.attachments.close_unused, _idle_limits
        )
        self._heaps: dict[tuple[int, str, str, int], Heap] = {}
        self.strategies: set[SharingStrategy] = set()
        """Strategies that this process has used; their leftovers are swept at its end."""
        self.has_left = False
        """Whether the end has begun. From then on, sent messages are handed over at once."""
        self._handover = Handover(self.attachments, self._get_family)
        self._parent_family = parent.known_family if parent is not None else None
        self._family: Family | None = None
        if self._parent_family is not None:
            self._parent_family.give_up_locks()
        opened = [] if parent is None else parent.attachments.segments()
        for segment in (*lineage.values(), *opened):
            segment.give_up_locks()
        for heap in [] if parent is None else parent.heaps:
            heap.keep_apart_in_child()

    @property
    def family(self) -> Family:
        """The process's membership in its family; without one it founds a family.

        Raises SegmentError if the process cannot join or found one, for lack of descriptors.
        """
        if self._family is None:
            parents = self._parent_family
            try:
                inherited = None if parents is None else parents.rejoined()
                made = inherited or Family.found(_default_budget())
            except OSError as error:
                if not is_from_system(error):
                    raise
                raise cannot_join(error) from error
            # There is no call between the two lines, so no other thread runs in between.
            if self._family is None:
                self._family = made
            else:
                made.leave(with_mailbox=inherited is None)
        return self._family

    def _get_family(self) -> Family:
        return self.family

    @property
    def known_family(self) -> Family | None:
        """The family of this process or of its parent, if there is one."""
        return self._family or self._parent_family

    def join(self, family: Family) -> None:
        """Become a member of the parent process's family.

        The process may already be a member of another family: its main module may have
        used shared memory while it was imported, or a module that its fork server loaded.
        """
        self.idle_return.stop()
        before, self._family = self._family, family
        if before is not None:
            family.take_over(before)
        self.on_growth()

    def heap(self, kind: int) -> Heap:
        """Return the heap for new blocks of a kind, for the current strategy."""
        return self.heap_for(kind, "")

    def spare_heap(self, kind: int) -> Heap:
        """Return a heap for a call that interrupted another call of the usual heap."""
        return self.heap_for(kind, "spare")

    @property
    def heaps(self) -> list[Heap]:
        """All heaps of this process."""
        return list(self._heaps.values())

    def heap_for(
        self,
        kind: int,
        purpose: str,
        make: Callable[[int, SharingStrategy, Runtime], Heap] = Heap,
    ) -> Heap:
        """Return the heap for a purpose and the current strategy; make it if there is none."""
        strategy = current_strategy()
        # By user: what root made before a daemon became another user is closed to that user.
        key = (kind, strategy.name, purpose, os.geteuid())
        heap = self._heaps.get(key)
        if heap is None:
            sweep(strategy)
            made = make(kind, strategy, self)
            heap = self._heaps.setdefault(key, made)
        return heap

    # What heaps use

    @property
    def boot(self) -> bytes:
        """Identity of the current boot of this host."""
        return self.attachments.boot

    @property
    def directory(self) -> dict[bytes, Segment]:
        """Open segments by token."""
        return self.attachments.directory

    def list_again(self, segment: Segment) -> None:
        """List a segment of this process that was taken out of the directory for a moment."""
        self.attachments.list_again(segment)

    def budget(self) -> int:
        """Return the family's budget in bytes."""
        budget = get_settings().budget
        return self.family.budget if budget is None else budget

    def cool_others(self, asking: Heap) -> int:
        """Free what other heaps do not use, and messages that nobody can read; return how much.

        The result is in bytes. All segments dropped from the mailbox count as one byte,
        because their sizes are not known.
        """
        released = int(self._family is not None and self.attachments.tidy_mailbox(at_once=True))
        for heap in self.heaps:
            if heap is not asking:
                heap.collect()
                # It must not wait: that heap's thread may be waiting for this one, or may be
                # this thread, interrupted there by a signal handler.
                with suppress(HeapBusyError), heap.exclusive(wait=False):
                    heap.reap()
                    released += heap.cool(0)
        return released

    def give_up(self) -> None:
        """End messages that nobody is going to read."""
        timeout = get_settings().message_timeout
        for segment in self.attachments.segments():
            # Other code may have closed its descriptors: its messages end with this process.
            with suppress(SegmentError):
                segment.give_up(timeout)

    def on_growth(self) -> None:
        """Look after a heap that has grown."""
        if self.has_left:
            # Nothing that runs later would remove the names.
            for heap in self.heaps:
                heap.unlink_names()
        self._look_after_idle()

    def _look_after_idle(self) -> None:
        """Start the thread that gives back, if heaps or others' open segments are too large."""
        if self.has_left:
            return
        own = sum(heap.block_bytes for heap in self.heaps)
        if max(own, self.attachments.foreign_bytes()) > get_settings().idle_keep:
            self.idle_return.start()

    # Fork

    def before_fork(self, fork: Fork) -> None:
        """Prepare for a child that sees the memory that this process sees."""
        # Announced first: until then, other threads take it for a fork that nobody notes.
        self.live.ledger.announce(fork)
        self.idle_return.before_fork()
        self.live.before_fork(fork)

    def after_fork_in_parent(self, over: list[Fork]) -> None:
        """Finish after a fork. A second call with the same list continues where this ended."""
        self.live.after_fork_in_parent(over)
        self.idle_return.after_fork_in_parent()

    # The end

    def leave(self) -> None:
        """Hand unread messages over and remove names.

        It runs at normal exit, after the queues' feeder threads have flushed, and again for
        each message that a function of :mod:`atexit` sends later. For a killed process,
        which cannot do this, the kernel frees the memory (memfd), or the next process that
        uses the strategy removes the names.
        """
        self.has_left = True
        self.idle_return.stop()
        self.live.settle()
        troubles = self._handover.post_unread()
        for heap in self.heaps:
            troubles += _try_to_tidy(heap.leave)
        for strategy in {heap.strategy for heap in self.heaps} | self.strategies:
            troubles += _try_to_tidy(functools.partial(sweep, strategy))
        self.live.current = False
        # Warned last, since a warning may be an error, which would skip what comes after it.
        if troubles:
            warnings.warn("; ".join(troubles), ShmreduceWarning, stacklevel=2)


def _try_to_tidy(step: Callable[[], object]) -> list[str]:
    """Do a step that removes names; return warnings."""
    try:
        step()
    except Exception as error:
        # A strategy may raise anything. The names of the others must be removed nevertheless.
        what = f"{type(error).__name__}: {error}"
        return [f"a name of shared memory could not be removed: {what}. Try `shmreduce gc`"]
    return []


def _default_budget() -> int:
    room = headroom()
    return _BUDGET_UNKNOWN if room is None else int(room * _BUDGET_SHARE)


def _idle_limits() -> tuple[float, int]:
    settings = get_settings()
    return settings.idle_seconds, settings.idle_keep
