"""The arrays that this process has received: mappings, and the attachments that use them.

May import public names of :mod:`shmreduce`, and ``errors``, ``devices``,
``mappings`` and ``messages`` of this plugin.

The memory of another process is opened once, however many arrays lie in it. For each
array there is an *attachment*, which the array and its views keep alive. When it dies,
these steps follow in this order:

1. wait for the devices, since kernels may still work on the array;
2. if this was the last attachment of its mapping, keep the mapping open for a moment, with
   the lease, so that the next array in the same memory need not open it again. Opening and
   closing take a driver as long as the rest of a message, and the allocators of array
   libraries use the same memory again and again. Then close it;
3. release the lease. From now on the sender may free the memory.

A mapping that nobody uses is *idle*. The keeper's thread closes it; closing does not wait
for anything, so it does not disturb a graph that another thread is capturing.

An attachment may die in any thread, inside the garbage collector, in the middle of any
function here. So its death is only noted, and the steps are done by the thread that gets
the lock: this one at once or, if another thread holds the lock, that one before it has
finished.
"""

from __future__ import annotations

import sys
import threading
import time
import weakref
from collections import deque
from contextlib import suppress
from math import inf
from typing import TYPE_CHECKING, NamedTuple

from shmreduce_cuda.devices import synchronise
from shmreduce_cuda.errors import CudaDriverError, CudaSharingError
from shmreduce_cuda.mappings import Mapping, Opener, mapping_key

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from shmreduce import Block
    from shmreduce_cuda.messages import Description

__all__ = ["Attachment", "Imports"]

_PATIENCE = 60.0
"""Seconds to wait for another thread that opens or closes memory."""
_IDLE_SECONDS = 0.1
"""Seconds for which a mapping that nobody uses is kept, at least."""
_QUICK = 0.05
"""Seconds to wait for the keeper's thread, which closes idle mappings."""
_MOST_IDLE = 64
"""How many idle mappings are kept."""
_MOST_IDLE_BYTES = 1 << 30
"""How many bytes they have together, unless it is a single one.

Its sender cannot use this memory for something else. The larger a mapping is, the more it
keeps from the sender, for nearly the same time saved.
"""


class Attachment:
    """Keeps the memory of one received array open.

    Attributes
    ----------
    mapping : Mapping
        The memory that the array lies in.
    lease : Block
        The block whose release tells the sender that the array is not used any more.
    description : Description
        The description from the message.
    """

    __slots__ = ("__weakref__", "_imports", "description", "lease", "mapping")

    def __init__(
        self, imports: Imports, mapping: Mapping, lease: Block, description: Description
    ) -> None:
        self._imports = imports
        self.mapping = mapping
        self.lease = lease
        self.description = description

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        # At interpreter shutdown nothing need be done: the process's end closes everything.
        if not is_finalizing():
            self._imports.ended(self.mapping, self.lease)

    def covers(self, low: int, high: int) -> bool:
        """Return whether its array has the bytes from ``low`` to ``high``."""
        first = self.mapping.base + self.description.offset
        lowest, highest = self.description.layout.extent
        return first + lowest <= low and high <= first + highest


class _Idle(NamedTuple):
    """A mapping that nobody uses, and the lease of its last array."""

    mapping: Mapping
    lease: Block
    since: float


