"""What is made anew in each forked child, and a signal does not keep from it.

May import the standard library only.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["renew_in_children"]


def renew_in_children(renew: Callable[[], object]) -> None:
    """Have something called in every forked child, twice.

    The handler of a signal may raise as a hook is entered. Python prints that, and goes
    on without the hook: a lock that another thread of the parent had would stay taken.

    Parameters
    ----------
    renew : callable
        Nothing may come of the second call that does not come of the first.
    """
    os.register_at_fork(after_in_child=renew)
    os.register_at_fork(after_in_child=renew)
