"""The ``file_descriptor`` sharing strategy: anonymous segments that leave nothing behind.

Imports only public names of :mod:`shmreduce`. This module implements the hook;
the strategy itself is in :mod:`shmreduce_fd.strategy`.
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
    """Provide the ``file_descriptor`` strategy.

    Returns
    -------
    list of SharingStrategy

    Examples
    --------
    >>> [strategy.name for strategy in shmreduce_strategies()]
    ['file_descriptor']
    """
    from shmreduce_fd.strategy import FileDescriptorStrategy

    return [FileDescriptorStrategy()]
