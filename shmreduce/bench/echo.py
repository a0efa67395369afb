"""An array goes to a worker and comes back: the time of the round trip.

The worker is the loop that anybody would write. Each system has a measuring
process of its own, which has a worker of its own; the coordinator asks the
measuring processes in turn, a few round trips at a time.
"""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any, Literal

from shmreduce.bench.measurements import Measurement
from shmreduce.bench.systems import Pipe, Shmreduce, Stock, System, Torch
from shmreduce.fresh_process import FreshProcess, RunFailedError, fail

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from multiprocessing.connection import Connection
    from multiprocessing.process import BaseProcess
    from multiprocessing.queues import SimpleQueue

    import numpy as np

    Array = np.ndarray[Any, np.dtype[Any]]

__all__ = ["COPY", "FRESH_SYSTEMS", "SHARED_SYSTEMS", "Effort", "measure_echo", "size_row"]

COPY = "one copy"
"""The row beside the systems: one warm memcpy within one process."""

FRESH_SYSTEMS: tuple[System, ...] = (
    Shmreduce(),
    Shmreduce("shmreduce file_system", "file_system"),
    Stock(),
    Torch(),
    Torch("torch file_system", "file_system"),
)
SHARED_SYSTEMS: tuple[System, ...] = (
    Shmreduce(),
    Shmreduce("shmreduce file_system", "file_system"),
    Pipe(),
    Torch(),
    Torch("torch file_system", "file_system"),
)

Kind = Literal["fresh", "shared"]


@dataclass(frozen=True)
class Effort:
    """How long to measure.

    Parameters
    ----------
    rounds : int
        Turns of each system at each size.
    seconds : float
        Length of one turn; at least one round trip is made.
    warm_up : int
        Round trips before each turn that do not count.
    """

    rounds: int = 5
    seconds: float = 0.25
    warm_up: int = 2


@dataclass(frozen=True)
class _Request:
    """What the coordinator asks of a measuring process."""

    nbytes: int
    effort: Effort


def size_row(nbytes: int) -> str:
    """Return the name of a size's row.

    Examples
    --------
    >>> size_row(65536), size_row(1 << 30)
    ('64 KiB', '1 GiB')
    """
    for unit, shift in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if nbytes >= 1 << shift and nbytes % (1 << shift) == 0:
            return f"{nbytes >> shift} {unit}"
    return f"{nbytes} B"


def measure_echo(
    workload: str,
    kind: Kind,
    systems: Sequence[System],
    sizes: Sequence[int],
    effort: Effort,
    notice: Callable[[str], None],
) -> list[Measurement]:
    """Measure round trips, systems taking turns.

    Parameters
    ----------
    workload : str
        Name for the measurements.
    kind : {"fresh", "shared"}
        Send by-value arrays that were never sent, or one shared array again
        and again. With ``"fresh"`` one warm copy is measured, too.
    systems : sequence of System
        Usable ones.
    sizes : sequence of int
        Bytes; float64 arrays, so multiples of 8.
    notice : callable
        Told what is going on, and which system failed.

    Returns
    -------
    list of Measurement
        Seconds. A system that failed has none from there on.
    """
    with ExitStack() as stack:
        processes = {
            system.name: stack.enter_context(FreshProcess(system.name, _serve, system, kind))
            for system in systems
        }
        if kind == "fresh":
            processes[COPY] = stack.enter_context(FreshProcess(COPY, _serve_copies))
        measurements = []
        for nbytes in sizes:
            notice(f"{workload}: {size_row(nbytes)}")
            rows = {name: Measurement(workload, name, size_row(nbytes), "s") for name in processes}
            for _ in range(effort.rounds):
                for name, process in list(processes.items()):
                    try:
                        process.send(_Request(nbytes, effort))
                        rows[name].samples += process.receive()
                    except RunFailedError as error:
                        notice(f"{workload}: {size_row(nbytes)}: {error}")
                        del processes[name]
            measurements += [row for row in rows.values() if row.samples]
    return measurements


# The measuring process


def _serve(connection: Connection, system: System, kind: Kind) -> None:
    system.prepare_parent()
    context = get_context("spawn")
    there: SimpleQueue[Any] = context.SimpleQueue()
    back: SimpleQueue[Any] = context.SimpleQueue()
    worker = context.Process(target=_work, args=(system, there, back), daemon=True)
    worker.start()
    finished = threading.Event()
    threading.Thread(target=_watch, args=(worker, finished, connection), daemon=True).start()
    make = system.fresh if kind == "fresh" else _Shared(system)

    for request in _requests(connection):
        source = _source(request.nbytes)
        seconds = []
        for _ in _turn(request.effort):
            message = make(source)
            started = time.perf_counter()
            there.put(message)
            received = back.get()
            seconds.append(time.perf_counter() - started)
            del message
            _check(system, received, source)
            del received
        connection.send(seconds[request.effort.warm_up :])
    finished.set()
    there.put(None)
    worker.join(30)


def _work(system: System, there: SimpleQueue[Any], back: SimpleQueue[Any]) -> None:
    system.prepare_worker()
    while True:
        message = there.get()
        if message is None:
            break
        back.put(message)


class _Shared:
    """Makes a message once for each size."""

    def __init__(self, system: System) -> None:
        self._system = system
        self._message: Any = None
        self._nbytes = -1

    def __call__(self, source: Array) -> Any:
        if self._nbytes != source.nbytes:
            self._message = None
            self._message = self._system.shared(source)
            self._nbytes = source.nbytes
        return self._message


def _watch(worker: BaseProcess, finished: threading.Event, connection: Connection) -> None:
    """Report the worker's death, which the queue would wait for in vain."""
    wait([worker.sentinel])
    if not finished.is_set():
        worker.join()
        fail(connection, f"its echo worker ended with exit code {worker.exitcode}")


def _serve_copies(connection: Connection) -> None:
    import numpy as np

    for request in _requests(connection):
        source = _source(request.nbytes)
        target = source.copy()
        seconds = []
        for _ in _turn(request.effort):
            started = time.perf_counter()
            np.copyto(target, source)
            seconds.append(time.perf_counter() - started)
        connection.send(seconds[request.effort.warm_up :])


def _requests(connection: Connection) -> Iterator[_Request]:
    """Yield requests until the coordinator closes its end."""
    while True:
        try:
            request: _Request = connection.recv()
        except EOFError:
            return
        yield request


def _turn(effort: Effort) -> Iterator[int]:
    """Count the warm-up, then at least one round trip and as many as there is time for."""
    for number in range(effort.warm_up):
        yield number
    number = effort.warm_up
    deadline = time.perf_counter() + effort.seconds
    yield number
    while time.perf_counter() < deadline:
        number += 1
        yield number


def _source(nbytes: int) -> Array:
    import numpy as np

    return np.arange(nbytes // 8, dtype=np.float64)


def _check(system: System, received: Any, source: Array) -> None:
    values = system.values(received)
    if values is None:
        return
    if values.shape != source.shape or values[0] != source[0] or values[-1] != source[-1]:
        raise RunFailedError(
            f"{system.name} returned other values than were sent",
            process=system.name,
            reason="wrong values",
        )
