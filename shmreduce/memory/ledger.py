"""The ledger of forks: which children may still see what was alive at their fork.

May import errors, ``anonymous``, ``locks`` and ``mapping``.

A forked child inherits every mapping, and with it every view. So memory that was alive at a
fork must not be reused before that child, and every child that it forked, has ended or
become another program by exec. Each fork gets a number and one byte of the process's ledger
file. The byte is locked through an open file description made for this fork alone. A mapped
page keeps that description, not a descriptor, because a child that closes all its
descriptors, as daemons do, still sees the memory. The parent unmaps its page right after
the fork. The child keeps the inherited page until it ends or calls exec, and so do its own
forked children. The lock is released with the last of these pages (fcntl(2),
F_OFD_SETLK), and one query answers for any range of forks. A fork that fails leaves no lock.

Fork hooks run in whatever state the process is in, even inside a signal handler, so nothing
here waits for a lock. Hooks may also be skipped: a signal handler may raise when Python
enters one, and near the recursion limit Python cannot call any. So C functions, which
cannot be interrupted, count each fork and mark it in ``pending``. If a mark stays there,
the fork was not prepared, and what was alive at the fork is never reused.
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

# Byte locks: the locked bytes lie far beyond the end of the file.
_LOCK_FORK = 1 << 44
_LONGEST_HOOK = 1.0
"""Seconds. If a fork was not noted for so long, it never will be."""

UNNOTED = sys.maxsize
"""The key in ``pending`` of a fork that no ledger has noted so far."""
_pending: dict[int, None] = {}
_forks = iter(range(sys.maxsize))

# C functions for os.register_at_fork; the module's docstring says why.
count_fork = functools.partial(next, _forks)
mark_fork = functools.partial(_pending.setdefault, UNNOTED)


def _forks_begun() -> int:
    return sys.maxsize - operator.length_hint(_forks)


_inherited: list[Fork] = []
"""The forks that led to this process."""


class Fork:
    """A fork that is about to happen."""

    __slots__ = ("number", "ready", "token")

    def __init__(self) -> None:
        self.number = 0
        """Number among the process's forks; 0 until the fork is announced."""
        self.token: Mapping | None = None
        """The page that the child inherits and the parent unmaps. Nobody touches it."""
        self.ready = False
        """Whether the fork is fully prepared."""


