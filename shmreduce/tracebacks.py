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
    r"""Return what Python prints for an error, or less if that cannot be formatted.

    Parameters
    ----------
    error : BaseException
        The error.
    trace : traceback, optional
        Its traceback.

    Notes
    -----
    Formatting needs a descriptor, to read source lines and, in CPython 3.15, to import a
    module; a lack of descriptors may be what the error is about. And 3.15 warns about
    frames of a child's main module, which raises if warnings are errors.

    Examples
    --------
    >>> formatted(ValueError("wrong"), None)
    'ValueError: wrong\n'
    """
    reason = ""
    # First without changing the warning filters, which all threads share.
    for around in (contextlib.nullcontext(), warnings.catch_warnings(action="ignore")):
        try:
            with around:
                return "".join(traceback.format_exception(type(error), error, trace))
        except Exception as failure:
            # Formatting may fail in any way, and the error must be reported nevertheless.
            if is_from_handler(failure):
                raise
            reason = repr(failure)
    return f"{type(error).__qualname__}, of which there is no traceback: {reason}\n"
