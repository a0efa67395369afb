"""The tracebacks of errors as text, for other processes.

May import ``signals``.
"""

from __future__ import annotations

import contextlib
import traceback
import warnings
from typing import TYPE_CHECKING

from shmreduce.signals import is_from_handler

if TYPE_CHECKING:
    from types import TracebackType

__all__ = ["formatted"]


def formatted(error: BaseException, trace: TracebackType | None) -> str:
    r"""Return what Python prints of an error, or as much of it as can be had.

    Parameters
    ----------
    error : BaseException
        Raised, or about to be.
    trace : traceback, optional
        Where it was raised.

    Notes
    -----
    To read source lines, and what CPython 3.15 imports when it first formats, takes a
    descriptor, which may be what the error is about. And 3.15 warns of frames of a
    child's main module, which raises where warnings are errors.

    Examples
    --------
    >>> formatted(ValueError("wrong"), None)
    'ValueError: wrong\n'
    """
    reason = ""
    # Warnings are left alone unless they are in the way: other threads share their filters.
    for around in (contextlib.nullcontext(), warnings.catch_warnings(action="ignore")):
        try:
            with around:
                return "".join(traceback.format_exception(type(error), error, trace))
        except Exception as failure:
            # Whatever it is, the error itself is what has to be told.
            if is_from_handler(failure):
                raise
            reason = repr(failure)
    return f"{type(error).__qualname__}, of which there is no traceback: {reason}\n"
