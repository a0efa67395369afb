"""An open file descriptor with one owner, which can be given to a child process.

Imports nothing of shmreduce.
"""

from __future__ import annotations

import os
from multiprocessing import reduction
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Descriptor"]


class Descriptor:
    """Owns an open file descriptor and closes it when it is dropped.

    As part of the arguments of a process that is being started it reaches the
    child as a descriptor of the child's own, under every start method. Nothing
    else pickles it: descriptors mean nothing in a process that did not get
    them from the kernel.

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
        """Close it; doing so again changes nothing."""
        # Forgotten before it is closed: the number may be somebody else's at once.
        number, self._number = self._number, None
        if number is not None:
            os.close(number)

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        # Also for an object whose __init__ failed, and while the interpreter ends:
        # the globals of this module may be gone by then, defaults are not.
        number = self.__dict__.pop("_number", None)
        if number is not None:
            close(number)

    def __reduce__(self) -> tuple[Any, ...]:
        # Raises where no process is being started, as for any resource of multiprocessing.
        return _received, (reduction.DupFd(self.fileno()),)


def _received(duplicate: Any) -> Descriptor:
    number = duplicate.detach()
    # A spawned child inherits it over exec; its own children shall not.
    os.set_inheritable(number, False)
    return Descriptor(number)
