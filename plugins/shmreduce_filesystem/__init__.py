"""The ``file_system`` sharing strategy: segments that any process of the user can open by name.

Imports only public names of :mod:`shmreduce`. This module implements the hook;
the strategy itself is in :mod:`shmreduce_filesystem.strategy`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shmreduce import hookimpl

if TYPE_CHECKING:
    from collections.abc import Iterable

    from shmreduce import SharingStrategy

__all__ = ["shmreduce_strategies"]


@hookimpl
def shmreduce_strategies() -> Iterable[SharingStrategy]:
    """Provide the ``file_system`` strategy.

    Returns
    -------
    list of SharingStrategy

    Examples
    --------
    >>> [strategy.name for strategy in shmreduce_strategies()]
    ['file_system']
    """
    from shmreduce_filesystem.strategy import FileSystemStrategy

    return [FileSystemStrategy()]
