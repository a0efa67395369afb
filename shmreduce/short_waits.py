"""How long readers look for a message before they sleep.

May import :mod:`shmreduce.compiled` and :mod:`shmreduce.settings`.

To sleep and to be woken takes tens of microseconds, a hundred on a virtual
processor; an answer is often quicker. So a reader looks for it first. The
channels of shmreduce do that by themselves; while shmreduce is installed, those of
:mod:`multiprocessing` do it, too, see :func:`make_methods`.
"""

from __future__ import annotations

import functools
import time
from threading import get_ident, main_thread
from typing import TYPE_CHECKING, Any

from shmreduce.compiled import PACKETS, find_module
from shmreduce.settings import get_settings

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["ShortWaits", "make_methods", "poll_after_look"]

_ANYWAY = 3e-4
"""Seconds for which a reader looks whoever else runs; for longer only where processors are free.

A processor that looks is none that the kernel would wake somebody on.
"""
_MOST_SLEEPS = 255
"""Waits in a row for which a reader sleeps at once, after looking was in vain."""
_REMEMBERED = "_shmreduce_short_waits"
_IN_VAIN, _AT_ONCE = 0, 1
"""What ``await_input`` says of what did not come, and of what was there before it looked."""
_module: Any = find_module(PACKETS)[0]


class ShortWaits:
    """The waits of one reader.

    Each time that nothing came, the reader sleeps twice as often before it looks
    again: to look in vain costs next to nothing. What was there before tells
    nothing: where there are more processes than processors, it is so all the time,
    and who looks keeps the others from writing.
    """

    __slots__ = ("_in_vain", "_sleeps")

    def __init__(self) -> None:
        self._sleeps = self._in_vain = 0

    def limits(self, at_most: float | None = None) -> tuple[float, float] | None:
        """Return for how long to look this time, None for not at all.

        That is in seconds, together not more than ``at_most``: how long at any rate, and
        how long after that as long as all who run have a processor.
        """
        if self._sleeps > 0:
            self._sleeps -= 1
            return None
        limit = get_settings().short_wait
        if at_most is not None:
            limit = min(limit, at_most)
        if limit <= 0:
            return None
        at_once = min(limit, _ANYWAY)
        return at_once, limit - at_once

    def in_vain(self) -> None:
        """Take note that nothing came."""
        self._in_vain = self._sleeps = min(2 * self._in_vain + 1, _MOST_SLEEPS)

    def worth_while(self) -> None:
        """Take note that something came."""
        self._in_vain = 0

    def look(self, fd: int, at_most: float | None = None) -> bool:
        """Look whether there is something to be read, or comes soon.

        Only with the compiled module: in Python it would keep the interpreter's other
        threads from working.
        """
        if _module is None:
            return False
        limits = self.limits(at_most)
        if limits is None:
            return False
        found = _module.await_input(fd, *limits)
        if found == _IN_VAIN:
            self.in_vain()
            return False
        if found != _AT_ONCE:
            self.worth_while()
        return True


def poll_after_look(
    waits: ShortWaits, fd: int, timeout: float | None, poll: Callable[[float | None], bool]
) -> bool:
    """Look whether there is something to be read, and if not, ``poll(timeout)`` sleeps for it.

    It sleeps for what is left of the ``timeout``, in seconds, None for ever.
    """
    if timeout is not None and timeout <= 0:
        # That is no wait, and tells nothing of waits.
        return poll(timeout)
    began = time.monotonic()
    if waits.look(fd, timeout):
        return True
    if timeout is not None:
        timeout = max(0.0, timeout - (time.monotonic() - began))
    return poll(timeout)


def make_methods(
    recv_bytes: Callable[..., Any],
    poll: Callable[[Any, float | None], bool],
    is_active: Callable[[], bool],
) -> tuple[Callable[..., Any], Callable[[Any, float | None], bool]]:
    """Return a ``Connection._recv_bytes`` and a ``_poll`` that look before they sleep.

    By these methods the connections, queues and pools of the standard library receive.
    The main thread looks, and no other: one that receives for others, as that of a
    pool does, would take a processor from those it works for.

    Parameters
    ----------
    recv_bytes, poll : callable
        The methods in force until now.
    is_active : callable
        Whether shmreduce is installed still; where not, these are all.
    """

    def looks() -> bool:
        return is_active() and get_ident() == main_thread().ident

    def _recv_bytes(self: Any, maxsize: int | None = None) -> Any:
        """Return the next message in a buffer; None if it is longer than that."""
        # Another thread may close it.
        handle = self._handle
        if handle is not None and looks():
            _waits_of(self).look(handle)
        return recv_bytes(self, maxsize)

    def _poll(self: Any, timeout: float | None) -> bool:
        """Return whether there is something to be received, within so many seconds."""
        handle = self._handle
        if handle is None or not looks():
            return poll(self, timeout)
        return poll_after_look(_waits_of(self), handle, timeout, functools.partial(poll, self))

    return _recv_bytes, _poll


def _waits_of(connection: Any) -> ShortWaits:
    waits: ShortWaits | None = connection.__dict__.get(_REMEMBERED)
    if waits is None:
        waits = connection.__dict__[_REMEMBERED] = ShortWaits()
    return waits
