"""A message goes to a worker and comes back: the time of the round trip.

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
    from shmreduce.bench.systems.base import Ability, Kind, Session, System

__all__ = ["Echo", "EchoFirstUse", "EchoObjects", "EchoSmallArrays"]


class _EchoAction(Action):
    """One round trip at a time, of a new message or of the same shared one."""

    def __init__(self, session: Session, row: Row, kind: Kind) -> None:
        self._session = session
        self._kind = kind
        self._source = make_payload(row.form, row.nbytes // row.count, row.count)
        self._number = 0
        session.prepare(row.nbytes)
        self._shared: Any = session.message(self._source, kind) if kind == "shared" else None

    def once(self) -> tuple[float, int]:
        """Send and receive, and check that the same values come back."""
        session = self._session
        box, expected = self._next()
        started = time.perf_counter()
        received = session.echo(box)
        seconds = time.perf_counter() - started
        found = session.payload(received)
        wrong = found is not None and marks(found) != expected
        del found
        session.release(received)
        if wrong:
            raise RunFailedError(
                "other values came back than were sent", process="echo", reason="wrong values"
            )
        return seconds, 1

    def _next(self) -> tuple[list[Any], list[Any]]:
        """Return a box with a message whose values were not sent before, and their marks."""
        self._number += 1
        session = self._session
        if self._kind == "shared":
            values = session.payload(self._shared)
            stamp(values, self._number)
            return [self._shared], marks(values)
        stamp(self._source, self._number)
        message = session.message(renewed(self._source), self._kind)
        return [message], marks(self._source)

    def close(self) -> None:
        """Give the shared message back."""
        self._session.release(self._shared)
        self._shared = None


@dataclass(frozen=True)
class Echo(Workload):
    """Round trips of one array."""

    array_kind: Kind = "fresh"

    ability: ClassVar[Ability] = "echo"

    @property
    def kind(self) -> Kind:
        """As given."""
        return self.array_kind

    def rows(self, plan: Plan) -> Sequence[Row]:
        """One for each size."""
        sizes = plan.fresh_sizes if self.kind == "fresh" else plan.shared_sizes
        return [Row(size_name(size), size) for size in sizes]

    def begin(self, session: Session, row: Row) -> Action:
        """See :class:`Workload`."""
        return _EchoAction(session, row, self.kind)


class _FirstUseAction(_EchoAction):
    """Round trips for which only the connection is warm."""

    def __init__(self, session: Session, row: Row) -> None:
        super().__init__(session, row, "fresh")
        small = make_payload("array", 8)
        session.release(session.echo([session.message(small, "fresh")]))


@dataclass(frozen=True)
class EchoFirstUse(Workload):
    """The first array that new processes send each other."""

    ability: ClassVar[Ability] = "echo"
    cold: ClassVar[bool] = True

    def rows(self, plan: Plan) -> Sequence[Row]:
        """One for each size."""
        return [Row(size_name(size), size) for size in plan.first_use_sizes]

    def suits(self, system: System) -> bool:
        """Leave out systems that take seconds to start, and the copy, which is always warm."""
        return super().suits(system) and system.starts_quickly and (system.ours or system.is_peer)

    def begin(self, session: Session, row: Row) -> Action:
        """See :class:`Workload`."""
        return _FirstUseAction(session, row)


@dataclass(frozen=True)
class _EchoContainers(Workload):
    """Round trips of objects that have arrays in them."""

    ability: ClassVar[Ability] = "echo"
    copies: ClassVar[float] = 6.0

    def suits(self, system: System) -> bool:
        """Leave out systems that can only send single arrays."""
        return super().suits(system) and system.sends_objects

    def begin(self, session: Session, row: Row) -> Action:
        """See :class:`Workload`."""
        return _EchoAction(session, row, "fresh")


@dataclass(frozen=True)
class EchoObjects(_EchoContainers):
    """Round trips of objects that contain arrays, and of records, which do not."""

    def rows(self, plan: Plan) -> Sequence[Row]:
        """One record and many, and each kind of object in each size."""
        records = [
            Row("a record", _RECORD_BYTES, "records"),
            Row(f"{plan.records} records", _RECORD_BYTES * plan.records, "records", plan.records),
        ]
        return records + [
            Row(f"{name} {size_name(size)}", size, form)
            for name, form in _OBJECTS.items()
            for size in plan.object_sizes
        ]


_RECORD_BYTES = 300
"""Bytes of a record's pickle, about."""
_OBJECTS: dict[str, Any] = {
    "64 nested arrays": "nested",
    "DataFrame of numbers": "DataFrame",
    "DataFrame with text": "DataFrame with text",
}


@dataclass(frozen=True)
class EchoSmallArrays(_EchoContainers):
    """Round trips of a list of many small arrays."""

    def rows(self, plan: Plan) -> Sequence[Row]:
        """One for each size of the arrays."""
        return [
            Row(
                f"{plan.small_arrays} x {size_name(size)}",
                size * plan.small_arrays,
                "list",
                plan.small_arrays,
            )
            for size in plan.small_array_sizes
        ]
