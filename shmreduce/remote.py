"""Recognises connections to other hosts, which cannot open shared memory of this one.

May import ``borrowed_socket``, ``signals`` and :mod:`multiprocessing.connection`.
:mod:`shmreduce.forking` and :mod:`shmreduce.managers` use it.

A :class:`multiprocessing.connection.Connection` may be a pipe, a Unix socket or a TCP
socket, and pickles in the same way for all of them. While shmreduce is installed,
``Connection.send`` checks first: if it is a socket other than a Unix socket, arrays are
pickled in the ordinary way. Managers over TCP send by the same method.
"""

from __future__ import annotations

import socket
import threading
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from shmreduce.borrowed_socket import ask_socket
from shmreduce.signals import is_from_handler

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["crosses_hosts", "make_send", "send_or_discard", "shared_memory_allowed"]

_REMEMBERED = "_shmreduce_crosses_hosts"


class _Thread(threading.local):
    """Whether the current thread is sending to another host."""

    crosses_hosts = False


_thread = _Thread()


def shared_memory_allowed() -> bool:
    """Return whether a message that this thread pickles now may refer to shared memory."""
    return not _thread.crosses_hosts


def crosses_hosts(connection: Connection) -> bool:
    """Return whether the peer of an open connection may be on another host.

    The answer is stored in the connection, since it costs system calls. The
    descriptor stays the connection's.

    Raises
    ------
    OSError
        If the connection is closed.

    Examples
    --------
    >>> from multiprocessing import Pipe
    >>> here, there = Pipe()
    >>> crosses_hosts(here)
    False
    >>> here.close()
    >>> there.close()
    """
    answer = connection.__dict__.get(_REMEMBERED)
    if answer is None:
        family = ask_socket(connection.fileno(), lambda borrowed: borrowed.family)
        answer = family not in (None, socket.AF_UNIX)
        connection.__dict__[_REMEMBERED] = answer
    return bool(answer)


def make_send(
    previous: Callable[[Connection, Any], None],
    dumps: Callable[[Any], Any],
    discard: Callable[[Any], None],
    is_active: Callable[[], bool],
) -> Callable[[Connection, Any], None]:
    """Return a ``Connection.send`` that uses no shared memory if the peer is on another host.

    Parameters
    ----------
    previous : callable
        The ``send`` that is replaced.
    dumps : callable
        Pickles an object to bytes: ``ForkingPickler.dumps``.
    discard : callable
        Gives back the memory of a message that could not be sent.
    is_active : callable
        Whether shmreduce is still installed; if not, ``previous`` is called.
    """
    # If another library has replaced send(), its function is called, not bypassed.
    is_standard = getattr(previous, "__module__", None) == Connection.__module__

    def send(self: Connection, obj: Any) -> None:
        """Send a picklable object; see :meth:`multiprocessing.connection.Connection.send`."""
        # If the connection is closed or read-only, the standard method raises the error.
        if not is_active() or self.closed or not self.writable:
            previous(self, obj)
            return
        before = _thread.crosses_hosts
        _thread.crosses_hosts = crosses_hosts(self)
        try:
            if not is_standard:
                previous(self, obj)
                return
            data = dumps(obj)
        finally:
            _thread.crosses_hosts = before
        send_or_discard(self, data, discard)

    return send


def send_or_discard(connection: Connection, data: Any, discard: Callable[[Any], None]) -> None:
    """Send the bytes of a message; if that fails, ``discard`` gives back its memory."""
    try:
        connection.send_bytes(data)
    except Exception as error:
        # The peer cannot have received the whole message, so it will not claim the memory. But
        # a signal handler may have raised the error after the last byte was sent.
        if not is_from_handler(error):
            discard(data)
        raise
