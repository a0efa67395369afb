"""Hooks of forks that do their work even if a signal handler interrupts one.

May import the standard library only.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["renew_in_children", "to_the_end"]

_ATTEMPTS = 10
"""How often a step of a fork is tried if it raises an exception."""
_FRAMES = 40
"""How many frames of recursion a step of a fork may need."""


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
