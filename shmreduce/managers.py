"""Managers whose proxies share arrays with the server process.

May import ``pickling``, ``remote``, ``standard_names``, :mod:`shmreduce.memory` and
:mod:`multiprocessing.managers`.

The managers of the standard library have a table of ways to talk, by name. One
of ours is added there, which concerns nobody who does not ask for it. The name
travels with each proxy, and brings this module along: whoever gets a proxy can
use it.
"""

from __future__ import annotations

import os
from multiprocessing import connection, managers
from typing import TYPE_CHECKING, Any

from shmreduce.memory.loading import discard_message
from shmreduce.pickling import dumps, loads
from shmreduce.remote import crosses_hosts, send_or_discard
from shmreduce.standard_names import names_of

__all__ = [
    "BaseManager",
    "BaseProxy",
    "DictProxy",
    "ListProxy",
    "Namespace",
    "SharedMemoryManager",
    "SyncManager",
    "Token",
    "ValueProxy",
]


class _Connection(connection.Connection):
    """A connection on which arrays travel by shared memory, unless it is to another host."""

    def send(self, obj: Any) -> None:
        """Send a picklable object."""
        # The standard method tells of closed connections.
        if self.closed or crosses_hosts(self):
            super().send(obj)
            return
        data, message = dumps(obj)
        if message is None:
            self.send_bytes(data)
            return
        message.commit()
        send_or_discard(self, data, discard_message)

    def recv(self) -> Any:
        """Return the next object; wait for it."""
        return loads(self.recv_bytes())


def _ours(standard: connection.Connection) -> _Connection:
    with standard:
        return _Connection(os.dup(standard.fileno()))


class _Listener(connection.Listener):
    """Accepts such connections."""

    def accept(self) -> _Connection:
        """Wait for a peer and return the connection to it."""
        return _ours(super().accept())


def _connect(*arguments: Any, **named: Any) -> _Connection:
    return _ours(connection.Client(*arguments, **named))


class _Serializer(str):
    """A name in the table, which is there wherever it is unpickled."""

    __slots__ = ()

    def __reduce__(self) -> tuple[Any, ...]:
        return _Serializer, (str(self),)


_SERIALIZER = _Serializer("shmreduce")
managers.listener_client[_SERIALIZER] = _Listener, _connect  # type: ignore[attr-defined]


class BaseManager(managers.BaseManager):
    """A manager as :class:`multiprocessing.managers.BaseManager`, which shares arrays.

    It has no types of its own; see :class:`SyncManager` for everything else.

    Examples
    --------
    >>> import shmreduce
    >>> from shmreduce.managers import BaseManager
    >>> class ListManager(BaseManager): ...
    >>> ListManager.register("list", list, exposed=["__len__"])
    >>> with ListManager(ctx=shmreduce.get_context("fork")) as manager:
    ...     manager.list([1, 2]).__len__()
    2
    """

    def __init__(
        self,
        address: Any = None,
        authkey: bytes | None = None,
        serializer: str = "pickle",
        ctx: Any = None,
        **named: Any,
    ) -> None:
        chosen = _SERIALIZER if serializer == "pickle" else serializer
        super().__init__(address, authkey, chosen, ctx, **named)


class SyncManager(managers.SyncManager, BaseManager):
    """A manager as :class:`multiprocessing.managers.SyncManager`, which shares arrays.

    What is sent to the server process and back is pickled by shmreduce; with an
    address ``(host, port)`` in the ordinary way. Subclass it and ``register`` to
    share other types of objects.

    Parameters
    ----------
    address, authkey, ctx, **named
        Those of the standard class.
    serializer : str
        As the standard class takes it. Arrays are shared with ``"pickle"``.

    Examples
    --------
    >>> import numpy, shmreduce
    >>> with shmreduce.get_context("fork").Manager() as manager:
    ...     shelf = manager.list([numpy.zeros(100_000)])
    ...     shelf[0].sum()
    np.float64(0.0)
    """


if TYPE_CHECKING:
    from multiprocessing.managers import (
        BaseProxy,
        DictProxy,
        ListProxy,
        Namespace,
        SharedMemoryManager,
        Token,
        ValueProxy,
    )
else:
    __getattr__ = names_of("managers")
