"""The tracebacks of errors as text, for other processes.

Imports nothing of :mod:`shmreduce`.
"""

from __future__ import annotations

import traceback
import warnings
from typing import TYPE_CHECKING

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
    try:
        return _format(error, trace)
    except Exception:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                return _format(error, trace)
            except Exception as failure:
                name = type(error).__qualname__
                return f"{name}, of which there is no traceback: {failure!r}\n"


def _format(error: BaseException, trace: TracebackType | None) -> str:
    return "".join(traceback.format_exception(type(error), error, trace))
