"""Connections whose messages bring the memory they refer to.

May import ``packets`` and everything below it, and
:mod:`multiprocessing.connection`.

A connection is one end of a pair of ``SOCK_SEQPACKET`` sockets (unix(7)). A
message is one packet, written and read by one system call. So writers and readers
need no locks, and a process that is killed never leaves half a message behind. The
descriptors of the segments that a message refers to travel with it
(SCM_RIGHTS), so the sender may have exited before the message is read.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import multiprocessing.connection
import os
import select
import socket
import sys
import termios
import time
from multiprocessing import reduction
from typing import TYPE_CHECKING, Any, cast

from shmreduce import channel_support
from shmreduce.borrowed_socket import AS_IT_IS, ask_socket
from shmreduce.descriptor import take_over
from shmreduce.errors import ConfigurationError, SegmentError
from shmreduce.memory.standard_streams import (
    clear_of_streams,
    seqpacket_pair,
)
from shmreduce.packet_socket import PacketSocket
from shmreduce.packets import (
    LARGEST_PACKET,
    SMALL_PACKET,
    load_packet,
    open_packet,
    pack_bytes,
    pack_last,
)
from shmreduce.receive_buffer import ReceiveBuffer
from shmreduce.short_waits import ShortWaits, poll_after_look
from shmreduce.signals import is_from_handler
from shmreduce.stack import need_stack
from shmreduce.standard_names import names_of

if TYPE_CHECKING:
    from shmreduce.packets import Packet, Received

__all__ = [
    "Client",
    "Connection",
    "Listener",
    "Pipe",
    "give_buffer",
    "take_buffer",
    "wait",
]

_BUFFER = 4 << 20
"""Bytes of SO_SNDBUF. The kernel doubles them (socket(7)), and counts 768 for a small message.

So the connection holds more messages of any size than a pipe of 64 KiB, if it gets that much.
"""
_BUFFER_WITHOUT_LIMIT = int(getattr(socket, "SO_SNDBUFFORCE", 32))
"""The privileged option that ``net.core.wmem_max`` does not limit; see socket(7)."""
# Plain integers: combining members of an enumeration would take longer than sending.
_NO_SIGNAL = int(getattr(socket, "MSG_NOSIGNAL", 0))
_DO_NOT_WAIT = int(getattr(socket, "MSG_DONTWAIT", 0))
_GONE = frozenset((errno.EPIPE, errno.ECONNRESET, errno.ENOTCONN, errno.ECONNREFUSED))
_NO_MEMORY = frozenset((errno.ENOBUFS, errno.ENOMEM))
_SPARE_BUFFERS = 4
_UNREAD_SHARE = 4
"""Unread packets may take up to 1/4 of the socket's buffer; beyond it, large ones go into blocks.

A block costs one more copy, so it is not used if the reader is only a little late.
"""
_WAITS_FROM = 16 << 20
"""Bytes. After sending this many, ``send_bytes`` waits for their reader.

A stream of such messages would fill the memory otherwise.
"""
_LONGEST_PAUSE = 20
"""Milliseconds."""
_CALLS = 5
"""Calls for which there must be room on the stack before a packet is read.

