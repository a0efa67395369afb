"""shmreduce, in the different ways in which it can be used.

May import ``payloads``, ``base``, ``channels``, the public names of shmreduce, errors,
settings and strategies.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from shmreduce.bench.payloads import change_arrays
from shmreduce.bench.systems.channels import ChannelSystem

if TYPE_CHECKING:
    from shmreduce.bench.systems.base import Ability, Kind

__all__ = ["OURS", "BornShared", "Installed", "Shmreduce"]


@dataclass(frozen=True)
class Shmreduce(ChannelSystem):
    """``import shmreduce as mp``: channels and pools of our own."""

    name: str = "shmreduce"
    strategy: str = "file_descriptor"

    abilities: ClassVar[frozenset[Ability]] = ChannelSystem.abilities | {"collect"}
    kinds: ClassVar[frozenset[Kind]] = frozenset({"fresh", "shared"})
    in_pipe: ClassVar[bool] = False
    """Whether its channels are those of the standard library."""

    @property
    def ours(self) -> bool:
        """True."""
        return True

    def unusable_reason(self) -> str | None:
        """Return why the sharing strategy does not work here, or None."""
        from shmreduce.errors import StrategyUnusableError, UnknownStrategyError
        from shmreduce.strategies import choose_strategy

        try:
            choose_strategy(self.strategy)
        except (StrategyUnusableError, UnknownStrategyError) as error:
            return str(error)
        return None

    def prepare(self) -> None:
        """Choose the strategy, which children inherit."""
        import shmreduce

        if shmreduce.get_sharing_strategy() != self.strategy:
            shmreduce.set_sharing_strategy(self.strategy)

    def context(self) -> Any:
        """Return a context of shmreduce."""
        import shmreduce

        return shmreduce.get_context("spawn")

    def queue(self, room: int) -> Any:  # noqa: ARG002 - messages of any size go through
        """Return a ``SimpleQueue``."""
        return self.context().SimpleQueue()

    def pool(self, workers: int) -> Any:
        """Return a ``Pool``."""
        return self.context().Pool(workers)

    def send_on(self, queue: Any, box: list[Any]) -> None:
        """Forward the message without keeping a reference, so that it is moved."""
        queue.put(box.pop())

    def shared(self, array: Any) -> Any:
        """Return a shared copy."""
        import shmreduce

        return shmreduce.share(array)

    def spread(self, array: Any) -> Any:
        """Copy the array once, and not for each receiver; but a small one is pickled."""
        from shmreduce.settings import inline_limit

        return array if array.nbytes < inline_limit(self.in_pipe) else self.shared(array)


@dataclass(frozen=True)
class Installed(Shmreduce):
    """Plain multiprocessing after ``shmreduce.install()``."""

    name: str = "shmreduce install"

    in_pipe: ClassVar[bool] = True

    def prepare(self) -> None:
        """Install; children inherit it."""
        import shmreduce

        shmreduce.install(self.strategy)

    def context(self) -> Any:
        """Return a context of the standard library."""
        return ChannelSystem.context(self)


@dataclass(frozen=True)
class BornShared(Shmreduce):
    """Arrays that NumPy makes in shared memory, inside ``shared_allocations()``."""

    name: str = "shmreduce born shared"

    abilities: ClassVar[frozenset[Ability]] = frozenset({"echo", "collect"})
    kinds: ClassVar[frozenset[Kind]] = frozenset({"born"})

    def can(self, ability: Ability, kind: Kind = "fresh") -> bool:
        """Return whether it has an ability in which it differs from :class:`Shmreduce`."""
        return ability == "collect" or super().can(ability, kind)

    def unusable_reason(self) -> str | None:
        """Return why arrays cannot be born in shared memory here, or None."""
        import shmreduce

        try:
            with shmreduce.shared_allocations():
                return None
        except shmreduce.ShmreduceError as error:
            return str(error)

    def pool(self, workers: int) -> Any:
        """Return a pool whose workers' functions make their arrays in shared memory."""
        return self.context().Pool(workers, shared_allocations=True)

    def message(self, payload: Any, kind: Kind) -> Any:
        """Let NumPy make new arrays in shared memory, like results of a computation."""
        if kind != "born":
            return super().message(payload, kind)
        import shmreduce

        with shmreduce.shared_allocations():
            return change_arrays(payload, copy)


OURS = Shmreduce().name
"""The system that the others are compared with: shmreduce with default settings."""
