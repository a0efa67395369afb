"""Errors and their tracebacks as text, for other processes, and notes of errors.

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

__all__ = ["formatted", "in_one_line", "note"]


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


def in_one_line(error: BaseException) -> str:
    """Return the class and the text of an error, or the class alone if it has no text.

    Examples
    --------
    >>> in_one_line(ValueError("wrong"))
    'ValueError: wrong'
    """
    name = type(error).__name__
    try:
        return f"{name}: {error}"
    except Exception as failure:
        # Its __str__ is the user's.
        if is_from_handler(failure):
            raise
        return name


def note(error: BaseException, text: str) -> None:
    """Add a note to an error (PEP 678), unless its class refuses attributes.

    A frozen dataclass does that, and ``add_note`` sets one.

    Examples
    --------
    >>> error = ValueError("wrong")
    >>> note(error, "in the first line")
    >>> error.__notes__
    ['in the first line']
    """
    try:
        error.add_note(text)
    except Exception as failure:
        if is_from_handler(failure):
            raise
