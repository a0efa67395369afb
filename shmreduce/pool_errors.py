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
from shmreduce.tracebacks import formatted, note

__all__ = ["WithTraceback", "expect_answer", "explained", "in_words"]


_forget_traceback = BaseException.__dict__["__traceback__"].__set__
_set_cause = BaseException.__dict__["__cause__"].__set__


class _Announced(threading.local):
    """The answer that the current thread is unpickling."""

    text: str | None = None
    """The traceback of its exception, once that has been unpickled."""
    for_executor: bool = False
    """Whether the answer is for an executor, and not for a pool."""


_announced = _Announced()


def _announce(text: str) -> None:
    _announced.text = text


class WithTraceback:
    """Pickles as the exception of a task, with the text of its traceback in front.

    So the parent has the traceback even if the exception cannot be unpickled, which
    happens if its class does not pass all its arguments on to ``Exception``.
    """

    def __init__(self, error: BaseException) -> None:
        self.exc = error
        self.tb = f'\n"""\n{formatted(error, error.__traceback__)}"""'
        # The frames hold the task's arrays. Not ``error.__traceback__ = None``: the class
        # may refuse assignments, as a frozen dataclass does.
        _forget_traceback(error, None)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (CallOnLoad(_announce, self.tb), self.exc, self.tb)


def _rebuild(_: None, error: BaseException, text: str) -> BaseException:
    _set_cause(error, _remote_traceback(text))
    return error


def _remote_traceback(text: str) -> Exception:
    """Return a worker's traceback as an exception of the class that the standard library uses."""
    made: type[Exception] = RemoteTraceback
    if _announced.for_executor:
        # A private name: another version of Python may not have it.
        with suppress(ImportError):
            from concurrent.futures.process import _RemoteTraceback as made
    return made(text)


def in_words(error: BaseException, value: object) -> WithTraceback:
    """Return a description of a result, or an exception, that could not be pickled.

    Its traceback is that of the task's exception or, for a result, of the pickling.
    """
    failed = value if isinstance(value, WithTraceback) else WithTraceback(error)
    lost = value.exc if isinstance(value, WithTraceback) else value
    told = error
    # MaybeEncodingError calls repr() of both, which may raise anything.
    with suppress(Exception):
        told = MaybeEncodingError(error, lost)
    words = WithTraceback(told)
    words.tb = failed.tb
    return words


def expect_answer(*, for_executor: bool) -> None:
    """Prepare this thread, in the parent, to unpickle another answer.

    Parameters
    ----------
    for_executor : bool
        Whether tracebacks are of the class of :mod:`concurrent.futures`, and not of that of
        :mod:`multiprocessing.pool`.
    """
    _announced.text = None
    _announced.for_executor = for_executor


def explained(error: BaseException) -> BaseException:
    """Return an error of unpickling an answer, with the traceback of the task's exception."""
    text = _announced.text
    if text is None:
        return error
    if not isinstance(error, ShmreduceError):
        # Our own errors say what to do.
        note(
            error,
            "while the exception of a task was unpickled: its class must take the arguments that "
            "it gives to Exception, or define __reduce__",
        )
    if error.__cause__ is None:
        _set_cause(error, _remote_traceback(text))
    return error
