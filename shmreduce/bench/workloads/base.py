"""The interface of workloads for which systems take turns.

May import ``plan``, ``payloads`` and ``systems.base``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shmreduce.bench.payloads import Form
    from shmreduce.bench.plan import Plan
    from shmreduce.bench.systems.base import Ability, Kind, Session, System

__all__ = ["Action", "Row", "Workload"]


@dataclass(frozen=True)
class Row:
    """What one row of a workload sends.

    Parameters
    ----------
    name : str
        Its name in tables.
    nbytes : int
        Bytes of the arrays in one message.
    form : str
        What the message is; see :func:`~shmreduce.bench.payloads.make_payload`.
    count : int
        Number of arrays in a message, or of results of a call.
    workers : int
        Number of workers, for workloads that do not fix it.
    """

    name: str
    nbytes: int
    form: Form = "array"
    count: int = 1
    workers: int = 1


class Action(ABC):
    """What is done repeatedly for one row, in a session."""

    @abstractmethod
    def once(self) -> tuple[float, int]:
        """Do it, and return the seconds that it took and how many messages that was."""

    def close(self) -> None:  # noqa: B027 - most keep nothing
        """Give back what was kept between calls."""


@dataclass(frozen=True)
class Workload(ABC):
    """Something that systems do in turn. It is picklable.

    Parameters
    ----------
    name : str
        Its name for ``--only``.
    title : str
        The heading of its tables.
    """

    name: str
    title: str

    ability: ClassVar[Ability]
    copies: ClassVar[float] = 4.0
    """How many times a row's bytes all processes of a system together need as memory."""
    cold: ClassVar[bool] = False
    """Whether each sample is taken in processes that were just started."""
    processors: ClassVar[int | None] = None
    """How many processors the processes share; None for all."""

    @abstractmethod
    def rows(self, plan: Plan) -> Sequence[Row]:
        """Return the rows of a plan, small ones first."""

    @property
    def kind(self) -> Kind:
        """How its arrays travel."""
        return "fresh"

    def suits(self, system: System) -> bool:
        """Return whether a system can do this at all."""
        return system.can(self.ability, self.kind)

    @abstractmethod
    def begin(self, session: Session, row: Row) -> Action:
        """Prepare a row in the measuring process."""
