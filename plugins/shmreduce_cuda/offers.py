"""Descriptors of pools and of virtual memory, kept while receivers may need them.

May import ``locks`` of this plugin.

Another process opens a pool, or a piece of virtual memory, by a descriptor that the
driver makes. One descriptor is enough for all arrays in it, and for all receivers. It is
closed when the last of these arrays has been dropped.
"""

from __future__ import annotations

import itertools
import os
from collections import deque
from typing import TYPE_CHECKING

from shmreduce_cuda.locks import InterruptibleLock

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

__all__ = ["Offer", "Offers"]


class Offer:
    """The descriptor of one pool, or of one piece of virtual memory.

    Parameters
    ----------
    number : int
        The number by which receivers ask for it. It is never reused.
    key : hashable
        Identifies the pool or piece.
    descriptor : int
        It belongs to the offer.
    """

    __slots__ = ("descriptor", "key", "number", "users")

    def __init__(self, number: int, key: Hashable, descriptor: int) -> None:
        self.number = number
        self.key = key
        self.descriptor = descriptor
        self.users = 0


class Offers:
    """The offers of one process."""

    def __init__(self) -> None:
        self._lock = InterruptibleLock("making or closing a descriptor of device memory")
        self._numbers = itertools.count(1)
        self._by_key: dict[Hashable, Offer] = {}
        self._by_number: dict[int, Offer] = {}
        self._released: deque[Offer] = deque()

    def __len__(self) -> int:
        return len(self._by_key)

    def take(self, key: Hashable, make: Callable[[], int]) -> Offer:
        """Return the offer for ``key``, to be given up by :meth:`release`.

        If there is none, ``make`` makes its descriptor.

        Raises
        ------
        CudaSharingError
            If a signal handler has interrupted this very call to take another one.
        """
        try:
            with self._lock:
                # First, since memory whose offer waits to be given up may be freed already, and
                # other memory may have its key.
                self._close_released()
                offer = self._by_key.get(key)
                if offer is None:
                    offer = Offer(next(self._numbers), key, make())
                    self._by_key[key] = self._by_number[offer.number] = offer
                offer.users += 1
                return offer
        finally:
            self._settle()

    def release(self, offer: Offer) -> None:
        """Give an offer up; its last user closes the descriptor."""
        self._released.append(offer)
        self._settle()

    def _settle(self) -> None:
        """Close what was given up, unless another call has the lock, which does so then."""
        while self._released and self._lock.attempt():
            try:
                self._close_released()
            finally:
                self._lock.release()

    def _close_released(self) -> None:
        while self._released:
            offer = self._released.popleft()
            offer.users -= 1
            if not offer.users:
                del self._by_key[offer.key]
                del self._by_number[offer.number]
                os.close(offer.descriptor)

    def duplicate(self, number: int) -> int | None:
        """Return a duplicate of a descriptor, which is the caller's; None if it is not offered.

        Raises
        ------
        OSError
            If this process has as many files open as it may.
        """
        try:
            with self._lock:
                offer = self._by_number.get(number)
                return None if offer is None else os.dup(offer.descriptor)
        finally:
            self._settle()

    def forget(self) -> None:
        """In a forked child, close the inherited descriptors; the parent keeps its own."""
        for offer in self._by_key.values():
            os.close(offer.descriptor)
        self._by_key.clear()
        self._by_number.clear()