The packet is opened and loaded one call less deep than it is read. Then ``load_message`` must be
entered, from where the message is discarded if the rest fails.
"""

_spare: list[ReceiveBuffer] = []
"""Receive buffers that are not in use; see :func:`take_buffer`."""


class Connection(multiprocessing.connection.Connection):
    """One end of a :func:`Pipe`; as :class:`multiprocessing.connection.Connection`.

    Any number of processes and threads may use an end at once. An object is sent as it
    is when :meth:`send` is called; later changes do not reach the receiver.

    Parameters
    ----------
    handle : int
        A connected ``SOCK_SEQPACKET`` socket. It belongs to this object from now on.
    readable, writable : bool
        Whether the end may receive, and send.

    Raises
    ------
    ConfigurationError
        If the handle is a pipe or another kind of socket. It stays the caller's.
    ValueError
        If it is negative, or if the end is neither readable nor writable.
    """

    _handle: int | None
    _readable: bool
    _writable: bool

    def __init__(self, handle: int, readable: bool = True, writable: bool = True) -> None:
        if handle >= 0:
            _check_kind(handle)
        super().__init__(handle, readable, writable)
        self._socket = PacketSocket(socket.AF_UNIX, socket.SOCK_SEQPACKET | AS_IT_IS, 0, handle)
        # A socket that was made after socket.setdefaulttimeout() does not block.
        if not os.get_blocking(handle):
            os.set_blocking(handle, True)
        self._waits = ShortWaits()

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (
            type(self),
            reduction.DupFd(self.fileno()),
            self.readable,
            self.writable,
        )

    def send(self, obj: Any) -> None:
        """Send a picklable object.

        Raises
        ------
        BrokenPipeError
            If nobody can receive it any more.
        OutOfSharedMemoryError, BudgetExceededError
            If it is large and there is no room for it.
        OSError
            If the connection is closed, or can only receive.
        """
        held = [obj]
        # Arrays without any other reference are moved: keep none in this frame.
        del obj
        self.send_last(held)

    def send_last(self, held: list[Any]) -> None:
        """Send the one object in a list as :meth:`send` does, and empty the list.

        Arrays to which no other reference is left are moved, if they were born in shared
        memory or received by value.
        """
        if self._handle is None or not self._writable:
            self._refuse()
        packet = pack_last(held)
        self.transmit(packet)
        packet.finish()

    def recv(self) -> Any:
        """Return the next object; wait for it.

        Raises
        ------
        EOFError
            If there is none and nobody can send one any more.
        AttachError
            If its memory cannot be opened here; ``message_bytes`` then has the
            message, which ``pickle.loads`` can try again.
        OSError
            If the connection is closed, or can only send.
        """
        if self._handle is None or not self._readable:
            self._refuse()
        buffer = take_buffer()
        try:
            return load_packet(buffer, self._read(buffer, 0))
        finally:
            give_buffer(buffer)

    def recv_bytes(self, maxlength: int | None = None) -> bytes:
        """Return the next message as bytes; wait for it.

        Arrays in it can be unpickled as long as the bytes object lives, even if the
        sender is dead. Otherwise the same as
        :meth:`multiprocessing.connection.Connection.recv_bytes`.
        """
        if self._handle is None or not self._readable:
            self._refuse()
        if maxlength is not None and maxlength < 0:
            raise ValueError("negative maxlength")
        data = self._contents()
        if maxlength is not None and len(data) > maxlength:
            self._bad_message_length()  # type: ignore[attr-defined]
        return data

    def receive(self, buffer: ReceiveBuffer, *, wait: bool) -> Received | None:
        """Receive a message, but do not unpickle it yet.

        Returns None if there is no message and ``wait`` is False.

        Parameters
        ----------
        buffer : ReceiveBuffer
            From :func:`take_buffer`. Give it back by :func:`give_buffer` after the arrival
            has been loaded. Its first byte is no longer 0 once a message is in it, even
            if a signal handler raises then.
        wait : bool
            Whether to wait for a message.

        Raises
        ------
        EOFError
            If the other end was closed, and all messages have been received.
        BlockingIOError
            If it would have to wait, and somebody has made the socket a non-blocking one.
        OSError
            If this connection is closed or can only send.
        """
        if self._handle is None or not self._readable:
            self._refuse()
        try:
            return open_packet(buffer, self._read(buffer, 0 if wait else _DO_NOT_WAIT))
        except BlockingIOError:
            if wait:
                # O_NONBLOCK was set by another process: it belongs to the socket, which all share.
                raise
            return None

    def transmit(self, packet: Packet, *, wait: bool = True, patient: bool = False) -> None:
        """Send a packet; discard it if that fails.

        If ``patient``, also wait while the kernel has no memory for it.

        Raises
        ------
        OSError
            Without ``wait``, ``EAGAIN`` if it would have to wait. Without ``wait`` the
            packet is not discarded after any error, and may be sent again.
        BrokenPipeError
            With ``wait``, if the other end was closed.
        """
        if not wait:
            self._write(packet, _NO_SIGNAL | _DO_NOT_WAIT)
            return
        while True:
            try:
                if len(packet.data) > SMALL_PACKET and not self.closed and self._fills_up():
                    # The reader is behind: leave room in the socket for more packets.
                    packet = packet.in_block()
                self._write(packet, _NO_SIGNAL)
            except OSError as error:
                if patient and error.errno in _NO_MEMORY:
                    # Nothing tells when the kernel has memory for packets again.
                    time.sleep(_LONGEST_PAUSE / 1000)
                    continue
                # A signal handler may raise when the packet has been written, and is to be read.
                if not is_from_handler(error):
                    if error.errno == errno.EMSGSIZE and (smaller := packet.in_block()) != packet:
                        # The socket's whole buffer is smaller, by net.core.wmem_max.
                        packet = smaller
                        continue
                    packet.discard()
                if error.errno in _GONE:
                    raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE)) from error
                raise
            except SegmentError:
                # Other code has closed a segment's descriptors; nothing has been written.
                packet.discard()
                raise
            else:
                return

    # What the base class calls

    def _send_bytes(self, buf: memoryview) -> None:
        packet = pack_bytes(buf)
        self.transmit(packet)
        if buf.nbytes >= _WAITS_FROM:
            self._await_reader(packet)

    def _recv_bytes(self) -> io.BytesIO:
        file = io.BytesIO()
        # The base class takes the size from the position.
        file.write(self._contents())
        return file

    def _poll(self, timeout: float | None) -> bool:
        return poll_after_look(self._waits, self.fileno(), timeout, self._sleep_until_readable)

    def _sleep_until_readable(self, timeout: float | None) -> bool:
        # As in the base class, whose method polls, too, after install().
        return bool(multiprocessing.connection.wait([self], timeout))

    def _contents(self) -> bytes:
        buffer = take_buffer()
        try:
            return open_packet(buffer, self._read(buffer, 0)).contents()
        finally:
            give_buffer(buffer)

    def _close(self) -> None:
        self._socket.close()

    def _refuse(self) -> None:
        self._check_closed()  # type: ignore[attr-defined]
        # At least one of these raises: the connection has the other direction.
        self._check_readable()  # type: ignore[attr-defined]
        self._check_writable()  # type: ignore[attr-defined]

    def _await_reader(self, packet: Packet) -> None:
        """Wait until a message has been received, as the writer to a full pipe has to wait."""
        hangup = select.poll()
        # With no events poll() reports only that the other end was closed.
        hangup.register(self.fileno(), 0)
        pause = 1
        while not packet.is_read():
            # Asked before poll(): the kernel drops unread messages when the reader closes,
            # after which there are no unread bytes either.
            taken = not self._unread_bytes()
            if hangup.poll(0 if taken else pause):
                if packet.is_read():
                    return
                packet.discard()
                raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))
            if taken:
                # The packet was received. Do not wait for the block: a reader that was
                # killed in between never reads it.
                return
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _fills_up(self) -> bool:
        """Return whether unread packets take more than their share of the socket's buffer."""
        unread = self._unread_bytes()
        if not unread:
            return False
        room = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
        return unread > room // _UNREAD_SHARE

    def _unread_bytes(self) -> int:
        # SIOCOUTQ (unix(7)), which has the same number.
        answer = fcntl.ioctl(self.fileno(), termios.TIOCOUTQ, bytes(4))
        return int.from_bytes(answer, sys.byteorder)

    # The socket

    def _write(self, packet: Packet, flags: int) -> None:
        descriptors = packet.descriptors() if packet.segments else []
        packet.is_under_way = True
        if len(packet.segments) != len(descriptors):
            packet.note_missing_descriptors()
        if descriptors:
            try:
                self._socket.write(packet.data, descriptors, flags)
            except OSError as error:
                # Too many descriptors are in flight, or one was closed after its array was
                # dropped. Send without them: the receiver opens the segments by name.
                if error.errno not in (errno.ETOOMANYREFS, errno.EBADF) or self.closed:
                    raise
                packet.note_missing_descriptors()
            else:
                return
        self._socket.write(packet.data, (), flags)

    def _watch(self, buffer: ReceiveBuffer) -> int | None:
        """Poll for a packet for a short time; return its size, or None to sleep instead."""
        limits = self._waits.limits()
        if limits is None:
            return None
        read = self._socket.read
        try:
            # A packet that is there already says nothing on whether polling is worth while.
            return read(buffer, _DO_NOT_WAIT)
        except BlockingIOError:
            pass  # there is none yet, so poll for it
        try:
            found = read(buffer, _DO_NOT_WAIT, *limits)
        except BlockingIOError:
            self._waits.in_vain()
            return None
        self._waits.worth_while()
        return found

    def _read(self, buffer: ReceiveBuffer, flags: int) -> int:
        """Read a packet and its descriptors; return its size."""
        # Otherwise the packet could be read, and then neither be loaded nor be discarded.
        need_stack(_CALLS)
        try:
            size = None if flags & _DO_NOT_WAIT else self._watch(buffer)
            if size is None:
                size = self._socket.read(buffer, flags)
        except ConnectionResetError:
            # The other end was closed with unread messages. The kernel reports that only
            # once, and what the other end had sent before can still be read.
            size = self._socket.read(buffer, flags)
        if not size:
            raise EOFError
        return size


