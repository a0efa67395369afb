"""Pickles of calls, which the unpickler makes when it reaches them in the stream.

May import the standard library only.
"""

from __future__ import annotations

import pickle
from types import FunctionType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["BEFORE_NAME", "BEGINNING", "PROTOCOL", "CallOnLoad", "pickle_of_call", "start_of_call"]

PROTOCOL = 5
"""The first protocol with out-of-band buffers: https://peps.python.org/pep-0574/"""
BEGINNING = pickle.PROTO + bytes([PROTOCOL])
"""The beginning of every pickle that is made here."""
BEFORE_NAME = BEGINNING + pickle.GLOBAL
"""The beginning of the pickle of a call whose function has a simple name."""
_CALLED = pickle.REDUCE + pickle.STOP
_MOST_CALLS = 64
"""How many functions are remembered. With more, all are forgotten."""
_calls: dict[Callable[..., Any], bytes] = {}
"""The beginning of the pickle of a call, by function."""


class CallOnLoad:
    """Pickles as a call, which the unpickler makes when it reaches it in the stream."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self._function, self._arguments = function, arguments

    def __reduce__(self) -> tuple[Any, ...]:
        return self._function, self._arguments


def pickle_of_call(function: Callable[..., Any], arguments: tuple[Any, ...]) -> bytes:
    """Return what ``pickle.dumps(CallOnLoad(function, *arguments))`` would, in half the time.

    Finding a function's name and checking that it leads to the function takes half of the
    time. So the name is cached.

    Parameters
    ----------
    function : callable
        A function at the top level of a module, or any other callable that can be pickled.
    arguments : tuple
        The arguments of the call.

    Examples
    --------
    >>> pickle.loads(pickle_of_call(divmod, (7, 2)))
    (3, 1)
    """
    start = start_of_call(function)
    if start is None:
        return pickle.dumps(CallOnLoad(function, *arguments), PROTOCOL)
    # GLOBAL puts nothing into the memo, so the memo indexes of the arguments are right.
    return b"".join((start, memoryview(pickle.dumps(arguments, PROTOCOL))[2:-1], _CALLED))


def start_of_call(function: Callable[..., Any]) -> bytes | None:
    """Return the beginning of the pickle of a function's call; None if its name is not simple."""
    start = _calls.get(function)
    if start is None:
        if type(function) is not FunctionType or not _is_simple_name(function):
            return None
        # Raises if the function cannot be found by its name.
        pickle.dumps(function, PROTOCOL)
        if len(_calls) >= _MOST_CALLS:
            _calls.clear()
        name = f"{function.__module__}\n{function.__qualname__}\n".encode()
        start = _calls[function] = BEFORE_NAME + name
    return start


def _is_simple_name(function: FunctionType) -> bool:
    name = f"{function.__module__}.{function.__qualname__}"
    return all(part.isidentifier() for part in name.split("."))
