"""Managers whose proxies share arrays with the server process.

May import ``pickling``, ``unpickling``, ``remote``, ``standard_names``,
:mod:`shmreduce.memory` and :mod:`multiprocessing.managers`.

The standard library has a table of serializers for managers, by name. Ours is added
there, under its own name, so nothing changes for managers that do not use it. Each proxy
carries the name, and unpickling the name imports this module. So every process that gets
a proxy can use it.
"""

from __future__ import annotations

import os
from multiprocessing import connection, managers
from typing import TYPE_CHECKING, Any

from shmreduce.memory.loading import discard_message
from shmreduce.pickling import dumps
from shmreduce.remote import crosses_hosts, send_or_discard
from shmreduce.standard_names import names_of
from shmreduce.unpickling import loads

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
        # If the connection is closed, the standard method raises the error.
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
    """Accepts connections on which arrays travel by shared memory."""

    def accept(self) -> _Connection:
        """Wait for a peer and return the connection to it."""
        return _ours(super().accept())


def _connect(*arguments: Any, **named: Any) -> _Connection:
    return _ours(connection.Client(*arguments, **named))


class _Serializer(str):
    """A name in the table. Unpickling it imports this module, which adds the name there."""

    __slots__ = ()

    def __reduce__(self) -> tuple[Any, ...]:
        return _Serializer, (str(self),)


_SERIALIZER = _Serializer("shmreduce")
managers.listener_client[_SERIALIZER] = _Listener, _connect  # type: ignore[attr-defined]


class BaseManager(managers.BaseManager):
    """A manager as :class:`multiprocessing.managers.BaseManager`, which shares arrays.

    It has no registered types; see :class:`SyncManager` for everything else.

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

    Messages to the server process and back are pickled by shmreduce. If the address is
    ``(host, port)``, they are pickled in the ordinary way. To share other types of objects,
    derive a class and call its ``register``.

    Parameters
    ----------
    address, authkey, ctx, **named
        As for the standard class.
    serializer : str
        As for the standard class. Arrays are shared only with ``"pickle"``.

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
