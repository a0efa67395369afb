"""Keeps the numbers of the standard streams away from shared memory.

Imports nothing of shmreduce.

A program may have closed its standard streams, as daemons do. The next files that
are opened get their numbers, and what any library prints would be written there.
"""

from __future__ import annotations

import fcntl
import os
import socket
from collections import deque

__all__ = ["all_clear_of_streams", "clear_of_streams", "seqpacket_pair"]

_STANDARD_ERROR = 2


def clear_of_streams(fd: int) -> int:
    """Return a descriptor of the same open file, beyond those of the standard streams.

    Parameters
    ----------
    fd : int
        Is taken over, also if this fails.

    Raises
    ------
    OSError
        If no other descriptor is free.

    Examples
    --------
    >>> reader, writer = os.pipe()
    >>> clear_of_streams(reader) == reader
    True
    >>> os.close(reader), os.close(writer)
    (None, None)
    """
    if fd > _STANDARD_ERROR:
        return fd
    try:
        return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _STANDARD_ERROR + 1)
    finally:
        os.close(fd)


def all_clear_of_streams(fds: list[int]) -> None:
    """Put :func:`clear_of_streams` of each in its place, up to the first that cannot be had.

    Those that are left out are closed.

    Examples
    --------
    >>> reader, writer = os.pipe()
    >>> fds = [reader, writer]
    >>> all_clear_of_streams(fds)
    >>> fds == [reader, writer]
    True
    >>> os.close(reader), os.close(writer)
    (None, None)
    """
    if not fds or min(fds) > _STANDARD_ERROR:
        return
    left = deque(fds)
    # If a signal handler raises, one may stay open. None is ever closed twice.
    fds.clear()
    try:
        while left:
            fds.append(clear_of_streams(left.popleft()))
    except OSError:
        for fd in left:
            os.close(fd)


def seqpacket_pair() -> tuple[socket.socket, socket.socket]:
    """Return two connected sockets for whole messages (unix(7)), neither a standard stream."""
    first, second = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        first, second = _clear(first), _clear(second)
    except BaseException:
        first.close()
        second.close()
        raise
    return first, second


def _clear(end: socket.socket) -> socket.socket:
    if end.fileno() > _STANDARD_ERROR:
        return end
    family, kind = end.family, end.type
    return socket.socket(family, kind, fileno=clear_of_streams(end.detach()))
