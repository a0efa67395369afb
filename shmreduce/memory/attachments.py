"""The segments that this process has open, by token.

May import errors, signals, ``free_descriptors``, contracts, strategies, ``locks``,
``processes``, ``handle``, ``layout``, ``segment_file``, ``lease_slots``, ``segment``,
``sweep`` and ``family``.

A segment is opened and mapped once, and then kept, because opening it costs far more than
claiming a lease. It is closed when nothing of it is in use and its owner is dead, or when
descriptors run out.
"""

from __future__ import annotations

import errno
import os
import resource
import stat
import sys
import time
from contextlib import suppress
from types import MappingProxyType
from typing import TYPE_CHECKING

from shmreduce.contracts import SegmentFile
from shmreduce.errors import (
    AttachError,
    ForeignSegmentError,
    InvalidHandleError,
    LeaseTimeoutError,
    PluginError,
    ProducerDied,
    SegmentError,
    SegmentGoneError,
    WrongHostError,
)
from shmreduce.free_descriptors import EXHAUSTED
from shmreduce.memory import locks
from shmreduce.memory.layout import HAD_AS_BYTES, LOCK_TRANSFER, Layout
from shmreduce.memory.lease_slots import MESSAGE, NONCE_MASK
from shmreduce.memory.processes import is_alive, is_hidden
from shmreduce.memory.segment import Segment
from shmreduce.memory.segment_file import check_file, check_opened, used_slots
from shmreduce.memory.sweep import sweep
from shmreduce.signals import is_from_system
from shmreduce.strategies import find_strategy

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from shmreduce.contracts import SharingStrategy
    from shmreduce.memory.family import Family
    from shmreduce.memory.handle import Handle
    from shmreduce.memory.mailbox import Letter

__all__ = ["FEW", "Attachments", "boot_identity", "open_process_descriptor"]

_MOST_IDLE = 32
"""This many segments of other processes stay open while nothing of them is in use."""
FEW = 16
"""With at most this many open segments, those in use need not be counted."""
_MOST_HELD = 8192
"""The most segments of others; each has two mappings of the 65,530 (vm.max_map_count)."""
_ASTRAY_SECONDS = 10.0
"""Messages that nobody can receive are kept this long, for a process that lacked descriptors."""
_GONE = frozenset((errno.ENOENT, errno.ESRCH, errno.ENXIO))
_NOT_THERE = (FileNotFoundError, PermissionError, InvalidHandleError)
"""The segment is gone, or the descriptor's number means another file by now, or the pid another
user's process."""


def open_process_descriptor(pid: int, fd: int, *, named: str = "") -> int:
    """Open the file behind another process's descriptor, with a new open file description.

    Parameters
    ----------
    pid : int
        The process id of the other process, which must be of the same user.
    fd : int
        The number of its descriptor.
    named : str
        What the file's name contains. Another file is not opened: when this process closed it
        again, it would lose all record locks that it has on that file (fcntl_locking(2)).

    Returns
    -------
    int
        A descriptor that is open for reading and writing and close-on-exec. The caller
        owns it. Process ids and descriptor numbers are reused: check what was opened.

    Raises
    ------
    FileNotFoundError
        If the process or its descriptor is gone, or if the number means another file now: one
        that is not named so, or no regular file.
    PermissionError
        If this process may not inspect that process (proc_pid_fd(5), ptrace(2)).

    Examples
    --------
    >>> import os
    >>> mine = os.memfd_create("example")
    >>> again = open_process_descriptor(os.getpid(), mine, named="example")
    >>> os.fstat(again).st_ino == os.fstat(mine).st_ino
    True
    >>> os.close(mine), os.close(again)
    (None, None)
    """
    # O_NONBLOCK and O_NOCTTY: the number may name a pipe or a terminal by now.
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
    path = f"/proc/{pid}/fd/{fd}"
    try:
        _check_file(path, named)
        return os.open(path, flags)
    except OSError as error:
        # A socket cannot be opened this way (ENXIO): the number was reused. The /proc files of
        # a process that has ended belong to root (EACCES).
        if error.errno == errno.ENOENT and is_hidden(pid):
            hidden = f"/proc does not show process {pid}, which lives"
            raise PermissionError(errno.EACCES, hidden) from error
        ended = error.errno == errno.EACCES and not is_alive(pid)
        if error.errno in _GONE or ended or _is_another_file(path, error):
            gone = "the process or its descriptor is gone"
            raise FileNotFoundError(errno.ENOENT, gone) from error
        raise


