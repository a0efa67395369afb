"""How long readers poll for a message before they sleep.

May import :mod:`shmreduce.compiled`, :mod:`shmreduce.processors` and :mod:`shmreduce.settings`.

Sleeping and being woken takes tens of microseconds, on a virtual processor a hundred. An
answer often arrives sooner. So a reader polls first. The channels of shmreduce always
do; those of :mod:`multiprocessing` do while shmreduce is installed, see
:func:`make_methods`.
"""

from __future__ import annotations

import functools
import time
from threading import get_ident, main_thread
from typing import TYPE_CHECKING, Any

from shmreduce.compiled import PACKETS, find_module
from shmreduce.processors import is_crowded
from shmreduce.settings import get_settings

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["ShortWaits", "make_methods", "poll_after_look"]

_ANYWAY = 3e-4
"""Seconds for which a reader polls even if all other processors are taken."""
_MOST_SLEEPS = 255
"""After polling in vain, a reader sleeps at once for at most this many waits in a row."""
_REMEMBERED = "_shmreduce_short_waits"
_IN_VAIN, _AT_ONCE = 0, 1
"""Results of ``await_input``: nothing arrived; or a message was there before it polled."""
_module: Any = find_module(PACKETS)[0]


class ShortWaits:
    """Decides when one reader polls and when it sleeps at once.

    Each time that it polls in vain, the reader sleeps at once for twice as many waits
    before it polls again. So useless polling costs next to nothing. A message that was
    there before the reader polled does not count as a success: with more processes than
    processors that is usual. There polling may succeed, but it keeps others from working, so
    it counts as in vain before it has begun.
    """

    __slots__ = ("_in_vain", "_sleeps")

    def __init__(self) -> None:
        self._sleeps = self._in_vain = 0

    def limits(self, at_most: float | None = None) -> tuple[float, float] | None:
        """Return for how many seconds to poll this time; None for not at all.

        The first number is for polling while no thread waits for this one's processor; the
        second is for polling after that while none waits for any processor. Together they
        are at most ``at_most``.
        """
        if self._sleeps > 0:
            self._sleeps -= 1
            return None
        limit = get_settings().short_wait
        if at_most is not None:
            limit = min(limit, at_most)
        if limit <= 0:
            return None
        if is_crowded():
            self.in_vain()
            return None
        at_once = min(limit, _ANYWAY)
        return at_once, limit - at_once

    def in_vain(self) -> None:
        """Note that nothing arrived."""
        self._in_vain = self._sleeps = min(2 * self._in_vain + 1, _MOST_SLEEPS)

    def worth_while(self) -> None:
        """Note that a message arrived."""
        self._in_vain = 0

    def look(self, fd: int, at_most: float | None = None) -> bool:
        """Poll a descriptor for a short time; return whether it can be read.

        Only with the compiled module: polling in Python would keep the interpreter's other
        threads from running.
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
    """Return whether ``fd`` can be read: poll it for a short time, then ``poll(timeout)`` sleeps.

    It sleeps for the rest of ``timeout`` seconds; for ever if that is None.
    """
    if timeout is not None and timeout <= 0:
        # The caller does not wait, so this must not influence when the reader polls.
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
    """Return a ``Connection._recv_bytes`` and a ``_poll`` that poll before they sleep.

    Connections, queues and pools of the standard library receive by these methods. Only the
    main thread polls: a thread that receives for others, as that of a pool, would take a
    processor from them.

    Parameters
    ----------
    recv_bytes, poll : callable
        The methods that are replaced.
    is_active : callable
        Whether shmreduce is still installed; if not, only the old methods are called.
    """

    def looks() -> bool:
        return is_active() and get_ident() == main_thread().ident

    def _recv_bytes(self: Any, maxsize: int | None = None) -> Any:
        """Return the next message in a buffer; None if it is longer than ``maxsize``."""
        # Read once: another thread may close the connection, which sets it to None.
        handle = self._handle
        if handle is not None and looks():
            _waits_of(self).look(handle)
        return recv_bytes(self, maxsize)

    def _poll(self: Any, timeout: float | None) -> bool:
        """Return whether a message arrives within ``timeout`` seconds."""
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
