"""Examines the socket behind a descriptor that somebody else owns.

Imports nothing of shmreduce.
"""

from __future__ import annotations

import os
import socket
import stat
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["ask_socket"]

_Answer = TypeVar("_Answer")


def ask_socket(fd: int, question: Callable[[socket.socket], _Answer]) -> _Answer | None:
    """Return ``question(socket)`` for the socket behind a descriptor; None if it is no socket.

    The descriptor stays its owner's.

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
    borrowed = socket.socket(fileno=fd)
    try:
        return question(borrowed)
    finally:
        # Without this, dropping the object would close the descriptor.
        borrowed.detach()
