"""The processes that descend from one installation: one budget, one mailbox.

May import errors, ``thread_locks``, ``standard_streams``, ``anonymous``, ``locks`` and
``mapping``.

A family shares one small file and one socket pair, inherited by fork and passed
to spawned children. The file has an entry for each member: its pid and the
bytes of shared memory it has reserved. An entry counts while its member holds
the entry's byte lock, so those who were killed count no more, unless a forked
child of theirs, which has inherited the lock and the mappings, lives on.

The mailbox holds descriptors of segments whose maker ended normally before its
messages were read. The kernel keeps them while any of the family lives, and
frees them, and so the memory, with the last (unix(7), SCM_RIGHTS). Readers
look without taking (``MSG_PEEK`` with ``SO_PEEK_OFF``, socket(7)).
"""

from __future__ import annotations

import array
import errno
import fcntl
import os
import socket
import struct
import sys
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, ParamSpec, Protocol, TypeVar

from shmreduce.errors import BudgetExceededError, LeaseTimeoutError, OutOfLeasesError
from shmreduce.memory import locks
from shmreduce.memory.anonymous import anonymous_file
from shmreduce.memory.mapping import PAGE_SIZE, Mapping
from shmreduce.memory.standard_streams import seqpacket_pair
from shmreduce.thread_locks import interrupt_safe

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    _P = ParamSpec("_P")
    _R = TypeVar("_R")

__all__ = ["Family", "Letter"]

# The family's file: a page with its identity and its budget, the members' pids, and the
# bytes that each has reserved.
_MEMBERS = 2048
_SIZE = PAGE_SIZE + 16 * _MEMBERS
# Byte locks, far beyond the end of the file.
_LOCK_MEMBER = 1 << 40
_LOCK_BUDGET = 1 << 41
_LOCK_MAILBOX = 1 << 42
_SO_PEEK_OFF = 42
"""Of socket(7); Python has no name for it."""
_PATIENCE = 10.0
"""Seconds to wait for a lock of the family, which is held for a moment."""
# token, family, whether all unread messages are named, whether they have the segment with
# them, since when they have not (monotonic seconds)
_LETTER = struct.Struct("<16s16s??6xd")
# slot, nonce
_UNREAD = struct.Struct("<IQ")
_MOST_UNREAD = 4096
"""Messages that a letter names: it must fit into one packet."""


class Letter:
    """One segment left in the mailbox.

    Parameters
    ----------
    token : bytes
        The segment's identity.
    unread : list of (int, int)
        Slot and nonce of messages nobody had read when the letter was posted.
    complete : bool
        Whether ``unread`` names them all.
    carried : bool
        Whether they all travel with a descriptor of the segment: when there are no such
        packets any more, nobody can receive them.
    astray : float
        When that was seen first, in monotonic seconds; 0 if it was not.
    """

    __slots__ = ("astray", "carried", "complete", "token", "unread")

    def __init__(
        self,
        token: bytes,
        unread: list[tuple[int, int]],
        *,
        complete: bool,
        carried: bool = False,
        astray: float = 0.0,
    ) -> None:
        self.token = token
        self.unread = unread
        self.complete = complete
        self.carried = carried
        self.astray = astray

    def pack(self, family: bytes) -> bytes:
        """Return the letter's bytes."""
        # Those that are read last, mostly: as long as they are not, nothing else is looked at.
        some = self.unread[-_MOST_UNREAD:]
        complete = self.complete and len(some) == len(self.unread)
        head = _LETTER.pack(self.token, family, complete, self.carried, self.astray)
        return head + b"".join(_UNREAD.pack(slot, nonce) for slot, nonce in some)

    @classmethod
    def unpack(cls, data: bytes) -> Letter:
        """Read a letter's bytes; what is no letter is one about no segment, to be dropped."""
        if len(data) < _LETTER.size or (len(data) - _LETTER.size) % _UNREAD.size:
            return cls(bytes(16), [], complete=True)
        token, _, complete, carried, astray = _LETTER.unpack_from(data)
        unread = [(slot, nonce) for slot, nonce in _UNREAD.iter_unpack(data[_LETTER.size :])]
        return cls(token, unread, complete=complete, carried=carried, astray=astray)


class Reserving(Protocol):
    """A segment, as far as the family is concerned."""

    reserved: int


