"""Progress bars for calls of a pool.

May import :mod:`shmreduce.extras`.
"""

from __future__ import annotations

from typing import Any

from shmreduce.extras import import_extra

__all__ = ["length_of", "make_bar"]


def make_bar(progress: bool | str, total: int | None) -> Any:
    """Return a progress bar of tqdm.

    Parameters
    ----------
    progress : bool or str
        What the user asked for; a string is shown beside the bar.
    total : int or None
        How many items there will be, if known.

    Raises
    ------
    MissingExtraError
        If tqdm is not installed.
    """
    tqdm = import_extra("tqdm", extra="cli").tqdm
    return tqdm(total=total, desc=progress if isinstance(progress, str) else None)


def length_of(iterable: Any) -> int | None:
    """Return how many items there are; None if len() fails, as for a generator or huge range."""
    try:
        return len(iterable)
    except Exception:
        # A user's __len__ may raise anything, and a bar works without a length.
        return None
