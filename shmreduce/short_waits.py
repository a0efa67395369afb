"""How long readers look for a message before they sleep.

May import :mod:`shmreduce.compiled` and :mod:`shmreduce.settings`.

To sleep and to be woken takes tens of microseconds, a hundred on a virtual
processor; an answer is often quicker. So a reader looks for it first. The
channels of shmreduce do that by themselves; while shmreduce is installed, those of
:mod:`multiprocessing` do it, too, see :func:`make_recv_bytes`.
"""

from __future__ import annotations

from threading import get_ident, main_thread
from typing import TYPE_CHECKING, Any

from shmreduce.compiled import PACKETS, find_module
from shmreduce.settings import get_settings

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["ShortWaits", "make_recv_bytes"]

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

    def limits(self) -> tuple[float, float] | None:
        """Return for how long to look this time, None for not at all.

        That is in seconds: how long at any rate, and how long after that as long as
        all who run have a processor.
        """
        if self._sleeps > 0:
            self._sleeps -= 1
            return None
        limit = get_settings().short_wait
        if not limit:
            return None
        at_once = min(limit, _ANYWAY)
        return at_once, limit - at_once

    def in_vain(self) -> None:
        """Take note that nothing came."""
        self._in_vain = self._sleeps = min(2 * self._in_vain + 1, _MOST_SLEEPS)

    def worth_while(self) -> None:
        """Take note that something came."""
        self._in_vain = 0


def make_recv_bytes(
    previous: Callable[..., Any], is_active: Callable[[], bool]
) -> Callable[..., Any]:
    """Return a ``Connection._recv_bytes`` that looks for a message before it sleeps.

    By that method the connections, queues and pools of the standard library receive.
    The main thread looks, and no other: one that receives for others, as that of a
    pool does, would take a processor from those it works for. It looks with the
    compiled module alone: in Python it would keep the interpreter's other threads
    from working.

    Parameters
    ----------
    previous : callable
        The method in force until now.
    is_active : callable
        Whether shmreduce is installed still; where not, ``previous`` is all.
    """

    def _recv_bytes(self: Any, maxsize: int | None = None) -> Any:
        """Return the next message in a buffer; None if it is longer than that."""
        if is_active() and get_ident() == main_thread().ident:
            _look(self)
        return previous(self, maxsize)

    return _recv_bytes


def _look(connection: Any) -> None:
    waits = connection.__dict__.get(_REMEMBERED)
    if waits is None:
        waits = connection.__dict__[_REMEMBERED] = ShortWaits()
    limits = waits.limits()
    # Another thread may have closed it.
    handle = connection._handle
    if limits is None or handle is None or _module is None:
        return
    found = _module.await_input(handle, *limits)
    if found == _IN_VAIN:
        waits.in_vain()
    elif found != _AT_ONCE:
        waits.worth_while()
