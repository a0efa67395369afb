"""Decides whether large copies bypass the caches, by how fast earlier ones were.

Imports nothing of shmreduce.

It depends on the processor and on the size. With one manufacturer's processors bypassing takes
two thirds of the time, with another's twice as long. And with a large cache, copies of twice
its size may be faster one way and copies of half its size the other. A part of a copy says
nothing, since the caches keep that part from one copy to the next.
"""

from __future__ import annotations

from collections import deque

__all__ = ["Trials"]

_TRIALS = 3
"""How many copies of each kind are compared: the first, and later the latest."""
_GAIN = 1.1
"""Bypassing the caches must be faster by this factor, since its reader will not find the
data in them."""
_BETWEEN_TRIES = 100
"""After so many copies one is made the other way: the first ones may have been disturbed."""


class Trials:
    """Copies of about one size: how fast they were, and how the next one is made.

    Examples
    --------
    >>> trials = Trials()
    >>> for rate in [1.0, 2.0] * 3:
    ...     trials.note(trials.choose(), rate)
    >>> trials.choose()
    True
    """

    __slots__ = ("_chosen", "_rates")

    def __init__(self) -> None:
        self._chosen = 0
        self._rates = deque[float](maxlen=_TRIALS), deque[float](maxlen=_TRIALS)

    def choose(self) -> bool:
        """Return whether the next copy bypasses the caches."""
        through, past = self._rates
        if len(past) < _TRIALS:
            return len(past) < len(through)
        self._chosen += 1
        # The best of each: disturbances only make a copy slower.
        quicker = max(past) > _GAIN * max(through)
        return quicker if self._chosen % _BETWEEN_TRIES else not quicker

    def note(self, past_caches: bool, rate: float) -> None:
        """Note how fast a copy was, in bytes per second."""
        self._rates[past_caches].append(rate)
