"""The mailbox of a family: segments whose maker has ended, for the readers of its messages.

May import ``standard_streams``.

The mailbox is a socket pair, which holds descriptors of segments whose maker ended normally
before its messages were read. The kernel keeps them while any member of the family lives.
When the last one ends, the kernel frees them, and with them the memory (unix(7),
SCM_RIGHTS). Readers peek at the letters (``MSG_PEEK`` with ``SO_PEEK_OFF``, socket(7)).
"""

from __future__ import annotations

import array
import errno
import os
import socket
import struct
from typing import TYPE_CHECKING, NamedTuple

from shmreduce.memory.standard_streams import seqpacket_pair

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = ["Letter", "Mailbox"]

_SO_PEEK_OFF = 42
"""An option of socket(7) for which Python has no name."""
# token, family, whether it names all unread messages, whether they carry the segment, since
# when no message carries it any more (monotonic seconds)
_LETTER = struct.Struct("<16s16s??6xd")
# slot, nonce
_UNREAD = struct.Struct("<IQ")
_SIZE = 104 << 10
"""Bytes of SO_SNDBUF, which the kernel doubles (socket(7)): room for some hundred letters. That is
Linux's default. Twice as much is the default of ``net.core.wmem_max``, up to which anybody may go.
"""
_MOST_UNREAD = 4096
"""The most messages that a letter names, since it must fit into one packet."""


class Letter:
    """A segment that was left in the mailbox.

    Parameters
    ----------
    token : bytes
        The segment's identity.
    unread : list of (int, int)
        Slot and nonce of each message that was unread when the letter was posted.
    complete : bool
        Whether ``unread`` names them all.
    carried : bool
        Whether all of them carry a descriptor of the segment. Then, when no packet with such a
        descriptor exists any more, nobody can receive them.
    astray : float
        When that was first seen, in monotonic seconds; 0 if it has not been seen.
    """

    __slots__ = ("astray", "carried", "complete", "token", "unread")

    def __init__(
        self,
        token: bytes,
        unread: list[tuple[int, int]],
        *,
        complete: bool,
        carried: bool = False,
        astray: float = 0.0,
    ) -> None:
        self.token = token
        self.unread = unread
        self.complete = complete
        self.carried = carried
        self.astray = astray

    def pack(self, family: bytes) -> bytes:
        """Return the letter's bytes."""
        # The last ones, which are mostly read last: while one of them is unread, the letter
        # stays in any case.
        some = self.unread[-_MOST_UNREAD:]
        complete = self.complete and len(some) == len(self.unread)
        head = _LETTER.pack(self.token, family, complete, self.carried, self.astray)
        return head + b"".join(_UNREAD.pack(slot, nonce) for slot, nonce in some)

    @classmethod
    def unpack(cls, data: bytes) -> Letter:
        """Read a letter's bytes. Other bytes give a letter about no segment, to be dropped."""
        if len(data) < _LETTER.size or (len(data) - _LETTER.size) % _UNREAD.size:
            return cls(bytes(16), [], complete=True)
        token, _, complete, carried, astray = _LETTER.unpack_from(data)
        unread = [(slot, nonce) for slot, nonce in _UNREAD.iter_unpack(data[_LETTER.size :])]
        return cls(token, unread, complete=complete, carried=carried, astray=astray)


