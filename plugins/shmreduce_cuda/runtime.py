"""The state of this process: the arrays that it has sent and received.

May import public names of :mod:`shmreduce`, and ``events``, ``exports``,
``imports``, ``keeper`` and ``offers`` of this plugin.

A forked child starts with a fresh state. It keeps the state that it inherited, and never
uses it: dropping it would free arrays, but CUDA does not work in a forked child.
"""

from __future__ import annotations

import os
import secrets
import warnings
from multiprocessing import util
from pathlib import Path

from shmreduce import ShmreduceWarning
from shmreduce_cuda.events import Events
from shmreduce_cuda.exports import Exports
from shmreduce_cuda.imports import Imports
from shmreduce_cuda.keeper import Keeper
from shmreduce_cuda.offers import Offers

__all__ = ["Runtime", "current"]


class Runtime:
    """The state of one process."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.namespace = Path("/proc/self/ns/pid").stat().st_ino
        self.token = secrets.token_bytes(16)
        self.offers = Offers()
        self.exports = Exports(self.token, self.offers)
        self.events = Events()
        self.keeper = Keeper(self.token, self.offers, self._check)
        self.imports = Imports(self.keeper.attend)

    def collect(self) -> int:
        """Close and free what is not used any more; return how many sent arrays were freed."""
        self.imports.retry()
        self.imports.close_idle(0.0, patient=True)
        return self.exports.reclaim()

    def _check(self) -> bool:
        """Do so for what has been idle for a while; return whether something is left."""
        self.imports.settle()
        self.imports.close_idle()
        self.exports.reclaim()
        return bool(len(self.exports) or self.imports.unsettled)

    def leave(self) -> None:
        """Free what can be freed, at the end of the process."""
        self.keeper.stop()
        self.imports.close_idle(0.0)
        self.exports.reclaim()
        left = len(self.exports)
        if left:
            warnings.warn(
                f"{left} CUDA arrays that process {self.pid} has sent are in use, or unread, "
                "while it ends, and their memory ends with it. Let a sender live until its "
                "receivers are done",
                ShmreduceWarning,
                stacklevel=2,
            )

    def retire(self) -> None:
        """In a forked child, mark this inherited state as unusable."""
        self.imports.retired = True
        self.offers.forget()
        self.keeper.forget()


_current: Runtime | None = None
_inherited: list[Runtime] = []


def current() -> Runtime:
    """Return the state of this process."""
    global _current
    if _current is None:
        made = Runtime()
        # Another thread may have made one, whose token may be in messages already. There is
        # no call between these two lines, so the interpreter does not switch threads there.
        if _current is None:
            _current = made
            _finish_at_exit(_current)
            # In children that it forks, multiprocessing clears its finalizers after the hooks
            # of os.register_at_fork. A function registered here runs after that.
            util.register_after_fork(_leave, _finish_at_exit)
    return _current


def _finish_at_exit(_: object) -> None:
    # After the queues' feeder threads have flushed (-5), before the core ends (-100).
    util.Finalize(None, _leave, exitpriority=-90)


def _leave() -> None:
    if _current is not None and _current.pid == os.getpid():
        _current.leave()


def _before_fork() -> None:
    if _current is not None:
        _current.keeper.before_fork()


def _after_fork_in_parent() -> None:
    if _current is not None:
        _current.keeper.after_fork_in_parent()


def _after_fork_in_child() -> None:
    global _current
    if _current is not None:
        _current.retire()
        _inherited.append(_current)
        _current = None


os.register_at_fork(
    before=_before_fork,
    after_in_parent=_after_fork_in_parent,
    after_in_child=_after_fork_in_child,
)
