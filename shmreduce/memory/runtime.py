"""The one state of this process: heaps, open segments, live blocks, family.

May import errors, ``fork_hooks``, signals, settings, strategies and every module of the
package but ``message``, ``inspection`` and ``inheritance``.

A forked child starts with a fresh state. It keeps what it inherited only to
look up: the parent's memory is the parent's to free.
"""

from __future__ import annotations

import errno
import functools
import os
import sys
import threading
import warnings
from contextlib import suppress
from multiprocessing import util
from typing import TYPE_CHECKING

from shmreduce.errors import (
    LeaseTimeoutError,
    SegmentError,
    ShmreduceWarning,
)
from shmreduce.fork_hooks import renew_in_children
from shmreduce.memory import locks
from shmreduce.memory.attachments import Attachments
from shmreduce.memory.blocks import LiveBlocks
from shmreduce.memory.family import Family, Letter
from shmreduce.memory.headroom import headroom
from shmreduce.memory.heap import Heap, HeapBusyError
from shmreduce.memory.idle import IdleReturn
from shmreduce.memory.ledger import Fork, ForkLedger, count_fork, mark_fork
from shmreduce.memory.sweep import sweep
from shmreduce.settings import get_settings
from shmreduce.signals import is_from_system
from shmreduce.strategies import current_strategy

if TYPE_CHECKING:
    from collections.abc import Callable

    from shmreduce.contracts import SharingStrategy
    from shmreduce.memory.segment import Segment

__all__ = ["Runtime", "current", "prepare_for_children"]

_BUDGET_SHARE = 0.8
"""Of the memory that is available when a family begins: its budget where none is set."""
_BUDGET_UNKNOWN = 1 << 40
"""Bytes: the budget where nobody tells how much is available."""
_ATTEMPTS = 10
"""At a step of a fork that raises an exception."""
_FRAMES = 40
"""Enough of them for any of these steps."""


