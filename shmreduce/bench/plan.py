"""How much to measure.

May import the standard library only.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

__all__ = ["Effort", "Plan", "quick_plan"]

_KIB, _MIB, _GIB = 1 << 10, 1 << 20, 1 << 30


@dataclass(frozen=True)
class Effort:
    """How long to measure.

    Parameters
    ----------
    rounds : int
        Turns of each system at each row.
    seconds : float
        Length of one turn; at least one message is sent.
    warm_up : int
        Messages before each turn that do not count; fewer if they are slow.
    longest : float
        Seconds of turns after which a system gets no further turns at a row. Starting and
        stopping it does not count.
    watched : bool
        Whether to spend one more turn on measuring memory and descriptors.
    """

    rounds: int = 5
    seconds: float = 0.25
    warm_up: int = 2
    longest: float = 20.0
    watched: bool = True


@dataclass(frozen=True)
class Plan:
    """How much to measure; sizes in bytes."""

    effort: Effort = field(default_factory=Effort)
    fresh_sizes: tuple[int, ...] = (
        10,
        128,
        _KIB,
        4 * _KIB,
        16 * _KIB,
        64 * _KIB,
        96 * _KIB,
        256 * _KIB,
        _MIB,
        8 * _MIB,
        64 * _MIB,
        256 * _MIB,
        _GIB,
    )
    shared_sizes: tuple[int, ...] = (128, 64 * _KIB, _MIB, 64 * _MIB, _GIB)
    first_use_sizes: tuple[int, ...] = (64 * _KIB, _MIB, 8 * _MIB, 64 * _MIB, 256 * _MIB)
    read_sizes: tuple[int, ...] = (_MIB, 8 * _MIB, 64 * _MIB)
    stream_sizes: tuple[int, ...] = (100, 10_000, 1_000_000)
    fan_out_sizes: tuple[int, ...] = (64 * _KIB, _MIB, 64 * _MIB)
    fan_out_workers: int = 4
    results_sizes: tuple[int, ...] = (64 * _KIB, _MIB, 8 * _MIB, 64 * _MIB, 256 * _MIB)
    results_items: int = 4
    pool_workers: int = 2
    pipeline_sizes: tuple[int, ...] = (64 * _KIB, _MIB, 64 * _MIB)
    object_sizes: tuple[int, ...] = (_MIB, 64 * _MIB)
    small_array_sizes: tuple[int, ...] = (100, 1_000, 10_000, 100_000)
    small_arrays: int = 10_000
    records: int = 1_000
    exchange_sizes: tuple[int, ...] = (10, 64 * _KIB, _MIB)
    exchange_workers: tuple[int, ...] = (2, 16)
    stage_sizes: tuple[int, ...] = (128, 64 * _KIB, _MIB, 64 * _MIB)
    stage_rounds: int = 200
    live_arrays: int = 100_000
    burst_arrays: int = 64
    burst_array_bytes: int = 64 * _MIB
    import_rounds: int = 30
    systems: tuple[str, ...] | None = None
    """The names of the systems to measure; None for all."""

    def as_json(self) -> dict[str, Any]:
        """Return everything but the systems as values for JSON."""
        values: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        del values["systems"]
        return values


_QUICK_SYSTEMS = (
    "shmreduce",
    "shmreduce install",
    "shmreduce install file_system",
    "shmreduce born shared",
    "shmreduce executor",
    "one copy",
    "ten bytes",
    "ten bytes by Pipe",
    "multiprocessing",
    "torch",
    "torch file_system",
    "SharedMemory by hand",
    "pyzmq",
    "ProcessPoolExecutor",
    "joblib",
)


def quick_plan() -> Plan:
    """Return a plan that takes a few minutes, and measures less.

    Some systems are left out, such as those that take seconds to start.
    """
    return Plan(
        effort=Effort(rounds=2, seconds=0.03, warm_up=1, longest=2.0),
        fresh_sizes=(128, 64 * _KIB, _MIB, 8 * _MIB),
        shared_sizes=(128, 8 * _MIB),
        first_use_sizes=(8 * _MIB,),
        read_sizes=(8 * _MIB,),
        stream_sizes=(100, 1_000_000),
        fan_out_sizes=(8 * _MIB,),
        results_sizes=(8 * _MIB,),
        pipeline_sizes=(8 * _MIB,),
        object_sizes=(_MIB,),
        small_array_sizes=(1_000,),
        small_arrays=1_000,
        records=100,
        exchange_sizes=(64 * _KIB,),
        exchange_workers=(2, 6),
        stage_sizes=(_MIB,),
        stage_rounds=30,
        live_arrays=10_000,
        burst_arrays=16,
        burst_array_bytes=32 * _MIB,
        import_rounds=3,
        systems=_QUICK_SYSTEMS,
    )
