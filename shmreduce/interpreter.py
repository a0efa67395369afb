"""What kind of Python this is.

Imports nothing of :mod:`shmreduce`.
"""

from __future__ import annotations

import sys

__all__ = ["is_free_threaded"]


def is_free_threaded() -> bool:
    """Return whether this Python is built without the global interpreter lock (PEP 703).

    True even if ``-X gil=1`` has switched the lock on: forked children of 3.13 hang all the same.
    """
    return "t" in getattr(sys, "abiflags", "")
