"""Which forked children may still see what this process had alive at the fork.

May import errors, ``anonymous``, ``locks`` and ``mapping``.

A forked child inherits every mapping, and with it every view. So what was
alive at a fork must not be reused before that child has gone, exec'ed
included. Each fork gets a number and one byte of the process's ledger file.
The byte is locked through an open file description made for this fork alone,
which a page of addresses keeps, not a descriptor: a child that closes all its
descriptors, as daemons do, goes on seeing the memory. The parent gives its page
up right after the fork, the child keeps the inherited one until it ends or
becomes another program by exec, as do the child's own forked children.
The lock is gone when the last of them is gone (fcntl(2), F_OFD_SETLK), and a
single query answers for any range of forks. A failed fork leaves no lock.

Fork hooks run in whatever state the process is in, a signal handler included,
so nothing here waits for a lock. They may also be lost: the handler of a signal
may raise as one is entered, and near the recursion limit none can be. So each
fork is counted, and marked in ``pending``, by functions in C, which nothing
strikes. What is still marked when it should not be was not prepared: all that
was alive then is never reused.
"""

from __future__ import annotations

import functools
import operator
import os
import sys
import threading
import time

from shmreduce.errors import SegmentError
from shmreduce.memory import locks
from shmreduce.memory.anonymous import anonymous_file
from shmreduce.memory.mapping import PAGE_SIZE, Mapping

__all__ = ["UNNOTED", "Fork", "ForkLedger", "count_fork", "mark_fork"]

_LOCK_FORK = 1 << 44
_LONGEST_HOOK = 1.0
"""Seconds after which a fork that nobody has noted never will be."""

UNNOTED = sys.maxsize
"""Stands in ``pending`` for a fork that no ledger knows of so far."""
_pending: dict[int, None] = {}
_forks = iter(range(sys.maxsize))

# For os.register_at_fork: functions in C, see above.
count_fork = functools.partial(next, _forks)
mark_fork = functools.partial(_pending.setdefault, UNNOTED)


def _forks_begun() -> int:
    return sys.maxsize - operator.length_hint(_forks)


_inherited: list[Fork] = []
"""The forks by which this process came about."""


class Fork:
    """One fork that is about to happen."""

    __slots__ = ("number", "ready", "token")

    def __init__(self) -> None:
        self.number = 0
        """Which of the process's forks it is; 0 until it is announced."""
        self.token: Mapping | None = None
        """What the child inherits and the parent gives up. Nobody touches the page."""
        self.ready = False
        """Whether all has been done for it."""


