"""Tells the exceptions of signal handlers from those of the code that they interrupt.

Imports nothing of shmreduce.
"""

from __future__ import annotations

import signal
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import CodeType

__all__ = ["is_from_handler", "is_from_system"]


def is_from_system(error: OSError) -> bool:
    """Return whether the system has said so: a number tells.

    What a signal handler raises to give up is an OSError, too (TimeoutError), and
    comes into any system call. It has none, nor has what waits for a lock in vain.

    Examples
    --------
    >>> is_from_system(FileNotFoundError(2, "gone")), is_from_system(TimeoutError("too long"))
    (True, False)
    """
    return error.errno is not None


def is_from_handler(error: BaseException) -> bool:
    """Return whether a handler of a signal has raised an exception, as its traceback tells.

    One that gives up after some time (``signal.alarm``) comes between any two
    instructions, and is for the caller of whatever it has interrupted, not for
    those who deal with the errors of that.

    Examples
    --------
    >>> def give_up(number, frame):
    ...     raise TimeoutError
    >>> before = signal.signal(signal.SIGALRM, give_up)
    >>> try:
    ...     signal.raise_signal(signal.SIGALRM)
    ... except TimeoutError as error:
    ...     is_from_handler(error)
    True
    >>> _ = signal.signal(signal.SIGALRM, before)
    """
    if threading.get_ident() != threading.main_thread().ident:
        return False
    handlers = set(_codes_of_handlers())
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code in handlers:
            return True
        trace = trace.tb_next
    return False


def _codes_of_handlers() -> Iterator[CodeType]:
    for number in signal.valid_signals():
        handler = signal.getsignal(number)
        if callable(handler):
            # A function, a method, or an object that is called.
            for each in (handler, type(handler).__call__):
                code = getattr(each, "__code__", None)
                if code is not None:
                    yield code
