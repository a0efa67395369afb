"""Descriptors of pools and of virtual memory, kept while others may need them.

May import the standard library only.

A pool, or a piece of virtual memory, is opened elsewhere by a descriptor that
the driver makes. One descriptor serves all arrays in it, and all receivers. It
is closed when the last of these arrays has been given up.
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
        By which receivers ask for it; never used again.
    key : hashable
        What it is of.
    descriptors : list of int
        Owned by the offer.
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
        """Return the offer for ``key``, made by ``make`` if there is none; :meth:`release` it."""
        with self._lock:
            offer = self._by_key.get(key)
            if offer is None:
                offer = self._by_key[key] = Offer(next(self._numbers), key, make())
            offer.users += 1
            return offer

    def release(self, offer: Offer) -> None:
        """Give an offer up; its descriptors are closed with its last user."""
        with self._lock:
            offer.users -= 1
            if offer.users:
                return
            del self._by_key[offer.key]
            descriptors, offer.descriptors = offer.descriptors, []
        for descriptor in descriptors:
            os.close(descriptor)

    def duplicate(self, number: int, index: int) -> int | None:
        """Return a duplicate of a descriptor, the caller's; None if there is no such."""
        with self._lock:
            for offer in self._by_key.values():
                if offer.number == number and index < len(offer.descriptors):
                    return os.dup(offer.descriptors[index])
        return None

    def forget(self) -> None:
        """Close what a forked child inherited; the parent has its own."""
        for offer in self._by_key.values():
            for descriptor in offer.descriptors:
                os.close(descriptor)
        self._by_key.clear()
