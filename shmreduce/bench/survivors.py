"""Keeps the systems of a workload that have not failed.

May import errors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shmreduce.errors import ShmreduceError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = ["Survivors"]


class Survivors:
    """The systems of a workload in which systems do not take turns.

    One that fails is left out from then on, and the others go on.

    Parameters
    ----------
    workload : str
        The name of the workload.
    names : iterable of str
        The systems.
    notice : callable
        Called with a text that says which system failed, and why.

    Examples
    --------
    >>> from shmreduce import ConfigurationError
    >>> def fail():
    ...     raise ConfigurationError("not today", setting="day", value="today")
    >>> survivors = Survivors("start", ["torch", "shmreduce"], print)
    >>> survivors.attempt("torch", fail)
    start: torch: not today
    False
    >>> survivors.names
    ['shmreduce']
    """

    def __init__(self, workload: str, names: Iterable[str], notice: Callable[[str], None]) -> None:
        self.names = list(names)
        self.workload = workload
        self._notice = notice

    def in_turn(self, number: int) -> list[str]:
        """List the systems in an order that is reversed every other time.

        If one system always followed the same other, it would always find that one's caches.
        """
        return self.names[:: -1 if number % 2 else 1]

    def attempt(self, name: str, act: Callable[[], object]) -> bool:
        """Do something with a system; return False if that failed."""
        try:
            act()
        except ShmreduceError as error:
            self._notice(f"{self.workload}: {name}: {error}")
            self.names.remove(name)
            return False
        return True
