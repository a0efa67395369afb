"""How the exception of a task travels from a worker to the parent of its pool.

May import :mod:`shmreduce.errors`, ``pickled_calls`` and ``tracebacks``.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from multiprocessing.pool import MaybeEncodingError, RemoteTraceback  # type: ignore[attr-defined]
from typing import Any

from shmreduce.errors import ShmreduceError
from shmreduce.pickled_calls import CallOnLoad
from shmreduce.tracebacks import formatted

__all__ = ["WithTraceback", "expect_answer", "explained", "in_words"]


_forget_traceback = BaseException.__dict__["__traceback__"].__set__
_set_cause = BaseException.__dict__["__cause__"].__set__


class _Announced(threading.local):
    """What the current thread has begun to unpickle."""

    text: str | None = None
    """The traceback of the exception, if it is one."""
    for_executor: bool = False
    """Whether the answer is for a program that uses :mod:`concurrent.futures`."""


_announced = _Announced()


def _announce(text: str) -> None:
    _announced.text = text


class WithTraceback:
    """Pickles as the exception of a task, behind its traceback.

    So the traceback is there also if the exception cannot be unpickled, as those
    of classes that take other arguments than they pass on cannot.
    """

    def __init__(self, error: BaseException) -> None:
        self.exc = error
        self.tb = f'\n"""\n{formatted(error, error.__traceback__)}"""'
        # Its frames hold the task's arrays. Its class may refuse attributes, as that of a
        # frozen dataclass.
        _forget_traceback(error, None)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (CallOnLoad(_announce, self.tb), self.exc, self.tb)


def _rebuild(_: None, error: BaseException, text: str) -> BaseException:
    _set_cause(error, _remote_traceback(text))
    return error


def _remote_traceback(text: str) -> Exception:
    """Return a traceback of a worker as the cause that programs know."""
    made: type[Exception] = RemoteTraceback
    if _announced.for_executor:
        # Private there: some version may not have it.
        with suppress(ImportError):
            from concurrent.futures.process import _RemoteTraceback as made
    return made(text)


def in_words(error: BaseException, value: object) -> WithTraceback:
    """Return what can be told of a result, or an exception, that this error kept from pickling.

    Behind the traceback of the task's exception, or of the pickling.
    """
    failed = value if isinstance(value, WithTraceback) else WithTraceback(error)
    lost = value.exc if isinstance(value, WithTraceback) else value
    told = error
    # It needs the repr() of both, which is the user's and may raise anything.
    with suppress(Exception):
        told = MaybeEncodingError(error, lost)
    words = WithTraceback(told)
    words.tb = failed.tb
    return words


def expect_answer(*, for_executor: bool) -> None:
    """Begin to unpickle another answer, in the parent.

    Parameters
    ----------
    for_executor : bool
        Whether the causes of exceptions are those of :mod:`concurrent.futures`, and not of
        :mod:`multiprocessing.pool`.
    """
    _announced.text = None
    _announced.for_executor = for_executor


def explained(error: BaseException) -> BaseException:
    """Return an error of unpickling an answer, with what the answer was, in the parent."""
    text = _announced.text
    if text is None:
        return error
    if not isinstance(error, ShmreduceError):
        # Which say themselves what to do.
        error.add_note(
            "while the exception of a task was unpickled: its class must take the arguments that "
            "it gives to Exception, or define __reduce__"
        )
    if error.__cause__ is None:
        error.__cause__ = _remote_traceback(text)
    return error
