"""The thread that sends what ``put`` of a queue could not send at once.

May import ``connection`` and ``packets`` for types alone, and :mod:`multiprocessing.util`.
"""

from __future__ import annotations

import contextlib
import errno
from multiprocessing.util import debug, info, is_exiting
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import collections
    import threading
    import weakref
    from collections.abc import Callable

    from shmreduce.connection import Connection
    from shmreduce.packets import Packet

__all__ = ["Feeder", "Unsendable", "end_feeder", "join_feeder"]

_END = object()


class Unsendable:
    """An object in a queue that could not be pickled, and why."""

    __slots__ = ("error", "is_under_way", "obj")

    def __init__(self, obj: Any, error: Exception) -> None:
        self.obj = obj
        self.error = error
        self.is_under_way = False
        """As for :class:`Packet`."""

    def finish(self) -> None:
        """Do nothing: nothing was packed."""


class Feeder(NamedTuple):
    """What the feeder thread needs of a queue; not the queue, which may be dropped meanwhile."""

    buffer: collections.deque[Any]
    not_empty: threading.Condition
    """Guards ``buffer`` and ``busy``; notified when an item comes in."""
    busy: list[bool]
    """One element: whether the thread is sending an item, which ``put`` must not overtake."""
    writer: Connection
    close_reader: Callable[[], None]
    ignores_broken_pipe: bool
    on_error: Callable[[Exception, Any], None]
    """Reports an error, and the object that could not be pickled. A packet that could not be sent
    is reported without its object, which ``put`` did not keep."""
    free: Any
    """The semaphore that counts the free places of the queue."""
    called_off: list[bool]
    """Not empty if the thread must not begin; also guarded by ``not_empty``."""

    def run(self) -> None:
        """Send the items of the buffer until ``_END`` comes."""
        debug("starting thread to feed data to pipe")
        while True:
            with self.not_empty:
                if self.called_off:
                    return
                self.busy[0] = False
                while not self.buffer:
                    self.not_empty.wait()
                item = self.buffer.popleft()
                # From now on put() must not send by itself, ahead of this item.
                self.busy[0] = True
                if item is not _END:
                    item.is_under_way = True
            if item is _END:
                debug("feeder thread got sentinel -- exiting")
                self.close_reader()
                self.writer.close()
                return
            if not self._send(item):
                return

    def _send(self, item: Packet | Unsendable) -> bool:
        """Send one item; return whether to go on."""
        try:
            if isinstance(item, Unsendable):
                raise item.error
            # Patient: put() has returned, so no caller is left who could try again.
            self.writer.transmit(item, patient=True)
        except Exception as error:
            if self.ignores_broken_pipe and getattr(error, "errno", 0) == errno.EPIPE:
                return False
            # While the process exits, what the thread uses may be gone already.
            if is_exiting():
                info("error in queue thread: %s", error)
                return False
            # The object is dropped, so its place in the queue is free.
            self.free.release()
            # Reporting may fail, for example if standard error is closed. Go on with the next.
            with contextlib.suppress(Exception):
                self.on_error(error, item.obj if isinstance(item, Unsendable) else None)
        return True


def join_feeder(reference: weakref.ref[threading.Thread]) -> None:
    """Wait for a thread of :meth:`Feeder.run`, if it lives still."""
    debug("joining queue thread")
    thread = reference()
    if thread is not None:
        thread.join()


def end_feeder(buffer: collections.deque[Any], not_empty: threading.Condition) -> None:
    """Let :meth:`Feeder.run` end after the items that are in the buffer now."""
    debug("telling queue thread to quit")
    with not_empty:
        buffer.append(_END)
        not_empty.notify()