def _check_kind(handle: int) -> None:
    """Refuse other sockets: a stream would split messages, or join several into one."""
    if ask_socket(handle, _type_of) == socket.SOCK_SEQPACKET:
        return
    raise ConfigurationError(
        f"handle={handle!r}: must be a socket of type SOCK_SEQPACKET, as Pipe() makes them; for "
        "any other descriptor use multiprocessing.connection.Connection",
        setting="handle",
        value=handle,
    )


def _type_of(borrowed: socket.socket) -> int:
    return borrowed.getsockopt(socket.SOL_SOCKET, socket.SO_TYPE)


def Pipe(duplex: bool = True) -> tuple[Connection, Connection]:  # noqa: N802
    """Return the two ends of a new pipe; see :func:`multiprocessing.Pipe`.

    Parameters
    ----------
    duplex : bool
        Whether both ends can send and receive. If not, the first can only
        receive and the second can only send.

    Examples
    --------
    >>> here, there = Pipe()
    >>> here.send([1, 2])
    >>> there.recv()
    [1, 2]
    >>> here.close(), there.close()
    (None, None)
    """
    if not channel_support.supported():
        return cast("tuple[Connection, Connection]", multiprocessing.connection.Pipe(duplex))
    ends = seqpacket_pair()
    for end in ends:
        _ask_for_room(end)
    first, second = (end.detach() for end in ends)
    return Connection(first, writable=duplex), Connection(second, readable=duplex)


