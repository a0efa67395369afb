"""Finds out whether descriptors are free, before calls that would not say that none are.

May import :mod:`shmreduce.errors` and :mod:`shmreduce.signals`.
"""

from __future__ import annotations

import errno
import os

from shmreduce.errors import SegmentError
from shmreduce.signals import is_from_system

__all__ = ["EXHAUSTED", "need_descriptors", "refuse_lack"]

EXHAUSTED = frozenset((errno.EMFILE, errno.ENFILE))
"""The system's errors when no descriptor is free."""


def need_descriptors(count: int, purpose: str) -> None:
    """Raise an error unless ``count`` descriptors are free.

    For use before a call that, without a descriptor, comes to a wrong result and remembers it.

    Parameters
    ----------
    count : int
        How many are needed at the same time.
    purpose : str
        What for; stands in the message.

    Raises
    ------
    SegmentError
        If they are not free.

    Examples
    --------
    >>> need_descriptors(2, "look for plugins")
    """
    opened = []
    try:
        for _ in range(count):
            opened.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))  # noqa: PERF401 - kept one by one, to be closed if one fails
    except OSError as error:
        if not is_from_system(error):
            raise
        if error.errno not in EXHAUSTED:
            # This says nothing of free descriptors: the container may have no /dev/null.
            return
        raise _lack(purpose, error) from error
    finally:
        for each in opened:
            os.close(each)


def refuse_lack(error: BaseException, purpose: str) -> None:
    """Raise an error if no descriptor was free, according to an error or what has led to it.

    For use after a call that failed, before its failure is remembered.

    Parameters
    ----------
    error : BaseException
        What the call has raised.
    purpose : str
        What the call was for; stands in the message.

    Raises
    ------
    SegmentError
        If they were not free.

    Examples
    --------
    >>> refuse_lack(ValueError("wrong"), "look for plugins")
    """
    reason: BaseException | None = error
    while reason is not None:
        if isinstance(reason, OSError) and reason.errno in EXHAUSTED:
            raise _lack(purpose, reason) from error
        reason = reason.__cause__ or reason.__context__


def _lack(purpose: str, error: OSError) -> SegmentError:
    return SegmentError(
        f"no descriptor is free to {purpose}: {error.strerror}. Close files, or raise the "
        "limit of open files (ulimit -n), and try again",
        operation="open",
        errno=error.errno or 0,
        segment=None,
    )
