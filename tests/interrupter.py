"""A KeyboardInterrupt at a chosen instant."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

__all__ = ["HandlerInterrupter", "Interrupter", "interrupted_everywhere"]


class Interrupter:
    """Raises KeyboardInterrupt at the n-th instruction of some files, once; for ``sys.settrace``.

    Also in front of those where no signal handler ever runs, as between the way out of a
    ``with`` and the lock that it gives back: see :class:`HandlerInterrupter`.

    Parameters
    ----------
    when : int
        Which instruction, from 1 on.
    *where : str
        Parts of the files' paths.
    """

    def __init__(self, when: int, *where: str) -> None:
        self.left = when
        self.where = where
        self.fired = False

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Any:
        """Count, and raise."""
        code = frame.f_code
        if code.co_name == "__del__" or not any(part in code.co_filename for part in self.where):
            # What interrupts a finalizer is told of, and ends there.
            return None
        frame.f_trace_opcodes = True
        if event in ("opcode", "call"):
            self.left -= 1
            if self.left == 0:
                self.fired = True
                raise KeyboardInterrupt
        return self


class HandlerInterrupter:
    """Raises KeyboardInterrupt where CPython runs signal handlers; for ``sys.setprofile``.

    That is when a function of Python begins, or a generator goes on, and when a function in C
    or a constructor has returned. It is when a loop begins again, too, which is left out: there
    is a call in every loop that matters. And when a ``with`` has entered a lock, which is a call
    of its own since 3.14: no handler runs behind it before the block, except in 3.14, where
    :mod:`shmreduce.thread_locks` takes care of it.

    Parameters
    ----------
    when : int
        At which of these instants, from 1 on; once.
    *where : str
        Parts of the paths of the files whose functions are struck. Those of
        :mod:`contextlib` are, too.
    """

    def __init__(self, when: int, *where: str) -> None:
        self.left = when
        self.where = (contextlib.__file__, *where)
        self.fired = False

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        """Count, and raise."""
        code = frame.f_code
        if sys.version_info >= (3, 15) and getattr(argument, "__name__", "") == "__enter__":
            return
        if (
            event in ("call", "c_return") or (event == "return" and code.co_name == "__init__")
        ) and any(part in code.co_filename for part in self.where):
            self.left -= 1
            if self.left == 0:
                self.fired = True
                raise KeyboardInterrupt


def interrupted_everywhere(action: Callable[[], object], *where: str) -> Iterator[int]:
    """Call a function with an interrupt at each instant of some files where one can come.

    Yields the number of the instant after each call, while the exception is kept, and
    with its traceback every frame that was struck, as ``sys.last_value`` keeps them.
    """
    when = 1
    while True:
        kept: BaseException | None = None
        interrupter = HandlerInterrupter(when, *where)
        try:
            sys.setprofile(interrupter)
            action()
        except KeyboardInterrupt as error:
            kept = error
        finally:
            sys.setprofile(None)
        if not interrupter.fired:
            return
        assert kept is None or kept.__traceback__ is not None
        yield when
        when += 1