class ForkLedger:
    """The forks of one process, numbered from 1.

    Examples
    --------
    >>> ledger = ForkLedger()
    >>> ledger.visible(ledger.forks, ledger.forks)
    False
    """

    def __init__(self) -> None:
        self.forks = 0
        """How many forks there were, including those that are about to happen."""
        self.pending = _pending
        """The numbers of forks that are about to happen."""
        self._begun_before = _forks_begun()
        self._unnoted_since: float | None = None
        self._unsure: dict[int, float] = {}
        """Numbers for forks that no thread has noted yet, and when each number was given."""
        self._fd = -1
        self._identity: tuple[int, int] | None = None
        self._ready: dict[int, list[Fork]] = {}
        self._without_token: dict[int, None] = {}
        """Numbers of forks that need no token, as long as nothing is made before they happen."""
        self._unguarded_until = 0

    def descriptors(self) -> tuple[int, ...]:
        """Return the descriptor of the ledger's file, if a fork needed one."""
        return () if self._fd == -1 else (self._fd,)

    def forget_unnoted(self) -> None:
        """Forget forks that happened before there was this ledger, and anything to see."""
        self.pending.pop(UNNOTED, None)

    @property
    def depth(self) -> int:
        """How many forks this thread has prepared for: a signal handler may fork before one."""
        return len(self._ready.get(threading.get_ident(), ()))

    @property
    def _is_open(self) -> bool:
        return self._fd != -1 and locks.identity_of(self._fd) == self._identity

    @property
    def birth(self) -> int:
        """The value of :attr:`forks` for something that is born now.

        A thread may make something after another thread's fork hook ran, but before that
        fork happens. The child sees it, so it counts as born before the fork.
        """
        if not self.pending:
            return self.forks
        for number in list(self._without_token):
            # A hook that runs between this module's and the fork, or a signal handler, makes
            # something. The child will see it.
            if number in self.pending:
                self._unguarded_until = max(self._unguarded_until, number)
        return min(self.forks, min(self.pending, default=self.forks + 1) - 1)

    @property
    def death(self) -> int:
        """The value of :attr:`forks` for something that dies now, counting an unnoted fork."""
        return self.forks + self.has_unnoted_fork

    def announce(self, fork: Fork) -> None:
        """Give a number to the fork that this thread is about to make.

        Call it before looking at what is alive, because whatever is born later looks at
        :attr:`pending`. If the same fork is tried a second time, it keeps its number: the
        allocator of shmreduce.born counts forks, not attempts.
        """
        if fork.number:
            return
        begun, now = _forks_begun(), time.monotonic()
        # From here until the number is noted, no call lets another thread run.
        missed = begun - self._begun_before - self.forks - 1
        while missed > 0:
            # Either nobody will note that fork, or another thread has not got to it yet.
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
        """Make the token that the child will inherit, if it is needed."""
        if guarded:
            try:
                if self._fd == -1:
                    made = anonymous_file("shmreduce-forks")
                    identity = locks.identity_of(made)
                    # Another thread may have made it first, and all tokens must be of one
                    # file. There is no call between the check and the assignment.
                    if self._fd == -1:
                        self._fd, self._identity = made, identity
                    else:
                        os.close(made)
                if not self._make_token(fork):
                    self._unguarded_until = max(self._unguarded_until, fork.number)
            except (OSError, SegmentError):
                # For example, no descriptor is free. What is alive now is never reused.
                self._unguarded_until = max(self._unguarded_until, fork.number)
        else:
            self._without_token[fork.number] = None
        # By thread, since another thread may fork at the same time. A stack, since a signal
        # handler may fork between this hook and the fork.
        self._ready.setdefault(threading.get_ident(), []).append(fork)
        fork.ready = True

    def _make_token(self, fork: Fork) -> bool:
        if not self._is_open:
            # Not to be opened and closed again: the process would lose its locks of another file.
            return False
        fd = locks.reopen(self._fd)
        try:
            locked = locks.try_lock(fd, _LOCK_FORK + fork.number)
            fork.token = Mapping(fd, 0, PAGE_SIZE)
        finally:
            os.close(fd)
        return locked

    def withdraw(self, fork: Fork) -> None:
        """Undo the preparation of a fork, except for its number."""
        fork.ready = False
        fork.token = None
        self._without_token.pop(fork.number, None)
        stack = self._ready.get(threading.get_ident(), [])
        if fork in stack:
            stack.remove(fork)

    @property
    def has_unnoted_fork(self) -> bool:
        """Whether a fork has happened, or is about to, that nobody has noted."""
        return UNNOTED in self.pending

    def leave_unguarded(self, fork: Fork) -> None:
        """Let a fork happen without a token: what is alive now is never reused."""
        self.announce(fork)
        self._unguarded_until = max(self._unguarded_until, fork.number)
        self.pending.pop(fork.number, None)

    def after_fork_in_parent(self, over: list[Fork]) -> bool:
        """Leave the token to the child alone; return whether there is no token.

        The fork is put into ``over``. A signal handler may raise in any call here, and then
        this is called again: with the same list it continues where it ended.
        """
        stack = self._ready.get(threading.get_ident(), [])
        if not over:
            over[:] = stack[-1:]
        if not over and self.has_unnoted_fork:
            # The hooks before the fork were skipped, so nobody has noted it.
            over[:] = [Fork()]
            self.leave_unguarded(over[0])
            return True
        for fork in over:
            fork.token = None
            self.pending.pop(fork.number, None)
            self._without_token.pop(fork.number, None)
            if fork in stack:
                stack.remove(fork)
            if not stack:
                self._ready.pop(threading.get_ident(), None)
        return False

    def after_fork_in_child(self) -> ForkLedger:
        """Return the child's own ledger; the child keeps the inherited tokens until it ends."""
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
            :attr:`death` when it died. It was alive at the forks in between.
        """
        if self.pending:
            self._give_up_waiting()
            if self.has_unnoted_fork or any(
                birth < number <= death for number in list(self._unsure)
            ):
                return True
        if birth == death:
            return False
        if self._unguarded_until > birth:
            return True
        if self._fd == -1:
            # So far no fork needed a token.
            return False
        if not self._is_open:
            # Other code has closed it, so assume that a child can see it.
            return True
        return locks.first_locked(self._fd, _LOCK_FORK + birth + 1, death - birth) is not None

    def _give_up_waiting(self) -> None:
        """Count forks that stay unnoted for long as unguarded: what lived then is not reused."""
        now = time.monotonic()
        if not self.has_unnoted_fork:
            self._unnoted_since = None
        elif self._unnoted_since is None:
            self._unnoted_since = now
        elif now - self._unnoted_since > _LONGEST_HOOK:
            self.leave_unguarded(Fork())
        # Iterates over the numbers, not the items: before CPython 3.12 each pair that items()
        # makes may start the garbage collector. A destructor that it calls, or another thread,
        # may fork or call this, too.
        for number in list(self._unsure):
            since = self._unsure.get(number, now)
            if now - since > _LONGEST_HOOK and self._unsure.pop(number, None) is not None:
                self._unguarded_until = max(self._unguarded_until, self.forks)
                self.pending.pop(number, None)
