"""Families: the processes that descend from one installation have one budget and one mailbox.

May import errors, signals, ``thread_locks``, ``anonymous``, ``locks``, ``mapping`` and
``mailbox``.

A family shares one small file and one socket pair, which forked children inherit and spawned
children are given. The file has an entry for each member: its pid and how many bytes of
shared memory it has reserved. An entry counts while its member holds the entry's byte lock.
So the entry of a killed member does not count any more, unless a forked child of it lives,
which has inherited the lock and the mappings.

Byte locks of the file exclude members from the budget and from the mailbox while one of them
changes it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import sys
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, ParamSpec, Protocol, TypeVar

from shmreduce.errors import (
    BudgetExceededError,
    LeaseTimeoutError,
    OutOfLeasesError,
    SegmentError,
)
from shmreduce.memory import locks
from shmreduce.memory.anonymous import anonymous_file
from shmreduce.memory.mailbox import Mailbox
from shmreduce.memory.mapping import PAGE_SIZE, Mapping
from shmreduce.signals import is_from_system
from shmreduce.thread_locks import interrupt_safe

if TYPE_CHECKING:
    from collections.abc import Callable

    from shmreduce.memory.mailbox import Letter

    _P = ParamSpec("_P")
    _R = TypeVar("_R")

__all__ = ["Family", "cannot_join"]

# The family's file: a page with its identity and its budget, then the members' pids, then the
# bytes that each member has reserved.
_MEMBERS = 2048
_SIZE = PAGE_SIZE + 16 * _MEMBERS
# Byte locks: the locked bytes lie far beyond the end of the file.
_LOCK_MEMBER = 1 << 40
_LOCK_BUDGET = 1 << 41
_LOCK_MAILBOX = 1 << 42
_PATIENCE = 10.0
"""Seconds to wait for a lock of the family. It is usually held for a moment only."""


_OF_ONE_FAMILY = (
    *("fd", "mailbox", "identity", "budget"),
    *("_identities", "_index", "_lock_fd", "_mapping", "_pids", "_reserved"),
)
"""The attributes of a membership that are not the same in another family."""


class Reserving(Protocol):
    """A segment, as far as the family needs it."""

    reserved: int


class Family:
    """Membership of this process in its family.

    Parameters
    ----------
    fd : int
        The family's file, opened under an open file description of this process alone. The
        object owns it from now on, even if the constructor raises.
    mailbox : Mailbox
        The family's.
    """

    def __init__(self, fd: int, mailbox: Mailbox) -> None:
        self.fd = fd
        self.mailbox = mailbox
        self._identities = self._what_is_open()
        self._index = self._lock_fd = -1
        try:
            self._begin(fd)
        except BaseException:
            # A traceback may keep the mapping, which keeps the description and its lock.
            if self._index != -1:
                locks.unlock(fd, _LOCK_MEMBER + self._index)
            os.close(fd)
            raise
        self._threads = threading.RLock()
        self._threads_locked = interrupt_safe(self._threads)
        self._depth = {_LOCK_BUDGET: 0, _LOCK_MAILBOX: 0}

    def _begin(self, fd: int) -> None:
        self._mapping = Mapping(fd, 0, _SIZE)
        everything = memoryview(self._mapping.pages)
        self.identity = bytes(everything[:16])
        self.budget = int.from_bytes(everything[16:24], sys.byteorder)
        self._pids = everything[PAGE_SIZE : PAGE_SIZE + 8 * _MEMBERS].cast("Q")
        self._reserved = everything[PAGE_SIZE + 8 * _MEMBERS : _SIZE].cast("Q")
        self._index = self._join()
        # Short-lived locks are taken through a description that forked children close at once.
        # Otherwise, if a parent is killed while it holds a lock, the lock would stay with a
        # child that knows nothing of it.
        self._lock_fd = locks.reopen(fd)

    @classmethod
    def found(cls, budget: int) -> Family:
        """Found a family, with this process as its first member.

        ``budget`` is in bytes, for members whose settings do not name one.
        """
        fd = anonymous_file("shmreduce-family")
        try:
            os.ftruncate(fd, _SIZE)
            os.posix_fallocate(fd, 0, _SIZE)
            _seal(fd)
            os.pwrite(fd, os.urandom(16) + budget.to_bytes(8, sys.byteorder), 0)
            mailbox = Mailbox.made()
        except BaseException:
            os.close(fd)
            raise
        try:
            return cls(fd, mailbox)
        except BaseException:
            mailbox.close()
            raise

    def descriptors(self) -> tuple[int, int, int]:
        """Return those of the file, and of the mailbox's receiver and sender, for a child.

        Raises
        ------
        SegmentError
            As :meth:`reserve`.
        """
        with self._threads_locked:
            self._renew_if_unused()
            receiver, sender = self.mailbox
            return self.fd, receiver.fileno(), sender.fileno()

    def _renew_if_unused(self) -> None:
        # Not in the middle of what this thread does under one of the locks.
        if not any(self._depth.values()):
            self._renew()

    def _renew(self) -> None:
        """Found another family if this process has closed what it had of this one.

        Daemons do so, and the numbers may be other files' by now, which must be neither locked
        nor written to, nor be passed on to children.
        """
        is_locking = self._lock_fd == -1 or locks.identity_of(self._lock_fd) == self._identities[0]
        if is_locking and self._what_is_open() == self._identities:
            return
        try:
            made = Family.found(self.budget)
        except OSError as error:
            if not is_from_system(error):
                raise
            raise cannot_join(error) from error
        made._reserved[made._index] = self._reserved[self._index]
        theirs = {name: vars(made)[name] for name in _OF_ONE_FAMILY}
        ours = {name: vars(self)[name] for name in _OF_ONE_FAMILY}
        # One call of a C function, within which no signal handler and no other thread runs.
        vars(self).update(theirs)
        vars(made).update(ours)
        made._give_up_descriptors()

    def _give_up_descriptors(self) -> None:
        """Close what is still open of the family, and forget the rest."""
        self.give_up_locks()
        file, *ends = self._identities
        if locks.identity_of(self.fd) == file:
            locks.unlock(self.fd, _LOCK_MEMBER + self._index)
            os.close(self.fd)
        for end, identity in zip(self.mailbox, ends, strict=True):
            if end.fileno() != -1 and locks.identity_of(end.fileno()) == identity:
                end.close()
            else:
                end.detach()

    def _what_is_open(self) -> list[tuple[int, int] | None]:
        return [locks.identity_of(fd) for fd in (self.fd, *(end.fileno() for end in self.mailbox))]

    def rejoined(self) -> Family | None:
        """Return the membership of a child that was just forked.

        None if the child has closed what it inherited, as daemons do. The numbers may belong
        to other files by now, which must be neither written to nor closed.

        The inherited descriptor stays open. It keeps the parent's entry alive for as long as
        the child may keep the parent's memory.
        """
        if self._what_is_open() != self._identities:
            self.mailbox.detach()
            return None
        return Family(locks.reopen(self.fd), self.mailbox)

    def give_up_locks(self) -> None:
        """Close the description of the locks, in a forked child that inherited it."""
        fd, self._lock_fd = self._lock_fd, -1
        if fd != -1 and locks.identity_of(fd) == self._identities[0]:
            os.close(fd)

    def take_over(self, other: Family) -> None:
        """Take over the reservation of this process in another family, and leave that family."""
        self._reserved[self._index] = other.reserved
        other.leave(with_mailbox=True)

    def leave(self, *, with_mailbox: bool) -> None:
        """Close a membership that is not used any more."""
        # The mapping keeps the description alive, and so the lock would stay until it is gone.
        locks.unlock(self.fd, _LOCK_MEMBER + self._index)
        self.give_up_locks()
        fd, self.fd = self.fd, -1
        os.close(fd)
        if with_mailbox:
            self.mailbox.close()

    def _join(self) -> int:
        for index in range(_MEMBERS):
            if locks.try_lock(self.fd, _LOCK_MEMBER + index):
                self._reserved[index] = 0
                self._pids[index] = os.getpid()
                return index
        raise OutOfLeasesError(
            f"this family of processes has {_MEMBERS} members already, the most there is room "
            "for: let some of them end, or start workers from another program",
            segment="family",
            slots=_MEMBERS,
        )

    def members(self) -> list[tuple[int, int]]:
        """Return pid and reserved bytes of every living member."""
        with self._threads_locked:
            self._renew_if_unused()
        found = []
        # A member takes the first free place, so all entries after the last used one are 0.
        used = len(self._pids.tobytes().rstrip(b"\0"))
        for index, pid in enumerate(self._pids[: -(-used // self._pids.itemsize)].tolist()):
            if not pid:
                continue
            if index == self._index or self._alive(index):
                found.append((pid, self._reserved[index]))
        return found

    def _alive(self, index: int) -> bool:
        return locks.first_locked(self.fd, _LOCK_MEMBER + index) is not None

    # Budget

    def reserve(self, nbytes: int, budget: int, segment: Reserving | None = None) -> None:
        """Add ``nbytes`` to this member's reservation, and to that of one of its segments.

        Raises
        ------
        BudgetExceededError
            If the living members together would then have more than ``budget`` bytes.
        LeaseTimeoutError
            If another process holds the lock and is stopped.
        SegmentError
            If this process has closed its descriptors, and cannot found another family.
        """
        self._locked(_LOCK_BUDGET, self._add, nbytes, budget, segment)

    def _add(self, nbytes: int, budget: int, segment: Reserving | None) -> None:
        self.check(nbytes, budget)
        self._book(nbytes, segment)

    def book(self, nbytes: int, segment: Reserving | None = None) -> None:
        """Book ``nbytes`` without checking the budget: memory is in use, or given back if < 0.

        This needs no lock against other processes, since only this process has the entry.
        """
        with self._threads_locked:
            self._book(nbytes, segment)

    def lower(self, nbytes: int) -> None:
        """Reduce this member's reservation by ``nbytes`` at the process's end, without a lock."""
        self._book(-nbytes, None)

    def _book(self, nbytes: int, segment: Reserving | None) -> None:
        booked = max(0, self._reserved[self._index] + nbytes)
        # Both assignments happen or neither: no signal handler and no other thread runs between
        # two assignments without a call.
        if segment is not None:
            segment.reserved += nbytes
        # If this is a forked child, without a lock, the entry is its parent's. A signal handler
        # may have forked while memory was taken, and the child gives that memory back, but it
        # must not change the entry. The entry counts as long as such a child lives, which has
        # the lock of the member's byte, too.
        if self._lock_fd != -1:
            self._reserved[self._index] = booked

    def check(self, nbytes: int, budget: int) -> None:
        """Raise the BudgetExceededError that :meth:`reserve` would raise now."""
        in_use = sum(reserved for _, reserved in self.members())
        if nbytes > 0 and in_use + nbytes > budget:
            raise BudgetExceededError(
                f"{nbytes} bytes more would take this family of processes over its budget: "
                f"{in_use} of {budget} bytes of shared memory are reserved. Read or drop "
                "arrays, or raise the budget (install(budget=...) or SHMREDUCE_BUDGET)",
                operation="reserve",
                errno=0,
                requested=nbytes,
                in_use=in_use,
                budget=budget,
                available=max(0, budget - in_use),
                strategy=None,
            )

    @property
    def reserved(self) -> int:
        """Bytes in this process's reservation."""
        return self._reserved[self._index]

    def _locked(
        self, offset: int, action: Callable[_P, _R], *arguments: _P.args, **options: _P.kwargs
    ) -> _R:
        """Call a function under one of the family's locks; wait a limited time for the lock."""
        release = locks.unlock_request(offset)
        # The byte lock excludes only other processes. A call in a signal handler passes both
        # locks, as a part of the call that it interrupted. Not a generator's context manager
        # for callers: Ctrl-C could come between its taking of the lock and the block. With the
        # thread lock's own context manager it cannot.
        with self._threads_locked:
            self._renew_if_unused()
            try:
                self._depth[offset] += 1
                waited = locks.keep_trying(
                    lambda: locks.try_lock(self._lock_fd, offset, later=True), _PATIENCE
                )
                if waited is not None:
                    raise _stayed_taken(waited)
                return action(*arguments, **options)
            finally:
                # Calls C functions only: Ctrl-C could come at the beginning of any Python
                # function, even of locks.unlock(), but not before a call of a C function.
                self._depth[offset] -= 1
                # A child that was forked meanwhile has closed the lock's description.
                if not self._depth[offset] and self._lock_fd != -1:
                    try:
                        fcntl.fcntl(self._lock_fd, locks.SETLK, release)
                    except OSError as error:
                        if error.errno != errno.EBADF:
                            raise

    # Mailbox

    def post(self, letter: Letter, fd: int) -> None:
        """Leave a segment in the mailbox for its readers.

        The open file description of ``fd`` must have no locks, because the mailbox keeps the
        description. The caller still owns ``fd``.

        Raises
        ------
        OSError
            ``EAGAIN`` or ``ETOOMANYREFS`` if the mailbox is full.
        """
        # Not self.mailbox.post: the mailbox may be another when the lock is taken.
        self._locked(_LOCK_MAILBOX, lambda: self.mailbox.post(letter, fd, self.identity))

    def look_for(self, token: bytes) -> int | None:
        """Return a descriptor of the segment if it is in the mailbox; the caller owns it.

        Raises
        ------
        OSError
            ``EMFILE`` if the segment is there, but no descriptor is free.
        """
        return self._locked(_LOCK_MAILBOX, lambda: self.mailbox.look_for(token))

    def tidy(self, is_read: Callable[[Letter, int], bool]) -> None:
        """Remove the letters whose messages have all been read; see :meth:`Mailbox.tidy`."""
        self._locked(_LOCK_MAILBOX, self._tidy, is_read)

    def _tidy(self, is_read: Callable[[Letter, int], bool]) -> None:
        if self._depth[_LOCK_MAILBOX] > 1:
            # Called by a signal handler or a destructor that interrupted another call.
            return
        self.mailbox.tidy(is_read, self.identity)


def cannot_join(error: OSError) -> SegmentError:
    """Return the error that says that the system refuses what membership takes."""
    return SegmentError(
        f"this process cannot join its family: {error}. Close files, or raise the limits "
        "(ulimit -n, ulimit -f), and try again",
        operation="open",
        errno=error.errno,
        segment=None,
    )


def _seal(fd: int) -> None:
    """Seal the file's size, because touching a page beyond the end of a file kills a process."""
    if hasattr(fcntl, "F_ADD_SEALS"):
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        # EINVAL: not a memfd. The file has no name then, so nobody else can open it.
        with suppress(OSError):
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)


def _stayed_taken(waited: float) -> LeaseTimeoutError:
    return LeaseTimeoutError(
        f"the family's lock stayed taken for {waited:.0f} s; one of its processes is stopped. "
        "Continue or kill it and try again",
        segment="family",
        block=0,
        waited=waited,
    )
