"""Holds forks back while another thread imports a part of shmreduce, or a plugin.

May import the standard library only.

The first use of a name or of a reducer imports modules. A thread that imports a module has
its lock, and CPython does not renew these locks in a forked child. So a child that was forked
meanwhile would wait for ever when it imports the same module:
https://docs.python.org/3/library/os.html#os.fork
"""

from __future__ import annotations

import os
import time
from _thread import get_ident

TYPE_CHECKING = False  # as typing's, which need not be imported for this
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeVar

    _Result = TypeVar("_Result")

__all__ = ["while_importing"]

_LONGEST_WAIT = 10.0
"""Seconds. The other thread may be waiting for the one that forks; then the fork goes on."""
_PAUSE = 1e-3
_importing: dict[object, int] = {}
"""The threads that import, by a mark of the call."""


def while_importing(function: Callable[..., _Result], *arguments: object) -> _Result:
    """Call a function that imports modules; forks of other threads wait for its end."""
    mark = object()
    try:
        _importing[mark] = get_ident()
        return function(*arguments)
    finally:
        _importing.pop(mark, None)


def _wait_for_others() -> None:
    end = time.monotonic() + _LONGEST_WAIT
    while set(_importing.values()) - {get_ident()} and time.monotonic() < end:
        # It polls: a lock that the importing thread held would itself stay taken in the child
        # if the wait ended without it.
        time.sleep(_PAUSE)


os.register_at_fork(before=_wait_for_others, after_in_child=_importing.clear)