class Imports:
    """The mappings of one process.

    Parameters
    ----------
    attend : callable
        Called when a mapping becomes idle, perhaps in a destructor. Returns whether somebody
        will call :meth:`close_idle`; if not, the mapping is closed at once.
    """

    def __init__(self, attend: Callable[[], bool]) -> None:
        self._attend = attend
        self._lock = threading.Lock()
        self._inside: int | None = None
        self._closes_idle = False
        self._opener = Opener()
        self._mappings: dict[tuple[Any, ...], Mapping] = {}
        self._attachments: dict[int, weakref.ref[Attachment]] = {}
        self._ended: deque[tuple[Mapping, Block]] = deque()
        # The one that has been idle for longest is the first.
        self._idle: dict[tuple[Any, ...], _Idle] = {}
        self._stuck: deque[tuple[Mapping, Block]] = deque()
        self._lost: list[tuple[Mapping, Block]] = []
        self.retired = False
        """Whether this process is a forked child, to which the mappings do not belong."""
        self.opened = 0
        """How many mappings were opened so far."""
        self.closed = 0
        """How many mappings were closed so far."""

    @property
    def mappings(self) -> int:
        """How many mappings are open."""
        return len(self._mappings)

    @property
    def unsettled(self) -> bool:
        """Whether there is something to be closed."""
        return bool(self._idle or self._ended)

    @property
    def arrays(self) -> int:
        """How many received arrays are alive."""
        return sum(mapping.users for mapping in list(self._mappings.values()))

    @property
    def stuck(self) -> int:
        """How many arrays have died, but could not be closed so far."""
        return len(self._stuck) + len(self._lost)

    def attach(self, description: Description, lease: Block, ordinal: int) -> Attachment:
        """Return an attachment for an array; open its memory if it is not open yet.

        Raises
        ------
        CudaSharingError
            If it cannot be opened.
        """
        key = mapping_key(description)
        self._enter()
        try:
            mapping = self._mappings.get(key)
            if mapping is None:
                mapping = self._opener.open(description, ordinal)
                self._mappings[key] = mapping
                self.opened += 1
            attachment = Attachment(self, mapping, lease, description)
            mapping.users += 1
            # The lease of its last array may go now: the new one's keeps the memory as well.
            self._idle.pop(key, None)
        finally:
            self._leave()
        self._attachments[id(attachment)] = weakref.ref(
            attachment, _Forget(self._attachments, id(attachment))
        )
        return attachment

    def find_mapping(self, address: int) -> Mapping | None:
        """Return the mapping that an address is in, or None."""
        for mapping in list(self._mappings.values()):
            if mapping.base <= address < mapping.base + mapping.size:
                return mapping
        return None

    def find_attachment(self, mapping: Mapping, low: int, high: int) -> Attachment | None:
        """Return a received array that has all the bytes from ``low`` to ``high``, or None."""
        for reference in list(self._attachments.values()):
            found = reference()
            if found is not None and found.mapping is mapping and found.covers(low, high):
                return found
        return None

    def ended(self, mapping: Mapping, lease: Block) -> None:
        """Note that an attachment has died."""
        if not self.retired:
            self._ended.append((mapping, lease))
            self.settle()

    def retry(self) -> None:
        """Try again to close what could not be closed."""
        self._take_up_stuck()
        self.settle()

    def _take_up_stuck(self) -> None:
        for _ in range(len(self._stuck)):
            # IndexError if another thread has taken them, which then closes them.
            with suppress(IndexError):
                self._ended.append(self._stuck.popleft())

    def settle(self) -> None:
        """Close what has ended, unless another call is doing that and will see it."""
        while self._ended and self._take_over():
            self._inside = threading.get_ident()
            try:
                self._close_ended()
            finally:
                self._inside = None
                self._lock.release()

    def _take_over(self) -> bool:
        """Take the lock if it is free, or if the keeper's thread has it and will be quick.

        That thread must not be left to wait for the devices: the program knows when this
        thread drops an array, and may start to capture a graph as soon as it has.
        """
        if self._closes_idle and self._inside != threading.get_ident():
            return self._lock.acquire(timeout=_QUICK)
        return self._lock.acquire(blocking=False)

    def _close_ended(self) -> None:
        while self._ended:
            mapping, lease = self._ended.popleft()
            try:
                synchronise(mapping.ordinal)
            except CudaDriverError:
                # The device has failed, or a stream is being captured. Keep the lease: the
                # owner must not free memory that is still mapped here.
                self._stuck.append((mapping, lease))
                continue
            self._take_up_stuck()
            mapping.users -= 1
            if not mapping.users:
                self._idle[mapping.key] = _Idle(mapping, lease, time.monotonic())
                self._limit_idle()
                if not self._attend():
                    self._close_until(inf)

    def _limit_idle(self) -> None:
        """Close those that have been idle for longest, if there are too many."""
        while len(self._idle) > 1 and (
            len(self._idle) > _MOST_IDLE
            or sum(each.mapping.size for each in self._idle.values()) > _MOST_IDLE_BYTES
        ):
            self._close(next(iter(self._idle.values())))

    def close_idle(self, seconds: float = _IDLE_SECONDS, *, patient: bool = False) -> None:
        """Close what nobody has used for some time, if the lock is free; or wait for the lock."""
        me = threading.get_ident()
        patience = _PATIENCE if patient and self._inside != me else 0.0
        if not (self._idle and self._lock.acquire(timeout=patience)):
            return
        self._inside = me
        self._closes_idle = True
        try:
            self._close_until(time.monotonic() - seconds)
        finally:
            self._closes_idle = False
            self._inside = None
            self._lock.release()
        # What has ended meanwhile is for the thread that waits for the lock; but perhaps it
        # waits no longer.
        if self._ended and not self._attend():
            self.settle()

    def _close_until(self, moment: float) -> None:
        for each in list(self._idle.values()):
            if each.since > moment:
                return
            self._close(each)

    def _close(self, idle: _Idle) -> None:
        """Close an idle mapping. Its lease ends with the caller's reference, so afterwards."""
        mapping = idle.mapping
        # Removed first: if closing fails half-way, nobody may use it again.
        del self._idle[mapping.key]
        self._mappings.pop(mapping.key, None)
        try:
            self._opener.close(mapping)
        except CudaDriverError:
            # It may be half closed, so do not try again: the lease ends with the process.
            self._lost.append((mapping, idle.lease))
        else:
            self.closed += 1

    def _enter(self) -> None:
        me = threading.get_ident()
        if self._inside == me or not self._lock.acquire(timeout=_PATIENCE):
            raise CudaSharingError(
                "a CUDA array was received while this process was opening or closing another "
                f"one, and that did not end within {_PATIENCE:.0f} s, or it was interrupted by "
                "this very call (a signal handler); receive it later"
            )
        self._inside = me

    def _leave(self) -> None:
        self._inside = None
        self._lock.release()
        self.settle()


class _Forget:
    """Removes a dead attachment from the table."""

    def __init__(self, table: dict[int, weakref.ref[Attachment]], key: int) -> None:
        self._table, self._key = table, key

    def __call__(self, reference: weakref.ref[Attachment]) -> None:
        if self._table.get(self._key) is reference:
            self._table.pop(self._key, None)
