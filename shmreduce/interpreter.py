"""What kind of Python this is.

Imports nothing of :mod:`shmreduce`.
"""

from __future__ import annotations

import sys

__all__ = ["is_free_threaded"]


def is_free_threaded() -> bool:
    """Whether this Python is built without the global interpreter lock (PEP 703).

    True even with ``-X gil=1``: with 3.13, forked children hang there too.
    """
    return "t" in getattr(sys, "abiflags", "")
