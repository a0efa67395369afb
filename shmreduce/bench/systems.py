"""What is compared: ways of getting an array from process to process.

May import the public names of shmreduce. A system is a small picklable object;
its methods run in the processes that are measured.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, np.dtype[Any]]

__all__ = ["OURS", "Pipe", "Shmreduce", "Stock", "System", "Torch"]


@dataclass(frozen=True)
class System:
    """One way of sending arrays through a queue of multiprocessing.

    Parameters
    ----------
    name : str
        As the tables call it.
    """

    name: str

    def unusable_reason(self) -> str | None:
        """Return why it cannot be measured here, or None."""
        return None

    def prepare_parent(self) -> None:
        """Do in the measuring process what users of the system do at the start."""

    def prepare_worker(self) -> None:
        """Do in its children what users of the system do there."""

    def fresh(self, source: Array) -> Any:
        """Return a message with ``source``'s values that was never sent before.

        Called outside the timed region.
        """
        return source

    def shared(self, source: Array) -> Any:
        """Return a message with ``source``'s values in shared memory."""
        raise NotImplementedError

    def values(self, message: Any) -> Any:
        """Return a received message's values as an array."""
        return message


@dataclass(frozen=True)
class Stock(System):
    """Plain multiprocessing, which pickles."""

    name: str = "multiprocessing"


@dataclass(frozen=True)
class Pipe(System):
    """Plain multiprocessing that sends one byte: what the queue itself costs."""

    name: str = "one byte"

    def shared(self, source: Array) -> Any:
        """Return a message that stands for any array."""
        return b"1" if source.nbytes else b"0"

    def values(self, message: Any) -> Any:
        """Return None: nothing to look at."""


@dataclass(frozen=True)
class Shmreduce(System):
    """Plain multiprocessing after ``shmreduce.install()``."""

    name: str = "shmreduce"
    strategy: str = "file_descriptor"

    def unusable_reason(self) -> str | None:
        """Return why the sharing strategy does not work here, or None."""
        from shmreduce.errors import StrategyUnusableError, UnknownStrategyError
        from shmreduce.strategies import choose_strategy

        try:
            choose_strategy(self.strategy)
        except (StrategyUnusableError, UnknownStrategyError) as error:
            return str(error)
        return None

    def prepare_parent(self) -> None:
        """Install; children inherit it."""
        import shmreduce

        shmreduce.install(self.strategy)

    def shared(self, source: Array) -> Any:
        """Return a shared copy."""
        import shmreduce

        return shmreduce.share(source)


@dataclass(frozen=True)
class Torch(System):
    """``torch.multiprocessing`` with tensors."""

    name: str = "torch"
    strategy: str = "file_descriptor"

    def unusable_reason(self) -> str | None:
        """Return that torch is missing, or that it lacks the strategy, or None."""
        if find_spec("torch") is None:
            return "torch is not installed: pip install 'shmreduce[bench]'"
        if self.strategy not in _torch().multiprocessing.get_all_sharing_strategies():
            return f"torch has no strategy {self.strategy} on this system"
        return None

    def prepare_parent(self) -> None:
        """Choose the strategy, which torch's children do not inherit."""
        _torch().multiprocessing.set_sharing_strategy(self.strategy)

    def prepare_worker(self) -> None:
        """Choose the strategy in the child, too."""
        self.prepare_parent()

    def fresh(self, source: Array) -> Any:
        """Return a tensor over ``source``.

        Sending a tensor moves its storage to shared memory for good, so each
        message needs a new one; ``source`` itself stays where it is.
        """
        return _torch().from_numpy(source)

    def shared(self, source: Array) -> Any:
        """Return a tensor in shared memory."""
        return _torch().from_numpy(source).share_memory_()

    def values(self, message: Any) -> Any:
        """Return the tensor's memory as an array."""
        return message.numpy()


def _torch() -> Any:
    # Not a plain import: it is optional, and only partly typed.
    import_module("torch.multiprocessing")
    return import_module("torch")


OURS = Shmreduce().name
"""The system that ratios are told against: ours, as it comes."""
