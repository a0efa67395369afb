"""A socket that reads and writes packets with descriptors beside them.

May import :mod:`shmreduce.compiled`, ``processors`` and, for a type, ``receive_buffer``.

The socket module takes such a packet in half a dozen objects for each
direction. ``_quick_packets.c``, where it was compiled, does it in one call.
"""

from __future__ import annotations

import array
import errno
import os
import socket
import time
from typing import TYPE_CHECKING, Any

from shmreduce.compiled import PACKETS, find_module
from shmreduce.processors import all_taken

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shmreduce.receive_buffer import ReceiveBuffer

__all__ = ["MOST_DESCRIPTORS", "PacketSocket", "PlainPacketSocket", "QuickPacketSocket"]

MOST_DESCRIPTORS = 64
"""Of one packet; the kernel's limit is 253 (unix(7), SCM_RIGHTS)."""
_ROOM_FOR_RIGHTS = socket.CMSG_SPACE(4 * MOST_DESCRIPTORS)
# Plain integers: to combine members of an enumeration takes longer than to send.
_CLOSE_ON_EXEC = int(getattr(socket, "MSG_CMSG_CLOEXEC", 0))
_SOCKET_LEVEL, _RIGHTS = int(socket.SOL_SOCKET), int(getattr(socket, "SCM_RIGHTS", 0))
_STEP = 2e-4
"""Seconds between two looks at what else runs."""
_module: Any = find_module(PACKETS)[0]


class PlainPacketSocket(socket.socket):
    """One end of a pair of ``SOCK_SEQPACKET`` sockets, by the socket module.

    It is closed in silence when it is dropped, as connections are.
    """

    __slots__ = ()

    def __del__(self) -> None:
        self.close()

    def write(self, data: bytes, descriptors: Sequence[int], flags: int) -> None:
        """Write a packet, and descriptors beside it, which stay the caller's.

        Parameters
        ----------
        data : bytes
            All of it.
        descriptors : sequence of int
            ``MOST_DESCRIPTORS`` at most.
        flags : int
            Of sendmsg(2).

        Raises
        ------
        OSError
            As sendmsg(2) says. Nothing was written then.
        """
        if len(descriptors) > MOST_DESCRIPTORS:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        if descriptors:
            rights = array.array("i", descriptors)
            self.sendmsg([data], [(_SOCKET_LEVEL, _RIGHTS, rights)], flags)
        else:
            self.send(data, flags)

    def read(
        self, buffer: ReceiveBuffer, flags: int, patience: float = 0.0, spare: float = 0.0
    ) -> int:
        """Read a packet into a buffer, with the descriptors beside it; return its size.

        The descriptors are closed on exec. Where none is free the kernel drops
        the rest (recvmsg(2), ``MSG_CTRUNC``).

        Parameters
        ----------
        buffer : ReceiveBuffer
            Long enough. The descriptors are added to its own.
        flags : int
            Of recvmsg(2).
        patience : float
            Seconds for which to look again where there is nothing, and it must
            not wait.
        spare : float
            Seconds for which to go on with that after the patience, as long as all who run
            have a processor.

        Raises
        ------
        BlockingIOError
            If there was nothing, and it must not wait.
        OSError
            As recvmsg(2) says.
        """
        until = time.perf_counter() + patience if patience else 0.0
        last = until + spare
        while True:
            try:
                size, control, _, _ = self.recvmsg_into(
                    [buffer], _ROOM_FOR_RIGHTS, flags | _CLOSE_ON_EXEC
                )
            except BlockingIOError:
                now = time.perf_counter()
                if now < until:
                    continue
                if now >= last or all_taken():
                    raise
                until = min(now + _STEP, last)
            else:
                if control:
                    _add_descriptors(control, buffer.descriptors)
                return size


class QuickPacketSocket(PlainPacketSocket):
    """The same, by ``_quick_packets.c``."""

    __slots__ = ()

    def write(self, data: bytes, descriptors: Sequence[int], flags: int) -> None:
        """See :meth:`PlainPacketSocket.write`."""
        _module.write_packet(self.fileno(), data, descriptors, flags)

    def read(
        self, buffer: ReceiveBuffer, flags: int, patience: float = 0.0, spare: float = 0.0
    ) -> int:
        """See :meth:`PlainPacketSocket.read`."""
        size: int = _module.read_packet(
            self.fileno(), buffer, flags, patience, spare, buffer.descriptors
        )
        return size


def _add_descriptors(control: list[tuple[int, int, bytes]], descriptors: list[int]) -> None:
    found = array.array("i")
    for level, kind, data in control:
        if level == _SOCKET_LEVEL and kind == _RIGHTS:
            found.frombytes(data[: len(data) - len(data) % found.itemsize])
    descriptors.extend(found)


PacketSocket: type[PlainPacketSocket] = PlainPacketSocket if _module is None else QuickPacketSocket
"""The one of the two to use."""
