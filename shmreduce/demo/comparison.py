"""Runs the same work on plain multiprocessing and on shmreduce, in turn.

Everything happens in one fresh process, see :func:`serve`. When that process has ended,
the caller can check what it has left behind.

May import ``filters`` and ``images`` of this package, errors, settings, the
public names of :mod:`shmreduce`, and NumPy.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from shmreduce.demo.filters import apply_filter
from shmreduce.demo.images import load_file, load_images
from shmreduce.errors import ShmreduceError
from shmreduce.settings import inline_limit

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager
    from multiprocessing.connection import Connection
    from multiprocessing.context import BaseContext
    from multiprocessing.pool import Pool

    import numpy as np

    import shmreduce

    Image = np.ndarray[Any, np.dtype[Any]]

__all__ = [
    "SYSTEMS",
    "Finished",
    "Outcome",
    "Plan",
    "Started",
    "Step",
    "WrongResultError",
    "serve",
]

SystemName = Literal["plain", "by value", "shared"]
SYSTEMS: tuple[SystemName, ...] = ("plain", "by value", "shared")
"""Plain multiprocessing; after install(); after install() with shared images."""


class WrongResultError(ShmreduceError):
    """A filtered image of one system differs from that of plain multiprocessing.

    Fields: ``system``, ``image`` (its number).
    """


@dataclass(frozen=True)
class Plan:
    """What to run.

    Parameters
    ----------
    filter_name : str
        A key of :data:`shmreduce.demo.filters.FILTERS`.
    workers : int
        Processes in each pool.
    repeat : int
        Rounds; each runs every system once.
    side : int
        Width and height of the shipped images after enlarging, in pixels.
    input_file : path or None
        Images to use instead of the shipped ones.
    start_method : str
        The start method of the pools' workers.
    strategy : str or None
        The sharing strategy; None for the default.
    """

    filter_name: str = "gaussian"
    workers: int = 2
    repeat: int = 3
    side: int = 1536
    input_file: Path | None = None
    start_method: str = "spawn"
    strategy: str | None = None


@dataclass(frozen=True)
class Started:
    """First message of :func:`serve`: what will be done."""

    images: int
    image_bytes: int
    strategy: str
    start_method: str


@dataclass(frozen=True)
class Step:
    """Message of :func:`serve`: one more image is done."""


@dataclass
class Outcome:
    """The result of one system.

    Parameters
    ----------
    system : str
        One of :data:`SYSTEMS`.
    workers : int
        Processes in its pool.
    seconds : list of float
        Time of each round, from handing the images to the pool to the last result.
    filter_seconds : list of float
        For each round, the sum of the times that the workers spent filtering.
    travelled : int
        Bytes of arrays that went to workers and back, in all rounds.
    copied : int
        How many of these bytes were copied into shared memory, once each. Shared
        images are not copied, and small ones go through the pipe.
    piped : int or None
        Bytes that this process and its workers read from pipes, in all rounds; None
        if the operating system does not count them.
    """

    system: SystemName
    workers: int
    seconds: list[float] = field(default_factory=list)
    filter_seconds: list[float] = field(default_factory=list)
    travelled: int = 0
    copied: int = 0
    piped: int | None = 0


@dataclass(frozen=True)
class Finished:
    """Last message of :func:`serve`: the results, and the ids of the processes."""

    outcomes: list[Outcome]
    processes: list[int]


def serve(connection: Connection, plan: Plan) -> None:
    """Run the comparison; send ``Started``, a ``Step`` per image, ``Finished``.

    The target of a :class:`shmreduce.fresh_process.FreshProcess`.

    Raises
    ------
    WrongResultError
        If a result differs from plain multiprocessing's.
    """
    import shmreduce

    context = multiprocessing.get_context(plan.start_method)

    def install() -> AbstractContextManager[shmreduce.Installation]:
        return shmreduce.install(strategy=plan.strategy)

    with install():
        strategy = shmreduce.get_sharing_strategy()
    images = load_file(plan.input_file) if plan.input_file else load_images(plan.side)
    connection.send(
        Started(
            images=len(images),
            image_bytes=sum(image.nbytes for image in images),
            strategy=strategy,
            start_method=plan.start_method,
        )
    )
    with ExitStack() as pools:
        systems = _start_systems(pools, context, plan, images, install)
        expected: list[Image] = []
        for _ in range(plan.repeat):
            for system in systems:
                results = system.run(plan.filter_name, lambda: connection.send(Step()))
                expected = expected or results
                _check(system.outcome.system, results, expected)
                # Freed now, and not while the next system is timed.
                del results
        workers = [process.pid for process in multiprocessing.active_children()]
        connection.send(
            Finished(
                outcomes=[system.outcome for system in systems],
                processes=[os.getpid(), *(pid for pid in workers if pid is not None)],
            )
        )


class _System:
    """One pool, and the images in the form in which they are sent to it."""

    def __init__(
        self,
        name: SystemName,
        workers: int,
        pool: Pool,
        images: Sequence[Image],
        installed: Callable[[], AbstractContextManager[object]],
    ) -> None:
        self.outcome = Outcome(name, workers)
        self._pool = pool
        self._images = images
        self._installed = installed

    def run(self, filter_name: str, step: Callable[[], None]) -> list[Image]:
        """Filter every image once and return the results in order."""
        results: list[Image | None] = [None] * len(self._images)
        filter_seconds = 0.0
        with self._installed():
            piped = _piped()
            started = time.perf_counter()
            tasks = ((filter_name, number, image) for number, image in enumerate(self._images))
            for number, filtered, seconds in self._pool.imap_unordered(apply_filter, tasks):
                results[number] = filtered
                filter_seconds += seconds
                step()
            self.outcome.seconds.append(time.perf_counter() - started)
            self._count(results, piped, _piped())
        self.outcome.filter_seconds.append(filter_seconds)
        return [result for result in results if result is not None]

    def _count(
        self, results: Sequence[Image | None], before: int | None, after: int | None
    ) -> None:
        outcome = self.outcome
        returned = [result for result in results if result is not None]
        outcome.travelled += sum(image.nbytes for image in (*self._images, *returned))
        if outcome.system != "plain":
            by_value = returned if outcome.system == "shared" else (*self._images, *returned)
            limit = inline_limit(in_pipe=True)
            outcome.copied += sum(image.nbytes for image in by_value if image.nbytes >= limit)
        if before is None or after is None or outcome.piped is None:
            outcome.piped = None
        else:
            outcome.piped += after - before


def _start_systems(
    pools: ExitStack,
    context: BaseContext,
    plan: Plan,
    images: Sequence[Image],
    install: Callable[[], AbstractContextManager[object]],
) -> list[_System]:
    """Start a pool for each system, that of ``plain`` without shmreduce installed."""
    import shmreduce

    systems = []
    for name in SYSTEMS:
        installed = nullcontext if name == "plain" else install
        with installed():
            pool = pools.enter_context(context.Pool(plan.workers))
            # One task for each worker, so that all have imported what they need before timing.
            pool.map(apply_filter, [(plan.filter_name, 0, _trial(images[0]))] * plan.workers, 1)
            ours = [shmreduce.share(image) for image in images] if name == "shared" else images
        systems.append(_System(name, plan.workers, pool, ours, installed))
    return systems


def _trial(image: Image) -> Image:
    return image[:8, :8].copy()


def _check(system: SystemName, results: Sequence[Image], expected: Sequence[Image]) -> None:
    import numpy as np

    for number, (result, wanted) in enumerate(zip(results, expected, strict=True)):
        # Pixels without a value are NaN, which is not equal to itself.
        if not np.array_equal(result, wanted, equal_nan=True):
            raise WrongResultError(
                f"image {number} as filtered by the system {system!r} differs from what plain "
                "multiprocessing gives: this is a bug of shmreduce, please report it",
                system=system,
                image=number,
            )


def _piped() -> int | None:
    """Return the bytes that this process and its workers have read so far.

    While images are filtered, these are the bytes that go through the pools' pipes
    (proc_pid_io(5)). Written bytes cannot be used, since the kernel also counts writes to
    files in shared memory.
    """
    workers = (process.pid for process in multiprocessing.active_children())
    try:
        return sum(_bytes_read(pid) for pid in (os.getpid(), *workers) if pid is not None)
    except OSError:
        return None


def _bytes_read(pid: int) -> int:
    text = Path(f"/proc/{pid}/io").read_text()
    counters = dict(line.split(": ") for line in text.splitlines())
    return int(counters["rchar"])
