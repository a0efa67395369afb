"""Which forked children may still see what this process had alive at the fork.

May import ``locks``.

A forked child inherits every mapping, and with it every view. So what was
alive at a fork must not be reused before that child has gone, exec'ed
included. Each fork gets a number and one byte of the process's ledger file.
The byte is locked through an open file description made for this fork alone;
the parent closes its descriptor right after the fork, the child keeps its
inherited one, close-on-exec, for life, as do the child's own forked children.
The lock is gone when the last of them is gone (fcntl(2), F_OFD_SETLK), and a
single query answers for any range of forks. A failed fork leaves no lock.

Fork hooks run in whatever state the process is in, a signal handler included,
so nothing here waits for a lock.
"""

from __future__ import annotations

import os
import threading

from shmreduce.memory import locks

__all__ = ["ForkLedger"]

_LOCK_FORK = 1 << 44


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
        self.pending: dict[int, None] = {}
        """Numbers of forks that are about to happen."""
        self._fd = -1
        self._tokens: dict[int, list[tuple[int, int]]] = {}
        self._unguarded_until = 0

    @property
    def descriptor(self) -> int:
        """Descriptor of the ledger's file, -1 until a fork needed one."""
        return self._fd

    @property
    def birth(self) -> int:
        """The value of :attr:`forks` for something that is born now.

        A thread may make something between the hook of another thread's fork
        and the fork itself: the child sees it, so it counts as older.
        """
        if not self.pending:
            return self.forks
        return min(self.pending, default=self.forks + 1) - 1

    def announce(self) -> int:
        """Give a number to the fork that this thread is about to make.

        To be called before looking at what is alive: what is born later looks
        at :attr:`pending`.
        """
        # No call between the two lines, so no other thread.
        self.forks += 1
        number = self.forks
        self.pending[number] = None
        return number

    def before_fork(self, number: int, *, guarded: bool) -> None:
        """Make the token that the child is going to inherit, where there is a need."""
        token = -1
        if guarded:
            try:
                if self._fd == -1:
                    self._fd = os.memfd_create("shmreduce-forks", os.MFD_CLOEXEC)
                token = os.open(f"/proc/self/fd/{self._fd}", os.O_RDWR | os.O_CLOEXEC)
                if not locks.try_lock(token, _LOCK_FORK + number):
                    self._unguarded_until = max(self._unguarded_until, number)
            except OSError:
                # Out of descriptors, say. What is alive now is then never reused.
                self._unguarded_until = max(self._unguarded_until, number)
        # Of this thread, since another may be forking too. A stack, since a
        # signal handler may fork between this hook and the fork.
        self._tokens.setdefault(threading.get_ident(), []).append((number, token))

    def after_fork_in_parent(self) -> None:
        """Leave the token to the child alone."""
        me = threading.get_ident()
        stack = self._tokens.get(me)
        if not stack:
            return
        number, token = stack.pop()
        if not stack:
            self._tokens.pop(me, None)
        self.pending.pop(number, None)
        if token != -1:
            os.close(token)

    def after_fork_in_child(self) -> ForkLedger:
        """Return the child's own ledger; the inherited token stays open for life."""
        if self._fd != -1:
            os.close(self._fd)
            self._fd = -1
        return ForkLedger()

    def visible(self, birth: int, death: int) -> bool:
        """Return whether a forked child may still see something that is dead here.

        Parameters
        ----------
        birth, death : int
            The values of :attr:`birth` when the thing was born, and of
            :attr:`forks` when it died: it was alive at the forks in between.
        """
        if birth == death:
            return False
        if self._unguarded_until > birth:
            return True
        if self._fd == -1:
            # No fork was in need of a token so far.
            return False
        return locks.first_locked(self._fd, _LOCK_FORK + birth + 1, death - birth) is not None
