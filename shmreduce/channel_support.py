"""Whether the channels of shmreduce work on this system.

May import ``interpreter`` and, of :mod:`shmreduce.memory`, ``locks``.

Apart from :mod:`shmreduce.connection`, since a child that was given no channel need not import
that.
"""

from __future__ import annotations

import errno
import functools
import socket

from shmreduce.interpreter import is_free_threaded
from shmreduce.memory import locks

__all__ = ["supported"]

_LACKING = frozenset(
    (
        errno.EAFNOSUPPORT,
        errno.EPROTONOSUPPORT,
        errno.ESOCKTNOSUPPORT,
        errno.EPROTOTYPE,
        errno.EOPNOTSUPP,
        errno.EINVAL,
        errno.ENOSYS,
        # A filter of system calls (seccomp(2)), or another rule.
        errno.EPERM,
        errno.EACCES,
    )
)
"""Errors of socketpair(2) on systems that have no sockets of this type."""


@functools.cache
def supported() -> bool:
    """Return whether the channels of shmreduce work here.

    Raises
    ------
    OSError
        If that cannot be told now: no descriptor or no memory is free. It is asked again then.
    """
    if is_free_threaded() or not (locks.supported() and hasattr(socket, "SOCK_SEQPACKET")):
        return False
    try:
        ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    except OSError as error:
        # Other errors tell only of this moment: no descriptor is free, say, or a signal's
        # handler raised. But the answer is cached for as long as the process lives.
        if error.errno not in _LACKING:
            raise
        return False
    for end in ends:
        end.close()
    return True
