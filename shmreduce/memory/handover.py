"""Hands the unread messages of a process that ends over to the family's mailbox.

May import errors, ``locks``, ``mailbox``, and for types alone ``segment``, ``family`` and
``attachments``.
"""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING

from shmreduce.errors import LeaseTimeoutError, SegmentError
from shmreduce.memory import locks
from shmreduce.memory.mailbox import Letter

if TYPE_CHECKING:
    from collections.abc import Callable

    from shmreduce.memory.attachments import Attachments
    from shmreduce.memory.family import Family
    from shmreduce.memory.segment import Segment

__all__ = ["Handover"]


class Handover:
    """What the mailbox knows of the messages of one process.

    Parameters
    ----------
    attachments : Attachments
        The open segments of the process.
    family : callable
        Returns the process's membership in its family.
    """

    def __init__(self, attachments: Attachments, family: Callable[[], Family]) -> None:
        self._attachments = attachments
        self._family = family
        self._posted: dict[bytes, frozenset[tuple[int, int]]] = {}
        """The (slot, nonce) of unread messages that the mailbox knows of, by segment."""

    def post_unread(self) -> list[str]:
        """Put the segments with unread messages into the mailbox; return warnings.

        It may be called again: only what the mailbox does not know yet is posted.
        """
        posted = bool(self._posted)
        troubles = []
        mark = object()
        try:
            for segments in self._with_unread(mark):
                troubles += self._post(segments)
        finally:
            for segment in self._attachments.segments():
                segment.unpin(mark)
        if self._posted and not posted:
            # Drops what earlier members left there and nobody can receive any more.
            self._attachments.tidy_mailbox()
        return troubles

    def _with_unread(self, mark: object) -> list[list[Segment]]:
        """Return the segments with unread messages, pinned; grouped, as one may be open twice."""
        found: dict[bytes, list[Segment]] = {}
        for segment in self._attachments.segments():
            # Pinned first: daemon threads still run, and may close segments that are not used.
            segment.pins[mark] = None
            if segment.unread():
                found.setdefault(segment.token, []).append(segment)
        return list(found.values())

    def _post(self, segments: list[Segment]) -> list[str]:
        """Put a segment into the mailbox unless it is there; return warnings."""
        first = segments[0]
        unread = [(sent.slot, sent.nonce) for each in segments for sent in each.unread()]
        before, now = self._posted.get(first.token), frozenset(unread)
        if now <= (before or frozenset()):
            return []
        # Posted even if no other member is known, since a forked child, or one that is just
        # starting, may not have joined yet. The mailbox ends with the last member.
        carried = all(each.are_carried([nonce for _, nonce in unread]) for each in segments)
        letter = Letter(first.token, unread, complete=True, carried=carried)
        try:
            self._put_into_mailbox(first, letter)
            self._posted[first.token] = now
            if before is not None:
                self._remove_letters(first.token, before)
            if not any(each.unread() for each in segments):
                # The messages were read before the letter was there, so nobody removed it.
                self._attachments.tidy_mailbox()
        except (OSError, LeaseTimeoutError, SegmentError) as error:
            if carried and isinstance(error, OSError):
                # Whoever receives the messages receives the segment, too.
                return []
            # The process ends in any case, and its names must still be removed.
            return [
                (
                    f"{len(unread)} messages sent by process {os.getpid()} have not been read and "
                    f"are lost with it, since they could not be handed over: {error}. Read them "
                    "before the sender ends"
                )
            ]
        return []

    def _put_into_mailbox(self, segment: Segment, letter: Letter) -> None:
        # Reopened: the mailbox keeps the description, and must not keep this one's locks.
        fd = locks.reopen(segment.checked_fd)
        try:
            # Marked first: then the reader of the last message removes the letter.
            segment.hand_over()
            self._post_or_make_room(letter, fd)
        finally:
            os.close(fd)

    def _remove_letters(self, token: bytes, before: frozenset[tuple[int, int]]) -> None:
        """Remove a segment's old letters, given the messages that they name.

        The new letter names what is left of these messages, and more, so it stays.
        """
        self._family().tidy(
            lambda letter, _: (
                letter.token == token and letter.complete and before.issuperset(letter.unread)
            )
        )

    def _post_or_make_room(self, letter: Letter, fd: int) -> None:
        try:
            self._family().post(letter, fd)
        except OSError as error:
            full = error.errno in (errno.EAGAIN, errno.ETOOMANYREFS)
            if not full or not self._attachments.tidy_mailbox(at_once=True):
                raise
            self._family().post(letter, fd)