def _check_file(path: str, named: str) -> None:
    """Raise FileNotFoundError if a descriptor is of no regular file, or of one with another name.

    Not asked of an opened descriptor: to open a device may do something, and to close the file
    again may release locks.
    """
    name = os.readlink(path).rpartition("/")[2]
    if named not in name or not stat.S_ISREG(os.stat(path).st_mode):
        raise FileNotFoundError(errno.ENOENT, "the number means another file now")


def _is_another_file(path: str, error: OSError) -> bool:
    """Return whether a descriptor that cannot be opened names another file by now.

    If this process may follow the link, it could open any file that a process of its user has
    made for sharing. So this is another file, a directory for example.
    """
    if not is_from_system(error) or error.errno in EXHAUSTED or error.errno == errno.ENOMEM:
        return False
    try:
        os.stat(path)
    except OSError:
        return False
    return True


def boot_identity() -> bytes:
    """Return 16 bytes that identify this boot of this host (proc_sys_kernel(5), boot_id).

    They are zeros if the system does not tell.

    Raises
    ------
    SegmentError
        If no descriptor is free: a later call may succeed.
    """
    try:
        # In binary, since importing the codec of a text file takes longer than all the rest.
        with open("/proc/sys/kernel/random/boot_id", "rb", buffering=0) as file:
            return bytes.fromhex(file.read().decode().strip().replace("-", ""))
    except (OSError, ValueError) as error:
        number = getattr(error, "errno", None)
        if number in EXHAUSTED:
            raise SegmentError(
                f"no descriptor is free to start using shared memory: {error}. Close files, or "
                "raise the limit (ulimit -n)",
                operation="open",
                errno=number,
                segment=None,
            ) from error
        return bytes(16)


