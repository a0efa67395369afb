"""An open file descriptor with one owner, which can be given to a child process.

Imports nothing of shmreduce.
"""

from __future__ import annotations

import os
from multiprocessing import reduction
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Descriptor", "take_over"]


class Descriptor:
    """Owns an open file descriptor and closes it when it is dropped.

    It can be passed to a child process as an argument, under every start method; the
    child gets its own copy of the descriptor. It cannot be pickled otherwise: the number
    means nothing in a process that did not get the descriptor from the kernel.

    Parameters
    ----------
    number : int
        The descriptor; it belongs to this object afterwards.
    """

    def __init__(self, number: int) -> None:
        self._number: int | None = number

    def fileno(self) -> int:
        """Return the number; ValueError if it is closed."""
        if self._number is None:
            raise ValueError("the descriptor is closed")
        return self._number

    @property
    def closed(self) -> bool:
        """Whether it is closed."""
        return self._number is None

    def close(self) -> None:
        """Close it; do nothing if it is closed."""
        # Forgotten before it is closed, since the number may be reused at once.
        number, self._number = self._number, None
        if number is not None:
            os.close(number)

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        # pop() with a default, since __init__ may have failed. `close` is a default argument
        # because globals may be gone during interpreter shutdown.
        number = self.__dict__.pop("_number", None)
        if number is not None:
            close(number)

    def __reduce__(self) -> tuple[Any, ...]:
        # DupFd() raises if no process is being started, as for locks of multiprocessing.
        return _received, (reduction.DupFd(self.fileno()),)


def _received(duplicate: Any) -> Descriptor:
    return Descriptor(take_over(duplicate))


def take_over(duplicate: Any) -> int:
    """Return the descriptor that came as a :func:`reduction.DupFd`; the caller owns it."""
    number: int = duplicate.detach()
    # A spawned child inherits it over exec; the child's own children must not.
    os.set_inheritable(number, False)
    return number
