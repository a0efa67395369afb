"""Hooks of forks that do their work even if a signal handler interrupts one, or that come late.

May import the standard library only.
"""

from __future__ import annotations

import os
import sys
import time
from _thread import get_ident

TYPE_CHECKING = False  # as typing's, which need not be imported for this
if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "also_prepare",
    "at_the_fork",
    "fork_begins",
    "fork_is_over",
    "forking",
    "prepare_late",
    "renew_in_children",
    "to_the_end",
]

_ATTEMPTS = 10
"""How often a step of a fork is tried if it raises an exception."""
_FRAMES = 40
"""How many frames of recursion a step of a fork may need."""
forking: dict[int, float] = {}
"""The threads that are about to fork, and since when; see :func:`fork_begins`.

A mark stays if a signal handler raises as each hook that would remove it is entered.
"""
at_the_fork: dict[int, float] = {}
"""Those of them that wait for nothing more, and since when; see :mod:`shmreduce.importing`."""
_late: list[Callable[[int], object]] = []
"""See :func:`also_prepare`."""


def fork_begins() -> None:
    """Note that this thread is about to fork; a second call changes nothing."""
    forking.setdefault(get_ident(), time.monotonic())


def fork_is_over() -> None:
    """Note that this thread's fork is over."""
    at_the_fork.pop(get_ident(), None)
    forking.pop(get_ident(), None)


def renew_in_children(renew: Callable[[], object]) -> None:
    """Call a function in every forked child, twice.

    A signal handler may raise when a hook is entered. Python prints the exception and
    skips the hook: then a lock that another thread of the parent held would never be
    released in the child.

    Parameters
    ----------
    renew : callable
        A second call must change nothing.
    """
    os.register_at_fork(after_in_child=renew)
    os.register_at_fork(after_in_child=renew)


def also_prepare(prepare: Callable[[int], object]) -> None:
    """Call a function before each fork, even before one whose hooks run already.

    Python makes the list of a fork's hooks when the fork begins. A hook that another thread
    registers then is not called for that fork.

    Parameters
    ----------
    prepare : callable
        Gets the number of forks that the thread has prepared for and not made yet. It does
        nothing if its own hook was called for this fork, and a second call changes nothing.
    """
    _late.append(prepare)


def prepare_late(depth: int) -> None:
    """Call these functions, in a hook before a fork that was registered long ago."""
    for prepare in _late:
        prepare(depth)


def to_the_end(step: Callable[[], None]) -> None:
    """Do a step of a fork, and do it again if Ctrl-C or another signal handler interrupts it.

    Python prints an exception that a hook raises, and forks without the rest of that hook.
    """
    raised: BaseException | None = None
    attempts = _ATTEMPTS
    limit = 0
    try:
        _go_down(_FRAMES)
    except RecursionError:
        # The recursion limit is near. The fork happens in any case, so raise the limit.
        limit = sys.getrecursionlimit()
        sys.setrecursionlimit(limit + 2 * _FRAMES)
    while attempts:
        try:
            step()
            break
        except Exception as error:
            # Probably from a signal handler. If the step raised it, it will come again.
            raised, attempts = error, attempts - 1
        except BaseException as error:
            raised = error
    if limit:
        sys.setrecursionlimit(limit)
    try:
        if raised is not None:
            raise raised
    finally:
        # Otherwise a cycle of the exception and this frame would keep the callers' variables.
        raised = None


def _go_down(frames: int) -> None:
    if frames:
        _go_down(frames - 1)


# Twice, since a signal handler may raise when Python enters a hook, which skips that hook.
os.register_at_fork(after_in_parent=fork_is_over, after_in_child=forking.clear)
os.register_at_fork(after_in_parent=fork_is_over, after_in_child=at_the_fork.clear)
