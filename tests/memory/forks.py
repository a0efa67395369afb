"""Objects that fork while they are pickled."""

from __future__ import annotations

import os
import warnings
from typing import TYPE_CHECKING, Any

from tests.memory.waiting import wait_for_exit

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Forks"]


class Forks:
    """Forks while it is pickled; the child goes on when it is told to, with a change first."""

    def __init__(self, change: Callable[[], None]) -> None:
        self.change = change
        self.child = 0
        self._go_on = os.pipe()

    def __reduce__(self) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            self.child = os.fork()
        if not self.child:
            os.read(self._go_on[0], 1)
            self.change()
        return str, ("forked",)

    def let_child_go_on(self) -> None:
        """Let it, and wait for its end."""
        os.write(self._go_on[1], b"x")
        assert wait_for_exit(self.child) == 0
        for end in self._go_on:
            os.close(end)
