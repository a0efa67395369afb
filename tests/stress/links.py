"""One-way links between two actors, over the stock channels of multiprocessing and our own.

Each link has one writer and one reader, so that a killed actor takes only its
own links with it. Messages are shorter than ``PIPE_BUF``: a writer that is
killed leaves a whole message or none. A link that has no room says so instead
of blocking, since its reader may be dead.
"""

from __future__ import annotations

import queue
import select
from abc import ABC, abstractmethod
from multiprocessing.reduction import ForkingPickler
from typing import Any

import shmreduce

__all__ = [
    "KINDS",
    "WEIGHTS",
    "ConnectionLink",
    "Link",
    "QueueLink",
    "SimpleQueueLink",
    "make_link",
]

BROADCAST = b"to several readers"
"""Stands in every message that was pickled once for several links."""
_MOST_WAITING = 16


class Link(ABC):
    """What both ends know of a link."""

    @abstractmethod
    def has_room(self) -> bool:
        """Whether a message can be sent without waiting."""

    @abstractmethod
    def send(self, message: object) -> None:
        """Pickle and send a message."""

    @abstractmethod
    def pass_on(self, held: list[Any]) -> None:
        """Send the one message in a list, of which nothing is kept."""

    @abstractmethod
    def is_ready(self) -> bool:
        """Whether a message can be received without waiting."""

    @abstractmethod
    def receive(self) -> Any:
        """Return the next message, None if another reader was faster."""

    @abstractmethod
    def close(self) -> None:
        """Close both ends in this process, boundedly: the reader may be dead."""

    pickles_at_once = True
    """False where the object must not be changed after sending."""
    is_own = False
    """Whether it is a channel of shmreduce, in which what nobody keeps is moved."""


class PipeLink(Link):
    def __init__(self, context: Any) -> None:
        self._reader, self._writer = context.Pipe(duplex=False)
        self._last = b""

    def has_room(self) -> bool:
        return bool(select.select([], [self._writer.fileno()], [], 0)[1])

    def send(self, message: object) -> None:
        self._writer.send(message)

    def pass_on(self, held: list[Any]) -> None:
        self._writer.send(held.pop())

    def send_pickled(self, data: Any) -> None:
        """Send what was pickled for several links."""
        self._writer.send_bytes(data)

    def is_ready(self) -> bool:
        return bool(self._reader.poll(0))

    def receive(self) -> Any:
        # As Connection.recv does, but the bytes are kept for was_broadcast().
        self._last = self._reader.recv_bytes()
        return ForkingPickler.loads(self._last)

    def was_broadcast(self) -> bool:
        """Whether the last message went to several readers."""
        return BROADCAST in self._last

    def close(self) -> None:
        self._reader.close()
        self._writer.close()


class ConnectionLink(PipeLink):
    """As a program would use it, without a look at the bytes."""

    def receive(self) -> Any:
        return self._reader.recv()


class SimpleQueueLink(Link):
    def __init__(self, context: Any) -> None:
        self._queue = context.SimpleQueue()

    def has_room(self) -> bool:
        return bool(self._queue.empty())

    def send(self, message: object) -> None:
        self._queue.put(message)

    def pass_on(self, held: list[Any]) -> None:
        self._queue.put(held.pop())

    def is_ready(self) -> bool:
        return not self._queue.empty()

    def receive(self) -> Any:
        return self._queue.get()

    def close(self) -> None:
        self._queue.close()


class QueueLink(Link):
    pickles_at_once = False

    def __init__(self, context: Any) -> None:
        self._queue = context.Queue()

    def has_room(self) -> bool:
        return bool(self._queue.qsize() < _MOST_WAITING)

    def send(self, message: object) -> None:
        self._queue.put(message)

    def pass_on(self, held: list[Any]) -> None:
        self._queue.put(held.pop())

    def is_ready(self) -> bool:
        return not self._queue.empty()

    def receive(self) -> Any:
        try:
            return self._queue.get(timeout=1.0)
        except queue.Empty:
            return None

    def close(self) -> None:
        self._queue.cancel_join_thread()
        self._queue.close()
        feeder = self._queue._thread
        if feeder is not None:
            feeder.join(1.0)
        self._queue._reader.close()
        self._queue._writer.close()


class OwnQueueLink(QueueLink):
    pickles_at_once = True


KINDS: dict[str, type[Link]] = {
    "pipe": PipeLink,
    "simple queue": SimpleQueueLink,
    "queue": QueueLink,
    "own pipe": PipeLink,
    "own simple queue": SimpleQueueLink,
    "own queue": OwnQueueLink,
}
WEIGHTS = (4, 2, 1, 3, 2, 1)
"""How often each kind is used, in proportion."""


def make_link(kind: str, context: Any) -> Link:
    """Return a link of a kind; the writer uses its one half, the reader the other.

    Those of our own need no installation, and are of the context's start method.
    """
    is_own = kind.startswith("own")
    if is_own:
        context = shmreduce.get_context(context.get_start_method())
    link = KINDS[kind](context)  # type: ignore[call-arg]
    link.is_own = is_own
    return link


def pickle_once(message: object) -> bytes:
    """Pickle a message as ``Connection.send`` does."""
    return bytes(ForkingPickler.dumps(message))
