"""Arrays that are read, streams, fan-out, pipelines, results of pools, and many processes.

May import ``base``, ``payloads`` and :mod:`shmreduce.fresh_process`.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from shmreduce.bench.payloads import make_payload, marks, renewed, size_name, stamp
from shmreduce.bench.workloads.base import Action, Row, Workload
from shmreduce.fresh_process import RunFailedError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shmreduce.bench.plan import Plan
    from shmreduce.bench.systems.base import Ability, Session

__all__ = ["Exchange", "FanOut", "Pipeline", "Read", "Results", "Stream"]


class _ArrayAction(Action):
    """Does something with one array."""

    def __init__(self, session: Session, row: Row) -> None:
        self._session = session
        self._source = make_payload("array", row.nbytes)
        self._workers = row.workers
        self._number = 0
        session.prepare(row.nbytes)

    def _next(self) -> Any:
        """Return an array with values that were not sent before."""
        self._number += 1
        stamp(self._source, self._number)
        return renewed(self._source)

    def _expect(self, told: Any) -> None:
        if told != marks(self._source):
            raise RunFailedError(
                "a worker got other values than were sent", process="worker", reason="wrong values"
            )


class _ReadAction(_ArrayAction):
    def once(self) -> tuple[float, int]:
        """Send, and wait for the sum."""
        array = self._next()
        # All values are whole numbers, so the sum is exact in whichever order they are added.
        expected = array.sum().item()
        started = time.perf_counter()
        told = self._session.read(array)
        seconds = time.perf_counter() - started
        if told != expected:
            raise RunFailedError(
                "the sum of other values came back", process="worker", reason="wrong values"
            )
        return seconds, 1


@dataclass(frozen=True)
class Read(Workload):
    """The receiver reads an array before it answers, so that its page faults count."""

    ability: ClassVar[Ability] = "read"

    def rows(self, plan: Plan) -> Sequence[Row]:
        """One for each size."""
        return [Row(size_name(size), size) for size in plan.read_sizes]

    def begin(self, session: Session, row: Row) -> Action:
        """See :class:`Workload`."""
        return _ReadAction(session, row)


class _StreamAction(_ArrayAction):
    """Sends as many messages as take a tenth of a second."""

    _least, _most, _seconds = 20, 20_000, 0.1

    def __init__(self, session: Session, row: Row) -> None:
        super().__init__(session, row)
        self._count = self._least

    def once(self) -> tuple[float, int]:
        """Send them, and check the last one."""
        count = self._count
        array = self._next()
        started = time.perf_counter()
        told = self._session.stream(array, count)
        seconds = time.perf_counter() - started
        self._expect(told)
        fitting = int(self._seconds * count / seconds)
        self._count = min(max(fitting, self._least), 10 * count, self._most)
        return seconds, count


@dataclass(frozen=True)
class Stream(Workload):
    """Messages one way, one after the other."""

    ability: ClassVar[Ability] = "stream"
    copies: ClassVar[float] = 1000.0

    def rows(self, plan: Plan) -> Sequence[Row]:
        """One for each size."""
        return [Row(size_name(size), size) for size in plan.stream_sizes]

    def begin(self, session: Session, row: Row) -> Action:
        """See :class:`Workload`."""
        return _StreamAction(session, row)


class _FanOutAction(_ArrayAction):
    def once(self) -> tuple[float, int]:
        """Send to all workers, and wait for all answers."""
        array = self._next()
        started = time.perf_counter()
        told = self._session.fan_out(array)
        seconds = time.perf_counter() - started
        for each in told:
            self._expect(each)
        return seconds, 1


@dataclass(frozen=True)
class FanOut(Workload):
    """One array goes to each of several workers."""

    ability: ClassVar[Ability] = "fan_out"
    copies: ClassVar[float] = 10.0

    def rows(self, plan: Plan) -> Sequence[Row]:
        """One for each size."""
        return [
            Row(f"{size_name(size)} to {plan.fan_out_workers}", size, workers=plan.fan_out_workers)
            for size in plan.fan_out_sizes
        ]

    def begin(self, session: Session, row: Row) -> Action:
        """See :class:`Workload`."""
        return _FanOutAction(session, row)


class _PipelineAction(_ArrayAction):
    def once(self) -> tuple[float, int]:
        """Send to the first worker, and wait for the answer of the last."""
        array = self._next()
        started = time.perf_counter()
        told = self._session.relay(array)
        seconds = time.perf_counter() - started
        self._expect(told)
        return seconds, 1


@dataclass(frozen=True)
class Pipeline(Workload):
    """A sends to B, B sends on to C."""

    ability: ClassVar[Ability] = "relay"
    copies: ClassVar[float] = 8.0

    def rows(self, plan: Plan) -> Sequence[Row]:
        """One for each size."""
        return [Row(size_name(size), size, workers=2) for size in plan.pipeline_sizes]

    def begin(self, session: Session, row: Row) -> Action:
        """See :class:`Workload`."""
        return _PipelineAction(session, row)


@dataclass(frozen=True)
class _Filled:
    """A function whose result is a new array, written from end to end."""

    nbytes: int

    def __call__(self, number: int) -> Any:
        import numpy as np

        return np.full(self.nbytes // 8, float(number))


@dataclass(frozen=True)
class _Marked(_Filled):
    """A function whose result is a new array with only two values written, so it is fast."""

    def __call__(self, number: int) -> Any:
        import numpy as np

        array = np.empty(self.nbytes // 8)
        array[0] = array[-1] = number
        return array


_RESULTS: dict[str, type[_Filled]] = {"filled": _Filled, "bare": _Marked}
"""The functions of a row, by the last word of its name."""


class _ResultsAction(Action):
    def __init__(self, session: Session, row: Row) -> None:
        self._session = session
        self._items = list(range(row.count))
        self._function = _RESULTS[row.name.rpartition(" ")[2]](row.nbytes // row.count)
        session.prepare(row.nbytes)

    def once(self) -> tuple[float, int]:
        """Map over all items, and check all results, which are alive at the same time."""
        started = time.perf_counter()
        results = self._session.collect(self._function, self._items)
        seconds = time.perf_counter() - started
        found = [self._session.payload(each)[-1] for each in results]
        if found != self._items:
            raise RunFailedError(
                "other results came back than were made", process="pool", reason="wrong values"
            )
        return seconds, len(self._items)


@dataclass(frozen=True)
class Results(Workload):
    """``pool.map`` over a function that returns a new array."""

    ability: ClassVar[Ability] = "collect"
    copies: ClassVar[float] = 4.0

    def rows(self, plan: Plan) -> Sequence[Row]:
        """Each size, with arrays that are written and with some that hardly are."""
        return [
            Row(
                f"{size_name(size)} {what}",
                size * plan.results_items,
                count=plan.results_items,
                workers=plan.pool_workers,
            )
            for size in plan.results_sizes
            for what in _RESULTS
        ]

    def begin(self, session: Session, row: Row) -> Action:
        """See :class:`Workload`."""
        return _ResultsAction(session, row)


class _ExchangeAction(_ArrayAction):
    """Lets messages go round for a twentieth of a second."""

    _seconds = 0.05

    def __init__(self, session: Session, row: Row) -> None:
        super().__init__(session, row)
        self._laps = 2

    def once(self) -> tuple[float, int]:
        """Let the messages go round, and check each where it ends."""
        array = self._next()
        started = time.perf_counter()
        sent, told = self._session.exchange(array, self._laps)
        seconds = time.perf_counter() - started
        for each in told:
            self._expect(each)
        self._laps = min(max(2, int(self._seconds * self._laps / seconds)), 10 * self._laps)
        return seconds, sent


@dataclass(frozen=True)
class Exchange(Workload):
    """Messages go round in a ring of processes, half as many messages as processes.

    All processes share two processors, however many processes there are, so that rows can
    be compared.
    """

    ability: ClassVar[Ability] = "exchange"
    copies: ClassVar[float] = 40.0
    processors: ClassVar[int | None] = 2

    def rows(self, plan: Plan) -> Sequence[Row]:
        """Each size among few and among many processes."""
        return [
            Row(f"{size_name(size)} among {workers}", size, workers=workers)
            for size in plan.exchange_sizes
            for workers in plan.exchange_workers
        ]

    def begin(self, session: Session, row: Row) -> Action:
        """See :class:`Workload`."""
        return _ExchangeAction(session, row)