class ForkLedger:
    """The forks of one process, numbered from 1 on.

    Examples
    --------
    >>> ledger = ForkLedger()
    >>> ledger.visible(ledger.forks, ledger.forks)
    False
    """

    def __init__(self) -> None:
        self.forks = 0
        """How many forks there were, or are about to be."""
        self.pending = _pending
        """Numbers of forks that are about to happen."""
        # What was forked before there was anything to see is nobody's to note.
        self.pending.pop(UNNOTED, None)
        self._begun_before = _forks_begun()
        self._unnoted_since: float | None = None
        self._unsure: dict[int, float] = {}
        """Forks of which it is not known who makes them, and since when there is a number."""
        self._fd = -1
        self._identity: tuple[int, int] | None = None
        self._ready: dict[int, list[Fork]] = {}
        self._unguarded_until = 0

    @property
    def descriptor(self) -> int:
        """Descriptor of the ledger's file, -1 until a fork needed one."""
        return self._fd

    @property
    def _is_open(self) -> bool:
        return self._fd != -1 and locks.identity_of(self._fd) == self._identity

    @property
    def birth(self) -> int:
        """The value of :attr:`forks` for something that is born now.

        A thread may make something between the hook of another thread's fork
        and the fork itself: the child sees it, so it counts as older.
        """
        if not self.pending:
            return self.forks
        return min(self.forks, min(self.pending, default=self.forks + 1) - 1)

    @property
    def death(self) -> int:
        """The value of :attr:`forks` for something that dies now: unnoted ones count."""
        return self.forks + self.was_struck

    def announce(self, fork: Fork) -> None:
        """Give a number to the fork that this thread is about to make.

        To be called before looking at what is alive: what is born later looks
        at :attr:`pending`. In a second attempt at the same fork it keeps its
        number: the allocator of shmreduce.born counts forks, not attempts.
        """
        if fork.number:
            return
        begun, now = _forks_begun(), time.monotonic()
        # No call that lets another thread in before the number is noted.
        missed = begun - self._begun_before - self.forks - 1
        while missed > 0:
            # Nobody is going to note it; or another thread is, which has not come that far.
            missed -= 1
            self.forks += 1
            self._unsure[self.forks] = now
            self.pending[self.forks] = None
        if missed < 0 and self._unsure:
            fork.number, _ = self._unsure.popitem()
        else:
            self._begun_before += missed
            self.forks += 1
            fork.number = self.forks
            self.pending[fork.number] = None
        self.pending.pop(UNNOTED, None)
        self._unnoted_since = None

    def before_fork(self, fork: Fork, *, guarded: bool) -> None:
        """Make the token that the child is going to inherit, where there is a need."""
        if guarded:
            try:
                if self._fd == -1:
                    made = anonymous_file("shmreduce-forks")
                    identity = locks.identity_of(made)
                    # Another thread may have been faster: all tokens are of one file.
                    # No call between the two lines.
                    if self._fd == -1:
                        self._fd, self._identity = made, identity
                    else:
                        os.close(made)
                if not self._make_token(fork):
                    self._unguarded_until = max(self._unguarded_until, fork.number)
            except (OSError, SegmentError):
                # Out of descriptors, say. What is alive now is then never reused.
                self._unguarded_until = max(self._unguarded_until, fork.number)
        # Of this thread, since another may be forking too. A stack, since a
        # signal handler may fork between this hook and the fork.
        self._ready.setdefault(threading.get_ident(), []).append(fork)
        fork.ready = True

    def _make_token(self, fork: Fork) -> bool:
        fd = locks.reopen(self._fd)
        try:
            locked = locks.try_lock(fd, _LOCK_FORK + fork.number)
            fork.token = Mapping(fd, 0, PAGE_SIZE)
        finally:
            os.close(fd)
        return locked

    def withdraw(self, fork: Fork) -> None:
        """Take back what was done for a fork so far, but for its number."""
        fork.ready = False
        fork.token = None
        stack = self._ready.get(threading.get_ident(), [])
        if fork in stack:
            stack.remove(fork)

    @property
    def was_struck(self) -> bool:
        """Whether there was, or is about to be, a fork that nobody has noted."""
        return UNNOTED in self.pending

    def leave_unguarded(self, fork: Fork) -> None:
        """Let a fork happen for which nothing could be done: what is alive now is never reused."""
        self.announce(fork)
        self._unguarded_until = max(self._unguarded_until, fork.number)
        self.pending.pop(fork.number, None)

    def after_fork_in_parent(self, over: list[Fork]) -> bool:
        """Leave the token to the child alone; return whether there is none.

        ``over`` gets the fork. A signal handler may raise at any call, and this be
        called again: with the same list it goes on from where it was.
        """
        stack = self._ready.get(threading.get_ident(), [])
        if not over:
            over[:] = stack[-1:]
        if not over and self.was_struck:
            # By the hooks before it nobody has noted it.
            over[:] = [Fork()]
            self.leave_unguarded(over[0])
            return True
        for fork in over:
            fork.token = None
            self.pending.pop(fork.number, None)
            if fork in stack:
                stack.remove(fork)
            if not stack:
                self._ready.pop(threading.get_ident(), None)
        return False

    def after_fork_in_child(self) -> ForkLedger:
        """Return the child's own ledger; the inherited tokens stay for life."""
        _inherited.extend(fork for stack in self._ready.values() for fork in stack)
        is_open, fd, self._fd = self._is_open, self._fd, -1
        if is_open:
            os.close(fd)
        self.pending.clear()
        return ForkLedger()

    def visible(self, birth: int, death: int) -> bool:
        """Return whether a forked child may still see something that is dead here.

        Parameters
        ----------
        birth, death : int
            The values of :attr:`birth` when the thing was born, and of
            :attr:`death` when it died: it was alive at the forks in between.
        """
        if self.pending:
            self._give_up_waiting()
            if self.was_struck or any(birth < number <= death for number in list(self._unsure)):
                return True
        if birth == death:
            return False
        if self._unguarded_until > birth:
            return True
        if self._fd == -1:
            # No fork was in need of a token so far.
            return False
        if not self._is_open:
            # Closed by somebody else: nobody knows any more.
            return True
        return locks.first_locked(self._fd, _LOCK_FORK + birth + 1, death - birth) is not None

    def _give_up_waiting(self) -> None:
        """See to it that forks which nobody notes for long leave what lived then unused."""
        now = time.monotonic()
        if not self.was_struck:
            self._unnoted_since = None
        elif self._unnoted_since is None:
            self._unnoted_since = now
        elif now - self._unnoted_since > _LONGEST_HOOK:
            self.leave_unguarded(Fork())
        # Numbers alone: before CPython 3.12 each pair that is made may set off the garbage
        # collector, and that a destructor or another thread, which forks or comes here, too.
        for number in list(self._unsure):
            since = self._unsure.get(number, now)
            if now - since > _LONGEST_HOOK and self._unsure.pop(number, None) is not None:
                self._unguarded_until = max(self._unguarded_until, self.forks)
                self.pending.pop(number, None)
