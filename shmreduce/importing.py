"""Keeps imports of a part of shmreduce, or of a plugin, apart from forks of other threads.

May import ``fork_hooks``.

The first use of a name or of a reducer imports modules. A thread that imports a module has
its lock, and CPython does not renew these locks in a forked child. So a child that was forked
meanwhile would wait for ever when it imports the same module:
https://docs.python.org/3/library/os.html#os.fork

A thread that forks waits until no other thread imports, and says that it is at the fork. A
thread that imports says so, and waits until no other thread is at the fork. Each says it before
it looks, so one of them sees the other.

A module may also register hooks of forks, and Python makes the list of a fork's hooks when the
fork begins. So the thread that has imported waits for forks that have begun: they would happen
without those hooks, and their children would see what it does with the module.
"""

from __future__ import annotations

import os
import sys
import time
from _thread import get_ident

from shmreduce.fork_hooks import at_the_fork, fork_begins, forking

TYPE_CHECKING = False  # as typing's, which need not be imported for this
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType
    from typing import TypeVar

    _Result = TypeVar("_Result")

__all__ = ["import_late", "while_importing"]

_LONGEST_WAIT = 10.0
"""Seconds. The other thread may be waiting for this one; then the fork, or the import, goes on."""
_PAUSE = 1e-3
_importing: dict[object, int] = {}
"""The threads that import, by a mark of the call."""


def import_late(module: str) -> ModuleType:
    """Import a module that a function needs, when it is needed for the first time.

    Forks of other threads wait for that. CPython does not renew the locks of modules in a
    forked child: one that is forked while a thread imports a module waits for ever when it
    imports the same module (see
    `os.fork <https://docs.python.org/3/library/os.html#os.fork>`_ on locks of other threads).

    Do not call it while you hold a lock that a hook of :func:`os.register_at_fork` takes: then
    the fork waits for the lock, and the import for the fork, which goes on after ten seconds.

    Parameters
    ----------
    module : str
        Its dotted name.

    Returns
    -------
    module
        The module itself, not its package as with :func:`__import__`.

    Raises
    ------
    ImportError
        If it cannot be imported.

    Examples
    --------
    >>> import_late("os.path").basename("a/b")
    'b'
    """
    while_importing(__import__, module)
    return sys.modules[module]


def while_importing(function: Callable[..., _Result], *arguments: object) -> _Result:
    """Call a function that imports modules; forks of other threads wait for its end.

    If such a fork has begun, it is over when this returns.
    """
    mark = object()
    try:
        _importing[mark] = get_ident()
        _wait_for_forks(at_the_fork)
        return function(*arguments)
    finally:
        _importing.pop(mark, None)
        # Not while forks wait for an outer call.
        if get_ident() not in _importing.values():
            _wait_for_forks(forking)


def _wait_for_forks(forks: dict[int, float]) -> None:
    """Wait until these forks, of which the dictionary has the threads, are over."""
    # Not in a hook of this thread's own fork.
    if get_ident() in forking:
        return
    # Not from items(): before CPython 3.12 each pair that they make may start the garbage
    # collector, and other threads run meanwhile.
    begun = {thread: forks.get(thread) for thread in list(forks)}
    # Older marks are of forks whose hooks were skipped.
    while any(
        since is not None and forks.get(thread) == since > time.monotonic() - _LONGEST_WAIT
        for thread, since in begun.items()
    ):
        time.sleep(_PAUSE)


def _wait_for_others() -> None:
    here = get_ident()
    fork_begins()
    end = time.monotonic() + _LONGEST_WAIT
    while True:
        at_the_fork[here] = time.monotonic()
        if not set(_importing.values()) - {here} or time.monotonic() > end:
            break
        # Not del: a signal handler may have forked here meanwhile.
        at_the_fork.pop(here, None)
        # It polls: a lock that the importing thread held would itself stay taken in the child
        # if the wait ended without it.
        time.sleep(_PAUSE)


os.register_at_fork(before=_wait_for_others, after_in_child=_importing.clear)
