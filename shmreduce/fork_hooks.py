"""Hooks that run in each forked child, even if a signal handler interrupts one.

May import the standard library only.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["renew_in_children"]


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
