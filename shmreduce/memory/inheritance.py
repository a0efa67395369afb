"""How a child that is spawned, not forked, becomes a member of its parent's family.

May import ``borrowed_socket``, :mod:`shmreduce.descriptor`, ``standard_streams``, ``locks``,
``mailbox``, ``family`` and ``runtime``.

An object that is pickled with the process gives it the descriptors of the family's file and
mailbox.
"""

from __future__ import annotations

import os
import socket
from multiprocessing import context, reduction
from typing import Any

from shmreduce.borrowed_socket import AS_IT_IS
from shmreduce.descriptor import take_over
from shmreduce.memory import locks
from shmreduce.memory.family import Family
from shmreduce.memory.mailbox import Mailbox
from shmreduce.memory.runtime import current
from shmreduce.memory.standard_streams import clear_of_streams

__all__ = ["inheritance"]


class _Inheritance:
    """Makes the child that unpickles it a member of the parent's family."""

    def __init__(self, descriptors: tuple[Any, ...]) -> None:
        self._descriptors = descriptors

    def __reduce__(self) -> tuple[Any, ...]:
        return _join_family, self._descriptors


def _join_family(*descriptors: Any) -> None:
    """Join the parent's family. This runs in the child."""
    file, receiver, sender = [clear_of_streams(take_over(each)) for each in descriptors]
    try:
        own = locks.reopen(file)
    finally:
        # Its description is the parent's: if it stayed open here, the parent's membership
        # would not end with the parent.
        os.close(file)
    current().join(Family(own, Mailbox(_socket(receiver), _socket(sender))))


def _socket(fd: int) -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | AS_IT_IS, fileno=fd)


def inheritance() -> _Inheritance | None:
    """Return an object that makes the child that is being pickled a member.

    Returns None if no child is being pickled, or if this was called for the child before:
    a descriptor must not be handed over twice.
    """
    child: Any = context.get_spawning_popen()
    if child is None or getattr(child, "_shmreduce_inherits", False):
        return None
    child._shmreduce_inherits = True
    descriptors = current().family.descriptors()
    return _Inheritance(tuple(reduction.DupFd(fd) for fd in descriptors))
