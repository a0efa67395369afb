"""A socket that reads and writes packets together with descriptors (SCM_RIGHTS).

May import :mod:`shmreduce.compiled`, ``processors`` and, for a type, ``receive_buffer``.

With the socket module, each direction needs half a dozen objects for a packet. If
``_quick_packets.c`` was compiled, it is one call.
"""

from __future__ import annotations

import array
import errno
import os
import socket
import time
from typing import TYPE_CHECKING, Any

from shmreduce.compiled import PACKETS, find_module
from shmreduce.processors import all_taken, lets_others_run

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shmreduce.receive_buffer import ReceiveBuffer

__all__ = ["MOST_DESCRIPTORS", "PacketSocket", "PlainPacketSocket", "QuickPacketSocket"]

MOST_DESCRIPTORS = 64
"""In one packet. The kernel's limit is 253 (unix(7), SCM_RIGHTS)."""
_ROOM_FOR_RIGHTS = socket.CMSG_SPACE(4 * MOST_DESCRIPTORS)
"""Bytes of the control message that brings that many descriptors, of 4 bytes each."""
# Plain integers: combining members of an enumeration would take longer than sending.
_CLOSE_ON_EXEC = int(getattr(socket, "MSG_CMSG_CLOEXEC", 0))
_CUT_OFF = int(socket.MSG_TRUNC)
_SOCKET_LEVEL, _RIGHTS = int(socket.SOL_SOCKET), int(getattr(socket, "SCM_RIGHTS", 0))
_FIRST_STEP, _LONGEST_STEP = 5e-5, 2e-4
"""Seconds of polling until the first check whether others need the processor, and between the
last ones; each step is twice as long as the one before.

An answer from a process that has a processor of its own mostly comes before the first check.
"""
_module: Any = find_module(PACKETS)[0]


class PlainPacketSocket(socket.socket):
    """One end of a pair of ``SOCK_SEQPACKET`` sockets, by the socket module.

    Dropping it closes it without a ResourceWarning, as for connections.
    """

    __slots__ = ()

    def __del__(self) -> None:
        self.close()

    def write(self, data: bytes, descriptors: Sequence[int], flags: int) -> None:
        """Write a packet, together with descriptors, which stay the caller's.

        Parameters
        ----------
        data : bytes
            The whole packet.
        descriptors : sequence of int
            At most ``MOST_DESCRIPTORS``.
        flags : int
            The flags of sendmsg(2).

        Raises
        ------
        OSError
            The error of sendmsg(2). Nothing was written then.
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
        """Read a packet and its descriptors into a buffer; return the packet's size.

        The descriptors are closed on exec. If the process has too few free descriptors, the
        kernel drops the rest (recvmsg(2), ``MSG_CTRUNC``).

        Parameters
        ----------
        buffer : ReceiveBuffer
            At least as long as the packet. The descriptors are added to its own.
        flags : int
            The flags of recvmsg(2).
        patience : float
            Seconds to poll if there is no packet and ``flags`` has ``MSG_DONTWAIT``, as long
            as no thread waits for this one's processor.
        spare : float
            Seconds to go on polling after that, as long as none waits for any processor.

        Raises
        ------
        BlockingIOError
            If there was no packet, and ``flags`` has ``MSG_DONTWAIT``.
        OSError
            The error of recvmsg(2); ``EMSGSIZE`` if the packet is longer than the buffer.
        """
        now = time.perf_counter()
        until = now + patience
        last = until + spare if patience else 0.0
        step = _FIRST_STEP
        check = now + step
        while True:
            try:
                size, control, found, _ = self.recvmsg_into(
                    [buffer], _ROOM_FOR_RIGHTS, flags | _CLOSE_ON_EXEC
                )
            except BlockingIOError:
                now = time.perf_counter()
                if now >= last:
                    raise
                if now < check:
                    continue
                if lets_others_run() or (now >= until and all_taken()):
                    raise
                step = min(2 * step, _LONGEST_STEP)
                check = now + step
            else:
                if control:
                    _add_descriptors(control, buffer.descriptors)
                if found & _CUT_OFF:
                    raise OSError(errno.EMSGSIZE, os.strerror(errno.EMSGSIZE))
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
"""The class to use: the quick one if the module was compiled."""
