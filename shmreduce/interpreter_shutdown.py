"""Interpreter shutdown: executors finish what was submitted before it goes on.

May import ``fork_hooks``, and ``pool_supervisor`` for types alone.
"""

from __future__ import annotations

import threading
import weakref
from multiprocessing import util
from typing import TYPE_CHECKING

from shmreduce.fork_hooks import renew_in_children

if TYPE_CHECKING:
    from collections.abc import Callable

    from shmreduce.pool_supervisor import Supervisor

__all__ = ["finish_at_shutdown", "is_shutting_down"]


class _Shutdown:
    """Finishes the executors when the main thread has ended."""

    def __init__(self) -> None:
        self.begin_anew()
        try:
            # A private function, which concurrent.futures uses for the same purpose.
            threading._register_atexit(self.run)  # type: ignore[attr-defined]
        except RuntimeError:
            self.has_begun = True

    def begin_anew(self) -> None:
        """Forget, in a forked child, the executors of its parent."""
        self.has_begun = False
        self.supervisors: weakref.WeakValueDictionary[int, Supervisor] = (
            weakref.WeakValueDictionary()
        )

    def run(self) -> None:
        """Wait until all executors have done what was submitted and their workers have left."""
        self.has_begun = True
        for reference in self.supervisors.valuerefs():
            _finish(reference)


_shutdown = _Shutdown()
renew_in_children(_shutdown.begin_anew)


def is_shutting_down() -> bool:
    """Return whether the main thread has ended, after which no calls can be submitted."""
    return _shutdown.has_begun


def finish_at_shutdown(supervisor: Supervisor) -> None:
    """Let workers finish what was submitted before the interpreter exits.

    That happens before the functions of :mod:`atexit` are called, and in a child process of
    multiprocessing before it waits for its own children.
    """
    _shutdown.supervisors[id(supervisor)] = supervisor
    reference = weakref.ref(supervisor)
    util.Finalize(supervisor, _finish, args=(reference,), exitpriority=15)


def _finish(reference: Callable[[], Supervisor | None]) -> None:
    supervisor = reference()
    if supervisor is not None:
        supervisor.close()
        supervisor.join()
