"""Memoryviews travel by shared memory; without this plugin they cannot be pickled.

Imports only public names of :mod:`shmreduce`. This module implements the hook. The core
gets ``reducer``. ``rebuild`` is the receiving side of a message. ``layout`` examines a
memoryview's format, layout and memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shmreduce import hookimpl

if TYPE_CHECKING:
    from collections.abc import Iterable

    from shmreduce import Reducer

__all__ = ["shmreduce_reducers"]


@hookimpl
def shmreduce_reducers() -> Iterable[Reducer]:
    """Provide the reducer of ``memoryview``.

    Returns
    -------
    list of Reducer

    Examples
    --------
    >>> [reducer.types for reducer in shmreduce_reducers()]
    [(<class 'memoryview'>,)]
    """
    from shmreduce_memoryview.reducer import MemoryviewReducer

    return [MemoryviewReducer()]
