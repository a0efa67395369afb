"""What a child process must do before it unpickles its arguments.

May import errors, settings, strategies, registry, process_registry,
:mod:`shmreduce.memory`, ``pickled_calls`` and, for a type, entry_points.

A child of ``spawn`` or ``forkserver`` gets its process object as a pickle. In front of
it the pickle has calls, which set up the settings, the family and the reducers.
"""

from __future__ import annotations

import pickle
from multiprocessing.context import get_spawning_popen
from typing import TYPE_CHECKING, Any

from shmreduce.errors import ReducerError
from shmreduce.memory.inheritance import inheritance
from shmreduce.memory.loading import Loading, here
from shmreduce.pickled_calls import CallOnLoad
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
    from collections.abc import Iterable

    from shmreduce.contracts import Reducer
    from shmreduce.entry_points import Told

__all__ = ["PreparedProcess", "preload_in_fork_server"]

_PRELOADED = "shmreduce.preload"


def preload_in_fork_server() -> None:
    """Have the fork server import what children need, once for all of them.

    It is called when a child is about to be started. It does nothing if the child does not
    come from the fork server, or if that is running already.
    """
    if getattr(get_spawning_popen(), "method", None) != "forkserver":
        return
    # Imported here, since it imports a dozen modules that a child may not need. The method of
    # such a child has imported it already.
    from multiprocessing import forkserver

    # Not public: set_forkserver_preload() replaces the list. A Python without these attributes
    # has each child import the modules.
    server: Any = forkserver._forkserver
    modules = getattr(server, "_preload_modules", None)
    running = getattr(server, "_forkserver_pid", 0) is not None
    # From 3.15 on a program can be told of a module that the server cannot import. The program
    # has not named this one.
    silent = getattr(server, "_preload_on_error", "ignore") == "ignore"
    if isinstance(modules, list) and not running and silent and _PRELOADED not in modules:
        server._preload_modules = [*modules, _PRELOADED]


class PreparedProcess:
    """Pickles as a process object, with the calls that the child must make before it.

    In the child it unpickles as the process object alone.

    Parameters
    ----------
    process : object
        The process object that is being started, or an object that pickles as one.
    *calls : CallOnLoad
        Further calls that the child makes after settings, family and reducers are set up.
    """

    def __init__(self, process: object, *calls: CallOnLoad) -> None:
        self._process = process
        self._calls = calls

    def __reduce__(self) -> tuple[Any, ...]:
        # With the strategy's name even if it is the default one: the child must use the same.
        settings = get_settings().changed(strategy=current_strategy().name)
        reducers = registered_by_hand()
        for reducer in reducers:
            _check_picklable(reducer)
        return _last, (
            CallOnLoad(set_settings, settings),
            inheritance(),
            CallOnLoad(_take_over, reducers, tell_found(), warned_plugins()),
            *self._calls,
            # Begins a Loading here, since the standard library unpickles the process object
            # by pickle.load(), and not by ForkingPickler.loads().
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
