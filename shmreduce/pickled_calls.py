"""Pickles of calls, which are made at the point of the stream where they stand.

May import the standard library only.
"""

from __future__ import annotations

import pickle
from types import FunctionType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["BEFORE_NAME", "BEGINNING", "CallOnLoad", "pickle_of_call", "start_of_call"]

_PROTOCOL = 5
BEGINNING = pickle.PROTO + bytes([_PROTOCOL])
"""Of each pickle that is made here."""
BEFORE_NAME = BEGINNING + pickle.GLOBAL
"""How one of a call begins whose function has a simple name."""
_CALLED = pickle.REDUCE + pickle.STOP
_MOST_CALLS = 64
_calls: dict[Callable[..., Any], bytes] = {}
"""How the pickle of a call of each function begins."""


class CallOnLoad:
    """Pickles as a call, made at the point of the stream where it stands."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self._function, self._arguments = function, arguments

    def __reduce__(self) -> tuple[Any, ...]:
        return self._function, self._arguments


def pickle_of_call(function: Callable[..., Any], arguments: tuple[Any, ...]) -> bytes:
    """Return what ``pickle.dumps(CallOnLoad(function, *arguments))`` would, in half the time.

    To find out how a function is named takes as long as all the rest. So a name that
    was found to lead to it is kept.

    Parameters
    ----------
    function : callable
        Of a module, at its top level, or anything else that can be pickled.
    arguments : tuple
        What it is called with.

    Examples
    --------
    >>> pickle.loads(pickle_of_call(divmod, (7, 2)))
    (3, 1)
    """
    start = start_of_call(function)
    if start is None:
        return pickle.dumps(CallOnLoad(function, *arguments), _PROTOCOL)
    # Nothing but the arguments is in the memo, whose numbers they have given by themselves.
    return b"".join((start, memoryview(pickle.dumps(arguments, _PROTOCOL))[2:-1], _CALLED))


def start_of_call(function: Callable[..., Any]) -> bytes | None:
    """Return how the pickle of a call of a function begins; None if its name is not simple."""
    start = _calls.get(function)
    if start is None:
        if type(function) is not FunctionType or not _is_simple_name(function):
            return None
        # This raises if there is no way to it by name.
        pickle.dumps(function, _PROTOCOL)
        if len(_calls) >= _MOST_CALLS:
            _calls.clear()
        name = f"{function.__module__}\n{function.__qualname__}\n".encode()
        start = _calls[function] = BEFORE_NAME + name
    return start


def _is_simple_name(function: FunctionType) -> bool:
    name = f"{function.__module__}.{function.__qualname__}"
    return all(part.isidentifier() for part in name.split("."))
