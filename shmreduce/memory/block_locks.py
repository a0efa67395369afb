"""The lock of each block of an open segment, against other processes and threads.

May import errors, ``locks`` and ``layout``.

A lock is a byte lock of the segment's file against other processes, and an entry in a table
against other threads of this process. The entry is the mark of the attempt: a tuple made for
it, with the thread's identity. A signal handler may raise between any two steps. Then the
``finally`` cannot know how far the attempt has come, so it undoes whatever bears its mark,
even if it is interrupted itself. A signal handler or a destructor that wants the lock while
its own thread has it is refused at once.
"""

from __future__ import annotations

import errno
import fcntl
import functools
from threading import get_ident
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar, cast

from shmreduce.errors import LeaseTimeoutError, SegmentError
from shmreduce.memory import locks
from shmreduce.memory.layout import LOCK_BLOCK

if TYPE_CHECKING:
    from collections.abc import Callable

    _P = ParamSpec("_P")
    _R = TypeVar("_R")
    _Transition = Callable[Concatenate[Any, int, _P], _R]
    Mark = tuple[int]

__all__ = ["LOCK_PATIENCE", "BlockLocks", "closed_by_somebody", "if_unlocked", "under_lock"]

LOCK_PATIENCE = 30.0
"""Seconds to wait for the lock of a block. It is usually held for microseconds."""


class BlockLocks:
    """The locks of blocks, by number.

    Parameters
    ----------
    lock_fd : int
        A descriptor of the segment's file, with an open file description that no other
        process has. The caller owns it.
    """

    token: bytes
    """The segment's token, for messages; a subclass sets it."""

    def __init__(self, lock_fd: int) -> None:
        self.lock_fd = lock_fd
        self._identity = locks.identity_of(lock_fd)
        self._busy: dict[int, Mark] = {}

    def try_lock_block(self, block: int, mark: Mark) -> bool:
        """Lock a block without waiting; return whether that was possible."""
        # It needs as many frames as locking and unlocking. So, if the recursion limit is near,
        # it raises while there is nothing to undo.
        request = locks.lock_request(LOCK_BLOCK + block)
        if self._busy.setdefault(block, mark) is not mark:
            return False
        locked = False
        try:
            # The lock of another file, which has the number by now, would keep nobody out.
            if locks.identity_of(self.lock_fd) != self._identity:
                raise closed_by_somebody(self.lock_fd, self.token)
            locked = locks.try_request(self.lock_fd, request, later=True)
        except OSError as error:
            if error.errno != errno.EBADF:
                raise
            raise closed_by_somebody(self.lock_fd, self.token) from error
        finally:
            if not locked:
                # An exception may have come after the lock was taken, before the assignment. Of
                # another file, whose lock belongs to others, the byte is far beyond the end.
                locks.unlock(self.lock_fd, LOCK_BLOCK + block)
                self._busy.pop(block, None)
        return locked

    def lock_block(self, block: int, mark: Mark) -> None:
        """Lock a block; wait a limited time for it.

        Raises
        ------
        LeaseTimeoutError
            If it stays locked, or if this call has interrupted the one that has the lock.
        """
        holder = self._busy.get(block)
        if holder is not None and holder[0] == mark[0]:
            # This call would wait for the one that it has interrupted.
            raise LeaseTimeoutError(
                f"block {block} of segment {self.token.hex()} is locked by this very thread: a "
                "signal handler or a destructor interrupted its work on the block. Do not use "
                "arrays there, or try again when the handler has returned",
                segment=self.token.hex(),
                block=block,
                waited=0.0,
            )
        waited = locks.keep_trying(lambda: self.try_lock_block(block, mark), LOCK_PATIENCE)
        if waited is not None:
            raise LeaseTimeoutError(
                f"block {block} of segment {self.token.hex()} stayed locked for "
                f"{waited:.0f} s; a process that uses it is stopped. Continue or kill that "
                "process and try again",
                segment=self.token.hex(),
                block=block,
                waited=waited,
            )

    def unlock_block(self, block: int, mark: Mark) -> None:
        """Undo the locking with ``mark``, if it happened."""
        if self._busy.get(block) is mark:
            locks.unlock(self.lock_fd, LOCK_BLOCK + block)
            self._busy.pop(block, None)


def closed_by_somebody(fd: int, token: bytes) -> SegmentError:
    """Return the error for a segment's descriptor that was closed or is another file's now."""
    return SegmentError(
        f"descriptor {fd} of segment {token.hex()} was closed by other code in this process, as "
        "by os.closerange() or a library for daemons: let that code leave it open, or use "
        "shared memory only afterwards",
        operation="fstat",
        errno=errno.EBADF,
        segment=token.hex(),
    )


def under_lock(transition: _Transition[_P, _R]) -> _Transition[_P, _R]:
    """Decorate a method: it holds the lock of the block that is its first parameter."""
    return cast("_Transition[_P, _R]", _with_lock(transition, wait=True))


def if_unlocked(transition: _Transition[_P, _R]) -> _Transition[_P, _R | None]:
    """Decorate a method to do so without waiting; it returns None if the block is locked."""
    return _with_lock(transition, wait=False)


def _with_lock(transition: _Transition[_P, _R], *, wait: bool) -> _Transition[_P, _R | None]:
    @functools.wraps(transition)
    def locked(self: Any, block: int, /, *arguments: _P.args, **options: _P.kwargs) -> _R | None:
        mark = (get_ident(),)
        release = locks.unlock_request(LOCK_BLOCK + block)
        try:
            if not self.try_lock_block(block, mark):
                if not wait:
                    return None
                self.lock_block(block, mark)
            return transition(self, block, *arguments, **options)
        finally:
            try:
                self.unlock_block(block, mark)
            except BaseException:
                # Ctrl-C, perhaps before the block was unlocked, and perhaps again now. No
                # Python function is called, since Ctrl-C could come at its beginning.
                if block in self._busy and self._busy[block] is mark:
                    try:
                        fcntl.fcntl(self.lock_fd, locks.SETLK, release)
                    finally:
                        del self._busy[block]
                raise

    return locked