class Runtime:
    """The state of one process.

    Parameters
    ----------
    parent : Runtime or None
        In a forked child, its parent's state as inherited.
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
        self.idle_return = IdleReturn(self.live, lambda: self.heaps, _idle_limits)
        self._heaps: dict[tuple[int, str, str], Heap] = {}
        self.strategies: set[SharingStrategy] = set()
        """Strategies that were in force here, whose leftovers are swept at the end."""
        self.has_left = False
        """Whether the end has begun: what is sent from now on is handed over at once."""
        self._posted: dict[bytes, frozenset[tuple[int, int]]] = {}
        """Unread messages, slot and nonce, that the mailbox knows of, by segment."""
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
        """Membership of the process in its family; a process without one begins a family."""
        if self._family is None:
            parents = self._parent_family
            try:
                inherited = None if parents is None else parents.rejoined()
                made = inherited or Family.found(_default_budget())
            except OSError as error:
                if not is_from_system(error):
                    raise
                raise SegmentError(
                    f"this process cannot join its family: {error}. Close files, or raise the "
                    "limits (ulimit -n, ulimit -f), and try again",
                    operation="open",
                    errno=error.errno,
                    segment=None,
                ) from error
            # No call between the two lines, so no other thread.
            if self._family is None:
                self._family = made
            else:
                made.leave(with_mailbox=inherited is None)
        return self._family

    def _get_family(self) -> Family:
        return self.family

    @property
    def known_family(self) -> Family | None:
        """The family that this process or its parent is in, if any."""
        return self._family or self._parent_family

    def join(self, family: Family) -> None:
        """Become a member of the family that the parent process is in.

        What this process has done before, when its main module was imported or
        its fork server had loaded one, may have made it one of another.
        """
        self.idle_return.stop()
        before, self._family = self._family, family
        if before is not None:
            family.take_over(before)
        self.on_growth()

    def heap(self, kind: int) -> Heap:
        """Return the heap for new blocks of a kind, by the strategy in force."""
        return self.heap_for(kind, "")

    def spare_heap(self, kind: int) -> Heap:
        """Return a heap for calls that interrupted the usual one."""
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
        """Return the heap that serves a purpose, by the strategy in force; make it if need be."""
        strategy = current_strategy()
        key = (kind, strategy.name, purpose)
        heap = self._heaps.get(key)
        if heap is None:
            sweep(strategy)
            made = make(kind, strategy, self)
            heap = self._heaps.setdefault(key, made)
        return heap

    # What heaps ask for

    @property
    def boot(self) -> bytes:
        """Identity of this boot of this host."""
        return self.attachments.boot

    @property
    def directory(self) -> dict[bytes, Segment]:
        """Open segments by token."""
        return self.attachments.directory

    def list_again(self, segment: Segment) -> None:
        """List a segment of this process that was taken out for a moment."""
        self.attachments.list_again(segment)

    def budget(self) -> int:
        """Return the family's budget in bytes."""
        budget = get_settings().budget
        return self.family.budget if budget is None else budget

    def cool_others(self, asking: Heap) -> int:
        """Give back what the other heaps have free, and what nobody can read; return how much.

        What was taken out of the mailbox counts as one byte: nobody knows how many there are.
        """
        released = int(self._family is not None and self.attachments.tidy_mailbox(at_once=True))
        for heap in self.heaps:
            if heap is not asking:
                heap.collect()
                # Not waiting: that heap's thread may be waiting for this one. It may
                # be this thread, which a signal handler has interrupted there.
                with suppress(HeapBusyError), heap.exclusive(wait=False):
                    heap.reap()
                    released += heap.cool(0)
        return released

    def give_up(self) -> None:
        """End messages that nobody is going to read."""
        timeout = get_settings().message_timeout
        for segment in self.attachments.segments():
            segment.give_up(timeout)

    def on_growth(self) -> None:
        """Have somebody look after heaps that hold more than they may keep idle."""
        if self.has_left:
            # Nobody comes after this who would remove the names.
            for heap in self.heaps:
                heap.unlink_names()
        elif sum(heap.block_bytes for heap in self.heaps) > get_settings().idle_keep:
            self.idle_return.start()

    # Fork

    def before_fork(self, fork: Fork) -> None:
        """Get ready for a child that sees what this process sees."""
        # First: until it has a number it looks to other threads like one that nobody notes.
        self.live.ledger.announce(fork)
        self.idle_return.before_fork()
        self.live.before_fork(fork)

    def after_fork_in_parent(self, over: list[Fork]) -> None:
        """Go on. Called again with the same list it goes on from where it was."""
        self.live.after_fork_in_parent(over)
        self.idle_return.after_fork_in_parent()

    # The end

    def leave(self) -> None:
        """Hand unread messages over and remove what has a name.

        Runs at normal exit, after the queues' feeder threads have flushed, and
        again for each message of a function that :mod:`atexit` calls later. What
        a killed process cannot do here, the kernel does (memfd), or the next
        user (names).
        """
        self.has_left = True
        self.idle_return.stop()
        self.live.settle()
        posted = bool(self._posted)
        troubles = []
        mark = object()
        try:
            for segments in self._with_unread(mark):
                troubles += self._post(segments)
        finally:
            for segment in self.attachments.segments():
                segment.unpin(mark)
        if self._posted and not posted:
            # What those before have left, and nobody can receive.
            self.attachments.tidy_mailbox()
        for heap in self.heaps:
            troubles += _try_to_tidy(heap.leave)
        for strategy in {heap.strategy for heap in self.heaps} | self.strategies:
            troubles += _try_to_tidy(functools.partial(sweep, strategy))
        self.live.current = False
        # Last: a warning may be an error, and nothing after it would be done.
        if troubles:
            warnings.warn("; ".join(troubles), ShmreduceWarning, stacklevel=2)

    def _with_unread(self, mark: object) -> list[list[Segment]]:
        """Return what has unread messages, pinned; together what is one segment, open twice."""
        found: dict[bytes, list[Segment]] = {}
        for segment in self.attachments.segments():
            # First: threads that nobody waits for go on, and close what is not in use any more.
            segment.pins[mark] = None
            if segment.unread():
                found.setdefault(segment.token, []).append(segment)
        return list(found.values())

    def _post(self, segments: list[Segment]) -> list[str]:
        """Leave a segment in the mailbox, unless it is there; return what to warn of."""
        first = segments[0]
        unread = [(sent.slot, sent.nonce) for each in segments for sent in each.unread()]
        before, now = self._posted.get(first.token), frozenset(unread)
        if now <= (before or frozenset()):
            return []
        # Also if no other member is known: a forked child, or one that is just
        # starting, may not have joined yet. The last to go takes it along.
        carried = all(each.are_carried([nonce for _, nonce in unread]) for each in segments)
        letter = Letter(first.token, unread, complete=True, carried=carried)
        try:
            # Another description: the mailbox keeps it, and this one has our locks.
            fd = locks.reopen(first.checked_fd)
            try:
                # First: who reads the last of them from now on takes the letter out.
                first.hand_over()
                self._post_or_make_room(letter, fd)
            finally:
                os.close(fd)
            self._posted[first.token] = now
            if before is not None:
                # This one says what is left of those of then, and something new: so it stays.
                self.family.tidy(
                    lambda other, _: (
                        other.token == first.token
                        and other.complete
                        and before.issuperset(other.unread)
                    )
                )
            if not any(each.unread() for each in segments):
                # Read meanwhile, when there was no letter yet.
                self.attachments.tidy_mailbox()
        except (OSError, LeaseTimeoutError, SegmentError) as error:
            if carried and isinstance(error, OSError):
                # Whoever receives them receives the segment, too.
                return []
            # The process ends all the same, and its names must go.
            return [
                (
                    f"{len(unread)} messages sent by process {os.getpid()} have not been read and "
                    f"are lost with it, since they could not be handed over: {error}. Read them "
                    "before the sender ends"
                )
            ]
        return []

    def _post_or_make_room(self, letter: Letter, fd: int) -> None:
        try:
            self.family.post(letter, fd)
        except OSError as error:
            full = error.errno in (errno.EAGAIN, errno.ETOOMANYREFS)
            if not full or not self.attachments.tidy_mailbox(at_once=True):
                raise
            self.family.post(letter, fd)


