"""One end of the connection between a pool and one of its workers.

Imports nothing of shmreduce when it is imported.

Pickling and sending are two steps here: a task is pickled when the user gives
it to the pool and sent when a worker is free, and an error while an answer is
unpickled must not be taken for a broken connection.
"""

from __future__ import annotations

import os
import weakref
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

__all__ = ["FAILED", "READY", "STOP", "Channel", "close_in_forked_children"]

STOP = b"\0"
"""To a worker: leave. No pickle looks like that."""
READY = "ready"
"""From a worker: the initializer is done."""
FAILED = "failed"
"""From a worker: the initializer raised this exception."""


class Channel:
    """One end of a connection, and how messages on it are pickled.

    As part of the arguments of a process that is being started it reaches the
    child under every start method.

    Parameters
    ----------
    connection : Connection
        It belongs to this object afterwards.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def fileno(self) -> int:
        """Return the descriptor, for selectors."""
        return self._connection.fileno()

    def close(self) -> None:
        """Close it; doing so again changes nothing."""
        self._connection.close()

    @staticmethod
    def dumps(obj: object) -> Any:
        """Pickle a message; nothing is held if that fails."""
        return ForkingPickler.dumps(obj)

    @staticmethod
    def loads(data: Any) -> Any:
        """Unpickle a message; what it holds is given back if that fails."""
        return ForkingPickler.loads(data)

    def send_dumped(self, message: Any) -> None:
        """Send what :meth:`dumps` returned; OSError if the other side is gone."""
        self._connection.send_bytes(message)

    def receive_bytes(self) -> bytes:
        """Wait for a message and return it as it came.

        Raises
        ------
        EOFError, OSError
            If the other side is gone.
        """
        return self._connection.recv_bytes()

    def poll(self) -> bool:
        """Whether a message, or the end, is there."""
        return self._connection.poll(0)


_channels: weakref.WeakSet[Channel] = weakref.WeakSet()


def close_in_forked_children(channel: Channel) -> None:
    """See to it that forked children do not keep this end of the connection.

    A worker would not see the end of its parent while a sibling has the
    parent's end, nor a parent the end of its worker while the worker's own
    children have its end.
    """
    _channels.add(channel)


def _close_all() -> None:
    for channel in list(_channels):
        channel.close()
    _channels.clear()


os.register_at_fork(after_in_child=_close_all)
