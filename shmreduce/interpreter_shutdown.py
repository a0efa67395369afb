"""The end of the interpreter: executors first do what was submitted, and then it goes on.

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
    """What is to be done when the main thread has come to its end."""

    def __init__(self) -> None:
        self.begin_anew()
        try:
            # As concurrent.futures has it called.
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
        """Let all executors do what was submitted, and their workers leave."""
        self.has_begun = True
        for reference in self.supervisors.valuerefs():
            _finish(reference)


_shutdown = _Shutdown()
renew_in_children(_shutdown.begin_anew)


def is_shutting_down() -> bool:
    """Whether the main thread has come to its end: workers get no new tasks."""
    return _shutdown.has_begun


def finish_at_shutdown(supervisor: Supervisor) -> None:
    """Have workers do what was submitted before the interpreter ends.

    Before functions of atexit are called, and in a child, before other children are
    waited for.
    """
    _shutdown.supervisors[id(supervisor)] = supervisor
    reference = weakref.ref(supervisor)
    util.Finalize(supervisor, _finish, args=(reference,), exitpriority=15)


def _finish(reference: Callable[[], Supervisor | None]) -> None:
    supervisor = reference()
    if supervisor is not None:
        supervisor.close()
        supervisor.join()
