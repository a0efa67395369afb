"""The state of this process: its heaps, open segments, live blocks and family.

May import errors, ``fork_hooks``, signals, settings, strategies and every module of the
package but ``message``, ``inspection`` and ``inheritance``.

A forked child starts with a new state. It keeps the inherited one only to look things up,
because only the parent may free its memory.
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
from shmreduce.memory.family import Family
from shmreduce.memory.headroom import headroom
from shmreduce.memory.heap import Heap, HeapBusyError
from shmreduce.memory.idle import IdleReturn
from shmreduce.memory.ledger import Fork, ForkLedger, count_fork, mark_fork
from shmreduce.memory.mailbox import Letter
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
"""If no budget is set, a family gets this part of the memory available when it begins."""
_BUDGET_UNKNOWN = 1 << 40
"""Bytes: the budget if it is unknown how much memory is available."""
_ATTEMPTS = 10
"""How often a step of a fork is tried if it raises an exception."""
_FRAMES = 40
"""How many frames of recursion a step of a fork may need."""


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
        self.idle_return = IdleReturn(self.live, lambda: self.heaps, _idle_limits)
        self._heaps: dict[tuple[int, str, str], Heap] = {}
        self.strategies: set[SharingStrategy] = set()
        """Strategies that this process has used; their leftovers are swept at its end."""
        self.has_left = False
        """Whether the end has begun. From then on, sent messages are handed over at once."""
        self._posted: dict[bytes, frozenset[tuple[int, int]]] = {}
        """The (slot, nonce) of unread messages that the mailbox knows of, by segment."""
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
                raise SegmentError(
                    f"this process cannot join its family: {error}. Close files, or raise the "
                    "limits (ulimit -n, ulimit -f), and try again",
                    operation="open",
                    errno=error.errno,
                    segment=None,
                ) from error
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
        key = (kind, strategy.name, purpose)
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
            segment.give_up(timeout)

    def on_growth(self) -> None:
        """Start the thread that cools heaps, if they hold more than they may keep idle."""
        if self.has_left:
            # Nothing that runs later would remove the names.
            for heap in self.heaps:
                heap.unlink_names()
        elif sum(heap.block_bytes for heap in self.heaps) > get_settings().idle_keep:
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
            # Drops what earlier members left there and nobody can receive any more.
            self.attachments.tidy_mailbox()
        for heap in self.heaps:
            troubles += _try_to_tidy(heap.leave)
        for strategy in {heap.strategy for heap in self.heaps} | self.strategies:
            troubles += _try_to_tidy(functools.partial(sweep, strategy))
        self.live.current = False
        # Warned last, since a warning may be an error, which would skip what comes after it.
        if troubles:
            warnings.warn("; ".join(troubles), ShmreduceWarning, stacklevel=2)

    def _with_unread(self, mark: object) -> list[list[Segment]]:
        """Return the segments with unread messages, pinned; grouped, as one may be open twice."""
        found: dict[bytes, list[Segment]] = {}
        for segment in self.attachments.segments():
            # Pinned first: daemon threads still run, and may close segments that are not used.
            segment.pins[mark] = None
            if segment.unread():
                found.setdefault(segment.token, []).append(segment)
        return list(found.values())

    def _post(self, segments: list[Segment]) -> list[str]:
        """Put a segment into the mailbox unless it is there; return warnings."""
        first = segments[0]
        unread = [(sent.slot, sent.nonce) for each in segments for sent in each.unread()]
        before, now = self._posted.get(first.token), frozenset(unread)
        if now <= (before or frozenset()):
            return []
        # Posted even if no other member is known, since a forked child, or one that is just
        # starting, may not have joined yet. The mailbox ends with the last member.
        carried = all(each.are_carried([nonce for _, nonce in unread]) for each in segments)
        letter = Letter(first.token, unread, complete=True, carried=carried)
        try:
            self._put_into_mailbox(first, letter)
            self._posted[first.token] = now
            if before is not None:
                self._remove_letters(first.token, before)
            if not any(each.unread() for each in segments):
                # The messages were read before the letter was there, so nobody removed it.
                self.attachments.tidy_mailbox()
        except (OSError, LeaseTimeoutError, SegmentError) as error:
            if carried and isinstance(error, OSError):
                # Whoever receives the messages receives the segment, too.
                return []
            # The process ends in any case, and its names must still be removed.
            return [
                (
                    f"{len(unread)} messages sent by process {os.getpid()} have not been read and "
                    f"are lost with it, since they could not be handed over: {error}. Read them "
                    "before the sender ends"
                )
            ]
        return []

    def _put_into_mailbox(self, segment: Segment, letter: Letter) -> None:
        # Reopened: the mailbox keeps the description, and must not keep this one's locks.
        fd = locks.reopen(segment.checked_fd)
        try:
            # Marked first: then the reader of the last message removes the letter.
            segment.hand_over()
            self._post_or_make_room(letter, fd)
        finally:
            os.close(fd)

    def _remove_letters(self, token: bytes, before: frozenset[tuple[int, int]]) -> None:
        """Remove a segment's old letters, given the messages that they name.

        The new letter names what is left of these messages, and more, so it stays.
        """
        self.family.tidy(
            lambda letter, _: (
                letter.token == token and letter.complete and before.issuperset(letter.unread)
            )
        )

    def _post_or_make_room(self, letter: Letter, fd: int) -> None:
        try:
            self.family.post(letter, fd)
        except OSError as error:
            full = error.errno in (errno.EAGAIN, errno.ETOOMANYREFS)
            if not full or not self.attachments.tidy_mailbox(at_once=True):
                raise
            self.family.post(letter, fd)


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


_current: list[Runtime] = []
"""The state of this process, if there is one. In a list, so that a C function can empty it."""
_latest: Runtime | None = None
"""The same state; in a forked child that has none yet, its parent's."""


