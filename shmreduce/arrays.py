"""Arrays born shared, and shared copies of objects.

May import errors, contracts, registry and process_registry; reaches shared memory
only through reducers and the array factory, so it knows no array library.

A shared array travels to other processes without a copy, and all processes that have
it, or a view of it, see each other's writes. ``mode`` says how it appears to receivers:
with ``rw`` as described; with ``ro`` they cannot write; with ``cow`` each receiver's
writes stay in that receiver.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shmreduce.contracts import check_mode
from shmreduce.errors import NotShareableError, PluginError, ReducerError
from shmreduce.process_registry import get_array_factory, get_registry, plugin_report
from shmreduce.registry import describe, qualified_name

if TYPE_CHECKING:
    from shmreduce.contracts import ArrayFactory, Mode, Reducer

__all__ = ["array", "empty", "full", "is_shared", "ones", "share", "zeros"]


def share(obj: Any, mode: Mode = "rw") -> Any:
    """Return a shared copy of an array; the array itself is never touched.

    Parameters
    ----------
    obj : object
        An object of a type whose reducer can share, such as ``numpy.ndarray``.
    mode : {"rw", "ro", "cow"}
        How the array appears to receivers: writable, read-only, or writable with
        writes that stay in the receiver.

    Returns
    -------
    object
        The caller's, of the same type. Its memory is freed when no process has it
        any more.

    Raises
    ------
    NotShareableError
        If the type has no reducer, or no shared form.
    ConfigurationError
        If there is no such mode.
    OutOfSharedMemoryError, BudgetExceededError, SegmentError
        If there is no room, or the system refuses a segment.
    UnknownStrategyError, StrategyUnusableError
        If the sharing strategy does not exist or does not work here.

    Examples
    --------
    >>> import numpy as np
    >>> import shmreduce
    >>> mine = np.arange(3)
    >>> ours = shmreduce.share(mine)
    >>> ours[0] = 7
    >>> ours, mine
    (array([7, 1, 2]), array([0, 1, 2]))
    """
    check_mode(mode)
    reducer = _find_reducer(obj)
    if reducer is None:
        type_name = qualified_name(type(obj))
        raise NotShareableError(
            f"{type_name} objects cannot be shared: no reducer handles the type; install a "
            f"plugin for it or use shmreduce.register_reducer{_unused_plugins()}",
            type_name=type_name,
            reason="no reducer",
        )
    shared = reducer.share(obj, mode)
    if shared is None:
        type_name = qualified_name(type(obj))
        raise ReducerError(
            f"share() of reducer {describe(reducer)} returned None for {type_name}: it must "
            "return the shared object",
            reducer=describe(reducer),
            type_name=type_name,
            reason="share() returned None",
        )
    return shared


def is_shared(obj: Any) -> bool:
    """Return whether an object's memory is shared, so that others see writes to it.

    True for arrays that :func:`share`, :func:`zeros` and the like made, for views of
    them, and for the arrays that other processes receive when these are sent, in mode
    ``cow`` too. False for arrays received by value, although these lie in shared memory.

    Parameters
    ----------
    obj : object
        An object of any type. If no reducer handles the type, the answer is False.

    Returns
    -------
    bool

    Raises
    ------
    ReducerError
        If ``find_block()`` of the type's reducer returns neither a Block nor None.

    Examples
    --------
    >>> import shmreduce
    >>> shmreduce.is_shared(shmreduce.zeros(3)[::2])
    True
    >>> shmreduce.is_shared([1, 2])
    False
    """
    reducer = _find_reducer(obj)
    block = None if reducer is None else reducer.find_block(obj)
    shared = False if block is None else getattr(block, "shared", None)
    if not isinstance(shared, bool):
        raise ReducerError(
            f"find_block() of reducer {describe(reducer)} returned {block!r}: it must return a "
            "Block, as shmreduce.find_block() does, or None; correct it, or block its plugin",
            reducer=describe(reducer),
            type_name=qualified_name(type(obj)),
            reason="find_block() returned no Block",
        )
    return shared


def empty(shape: Any, dtype: Any = None, order: str = "C", *, mode: Mode = "rw") -> Any:
    """Return a shared array whose contents are not set.

    Parameters
    ----------
    shape : int or sequence of int
        Length of each axis.
    dtype : optional
        As for :func:`numpy.empty`; the default is float64.
    order : {"C", "F"}
        Memory layout.
    mode : {"rw", "ro", "cow"}
        How the array appears to receivers; see :func:`share`. In this process it is
        writable.

    Returns
    -------
    numpy.ndarray
        The caller's. Its memory is freed when no process has it any more. If another
        plugin provides the array factory, an array of that plugin.

    Raises
    ------
    NotShareableError
        If the dtype holds Python objects.
    PluginError
        If no plugin makes arrays.
    ConfigurationError
        If there is no such mode.
    OutOfSharedMemoryError, BudgetExceededError, SegmentError
        If there is no room, or the system refuses a segment.
    UnknownStrategyError, StrategyUnusableError
        If the sharing strategy does not exist or does not work here.

    Examples
    --------
    >>> import shmreduce
    >>> shmreduce.empty((2, 3), "i4").shape
    (2, 3)
    """
    return _factory(mode).empty(shape, dtype, order, mode)


def zeros(shape: Any, dtype: Any = None, order: str = "C", *, mode: Mode = "rw") -> Any:
    """Return a shared array of zeros; parameters, result and errors as for :func:`empty`.

    Examples
    --------
    >>> import shmreduce
    >>> shmreduce.zeros(3)
    array([0., 0., 0.])
    """
    return _factory(mode).zeros(shape, dtype, order, mode)


def ones(shape: Any, dtype: Any = None, order: str = "C", *, mode: Mode = "rw") -> Any:
    """Return a shared array of ones; parameters, result and errors as for :func:`empty`.

    Examples
    --------
    >>> import shmreduce
    >>> shmreduce.ones(2, int)
    array([1, 1])
    """
    return _factory(mode).ones(shape, dtype, order, mode)


def full(
    shape: Any, fill_value: Any, dtype: Any = None, order: str = "C", *, mode: Mode = "rw"
) -> Any:
    """Return a shared array filled with one value; result and errors as for :func:`empty`.

    Parameters
    ----------
    shape, dtype, order, mode
        As for :func:`empty`. The default dtype is that of ``fill_value``.
    fill_value : scalar or array_like
        The value of every element.

    Examples
    --------
    >>> import shmreduce
    >>> shmreduce.full((2, 2), 7)
    array([[7, 7],
           [7, 7]])
    """
    return _factory(mode).full(shape, fill_value, dtype, order, mode)


def array(obj: Any, dtype: Any = None, order: str = "K", *, mode: Mode = "rw") -> Any:
    """Return a shared array with the contents of an array, list or scalar.

    The result is always a copy. Unlike :func:`share`, this takes lists and scalars
    too, and returns a plain array.

    Parameters
    ----------
    obj : array_like
        The contents. It is only read.
    dtype, order
        As for :func:`numpy.array`.
    mode : {"rw", "ro", "cow"}
        How the array appears to receivers; see :func:`share`.

    Returns
    -------
    numpy.ndarray
        As for :func:`empty`.

    Raises
    ------
    NotShareableError, PluginError, ConfigurationError, SegmentError
        As for :func:`empty`, and the errors of strategies.

    Examples
    --------
    >>> import shmreduce
    >>> shmreduce.array([1, 2, 3])
    array([1, 2, 3])
    """
    return _factory(mode).array(obj, dtype, order, mode)


def _find_reducer(obj: Any) -> Reducer | None:
    claim = get_registry().find(type(obj))
    return None if claim is None else claim.reducer


def _factory(mode: str) -> ArrayFactory:
    check_mode(mode)
    factory = get_array_factory()
    if factory is None:
        raise PluginError(
            "no plugin makes arrays: install numpy, or a plugin that implements "
            f"shmreduce_array_factory{_unused_plugins()}",
            plugin=None,
            distribution=None,
            reason="no array factory",
        )
    return factory


def _unused_plugins() -> str:
    """Return the plugins that are installed but not in use, for messages."""
    reasons = [
        f"{report.name} is {report.status} ({report.reason})"
        for report in plugin_report()
        if report.status != "loaded"
    ]
    return f"; plugins not in use: {'; '.join(reasons)}" if reasons else ""
