"""The interface of the systems that are compared.

May import :mod:`shmreduce.errors`, :mod:`shmreduce.fresh_process` and ``payloads``. A
system is a small picklable object. A session is a running system, in the process that
is measured.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, ClassVar, Literal

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["Ability", "Kind", "Session", "System", "missing", "why_unusable"]

Ability = Literal["echo", "read", "stream", "fan_out", "relay", "collect", "exchange"]
"""What a session can do; these are names of its methods."""

Kind = Literal["fresh", "shared", "born"]
"""How an array travels: by value, and never sent before; as an array that is shared already;
or by value, but made by NumPy in shared memory."""


class Session:
    """A running system: its workers are started, and its connections made.

    A subclass implements the methods for the abilities of its system.
    """

    def prepare(self, nbytes: int) -> None:
        """Get ready for messages whose arrays have ``nbytes`` bytes in total."""

    def message(self, payload: Any, kind: Kind) -> Any:
        """Return the object to send for ``payload``. This is not timed."""
        raise NotImplementedError

    def payload(self, message: Any) -> Any:
        """Return a received message's contents as NumPy arrays."""
        return message

    def release(self, message: Any) -> None:
        """Give a received message's memory back, if dropping the message does not."""

    def echo(self, box: list[Any]) -> Any:
        """Send the message in ``box`` to a worker, and return what comes back.

        The box is emptied, so that there is no other reference to the message, which would
        prevent its arrays from being moved.
        """
        raise NotImplementedError

    def read(self, payload: Any) -> Any:
        """Send an array to a worker that reads all of it; return the sum of its values."""
        raise NotImplementedError

    def stream(self, payload: Any, count: int) -> Any:
        """Send ``count`` messages one way, and return the marks of the last one received."""
        raise NotImplementedError

    def fan_out(self, payload: Any) -> list[Any]:
        """Send one array to each worker, and return each worker's marks of it."""
        raise NotImplementedError

    def relay(self, payload: Any) -> Any:
        """Send an array to a worker, which forwards it to a second; return that one's marks."""
        raise NotImplementedError

    def collect(self, function: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
        """Call ``function`` in workers for each item and return the results."""
        raise NotImplementedError

    def exchange(self, payload: Any, laps: int) -> tuple[int, list[Any]]:
        """Let messages go round among all workers.

        Returns
        -------
        int
            How many were sent in total.
        list
            The marks of each message where it ended.
        """
        raise NotImplementedError

    def processes(self) -> list[Any]:
        """Return the workers whose death the system does not notice itself."""
        return []

    def close(self) -> None:
        """End the workers."""


@dataclass(frozen=True)
class System:
    """One way of getting arrays from process to process.

    Parameters
    ----------
    name : str
        Its name in tables.
    """

    name: str

    abilities: ClassVar[frozenset[Ability]] = frozenset()
    kinds: ClassVar[frozenset[Kind]] = frozenset({"fresh"})
    sends_objects: ClassVar[bool] = True
    """Whether it can send objects other than single arrays."""
    starts_quickly: ClassVar[bool] = True
    """Whether it starts fast enough for a new session per sample."""
    apart: ClassVar[bool] = False
    """Whether its processes need time even when it is not its turn, so that it must be measured
    when no other system is running."""

    @property
    def ours(self) -> bool:
        """Whether it is shmreduce."""
        return False

    @property
    def is_peer(self) -> bool:
        """Whether it is another system that shmreduce is compared with."""
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


def why_unusable(system: System) -> str | None:
    """Return why a system cannot be measured here, or None.

    That may be anything that its package raises while it is imported.
    """
    try:
        return system.unusable_reason()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def missing(module: str, distribution: str) -> str | None:
    """Return a text if a module is not installed, which says how to get it, or None."""
    if find_spec(module) is None:
        return f"{distribution} is not installed: pip install 'shmreduce[bench]'"
    return None
