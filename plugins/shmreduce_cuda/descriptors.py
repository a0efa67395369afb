"""Passes descriptors to receivers, through a socket of the process that offers them.

May import ``errors`` and ``offers`` of this plugin.

A pool's descriptor cannot be opened through ``/proc``, since the pool belongs to the
open file description. So it is passed in a message (SCM_RIGHTS, unix(7)). The socket
has an abstract name made of the sender's token. Each side checks that the other runs as
the same user.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from shmreduce_cuda.errors import CudaProducerDied, CudaSharingError

if TYPE_CHECKING:
    from shmreduce_cuda.offers import Offers

__all__ = ["fetch_descriptor", "open_listener", "serve"]

_REQUEST = struct.Struct("<16sQ")
_PEER = struct.Struct("iII")
_PATIENCE = 5.0
"""Seconds that a receiver waits for the sender."""
_SERVER_PATIENCE = 1.0
"""Seconds that the sender waits for a receiver's request."""
_NONE_LEFT = b"f"
"""The answer of a sender that has no descriptor left to duplicate one."""
_PAUSE = 0.01
"""Seconds between two tries to connect."""


def _name(token: bytes) -> bytes:
    return b"\0shmreduce-cuda-" + token.hex().encode()


def _is_same_user(connection: socket.socket) -> bool:
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
    _, user, _ = _PEER.unpack(data)
    return bool(user == os.geteuid())


def open_listener(token: bytes) -> socket.socket:
    """Return the non-blocking socket to which :func:`fetch_descriptor` connects."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        listener.bind(_name(token))
        listener.listen(128)
        listener.setblocking(False)
    except BaseException:
        listener.close()
        raise
    return listener


def serve(listener: socket.socket, token: bytes, offers: Offers) -> bool:
    """Answer one request, if there is one.

    Returns False if there may be one that cannot be accepted now, such as for lack of
    descriptors. Trying again at once would be in vain.
    """
    try:
        connection, _ = listener.accept()
    except (BlockingIOError, ConnectionAbortedError):
        # Nobody is waiting any more.
        return True
    except OSError:
        return False
    with connection:
        connection.settimeout(_SERVER_PATIENCE)
        # The receiver has ended or sends no request; or a driver's call keeps the offers, which
        # is longer than a receiver waits. It will notice that it got nothing.
        with suppress(OSError, CudaSharingError):
            _answer(connection, token, offers)
    return True


def _answer(connection: socket.socket, token: bytes, offers: Offers) -> None:
    # Checked before waiting for the request: another user must not be able to block this.
    if not _is_same_user(connection):
        return
    request = connection.recv(_REQUEST.size)
    if len(request) != _REQUEST.size:
        return
    asked, number = _REQUEST.unpack(request)
    try:
        descriptor = offers.duplicate(number) if asked == token else None
    except OSError:
        connection.send(_NONE_LEFT)
        return
    if descriptor is None:
        connection.send(b"n")
        return
    try:
        socket.send_fds(connection, [b"y"], [descriptor])
    finally:
        os.close(descriptor)


def _connect(connection: socket.socket, token: bytes) -> None:
    deadline = time.monotonic() + _PATIENCE
    while True:
        try:
            return connection.connect(_name(token))
        except BlockingIOError:
            # The listener's queue is full; a Unix socket with a timeout does not wait then.
            if time.monotonic() > deadline:
                raise TimeoutError from None
            time.sleep(_PAUSE)


def fetch_descriptor(token: bytes, pid: int, number: int) -> int:
    """Return a descriptor that another process offers; it is the caller's.

    Raises
    ------
    CudaProducerDied
        If the process is gone.
    CudaSharingError
        If it does not answer, or does not offer that descriptor.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.settimeout(_PATIENCE)
        try:
            _connect(connection, token)
            if not _is_same_user(connection):
                raise CudaSharingError(
                    f"the socket of process {pid} belongs to another user; run both as one user"
                )
            connection.send(_REQUEST.pack(token, number))
            # Close-on-exec from the beginning: a program that another thread starts at this
            # moment would otherwise inherit it, and keep the memory.
            answer, descriptors, flags, _ = socket.recv_fds(
                connection, 1, 1, socket.MSG_CMSG_CLOEXEC
            )
        except ConnectionError as error:
            raise CudaProducerDied(
                f"process {pid}, which sent the array, is not there any more, or is in another "
                "network namespace: send again from a process that lives, on this host",
                pid=pid,
                segment=None,
                locator=None,
            ) from error
        except TimeoutError as error:
            raise CudaSharingError(
                f"process {pid}, which sent the array, did not hand over its memory within "
                f"{_PATIENCE:.0f} s; if it is stopped, continue it, and send the array again"
            ) from error
    if flags & socket.MSG_CTRUNC:
        raise CudaSharingError(
            f"process {os.getpid()} has no descriptor left for the memory of process {pid}: it "
            "has as many files open as it may: close some, or raise the limit (ulimit -n)"
        )
    if answer == _NONE_LEFT:
        raise CudaSharingError(
            f"process {pid}, which sent the array, has as many files open as it may and so cannot "
            "hand over its memory: close some there, or raise its limit (ulimit -n)"
        )
    if answer != b"y" or not descriptors:
        raise CudaSharingError(
            f"process {pid} does not offer the memory any more; send the array again"
        )
    return descriptors[0]
