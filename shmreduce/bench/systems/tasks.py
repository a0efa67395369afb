"""Systems that call functions in workers: executors, joblib, pools, Ray, Dask.

May import ``base``, ``payloads`` and :mod:`shmreduce.fresh_process`. The packages
themselves, shmreduce and its ``executor`` among them, are imported in the processes that
are measured.
"""

from __future__ import annotations

import logging
import shutil
import tempfile
import time
from abc import abstractmethod
from dataclasses import dataclass
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from shmreduce.bench.payloads import marks, renewed
from shmreduce.bench.systems.base import Ability, Kind, Session, System, missing
from shmreduce.fresh_process import RunFailedError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["Dask", "Executor", "Joblib", "Loky", "OurExecutor", "Ray"]


class _TaskSession(Session):
    """Workers that call functions."""

    def __init__(self, workers: int) -> None:
        self._workers = workers

    @abstractmethod
    def start(self, function: Callable[[Any], Any], argument: Any) -> Any:
        """Submit a call to a worker, and return a future or the like."""

    @abstractmethod
    def results(self, calls: list[Any]) -> list[Any]:
        """Wait for calls, and return their results."""

    def meet(self) -> None:
        """Wait until all workers have started: each call waits for as many as there are workers.

        Executors start workers when calls come, and this time must not be measured.
        """
        with tempfile.TemporaryDirectory(prefix="bench-meeting-") as folder:
            meeting = _Meeting(folder, self._workers)
            self.results([self.start(meeting, number) for number in range(self._workers)])

    def spread(self, payload: Any) -> Any:
        """Return an argument that is sent to several workers."""
        return payload

    def message(self, payload: Any, kind: Kind) -> Any:  # noqa: ARG002 - fresh is all there is
        """Return the argument to send for ``payload``."""
        return payload

    def echo(self, box: list[Any]) -> Any:
        """Call a function that returns its argument."""
        return self.results([self.start(_same, box.pop())])[0]

    def stream(self, payload: Any, count: int) -> Any:
        """Call a function that does nothing, many times, and last one that returns marks."""
        # Each with an array of its own: one that stands in a message twice is sent once.
        calls = [self.start(_nothing, renewed(payload)) for _ in range(count - 1)]
        return self.results([*calls, self.start(marks, payload)])[-1]

    def fan_out(self, payload: Any) -> list[Any]:
        """Make a call for each worker with the same argument."""
        argument = self.spread(payload)
        return self.results([self.start(marks, argument) for _ in range(self._workers)])

    def relay(self, payload: Any) -> Any:
        """Pass the result of one call to another call."""
        middle = self.results([self.start(_same, payload)])[0]
        return self.results([self.start(marks, middle)])[0]

    def collect(self, function: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
        """Make a call for each item."""
        return self.results([self.start(function, item) for item in items])


@dataclass(frozen=True)
class _TaskSystem(System):
    """A system whose workers call functions."""

    abilities: ClassVar[frozenset[Ability]] = frozenset(
        {"echo", "stream", "fan_out", "relay", "collect"}
    )

    workers_for: ClassVar[dict[Ability, int]] = {"echo": 1, "stream": 1, "relay": 2}

    @abstractmethod
    def session(self, workers: int) -> _TaskSession:
        """Start workers, perhaps later."""

    def open(self, ability: Ability, workers: int) -> Session:
        """Start as many workers as systems with queues do, and wait until all are there."""
        session = self.session(self.workers_for.get(ability, workers))
        session.meet()
        return session


class _ExecutorSession(_TaskSession):
    """An executor of :mod:`concurrent.futures`, or one like it."""

    def __init__(self, executor: Any, workers: int) -> None:
        super().__init__(workers)
        self._executor = executor

    def start(self, function: Callable[[Any], Any], argument: Any) -> Any:
        return self._executor.submit(function, argument)

    def results(self, calls: list[Any]) -> list[Any]:
        return [each.result() for each in calls]

    def close(self) -> None:
        self._executor.shutdown()


@dataclass(frozen=True)
class Executor(_TaskSystem):
    """``concurrent.futures.ProcessPoolExecutor``."""

    name: str = "ProcessPoolExecutor"

    def session(self, workers: int) -> _TaskSession:
        """Start an executor."""
        from concurrent.futures import ProcessPoolExecutor

        executor = ProcessPoolExecutor(workers, mp_context=get_context("spawn"))
        return _ExecutorSession(executor, workers)


@dataclass(frozen=True)
class OurExecutor(_TaskSystem):
    """``shmreduce.ProcessPoolExecutor``, with which the other executors are compared."""

    name: str = "shmreduce executor"

    @property
    def ours(self) -> bool:
        """True."""
        return True

    def session(self, workers: int) -> _TaskSession:
        """Start an executor."""
        import shmreduce
        from shmreduce.executor import ProcessPoolExecutor

        executor = ProcessPoolExecutor(workers, mp_context=shmreduce.get_context("spawn"))
        return _ExecutorSession(executor, workers)


@dataclass(frozen=True)
class Loky(_TaskSystem):
    """loky's reusable executor."""

    name: str = "loky"

    def unusable_reason(self) -> str | None:
        """Return that it is missing, or None."""
        return missing("loky", "loky")

    def session(self, workers: int) -> _TaskSession:
        """Start an executor."""
        executor = import_module("loky").get_reusable_executor(max_workers=workers, timeout=600)
        return _ExecutorSession(executor, workers)


class _JoblibSession(_TaskSession):
    """``with Parallel() as parallel``: workers are kept, large arguments become memory maps."""

    def __init__(self, workers: int) -> None:
        super().__init__(max(2, workers))
        joblib = import_module("joblib")
        self._delayed = joblib.delayed
        self._parallel = joblib.Parallel(n_jobs=self._workers, backend="loky")
        self._parallel.__enter__()

    def start(self, function: Callable[[Any], Any], argument: Any) -> Any:
        return self._delayed(function)(argument)

    def results(self, calls: list[Any]) -> list[Any]:
        found: list[Any] = self._parallel(calls)
        return found

    def release(self, message: Any) -> None:  # noqa: ARG002 - the files of all messages
        # It removes the files of its memory maps only here; the workers stay.
        self._parallel.__exit__(None, None, None)
        self._parallel.__enter__()

    def close(self) -> None:
        self._parallel.__exit__(None, None, None)
        import_module("joblib.externals.loky").get_reusable_executor().shutdown()


@dataclass(frozen=True)
class Joblib(_TaskSystem):
    """``joblib.Parallel`` with its default backend.

    It has at least two workers: with one, joblib calls functions in its own process.
    """

    name: str = "joblib"

    apart: ClassVar[bool] = True

    def unusable_reason(self) -> str | None:
        """Return that it is missing, or None."""
        return missing("joblib", "joblib")

    def session(self, workers: int) -> _TaskSession:
        """Start the workers."""
        return _JoblibSession(workers)


@dataclass(frozen=True)
class _Stored:
    """A reference to an array in the object store. Ray does not resolve it inside an object."""

    reference: Any


class _RaySession(_TaskSession):
    """Actors, and the object store for arguments of several of them."""

    def __init__(self, workers: int) -> None:
        super().__init__(workers)
        self._ray = ray = import_module("ray")
        self._folder = tempfile.mkdtemp(prefix="bench-ray-")
        ray.init(
            num_cpus=workers + 1,
            include_dashboard=False,
            logging_level=logging.ERROR,
            log_to_driver=False,
            _temp_dir=self._folder,
        )
        self._actors = [ray.remote(_Actor).remote() for _ in range(workers)]
        self._next = 0
        self._known: list[Callable[[Any], Any]] = []

    def message(self, payload: Any, kind: Kind) -> Any:
        return payload if kind == "fresh" else _Stored(self._ray.put(payload))

    def payload(self, message: Any) -> Any:
        return self._ray.get(message.reference) if isinstance(message, _Stored) else message

    def spread(self, payload: Any) -> Any:
        return self._ray.put(payload)

    def echo(self, box: list[Any]) -> Any:
        message = box.pop()
        if not isinstance(message, _Stored):
            return self.results([self.start(_same, message)])[0]
        received = self._ray.get(self._actors[0].look.remote(message))
        # Get it here too, so that both sides have the array, as with queues.
        self._ray.get(received.reference)
        return received

    def start(self, function: Callable[[Any], Any], argument: Any) -> Any:
        if function not in self._known:
            self._known.append(function)
            self._ray.get([actor.learn.remote(function) for actor in self._actors])
        actor = self._actors[self._next]
        self._next = (self._next + 1) % self._workers
        return actor.call.remote(self._known.index(function), argument)

    def results(self, calls: list[Any]) -> list[Any]:
        found: list[Any] = self._ray.get(calls)
        return found

    def relay(self, payload: Any) -> Any:
        # Only the reference goes through this process; the array goes from actor to actor.
        return self._ray.get(self.start(marks, self.start(_same, payload)))

    def close(self) -> None:
        self._ray.shutdown()
        shutil.rmtree(self._folder, ignore_errors=True)


class _Actor:
    """Calls functions in a worker of Ray. It gets each of them once, and not with each call."""

    def __init__(self) -> None:
        self._functions: list[Callable[[Any], Any]] = []

    def learn(self, function: Callable[[Any], Any]) -> None:
        self._functions.append(function)

    def call(self, number: int, argument: Any) -> Any:
        return self._functions[number](argument)

    def look(self, stored: _Stored) -> _Stored:
        import_module("ray").get(stored.reference)
        return stored


@dataclass(frozen=True)
class Ray(_TaskSystem):
    """Ray on this machine, with actors."""

    name: str = "Ray"

    kinds: ClassVar[frozenset[Kind]] = frozenset({"fresh", "shared", "born"})
    starts_quickly: ClassVar[bool] = False
    apart: ClassVar[bool] = True

    def unusable_reason(self) -> str | None:
        """Return that it is missing, or None."""
        return missing("ray", "ray")

    def session(self, workers: int) -> _TaskSession:
        """Start a cluster on this machine."""
        return _RaySession(workers)


class _DaskSession(_TaskSession):
    """A LocalCluster. Large arguments are scattered first."""

    def __init__(self, workers: int) -> None:
        super().__init__(workers)
        distributed = import_module("distributed")
        self._folder = tempfile.mkdtemp(prefix="bench-dask-")
        self._cluster = distributed.LocalCluster(
            n_workers=workers,
            threads_per_worker=1,
            processes=True,
            dashboard_address=None,
            local_directory=self._folder,
            silence_logs=logging.CRITICAL,
        )
        self._client = distributed.Client(self._cluster)

    def meet(self) -> None:
        # Its scheduler might give one worker two of the calls that wait for each other.
        self._client.wait_for_workers(self._workers)
        self._client.run(_nothing, None)

    def spread(self, payload: Any) -> Any:
        return self._client.scatter(payload, broadcast=True, hash=False)

    def start(self, function: Callable[[Any], Any], argument: Any) -> Any:
        if getattr(argument, "nbytes", 0) >= _SCATTERED_FROM:
            argument = self._client.scatter(argument, hash=False)
        return self._client.submit(function, argument, pure=False)

    def results(self, calls: list[Any]) -> list[Any]:
        found: list[Any] = self._client.gather(calls)
        return found

    def relay(self, payload: Any) -> Any:
        # Only the future goes through this process; the array goes from worker to worker.
        return self.start(marks, self.start(_same, payload)).result()

    def close(self) -> None:
        self._client.close()
        self._cluster.close()
        shutil.rmtree(self._folder, ignore_errors=True)


_SCATTERED_FROM = 1 << 20
"""Bytes. Dask's documentation on efficiency recommends ``scatter`` for larger arguments."""


@dataclass(frozen=True)
class Dask(_TaskSystem):
    """Dask distributed on this machine."""

    name: str = "Dask"

    starts_quickly: ClassVar[bool] = False
    apart: ClassVar[bool] = True

    def unusable_reason(self) -> str | None:
        """Return that it is missing, or None."""
        return missing("distributed", "distributed")

    def session(self, workers: int) -> _TaskSession:
        """Start a cluster on this machine."""
        return _DaskSession(workers)


@dataclass(frozen=True)
class _Meeting:
    """A function that returns when it was called in as many workers as there are.

    Parameters
    ----------
    folder : str
        Each call puts a file there.
    calls : int
        How many calls there will be.
    """

    folder: str
    calls: int

    def __call__(self, number: int) -> None:
        Path(self.folder, str(number)).touch()
        deadline = time.monotonic() + _PATIENCE
        while len(list(Path(self.folder).iterdir())) < self.calls:
            if time.monotonic() > deadline:
                raise RunFailedError(
                    f"fewer than {self.calls} workers started within {_PATIENCE:g} s",
                    process="workers",
                    reason="workers did not start",
                )
            time.sleep(_PAUSE)


_PATIENCE = 60.0
"""Seconds in which all workers must start."""
_PAUSE = 0.002
"""Seconds between two looks for other workers."""


def _same(argument: Any) -> Any:
    return argument


def _nothing(_argument: Any) -> None:
    return None