def _ask_for_room(end: socket.socket) -> None:
    # Never an error: of a size above net.core.wmem_max the kernel gives only that much.
    end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)
    if end.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) < 2 * _BUFFER:
        # Only a process with CAP_NET_ADMIN may pass that limit. Others keep the smaller buffer.
        with contextlib.suppress(PermissionError):
            end.setsockopt(socket.SOL_SOCKET, _BUFFER_WITHOUT_LIMIT, _BUFFER)


def _rebuild(kind: type[Connection], descriptor: Any, readable: bool, writable: bool) -> Any:
    return kind(clear_of_streams(take_over(descriptor)), readable, writable)


def take_buffer() -> ReceiveBuffer:
    """Return a receive buffer. Its first byte is 0, which no packet begins with."""
    try:
        buffer = _spare.pop()
    except IndexError:
        return ReceiveBuffer(LARGEST_PACKET)
    buffer[0] = 0
    return buffer


def give_buffer(buffer: ReceiveBuffer) -> None:
    """Take back a buffer from :func:`take_buffer`, and close the descriptors in it."""
    if buffer.descriptors:
        buffer.close_descriptors()
    if len(_spare) < _SPARE_BUFFERS:
        _spare.append(buffer)


if TYPE_CHECKING:
    from multiprocessing.connection import Client, Listener, wait
else:
    __getattr__ = names_of("connection")
