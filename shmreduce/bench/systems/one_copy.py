"""The reference for all systems: one copy within one process.

May import ``base``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from shmreduce.bench.systems.base import Ability, Kind, Session, System

if TYPE_CHECKING:
    import numpy as np

__all__ = ["OneCopy"]


class _CopySession(Session):
    """Copies into memory that was written before."""

    def __init__(self) -> None:
        self._target: np.ndarray[Any, Any] | None = None

    def message(self, payload: Any, kind: Kind) -> Any:  # noqa: ARG002 - fresh is all there is
        if self._target is None or self._target.nbytes != payload.nbytes:
            self._target = payload.copy()
        return payload

    def echo(self, box: list[Any]) -> Any:
        import numpy as np

        if self._target is not None:
            np.copyto(self._target, box.pop())
        return self._target


@dataclass(frozen=True)
class OneCopy(System):
    """One warm memcpy."""

    name: str = "one copy"

    abilities: ClassVar[frozenset[Ability]] = frozenset({"echo"})
    sends_objects: ClassVar[bool] = False

    @property
    def is_peer(self) -> bool:
        """False: it sends nothing."""
        return False

    def open(self, ability: Ability, workers: int) -> Session:  # noqa: ARG002 - has no workers
        """Return a session."""
        return _CopySession()
