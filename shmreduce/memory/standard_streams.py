"""Keeps the numbers of the standard streams away from shared memory.

Imports nothing of shmreduce.

A program may have closed its standard streams, as daemons do. Then the next files that are
opened get their numbers, and whatever a library prints would be written to those files.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
from collections import deque

__all__ = ["all_clear_of_streams", "clear_of_streams", "pipe", "seqpacket_pair"]

_STANDARD_ERROR = 2


def clear_of_streams(fd: int) -> int:
    """Return a descriptor of the same open file, with a number above the standard streams'.

    Parameters
    ----------
    fd : int
        The descriptor. This call takes it over, even if it fails.

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
    """Replace each descriptor by the result of :func:`clear_of_streams`.

    If no descriptor is free for one, it and those after it are closed and removed.

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
    # If a signal handler raises, one may stay open. But none is ever closed twice.
    fds.clear()
    try:
        while left:
            fds.append(clear_of_streams(left.popleft()))
    except OSError:
        for fd in left:
            os.close(fd)


def pipe() -> tuple[int, int]:
    """Return the reading and the writing end of a pipe, neither a standard stream.

    Raises
    ------
    OSError
        If not enough descriptors are free.
    """
    ends = list(os.pipe())
    all_clear_of_streams(ends)
    if len(ends) < 2:
        for end in ends:
            os.close(end)
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    reader, writer = ends
    return reader, writer


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
