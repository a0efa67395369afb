"""How a parent notices the end of a child process, and what it can tell about it.

May import :mod:`shmreduce.descriptor`.
"""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING

from shmreduce.descriptor import Descriptor

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.process import BaseProcess

__all__ = ["Sentinel", "once_stored", "signal_name"]

_SECONDS_TO_STORE = 0.5
"""How long a thread may need between collecting an exit code and storing it."""
_PAUSE = 1e-3


class Sentinel:
    """A descriptor that becomes readable when a child process itself has ended.

    Parameters
    ----------
    process : multiprocessing.Process
        A process that has been started.
    """

    def __init__(self, process: BaseProcess) -> None:
        self._process = process
        self._pidfd = _open_pidfd(process)

    def fileno(self) -> int:
        """Return the descriptor to wait for. It is valid until this object is closed."""
        return self._process.sentinel if self._pidfd is None else self._pidfd.fileno()

    def close(self) -> None:
        """Close the descriptor, unless it is the sentinel of multiprocessing."""
        if self._pidfd is not None:
            self._pidfd.close()


def _open_pidfd(process: BaseProcess) -> Descriptor | None:
    """Return a pidfd of the process; None if its sentinel must be used.

    The sentinel of multiprocessing is a pipe. Processes that the child forks inherit it, so
    it becomes ready only when they have ended too. That is not so with a fork server, whose
    children do not inherit it. And no pidfd can be opened for a fork server's child, whose
    pid may belong to another process by now (pidfd_open(2)).
    """
    popen = getattr(process, "_popen", None)
    if getattr(popen, "method", None) not in {"fork", "spawn"} or process.pid is None:
        return None
    try:
        pidfd = os.pidfd_open(process.pid)
    except (AttributeError, OSError):
        # Not Linux, an old kernel or a sandbox: use the sentinel.
        return None
    return Descriptor(pidfd)


def signal_name(exit_code: int | None) -> str | None:
    """Return the name of the signal that killed a process; None if none did."""
    if exit_code is None or exit_code >= 0:
        return None
    try:
        return signal.Signals(-exit_code).name
    except ValueError:
        return f"<Unknown signal {-exit_code}>"


def once_stored(look: Callable[[], int | None]) -> int | None:
    """Return an exit code that another thread may have collected and not stored yet.

    An exit code can be collected once. :mod:`multiprocessing` does that wherever it starts a
    process or lists them, in any thread, and no lock keeps two from doing it at once.

    Parameters
    ----------
    look : callable
        Returns the exit code that is stored, or None.

    Returns
    -------
    int or None
        None if nobody has stored it after half a second.
    """
    end = time.monotonic() + _SECONDS_TO_STORE
    while (code := look()) is None and time.monotonic() < end:
        time.sleep(_PAUSE)
    return code
