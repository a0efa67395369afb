"""NumPy arrays travel by shared memory, and are born in it.

Imports only public names of :mod:`shmreduce`, and NumPy not before it is needed. This
module implements the hooks. The core gets ``reducer``, ``factory`` and ``handler``.
``reduction`` is the sending side of a message and ``rebuild`` the receiving side.
``sharing`` makes shared arrays, ``blocks`` relates arrays to memory, and ``dtypes`` and
``classes`` say what can travel and how.
"""

from __future__ import annotations

import importlib.util
import sys
from typing import TYPE_CHECKING

from shmreduce import hookimpl

if TYPE_CHECKING:
    from collections.abc import Iterable

    from shmreduce import ArrayFactory, MemoryHandlers, Reducer

__all__ = ["shmreduce_array_factory", "shmreduce_memory_handlers", "shmreduce_reducers"]


@hookimpl
def shmreduce_reducers() -> Iterable[Reducer]:
    """Provide the reducer of ``numpy.ndarray`` and its subclasses.

    Returns
    -------
    list of Reducer

    Examples
    --------
    >>> [(reducer.types, reducer.subclasses) for reducer in shmreduce_reducers()]
    [(('numpy.ndarray',), True)]
    """
    from shmreduce_numpy.reducer import NumpyReducer

    reducer = NumpyReducer()
    if sys.modules.get("numpy") is not None:
        # Now, not at the first message or shared array: children that are forked later need
        # not import the modules, and no descriptor may be free by then.
        reducer.prepare()
    return [reducer]


@hookimpl
def shmreduce_array_factory() -> ArrayFactory | None:
    """Provide the factory of shared NumPy arrays.

    Returns
    -------
    ArrayFactory or None
        None if NumPy is not installed.

    Examples
    --------
    >>> shmreduce_array_factory().zeros(3, None, "C", "rw")
    array([0., 0., 0.])
    """
    if sys.modules.get("numpy") is None and importlib.util.find_spec("numpy") is None:
        return None
    from shmreduce_numpy.factory import NumpyArrayFactory

    return NumpyArrayFactory()


@hookimpl
def shmreduce_memory_handlers() -> MemoryHandlers:
    """Provide the object that changes NumPy's memory handler.

    Returns
    -------
    MemoryHandlers
        The same object each time.

    Examples
    --------
    >>> shmreduce_memory_handlers() is shmreduce_memory_handlers()
    True
    """
    from shmreduce_numpy.handler import memory_handlers

    return memory_handlers