class Mailbox(NamedTuple):
    """The two ends of a family's mailbox.

    The caller of :meth:`post`, :meth:`letters`, :meth:`look_for` and :meth:`tidy` has the
    family's lock of the mailbox: of two who peeked at once, each would move the other's place.
    """

    receiver: socket.socket
    sender: socket.socket

    @classmethod
    def made(cls) -> Mailbox:
        """Make an empty mailbox."""
        receiver, sender = seqpacket_pair()
        receiver.setblocking(False)
        sender.setblocking(False)
        made = cls(receiver, sender)
        made._make_size(_SIZE)
        return made

    def close(self) -> None:
        """Close both ends."""
        self.receiver.close()
        self.sender.close()

    def detach(self) -> None:
        """Forget both ends, whose numbers may belong to other files by now."""
        self.receiver.detach()
        self.sender.detach()

    def post(self, letter: Letter, fd: int, family: bytes) -> None:
        """Put a letter and a descriptor of its segment in, behind the others.

        Raises
        ------
        OSError
            ``EAGAIN`` or ``ETOOMANYREFS`` if the mailbox is full.
        """
        rights = array.array("i", [fd])
        self.sender.sendmsg(
            [letter.pack(family)], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)]
        )

    def letters(self) -> Iterable[tuple[Letter, int]]:
        """Yield each letter, and a descriptor of its segment, which the caller owns.

        The descriptor is -1 if no number is free for it. The letters stay in the mailbox.
        """
        place = 0
        while True:
            # Set each time: a signal handler or a destructor may have peeked meanwhile.
            self.receiver.setsockopt(socket.SOL_SOCKET, _SO_PEEK_OFF, place)
            answer = self._receive(socket.MSG_PEEK)
            if answer is None:
                return
            letter, fd, size = answer
            place += size
            yield letter, fd

    def look_for(self, token: bytes) -> int | None:
        """Return a descriptor of a segment if it is here; the caller owns it.

        Raises
        ------
        OSError
            ``EMFILE`` if the segment is here, but no descriptor is free.
        """
        found, is_there = None, False
        for letter, fd in self.letters():
            is_there = is_there or letter.token == token
            if letter.token == token and found is None and fd != -1:
                found = fd
            else:
                _close(fd)
        if is_there and found is None:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return found

    def tidy(self, is_read: Callable[[Letter, int], bool], family: bytes) -> None:
        """Remove the letters whose messages have all been read.

        ``is_read`` gets a letter and a descriptor of its segment. Only the first letter can
        be removed, so one that stays is moved to the end: a copy is posted before the
        original is removed. If the process is killed in between, the letter is there twice,
        which does no harm. Even a full mailbox has room for the copy meanwhile.
        """
        count = 0
        for _, fd in self.letters():
            _close(fd)
            count += 1
        self._make_size(2 * _SIZE)
        try:
            for _ in range(count):
                first = next(iter(self.letters()), None)
                if first is None or not self._settle(*first, is_read, family):
                    return
        finally:
            self._make_size(_SIZE)

    def _make_size(self, nbytes: int) -> None:
        self.sender.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, nbytes)

    def _settle(
        self, letter: Letter, fd: int, is_read: Callable[[Letter, int], bool], family: bytes
    ) -> bool:
        """Drop the first letter or move it to the end; return whether that worked."""
        if fd == -1:
            return False
        try:
            if not is_read(letter, fd):
                self.post(letter, fd, family)
        except OSError:
            # Too many descriptors are in flight, or net.core.wmem_max leaves no room.
            return False
        finally:
            os.close(fd)
        taken = self._receive(0)
        if taken is not None:
            _close(taken[1])
        return True

    def _receive(self, flags: int) -> tuple[Letter, int, int] | None:
        """Return a letter, its descriptor and its size in bytes."""
        try:
            data, control, _, _ = self.receiver.recvmsg(
                _LETTER.size + _UNREAD.size * _MOST_UNREAD,
                socket.CMSG_SPACE(4),
                flags | socket.MSG_DONTWAIT | getattr(socket, "MSG_CMSG_CLOEXEC", 0),
            )
        except BlockingIOError:
            return None
        if not data:
            return None
        fds = array.array("i")
        for _, _, rights in control:
            fds.frombytes(rights[: len(rights) - len(rights) % fds.itemsize])
        # The buffer may have room for more than one.
        for surplus in fds[1:]:
            os.close(surplus)
        # If no number is free for the descriptor (EMFILE), the kernel drops it silently.
        return Letter.unpack(data), fds[0] if fds else -1, len(data)


def _close(fd: int) -> None:
    if fd != -1:
        os.close(fd)
