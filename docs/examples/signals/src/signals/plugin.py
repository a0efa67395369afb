"""What shmreduce gets from this package; named in pyproject.toml."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shmreduce import hookimpl

if TYPE_CHECKING:
    from shmreduce import Reducer, SharingStrategy


@hookimpl
def shmreduce_reducers() -> list[Reducer]:
    from signals.reducer import SignalReducer

    return [SignalReducer()]


@hookimpl
def shmreduce_strategies() -> list[SharingStrategy]:
    from signals.strategy import RuntimeDirectoryStrategy

    return [RuntimeDirectoryStrategy()]
