"""Sampled signals: numbers at equal distances in time."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["Signal"]


class Signal:
    """Samples of something, and how many there are in a second.

    Parameters
    ----------
    samples : iterable of float
        Copied.
    rate : float
        Samples per second.
    """

    def __init__(self, samples: Iterable[float], rate: float) -> None:
        self.samples: Any = memoryview(array("d", samples))
        self.rate = rate

    @classmethod
    def over(cls, memory: memoryview, rate: float) -> Signal:
        """Return a signal whose samples are the bytes of ``memory``, which is not copied."""
        signal = cls.__new__(cls)
        signal.samples = memory.cast("d")
        signal.rate = rate
        return signal

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Signal):
            return NotImplemented
        return self.rate == other.rate and self.samples == other.samples

    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self) -> tuple[object, ...]:
        # How it is pickled where there is no shared memory.
        return Signal, (self.samples.tolist(), self.rate)

    def amplify(self, factor: float) -> None:
        """Multiply every sample, in place."""
        for index, sample in enumerate(self.samples):
            self.samples[index] = sample * factor
