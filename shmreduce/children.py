"""What a child process must do before it looks at its arguments.

May import errors, settings, strategies, registry, process_registry,
:mod:`shmreduce.memory` and, for a type, entry_points.

A child of ``spawn`` or ``forkserver`` gets its process object as a pickle. What
stands before it there is done first: the settings, the family, the reducers.
"""

from __future__ import annotations

import pickle
from types import FunctionType
from typing import TYPE_CHECKING, Any

from shmreduce.errors import ReducerError
from shmreduce.memory.inheritance import inheritance
from shmreduce.memory.loading import Loading, here
from shmreduce.process_registry import (
    mark_plugins_as_warned,
    registered_by_hand,
    take_over_found,
    take_over_reducers,
    tell_found,
    warned_plugins,
)
from shmreduce.registry import describe
from shmreduce.settings import get_settings, set_settings
from shmreduce.strategies import current_strategy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from shmreduce.contracts import Reducer
    from shmreduce.entry_points import Told

__all__ = ["CallOnLoad", "PreparedProcess", "pickle_of_call", "start_of_call"]


class CallOnLoad:
    """Pickles as a call, made at the point of the stream where it stands."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self._function, self._arguments = function, arguments

    def __reduce__(self) -> tuple[Any, ...]:
        return self._function, self._arguments


_PROTOCOL = 5
_calls: dict[Callable[..., Any], bytes] = {}
"""How the pickle of a call of each function begins."""
_MOST_CALLS = 64


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


_CALLED = pickle.REDUCE + pickle.STOP


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
        start = _calls[function] = pickle.PROTO + bytes([_PROTOCOL]) + pickle.GLOBAL + name
    return start


def _is_simple_name(function: FunctionType) -> bool:
    name = f"{function.__module__}.{function.__qualname__}"
    return all(part.isidentifier() for part in name.split("."))


class PreparedProcess:
    """Pickles as a process object, with what the child must do before it.

    In the child it is the process object alone that comes out.

    Parameters
    ----------
    process : object
        What is being started, a process object or what pickles as one.
    *calls : CallOnLoad
        What else the child does, after it has settings, family and reducers.
    """

    def __init__(self, process: object, *calls: CallOnLoad) -> None:
        self._process = process
        self._calls = calls

    def __reduce__(self) -> tuple[Any, ...]:
        # The name too, where the default was taken: the child takes the same.
        settings = get_settings().changed(strategy=current_strategy().name)
        reducers = registered_by_hand()
        for reducer in reducers:
            _check_picklable(reducer)
        return _last, (
            CallOnLoad(set_settings, settings),
            inheritance(),
            CallOnLoad(_take_over, reducers, tell_found(), warned_plugins()),
            *self._calls,
            # The standard library unpickles it outside of ForkingPickler.loads().
            CallOnLoad(_begin_loading),
            self._process,
        )


def _begin_loading() -> tuple[Loading, Loading | None]:
    loading, outer = Loading(), here.loading
    here.loading = loading
    return loading, outer


def _last(*items: Any) -> Any:
    *_, (loading, outer), process = items
    here.loading = outer
    loading.close()
    return process


def _take_over(reducers: Iterable[Reducer], found: Told | None, warned: Iterable[str]) -> None:
    take_over_found(found)
    mark_plugins_as_warned(warned)
    take_over_reducers(reducers)


def _check_picklable(reducer: Reducer) -> None:
    try:
        pickle.dumps(reducer)
    except Exception as error:
        raise ReducerError(
            f"reducer {describe(reducer)} cannot be sent to the child process "
            f"({type(error).__name__}: {error}): define its class at the top level of a module, "
            "or take it back with unregister_reducer() before starting children",
            reducer=describe(reducer),
            type_name=", ".join(str(each) for each in reducer.types),
            reason=str(error),
        ) from error
