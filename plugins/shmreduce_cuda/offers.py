"""Descriptors of pools and of virtual memory, kept while receivers may need them.

May import the standard library only.

Another process opens a pool, or a piece of virtual memory, by a descriptor that the
driver makes. One descriptor is enough for all arrays in it, and for all receivers. It is
closed when the last of these arrays has been dropped.
"""

from __future__ import annotations

import itertools
import os
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

__all__ = ["Offer", "Offers"]


class Offer:
    """Descriptors of one pool, or of the pieces of one range.

    Parameters
    ----------
    number : int
        The number by which receivers ask for it. It is never reused.
    key : hashable
        Identifies the pool or range.
    descriptors : list of int
        They belong to the offer.
    """

    __slots__ = ("descriptors", "key", "number", "users")

    def __init__(self, number: int, key: Hashable, descriptors: list[int]) -> None:
        self.number = number
        self.key = key
        self.descriptors = descriptors
        self.users = 0


class Offers:
    """The offers of one process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._by_key: dict[Hashable, Offer] = {}

    def __len__(self) -> int:
        return len(self._by_key)

    def take(self, key: Hashable, make: Callable[[], list[int]]) -> Offer:
        """Return the offer for ``key``, to be given up by :meth:`release`.

        If there is none, ``make`` makes its descriptors.
        """
        with self._lock:
            offer = self._by_key.get(key)
            if offer is None:
                offer = self._by_key[key] = Offer(next(self._numbers), key, make())
            offer.users += 1
            return offer

    def release(self, offer: Offer) -> None:
        """Give an offer up; its last user closes the descriptors."""
        with self._lock:
            offer.users -= 1
            if offer.users:
                return
            del self._by_key[offer.key]
            descriptors, offer.descriptors = offer.descriptors, []
        for descriptor in descriptors:
            os.close(descriptor)

    def duplicate(self, number: int, index: int) -> int | None:
        """Return a duplicate of a descriptor, which is the caller's; None if it is not offered."""
        with self._lock:
            for offer in self._by_key.values():
                if offer.number == number and index < len(offer.descriptors):
                    return os.dup(offer.descriptors[index])
        return None

    def forget(self) -> None:
        """In a forked child, close the inherited descriptors; the parent keeps its own."""
        for offer in self._by_key.values():
            for descriptor in offer.descriptors:
                os.close(descriptor)
        self._by_key.clear()