def _try_to_tidy(step: Callable[[], object]) -> list[str]:
    """Take a step that removes names; return what to warn of."""
    try:
        step()
    except Exception as error:
        # A strategy's own code may raise anything. The others' names are to go all the same.
        what = f"{type(error).__name__}: {error}"
        return [f"a name of shared memory could not be removed: {what}. Try `shmreduce gc`"]
    return []


def _default_budget() -> int:
    room = headroom()
    return _BUDGET_UNKNOWN if room is None else int(room * _BUDGET_SHARE)


def _idle_limits() -> tuple[float, int]:
    settings = get_settings()
    return settings.idle_seconds, settings.idle_keep


_current: list[Runtime] = []
"""The state of this process, if it has one. A list, since what empties it is in C."""
_latest: Runtime | None = None
"""That state; in a forked child that has none yet, its parent's."""


def current() -> Runtime:
    """Return the state of this process."""
    return _current[0] if _current else _begin()


def _begin() -> Runtime:
    global _latest
    if _latest is not None and not _current:
        # A forked child whose hook was lost.
        _renew(_latest)
        return _current[0]
    made = Runtime()
    # Another thread may have been faster, and arrays be in its state already.
    # No call before the state is in the list, so no other thread.
    if _latest is None:
        _latest = made
        _current.append(made)
        _finish_at_exit(made)
        _retire_in_children(made)
        # multiprocessing clears its finalizers in the children it forks, after
        # the hooks of os.register_at_fork; what is registered here runs then.
        util.register_after_fork(_leave, _finish_at_exit)
    return _current[0]


def _retire_in_children(runtime: Runtime) -> None:
    """See to it that in a child nothing of its parent's is released, whatever becomes of hooks."""
    os.register_at_fork(after_in_child=functools.partial(setattr, runtime.live, "current", False))


def _finish_at_exit(_: object) -> None:
    # Lowest priority: the queues' feeder threads flush before (they have -5).
    util.Finalize(None, _leave, exitpriority=-100)


def prepare_for_children() -> None:
    """Make this process a member of a family, which children started from now on join.

    To be called when the settings have changed and before a child is started.
    The settings in force are not kept: they are read when they matter.
    """
    runtime = current()
    runtime.strategies.add(current_strategy())
    _ = runtime.family
    # The settings may allow less idle memory than there is.
    runtime.on_growth()


def _leave() -> None:
    if not _current:
        return
    runtime = _current[0]
    if _threads_that_go_on():
        # Before Python 3.13 a child process calls its finalizers first and waits for
        # its threads then: for this one, too.
        with suppress(RuntimeError):
            threading.Thread(
                target=_leave_last, args=(runtime,), name="shmreduce-leave", daemon=False
            ).start()
            return
    runtime.leave()


def _leave_last(runtime: Runtime) -> None:
    while threads := _threads_that_go_on():
        threads[0].join()
    runtime.leave()


def _threads_that_go_on() -> list[threading.Thread]:
    """Return the other threads that the interpreter has yet to wait for."""
    here, main = threading.current_thread(), threading.main_thread()
    if not main.is_alive():
        # It has waited for them.
        return []
    return [each for each in threading.enumerate() if not each.daemon and each not in {here, main}]