def current() -> Runtime:
    """Return the state of this process."""
    return _current[0] if _current else _begin()


def _begin() -> Runtime:
    global _latest
    if _latest is not None and not _current:
        # This is a forked child whose hook did not run.
        _renew(_latest)
        return _current[0]
    made = Runtime()
    # Another thread may have made a state first, and arrays may be in it already. From this
    # check until the state is in the list there is no call, so no other thread runs.
    if _latest is None:
        _latest = made
        _current.append(made)
        _finish_at_exit(made)
        _retire_in_children(made)
        # multiprocessing clears the finalizers in children that it forks, after the hooks of
        # os.register_at_fork have run. Then it calls what is registered here.
        util.register_after_fork(_leave, _finish_at_exit)
    return _current[0]


def _retire_in_children(runtime: Runtime) -> None:
    """Make sure that a child releases nothing of its parent's, even if its hooks do not run."""
    os.register_at_fork(after_in_child=functools.partial(setattr, runtime.live, "current", False))


def _finish_at_exit(_: object) -> None:
    # Lowest priority, so that the queues' feeder threads, which have -5, flush first.
    util.Finalize(None, _leave, exitpriority=-100)


def prepare_for_children() -> None:
    """Make this process a member of a family, which its children will join.

    Call it after the settings were changed, and before a child is started. It does not
    keep the settings; they are read when they are needed.
    """
    runtime = current()
    runtime.strategies.add(current_strategy())
    _ = runtime.family
    # The new settings may allow less idle memory than there is now.
    runtime.on_growth()


def _leave() -> None:
    if not _current:
        return
    runtime = _current[0]
    if _threads_that_go_on():
        # Before Python 3.13 a child process runs its finalizers first, and then waits for its
        # threads. So it will wait for this thread, too.
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
    """Return the other threads for which the interpreter is still going to wait."""
    here, main = threading.current_thread(), threading.main_thread()
    if not main.is_alive():
        # The interpreter has waited for them.
        return []
    return [each for each in threading.enumerate() if not each.daemon and each not in {here, main}]


def _to_the_end(step: Callable[[], None]) -> None:
    """Do a step of a fork, and do it again if Ctrl-C or another signal handler interrupts it.

    Python prints an exception that a hook raises, and forks without the rest of that hook.
    """
    raised: BaseException | None = None
    attempts = _ATTEMPTS
    limit = 0
    try:
        _go_down(_FRAMES)
    except RecursionError:
        # The recursion limit is near. The fork happens in any case, so raise the limit.
        limit = sys.getrecursionlimit()
        sys.setrecursionlimit(limit + 2 * _FRAMES)
    while attempts:
        try:
            step()
            break
        except Exception as error:
            # Probably from a signal handler. If the step raised it, it will come again.
            raised, attempts = error, attempts - 1
        except BaseException as error:
            raised = error
    if limit:
        sys.setrecursionlimit(limit)
    try:
        if raised is not None:
            raise raised
    finally:
        # Otherwise a cycle of the exception and this frame would keep the callers' variables.
        raised = None


def _go_down(frames: int) -> None:
    if frames:
        _go_down(frames - 1)


def _hear_signals() -> None:
    """Do nothing, so that the handler of a signal that came during the fork runs here."""


# A signal handler may raise when Python enters a hook, and then that hook is skipped. So each
# hook is registered twice, and the second call does what the first did not do. An exception
# later in a hook, or at the beginning of a function that it calls, is caught, and the step is
# tried again. Near the recursion limit both calls may be skipped: then the ledger and current()
# rely on hooks that are C functions.

_prepared: dict[int, None] = {}
"""Threads that have run the first of the hooks before a fork, but not the second."""
_finished: dict[int, None] = {}
"""The same for the hooks after a fork."""


def _before_fork() -> None:
    here = threading.get_ident()
    # Left by an earlier fork, if its second hook was skipped.
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
            # There is no call in this line, so no signal handler runs.
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
    """Return whether the first hook was skipped, so that the second must do its work."""
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
        # Warned last, since a warning may be an error.
        _current[0].live.warn_of_exposed()


def _after_fork_in_parent_again() -> None:
    if _is_missing(_finished):
        _after_fork_in_parent()


def _after_fork_in_child() -> None:
    parent = _latest
    # When it is called the second time, there is a state already.
    if parent is not None and not _current:
        _to_the_end(lambda: _renew(parent))


def _renew(parent: Runtime) -> None:
    global _latest
    # Done first: whatever fails below, this process must not use its parent's state.
    parent.live.current = False
    made = Runtime(parent)
    _latest = made
    _current[:] = [made]
    _retire_in_children(made)
    # For os.fork(); inherited finalizers do nothing in another process than their own.
    _finish_at_exit(None)


# Hooks run before a fork in the reverse order of registration, and after it in that order.
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
