"""The buffer that a packet is read into, which owns the descriptors that came with it.

May import :mod:`shmreduce.compiled`.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections import deque
from itertools import repeat
from typing import TYPE_CHECKING, Any

from shmreduce.compiled import PACKETS, find_module

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["ReceiveBuffer"]

_module: Any = find_module(PACKETS)[0]


class ReceiveBuffer(bytearray):
    """A buffer for one packet, which also owns the descriptors that come with it.

    They are in ``descriptors`` when :meth:`PacketSocket.read` returns, so that none stays
    open if a signal handler raises after that. With the module in C, none stays open if it
    raises before that either.

    Parameters
    ----------
    size : int
        Bytes.

    Examples
    --------
    >>> buffer = ReceiveBuffer(8)
    >>> buffer.descriptors.extend(os.pipe())
    >>> buffer.close_descriptors()
    >>> len(buffer), buffer.descriptors
    (8, [])
    """

    __slots__ = ("descriptors",)

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.descriptors: list[int] = []

    def close_descriptors(self) -> None:
        """Close the descriptors, and remove them from the list."""
        if _module is not None:
            _module.close_descriptors(self.descriptors)
            return
        # One expression that makes its calls in C. In a loop, a signal handler could raise
        # between pop() and close(), and the descriptor would stay open.
        numbers = map(self.descriptors.pop, repeat(-1, len(self.descriptors)))
        deque(map(os.close, numbers), maxlen=0)

    def __del__(self, is_ending: Callable[[], bool] = sys.is_finalizing) -> None:
        # During interpreter shutdown the module's globals may be gone.
        if self.descriptors and not is_ending():
            # Other code has closed one. An error in a destructor would only be printed.
            with contextlib.suppress(OSError):
                self.close_descriptors()