class Attachments:
    """The segments that one process has open, its own and those of others.

    Parameters
    ----------
    family : callable
        Returns this process's family. Its mailbox is searched when a sender is dead.
    inherited : dict
        The parent's segments at the time of the fork that made this process.
    boot : bytes, optional
        The result of :func:`boot_identity` in the parent.
    """

    def __init__(
        self,
        family: Callable[[], Family],
        inherited: dict[bytes, Segment] | None = None,
        boot: bytes | None = None,
    ) -> None:
        self.directory: dict[bytes, Segment] = {}
        """Open segments by token; heaps list their own here, too."""
        # A forked child uses the parent's result, since it may have no descriptor free.
        self.boot = boot_identity() if boot is None else boot
        self._family = family
        self._inherited = dict(inherited or {})
        self._replaced: dict[Segment, None] = {}
        self.on_open: Callable[[], None] = _do_nothing
        """Called when another process's segment was opened."""

    def segments(self) -> list[Segment]:
        """Return all open segments, including those that were replaced in the directory."""
        return list(self.directory.values()) + list(self._replaced)

    def list_again(self, segment: Segment) -> None:
        """List a segment of this process that was taken out of the directory for a moment."""
        found = self.directory.setdefault(segment.token, segment)
        if found is not segment:
            # Another thread has opened it meanwhile, for example for an old message.
            self.directory[segment.token] = segment
            self._replaced[found] = None

    def lineage(self) -> dict[bytes, Segment]:
        """Return the segments that a forked child can reach through inherited descriptors."""
        return {**self._inherited, **self.directory}

    def pin(
        self, handle: Handle, mark: object, arrived: Mapping[bytes, int] = MappingProxyType({})
    ) -> Segment:
        """Open the handle's segment and keep it open until :meth:`Segment.unpin`.

        ``mark`` identifies the call. ``arrived`` has the descriptors that came with the
        message, by token of the segment. The caller owns them.

        Raises
        ------
        WrongHostError
            If the handle is from another host, or from before this host's last boot.
        AttachError
            If the segment cannot be opened here.
        """
        if handle.boot != self.boot:
            raise WrongHostError(
                f"the array lives on another host, or was sent before this host's last boot "
                f"(boot {handle.boot.hex()}, here {self.boot.hex()}); send it over a connection "
                "by TCP (AF_INET), which pickles in the ordinary way",
                segment=handle.token.hex(),
                locator=handle.locator,
                reason="another host",
                errno=0,
                here=self.boot.hex(),
                there=handle.boot.hex(),
            )
        segment = self._pin(handle.token, mark)
        while segment is None:
            self._attach(handle, arrived)
            segment = self._pin(handle.token, mark)
        return segment

    def own_view_of(self, segment: Segment, mark: object) -> Segment:
        """Return this process's view of a segment, pinned; ``segment`` may be its parent's.

        A forked child must not lock through descriptions that it inherited: it shares them
        with its parent, so its locks would not exclude the parent.
        """
        known = self._pin(segment.token, mark)
        while known is None:
            if not segment.is_open:
                raise _closed_here(segment)
            self._adopt(self._reopened(segment), segment.file.name, segment)
            known = self._pin(segment.token, mark)
        return known

    def _reopened(self, segment: Segment) -> int:
        try:
            return locks.reopen(segment.fd)
        except OSError as error:
            if not is_from_system(error):
                raise
            if error.errno in EXHAUSTED and self.close_idle(0):
                return self._reopened(segment)
            raise SegmentError(
                f"segment {segment.token.hex()}, which this process has inherited, cannot be "
                f"opened here to send it on: {error}. If no descriptor is free, close files or "
                "raise the limit (ulimit -n); if permission is denied, this process has another "
                "user than its parent: send a copy of the array",
                operation="open",
                errno=error.errno,
                segment=segment.token.hex(),
            ) from error

    def _pin(self, token: bytes, mark: object) -> Segment | None:
        segment = self.directory.get(token)
        if segment is None:
            return None
        segment.pins[mark] = None
        if self.directory.get(token) is segment:
            return segment
        # Another thread closed it between the two looks.
        segment.unpin(mark)
        return None

    def _adopt(self, fd: int, name: str | None, like: Segment) -> Segment:
        segment = Segment.adopt(SegmentFile(fd, name), like.token, like.strategy)
        return self._publish(segment)

    def _publish(self, segment: Segment) -> Segment:
        known = self.directory.setdefault(segment.token, segment)
        if known is not segment:
            # Another thread was first. This segment holds nothing yet.
            segment.close()
        return known

    def _attach(self, handle: Handle, arrived: Mapping[bytes, int]) -> None:
        self.close_idle(_MOST_IDLE)
        try:
            self._open(handle, arrived)
        except OSError as error:
            if not is_from_system(error):
                # A TimeoutError that the system did not raise: either the mailbox, which may
                # have the segment, is locked, or a signal handler raised it.
                raise
            if error.errno not in EXHAUSTED:
                raise self._failure(handle, error) from error
            self.close_idle(0)
            try:
                self._open(handle, arrived)
            except OSError as again:
                raise self._failure(handle, again) from again

    def _open(self, handle: Handle, arrived: Mapping[bytes, int]) -> None:
        inherited = self._inherited.get(handle.token)
        if inherited is not None and inherited.is_open:
            self._adopt(locks.reopen(inherited.fd), inherited.file.name, inherited)
            return
        strategy = find_strategy(handle.strategy)
        fd = arrived.get(handle.token)
        try:
            if fd is None:
                segment = _open_at_sender_or_maker(strategy, handle)
            else:
                # Reopened, because the arrived description is shared with the sender.
                file = SegmentFile(locks.reopen(fd), None)
                segment = Segment.adopt(file, handle.token, strategy)
        except _NOT_THERE as error:
            fd = self._family().look_for(handle.token)
            if fd is None and isinstance(error, PermissionError):
                raise
            if fd is None:
                raise self._gone(handle) from error
            try:
                again = locks.reopen(fd)
            finally:
                os.close(fd)
            segment = Segment.adopt(SegmentFile(again, None), handle.token, strategy)
        self._publish(segment)
        self.on_open()
        sweep(strategy)

    def _gone(self, handle: Handle) -> AttachError:
        if is_alive(handle.pid):
            return SegmentGoneError(
                f"process {handle.pid}, which sent the array, does not have segment "
                f"{handle.token.hex()} open. Either it has closed the segment, because the "
                "array was released (this message was loaded before, or given up); or it has "
                "become another program by exec; or another process has its pid, because it "
                "was killed before the array was read, or is in another PID namespace. Pickle "
                "the array again; use strategy 'file_system' between containers",
                segment=handle.token.hex(),
                locator=handle.locator,
                reason="no such descriptor",
                errno=errno.ENOENT,
                pid=handle.pid,
                block=handle.block,
            )
        return ProducerDied(
            f"process {handle.pid}, which sent the array, is dead, and segment "
            f"{handle.token.hex()} is gone with it: it was killed before the array was read, or "
            "it ended after another process had loaded this same message. Send again from a "
            "living process, once for each receiver",
            segment=handle.token.hex(),
            locator=handle.locator,
            reason="the producer died",
            errno=errno.ESRCH,
            pid=handle.pid,
        )

    def _failure(self, handle: Handle, error: OSError) -> AttachError:
        if error.errno in EXHAUSTED:
            advice = "raise the limit of open files (ulimit -n), then load the message again"
        elif error.errno in (errno.EACCES, errno.EPERM):
            # A forked child may have changed its user since it inherited the segment.
            advice = (
                "either somebody has changed the owner or the mode of the file: restore them; or "
                "this process has changed its user: both processes must be of the same user"
                if handle.strategy == "file_system"
                else "the sender must be of the same user and inspectable through /proc, as it is "
                "not after it has changed its user, until it calls exec; strategy 'file_system' "
                "needs only the same user"
            )
        else:
            advice = "'shmreduce doctor' lists what may be missing"
        return AttachError(
            f"segment {handle.token.hex()} of process {handle.pid} cannot be opened at "
            f"{handle.locator!r}: {error.strerror or error}; {advice}",
            segment=handle.token.hex(),
            locator=handle.locator,
            reason=error.strerror or str(error),
            errno=error.errno,
            pid=handle.pid,
        )

    def is_one_too_many(self, segment: Segment) -> bool:
        """Return whether a block that was just claimed should be copied, to spare descriptors.

        All blocks of one process's segment share its descriptors. But if this process holds
        blocks of hundreds of processes, each needs a segment, and the limit of open files
        may be reached; sooner if other descriptors, such as those of a pool's workers, have
        used most of it.
        """
        if len(self.directory) <= FEW or segment.owner or segment.needed > 1:
            return False
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft == resource.RLIM_INFINITY:
            most = _MOST_HELD
        elif segment.fd >= soft - soft // 4:
            # The kernel gives the lowest free number (open(2)), so all below are taken.
            return True
        else:
            most = min(soft // 8, _MOST_HELD)
        if len(self.directory) <= most:
            return False
        others = [each for each in list(self.directory.values()) if not each.owner]
        return sum(each.needed > 0 for each in others) > most

    # Giving back

    def close_idle(self, keep: int) -> int:
        """Close segments of other processes that nothing here uses; return how many.

        All of those with a dead owner are closed. Of the others ``keep`` stay open, and the
        oldest are closed.
        """
        idle = [segment for segment in list(self.directory.values()) if segment.idle]
        closed = 0
        for position, segment in enumerate(idle):
            surplus = len(idle) - position > keep
            if (surplus or not segment.owner_alive()) and self._close(segment):
                closed += 1
        return closed + self._close_replaced()

    def _close_replaced(self) -> int:
        """Close the idle ones that were replaced in the directory; return how many."""
        closed = 0
        for segment in [one for one in list(self._replaced) if one.idle]:
            # Another thread may do the same. There is no call between these two lines.
            if segment in self._replaced:
                del self._replaced[segment]
                segment.close()
                closed += 1
        return closed

    def close_ownerless(self, segment: Segment) -> None:
        """Note that this process's last hold in a segment ended; close it if its owner is dead.

        Nothing will come from that owner any more, and the pages are freed when the last
        process closes the segment. This runs when views die, so it does not wait.
        """
        if segment.idle:
            segment.idle_since = time.monotonic()
            if not segment.owner_alive():
                self._close(segment)

    def foreign_bytes(self) -> int:
        """Return how large the open segments of other processes are, with all their gaps."""
        return sum(each.header.size for each in self.segments() if not each.owner)

    def close_unused(self, seconds: float, keep: int) -> int:
        """Close segments of other processes, and return how large those are that stay open.

        If such a process is killed, nobody else can free what was in use there. So all idle
        ones with a dead owner are closed, and those that were idle for some time until the
        others have ``keep`` bytes, the oldest first.
        """
        self._close_replaced()
        left = self.foreign_bytes()
        now = time.monotonic()
        listed = list(self.directory.values())
        for segment in sorted(listed, key=lambda each: each.idle_since):
            if not segment.idle:
                continue
            is_surplus = left > keep and now - segment.idle_since >= seconds
            if (is_surplus or _is_ownerless(segment)) and self._close(segment):
                left -= segment.header.size
        return left

    def _close(self, segment: Segment) -> bool:
        # Removed from the directory before pins are looked at: see _pin.
        found = self.directory.pop(segment.token, None)
        if found is segment and segment.idle:
            segment.close()
            return True
        if found is not None and self.directory.setdefault(found.token, found) is not found:
            # A third thread has opened it again meanwhile. From now on that one is found; this
            # one is closed when its last user is done.
            self._replaced[found] = None
        return False

    def tidy_mailbox(self, *, at_once: bool = False) -> bool:
        """Drop segments from the mailbox whose messages were read, or never will be.

        If that is not possible now, it is left to the next process that reads such a message.

        Parameters
        ----------
        at_once : bool
            Whether messages that nobody can receive are dropped at once. If not, they are
            kept for some seconds: a process that had no descriptor free when one came can
            still load it.

        Returns
        -------
        bool
            Whether any were dropped.
        """
        found = []

        def is_over(letter: Letter, fd: int) -> bool:
            patience = 0.0 if at_once else _ASTRAY_SECONDS
            over = _all_read(letter, fd) or _is_astray(letter, fd, patience)
            found.append(over)
            return over

        # For example, no descriptor is free. The caller has an array that must not be lost.
        with suppress(OSError, LeaseTimeoutError, SegmentError):
            self._family().tidy(is_over)
        return any(found)


def _open_at_sender_or_maker(strategy: SharingStrategy, handle: Handle) -> Segment:
    try:
        return _open_at(handle.locator, strategy, handle)
    except _NOT_THERE:
        # The sender, which sent on what it had from the maker, may have been killed. What is
        # raised if the maker does not have it either is about the sender: it may have ended, and
        # left the segment in the mailbox.
        if handle.maker_locator:
            with suppress(*_NOT_THERE, ForeignSegmentError, SegmentError, PluginError):
                return _open_at(handle.maker_locator, strategy, handle)
        raise


def _open_at(locator: str, strategy: SharingStrategy, handle: Handle) -> Segment:
    return Segment.adopt(check_opened(strategy, strategy.open(locator)), handle.token, strategy)


def _do_nothing() -> None:
    """Stand in for :attr:`Attachments.on_open`."""


def _is_ownerless(segment: Segment) -> bool:
    try:
        return not segment.owner_alive()
    except OSError:
        # Other code has closed the descriptor, as daemons do.
        return False


def _closed_here(segment: Segment) -> AttachError:
    return AttachError(
        f"segment {segment.token.hex()}, which this process has inherited, cannot be sent on: its "
        "descriptor was closed here, as daemons close all descriptors. Send a copy of "
        "the array, or share it afterwards",
        segment=segment.token.hex(),
        locator=None,
        reason="its descriptor was closed",
        errno=errno.EBADF,
    )


def _all_read(letter: Letter, fd: int) -> bool:
    try:
        layout = Layout.of(check_file(fd, letter.token))
    except (OSError, InvalidHandleError, ForeignSegmentError, SegmentError):
        return True
    # In reverse, since most messages are read in the order in which they were sent.
    for slot, nonce in reversed(letter.unread):
        word = os.pread(fd, 8, layout.slot_words + 8 * slot)
        if int.from_bytes(word, sys.byteorder) == MESSAGE | nonce:
            return False
    return letter.complete or not _has_messages(fd, layout)


def _is_astray(letter: Letter, fd: int, patience: float) -> bool:
    """Return whether the messages cannot be received any more, and have not been for long."""
    if (
        not letter.carried
        or locks.first_locked(fd, LOCK_TRANSFER) is not None
        or any(os.pread(fd, 8, HAD_AS_BYTES))
    ):
        letter.astray = 0.0
        return False
    now = time.monotonic()
    # The letter is posted again, and `astray` with it.
    letter.astray = letter.astray or now
    return now - letter.astray >= patience


def _has_messages(fd: int, layout: Layout) -> bool:
    """Return whether a segment has any unread message, whoever sent it."""
    return any(word & ~NONCE_MASK == MESSAGE for word in used_slots(fd, layout))
