"""Tells the exceptions of signal handlers from those of the code that they interrupt.

Imports nothing of shmreduce.
"""

from __future__ import annotations

import functools
import signal
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import CodeType

__all__ = ["is_from_handler", "is_from_system"]


def is_from_system(error: OSError) -> bool:
    """Return whether an OSError comes from a system call: then it has an ``errno``.

    A signal handler may raise TimeoutError, which is an OSError too, during any system
    call. It has no ``errno``, and neither has a wait for a lock that timed out.

    Examples
    --------
    >>> is_from_system(FileNotFoundError(2, "gone")), is_from_system(TimeoutError("too long"))
    (True, False)
    """
    return error.errno is not None


def is_from_handler(error: BaseException) -> bool:
    """Return whether a signal handler has raised an exception, according to its traceback.

    A handler may raise between any two instructions, for example to give up after some
    time (``signal.alarm``). Such an exception must reach the caller of what it has
    interrupted, and must not be treated as an error of that code.

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
        while isinstance(handler, functools.partial):
            handler = handler.func
        if callable(handler):
            # A function or method has __code__; of another object, __call__ may have it.
            for each in (handler, type(handler).__call__):
                code = getattr(each, "__code__", None)
                if code is not None:
                    yield code
