"""Room on the stack for what must not be left half done.

Imports nothing of shmreduce.
"""

from __future__ import annotations

__all__ = ["need_stack"]


def need_stack(calls: int) -> None:
    """Raise RecursionError if the caller could not make this many calls, one inside the other.

    Examples
    --------
    >>> need_stack(10)
    """
    if calls > 1:
        need_stack(calls - 1)
