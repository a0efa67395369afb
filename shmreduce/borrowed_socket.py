"""Socket objects over descriptors of others, which stay as they are.

Imports nothing of shmreduce.
"""

from __future__ import annotations

import os
import socket
import stat
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["AS_IT_IS", "ask_socket"]

AS_IT_IS = int(getattr(socket, "SOCK_NONBLOCK", 0))
"""With this bit in its type, a new socket object leaves the flags of its descriptor alone.

Without it, after :func:`socket.setdefaulttimeout`, ``O_NONBLOCK`` would be set, for everybody who
has the same open file description (fcntl(2)), and would stay set.
"""
_Answer = TypeVar("_Answer")


def ask_socket(fd: int, question: Callable[[socket.socket], _Answer]) -> _Answer | None:
    """Return ``question(socket)`` for the socket behind a descriptor; None if it is no socket.

    The descriptor stays its owner's. The object does not know its type: ask for ``SO_TYPE``.

    Raises
    ------
    OSError
        If it is closed.

    Examples
    --------
    >>> reader, writer = os.pipe()
    >>> ask_socket(reader, lambda borrowed: borrowed.family) is None
    True
    >>> os.close(reader), os.close(writer)
    (None, None)
    """
    if not stat.S_ISSOCK(os.fstat(fd).st_mode):
        return None
    # Ctrl-C may come as soon as the object has the descriptor.
    borrowed = socket.socket.__new__(socket.socket)
    try:
        socket.socket.__init__(borrowed, type=AS_IT_IS, fileno=fd)
        return question(borrowed)
    finally:
        # Without this, dropping the object would close the descriptor.
        borrowed.detach()