def _to_the_end(step: Callable[[], None]) -> None:
    """Take a step of a fork, again if Ctrl-C comes into it, or another handler raises.

    Whatever a hook raises is printed, and the fork goes on without the rest of
    what the hook was to do.
    """
    raised: BaseException | None = None
    attempts = _ATTEMPTS
    limit = 0
    try:
        _go_down(_FRAMES)
    except RecursionError:
        # The fork comes from deep down, and happens in any case.
        limit = sys.getrecursionlimit()
        sys.setrecursionlimit(limit + 2 * _FRAMES)
    while attempts:
        try:
            step()
            break
        except Exception as error:
            # A handler's, most likely. If it is the step's own it comes again.
            raised, attempts = error, attempts - 1
        except BaseException as error:
            raised = error
    if limit:
        sys.setrecursionlimit(limit)
    try:
        if raised is not None:
            raise raised
    finally:
        # In a cycle with this frame it would keep what the callers' frames have.
        raised = None


def _go_down(frames: int) -> None:
    if frames:
        _go_down(frames - 1)


def _hear_signals() -> None:
    """Do nothing: the handler of a signal that came during the fork runs here, and may raise."""


# The handler of a signal may also raise as a hook is entered, which is lost then. So each
# is there twice, and the second does what the first was kept from. What is raised further
# on in a hook, or as what it calls is entered, is not lost on the fork: that is tried again.
# Near the recursion limit both are lost; what the ledger then does, and current(), is
# begun by functions in C.

_prepared: dict[int, None] = {}
"""Threads that have made the first of the hooks before a fork, but not the second."""
_finished: dict[int, None] = {}
"""The same of the hooks after it."""


def _before_fork() -> None:
    here = threading.get_ident()
    # Of a fork before, if the second hook was lost then.
    _prepared.pop(here, None)
    forks: list[Fork] = []
    try:
        if _current:
            _to_the_end(lambda: _prepare(_current[0], forks))
    finally:
        try:
            if _current and not (forks and forks[0].ready):
                _to_the_end(lambda: _prepare(_current[0], forks, last=True))
        finally:
            # No call in this line, so no handler.
            _prepared[here] = None


def _before_fork_again() -> None:
    if _is_missing(_prepared):
        _before_fork()


def _prepare(runtime: Runtime, forks: list[Fork], *, last: bool = False) -> None:
    if not forks:
        forks.append(Fork())
    try:
        runtime.before_fork(forks[0])
    except Exception:
        if last:
            runtime.live.ledger.leave_unguarded(forks[0])
        raise


def _is_missing(threads: dict[int, None]) -> bool:
    """Whether the first hook has not been made, and so is to be made by the second."""
    return threads.pop(threading.get_ident(), ...) is ...


def _after_fork_in_parent() -> None:
    here = threading.get_ident()
    _finished.pop(here, None)
    over: list[Fork] = []
    try:
        if _current:
            _to_the_end(lambda: _current[0].after_fork_in_parent(over))
    finally:
        try:
            if _current and not over:
                _to_the_end(lambda: _current[0].after_fork_in_parent(over))
        finally:
            _finished[here] = None
    if _current:
        # Last: a warning may be an error.
        _current[0].live.warn_of_exposed()


def _after_fork_in_parent_again() -> None:
    if _is_missing(_finished):
        _after_fork_in_parent()


def _after_fork_in_child() -> None:
    parent = _latest
    # The second time there is one already.
    if parent is not None and not _current:
        _to_the_end(lambda: _renew(parent))


def _renew(parent: Runtime) -> None:
    global _latest
    # Whatever comes into it: its parent's state is never this process's to go on with.
    parent.live.current = False
    made = Runtime(parent)
    _latest = made
    _current[:] = [made]
    _retire_in_children(made)
    # For os.fork; inherited finalizers know that they are not this process's.
    _finish_at_exit(None)


# Before a fork the last that was registered comes first, after it the first.
os.register_at_fork(after_in_parent=_hear_signals)
for _parents in (_prepared, _finished, _current):
    os.register_at_fork(after_in_child=_parents.clear)
os.register_at_fork(
    before=_before_fork_again,
    after_in_parent=_after_fork_in_parent,
)
os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent_again)
renew_in_children(_after_fork_in_child)
os.register_at_fork(before=mark_fork)
os.register_at_fork(before=count_fork)
os.register_at_fork(before=_hear_signals)
