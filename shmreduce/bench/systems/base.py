"""What the suite asks of each system that is compared.

May import :mod:`shmreduce.errors`, :mod:`shmreduce.fresh_process` and
``payloads``. A system is a small picklable object. A session is a system at
work, in the process that is measured.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, ClassVar, Literal

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["Ability", "Kind", "Session", "System", "missing"]

Ability = Literal["echo", "stream", "fan_out", "relay", "collect", "exchange"]
"""What a session can be asked for; the names of its methods."""

Kind = Literal["fresh", "shared", "born"]
"""How an array is meant to travel: by value and not sent before; shared already;
by value, but made by NumPy in shared memory."""


class Session:
    """A system at work: its workers are started, its connections made.

    A subclass implements the methods for the abilities that its system names.
    """

    def prepare(self, nbytes: int) -> None:
        """Get ready for messages with arrays of ``nbytes`` in all."""

    def message(self, payload: Any, kind: Kind) -> Any:
        """Return what is sent to say ``payload``. Called outside the timed region."""
        raise NotImplementedError

    def payload(self, message: Any) -> Any:
        """Return a received message's contents as NumPy arrays."""
        return message

    def release(self, message: Any) -> None:
        """Give a received message's memory back where that is not done by dropping it."""

    def echo(self, box: list[Any]) -> Any:
        """Send the message in ``box`` to a worker and return what comes back.

        The box is emptied on the way, so that nobody else has the message: what
        is referred to elsewhere cannot be moved.
        """
        raise NotImplementedError

    def stream(self, payload: Any, count: int) -> None:
        """Send ``count`` messages one way, and return when the last one was received."""
        raise NotImplementedError

    def fan_out(self, payload: Any) -> list[Any]:
        """Give one array to each worker, and return what each says of it."""
        raise NotImplementedError

    def relay(self, payload: Any) -> Any:
        """Send an array to a worker, on to a second, and return what that one says of it."""
        raise NotImplementedError

    def collect(self, function: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
        """Call ``function`` in workers for each item and return the results."""
        raise NotImplementedError

    def exchange(self, payload: Any, laps: int) -> int:
        """Let messages go round among all workers and return how often one was sent."""
        raise NotImplementedError

    def processes(self) -> list[Any]:
        """Return the workers whose death nobody else would notice."""
        return []

    def close(self) -> None:
        """End the workers."""


@dataclass(frozen=True)
class System:
    """One way of getting arrays from process to process.

    Parameters
    ----------
    name : str
        As the tables call it.
    """

    name: str

    abilities: ClassVar[frozenset[Ability]] = frozenset()
    kinds: ClassVar[frozenset[Kind]] = frozenset({"fresh"})
    sends_objects: ClassVar[bool] = True
    """Whether more than single arrays can be sent."""
    starts_quickly: ClassVar[bool] = True
    """Whether a new session for each sample is bearable."""

    @property
    def ours(self) -> bool:
        """Whether it is ours."""
        return False

    @property
    def is_peer(self) -> bool:
        """Whether it does what ours does, and is none of ours."""
        return not self.ours

    def can(self, ability: Ability, kind: Kind = "fresh") -> bool:
        """Return whether it has an ability and can send arrays of a kind."""
        return ability in self.abilities and kind in self.kinds

    def unusable_reason(self) -> str | None:
        """Return why it cannot be measured here, or None."""
        return None

    def open(self, ability: Ability, workers: int) -> Session:
        """Start workers and return the session. Called in the measuring process."""
        raise NotImplementedError


def missing(module: str, distribution: str) -> str | None:
    """Return that a module is not installed, and how to get it, or None."""
    if find_spec(module) is None:
        return f"{distribution} is not installed: pip install 'shmreduce[bench]'"
    return None
