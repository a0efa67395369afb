"""All systems that are compared.

May import every module of this package.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shmreduce.bench.systems.by_hand import ByHand
from shmreduce.bench.systems.one_copy import OneCopy
from shmreduce.bench.systems.ours import BornShared, Installed, Shmreduce
from shmreduce.bench.systems.queues import (
    FasterFifo,
    Stock,
    TenBytes,
    TenBytesByPipe,
    Torch,
    ZeroMQ,
)
from shmreduce.bench.systems.tasks import Dask, Executor, Joblib, Loky, OurExecutor, Ray

if TYPE_CHECKING:
    from shmreduce.bench.systems.base import System

__all__ = ["OURS_BOTH_STRATEGIES", "SYSTEMS"]

SYSTEMS: tuple[System, ...] = (
    Shmreduce(),
    Shmreduce("shmreduce file_system", "file_system"),
    Installed(),
    BornShared(),
    OurExecutor(),
    OneCopy(),
    TenBytes(),
    TenBytesByPipe(),
    Stock(),
    Torch(),
    Torch("torch file_system", "file_system"),
    ByHand(),
    FasterFifo(),
    ZeroMQ(),
    Executor(),
    Loky(),
    Joblib(),
    Ray(),
    Dask(),
)
"""Ours first, then their peers."""

OURS_BOTH_STRATEGIES = (
    Shmreduce(),
    Installed(),
    Installed("shmreduce install file_system", "file_system"),
)
"""Systems for what is counted, not compared."""