class Family:
    """Membership of this process.

    Parameters
    ----------
    fd : int
        The family's file, under an open file description of this process's own. It
        is this object's from now on, also when it cannot be made.
    mailbox : (socket, socket)
        Receiving and sending end.
    """

    def __init__(self, fd: int, mailbox: tuple[socket.socket, socket.socket]) -> None:
        self.fd = fd
        self.mailbox = mailbox
        self._identities = self._what_is_open()
        self._index = self._lock_fd = -1
        try:
            self._begin(fd)
        except BaseException:
            # The mapping, which a traceback may keep, keeps the lock, too.
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
        # For locks held for a moment: a description that forked children close
        # at once. Otherwise a parent that is killed while it has a lock would
        # leave it to a child that knows nothing of it.
        self._lock_fd = locks.reopen(fd)

    @classmethod
    def found(cls, budget: int) -> Family:
        """Begin a new family with this process as its first member.

        ``budget`` is the family's in bytes, for members whose settings name none.
        """
        fd = anonymous_file("shmreduce-family")
        try:
            os.ftruncate(fd, _SIZE)
            os.posix_fallocate(fd, 0, _SIZE)
            _seal(fd)
            os.pwrite(fd, os.urandom(16) + budget.to_bytes(8, sys.byteorder), 0)
            receiver, sender = seqpacket_pair()
            receiver.setblocking(False)
            sender.setblocking(False)
        except BaseException:
            os.close(fd)
            raise
        try:
            return cls(fd, (receiver, sender))
        except BaseException:
            receiver.close()
            sender.close()
            raise

    def _what_is_open(self) -> list[tuple[int, int] | None]:
        return [locks.identity_of(fd) for fd in (self.fd, *(end.fileno() for end in self.mailbox))]

    def rejoined(self) -> Family | None:
        """Return the membership of a child that was just forked.

        None if it has closed what it inherited, as daemons do: the numbers may be
        other files' by now, which must not be written to, nor closed.

        The inherited descriptor stays open: it keeps the parent's entry alive
        as long as the child may keep the parent's memory.
        """
        if self._what_is_open() != self._identities:
            for end in self.mailbox:
                end.detach()
            return None
        return Family(locks.reopen(self.fd), self.mailbox)

    def give_up_locks(self) -> None:
        """Let go of the locks of an inherited membership, in a forked child."""
        fd, self._lock_fd = self._lock_fd, -1
        if fd != -1 and locks.identity_of(fd) == self._identities[0]:
            os.close(fd)

    def take_over(self, other: Family) -> None:
        """Count here what this process has reserved as a member of another family; leave that."""
        self._reserved[self._index] = other.reserved
        other.leave(with_mailbox=True)

    def leave(self, *, with_mailbox: bool) -> None:
        """Close a membership that nobody uses any more."""
        # The mapping keeps the description, and so the lock, until it is gone, too.
        locks.unlock(self.fd, _LOCK_MEMBER + self._index)
        self.give_up_locks()
        fd, self.fd = self.fd, -1
        os.close(fd)
        if with_mailbox:
            for end in self.mailbox:
                end.close()

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
        found = []
        # Members take the first place that is free: behind the last is nothing but zeros.
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
        """Add ``nbytes`` to what this member has reserved, and to what a segment of its has.

        Raises
        ------
        BudgetExceededError
            If the living members together would then be over ``budget`` bytes.
        LeaseTimeoutError
            If another process that is stopped has the lock.
        """
        self._locked(_LOCK_BUDGET, self._add, nbytes, budget, segment)

    def _add(self, nbytes: int, budget: int, segment: Reserving | None) -> None:
        self.check(nbytes, budget)
        self._book(nbytes, segment)

    def book(self, nbytes: int, segment: Reserving | None = None) -> None:
        """Do as :meth:`reserve` without asking: memory is in use, or, if negative, given back.

        This needs no lock of the processes, since the entry is this process's alone.
        """
        with self._threads_locked:
            self._book(nbytes, segment)

    def lower(self, nbytes: int) -> None:
        """Take ``nbytes`` off this member's reservation at the process's end, without a lock."""
        self._book(-nbytes, None)

    def _book(self, nbytes: int, segment: Reserving | None) -> None:
        booked = max(0, self._reserved[self._index] + nbytes)
        # Both or none: no signal handler, and no other thread, runs between two assignments
        # without a call.
        if segment is not None:
            segment.reserved += nbytes
        # The entry counts as long as a forked child lives, which has the member's byte,
        # too. It stays its parent's where the child, whose lock is gone, gives back what
        # was being taken when a signal handler forked.
        if self._lock_fd != -1:
            self._reserved[self._index] = booked

    def check(self, nbytes: int, budget: int) -> None:
        """Raise what :meth:`reserve` would raise at this instant."""
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
        """Bytes that this process has reserved."""
        return self._reserved[self._index]

    def _locked(
        self, offset: int, action: Callable[_P, _R], *arguments: _P.args, **options: _P.kwargs
    ) -> _R:
        """Call a function under one of the family's locks, which is waited for boundedly."""
        release = locks.unlock_request(offset)
        # The byte lock excludes other processes only. A call from a signal
        # handler passes both, as part of the call that it interrupted. The thread
        # lock's own ``with``: Ctrl-C does not come between the lock and the block. It
        # would in a generator for the ``with`` of callers, so there is none.
        with self._threads_locked:
            try:
                self._depth[offset] += 1
                waited = locks.keep_trying(
                    lambda: locks.try_lock(self._lock_fd, offset, later=True), _PATIENCE
                )
                if waited is not None:
                    raise _stayed_taken(waited)
                return action(*arguments, **options)
            finally:
                # No function of Python, not even locks.unlock(): Ctrl-C could strike as it
                # begins. Before a call of what is in C it does not.
                self._depth[offset] -= 1
                # A child that was forked in the middle has given them up.
                if not self._depth[offset] and self._lock_fd != -1:
                    try:
                        fcntl.fcntl(self._lock_fd, locks.SETLK, release)
                    except OSError as error:
                        if error.errno != errno.EBADF:
                            raise

    # Mailbox

    def post(self, letter: Letter, fd: int) -> None:
        """Leave a segment for its readers.

        ``fd`` must be of an open file description without locks, since the
        mailbox keeps the description. It stays the caller's.

        Raises
        ------
        OSError
            ``EAGAIN`` or ``ETOOMANYREFS`` when the mailbox is full.
        """
        self._locked(_LOCK_MAILBOX, self._send, letter, fd)

    def look_for(self, token: bytes) -> int | None:
        """Return a descriptor of the segment if it is in the mailbox; the caller owns it.

        Raises
        ------
        OSError
            ``EMFILE`` if it is there and no descriptor is free.
        """
        return self._locked(_LOCK_MAILBOX, self._look_for, token)

    def _look_for(self, token: bytes) -> int | None:
        found, is_there = None, False
        for letter, fd in self._letters():
            is_there = is_there or letter.token == token
            if letter.token == token and found is None and fd != -1:
                found = fd
            else:
                _close(fd)
        if is_there and found is None:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return found

    def tidy(self, is_read: Callable[[Letter, int], bool]) -> None:
        """Take out the letters whose messages have all been read.

        ``is_read`` gets a letter and a descriptor of its segment. Only the
        first letter can be taken, so one that stays goes to the end: a copy
        is posted before the original is taken, and a process killed in between
        leaves it twice, which does no harm.
        """
        self._locked(_LOCK_MAILBOX, self._tidy, is_read)

    def _tidy(self, is_read: Callable[[Letter, int], bool]) -> None:
        if self._depth[_LOCK_MAILBOX] > 1:
            # A signal handler, or a destructor, in the middle of another call.
            return
        count = 0
        for _, fd in self._letters():
            _close(fd)
            count += 1
        for _ in range(count):
            first = next(iter(self._letters()), None)
            if first is None or not self._settle(*first, is_read):
                return

    def _settle(self, letter: Letter, fd: int, is_read: Callable[[Letter, int], bool]) -> bool:
        """Drop the first letter or move it to the end; return whether that worked."""
        if fd == -1:
            return False
        try:
            if not is_read(letter, fd):
                self._send(letter, fd)
        except OSError:
            # It is full, or too many descriptors are in flight.
            return False
        finally:
            os.close(fd)
        taken = self._receive(0)
        if taken is not None:
            _close(taken[1])
        return True

    def _send(self, letter: Letter, fd: int) -> None:
        rights = array.array("i", [fd])
        self.mailbox[1].sendmsg(
            [letter.pack(self.identity)], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)]
        )

    def _letters(self) -> Iterable[tuple[Letter, int]]:
        place = 0
        while True:
            # Each time: a signal handler, or a destructor, may have looked meanwhile.
            self.mailbox[0].setsockopt(socket.SOL_SOCKET, _SO_PEEK_OFF, place)
            answer = self._receive(socket.MSG_PEEK)
            if answer is None:
                return
            letter, fd, size = answer
            place += size
            yield letter, fd

    def _receive(self, flags: int) -> tuple[Letter, int, int] | None:
        """Return a letter, its descriptor and its size in bytes."""
        try:
            data, control, _, _ = self.mailbox[0].recvmsg(
                _LETTER.size + _UNREAD.size * _MOST_UNREAD,
                socket.CMSG_SPACE(4),
                flags | socket.MSG_DONTWAIT | getattr(socket, "MSG_CMSG_CLOEXEC", 0),
            )
        except BlockingIOError:
            return None
        if not data:
            return None
        fds = array.array("i")
        for _, _, rights in control:
            fds.frombytes(rights[: len(rights) - len(rights) % fds.itemsize])
        # There may be room for more than one.
        for surplus in fds[1:]:
            os.close(surplus)
        # Without room for the descriptor (EMFILE) the kernel drops it silently.
        return Letter.unpack(data), fds[0] if fds else -1, len(data)


def _seal(fd: int) -> None:
    """Keep the file as long as it is: whoever touches a page beyond its end is killed."""
    if hasattr(fcntl, "F_ADD_SEALS"):
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        # A file that is no memfd (EINVAL) has no name; nobody else can open it.
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


def _close(fd: int) -> None:
    if fd != -1:
        os.close(fd)
