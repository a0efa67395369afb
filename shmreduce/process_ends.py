"""What a parent can know of the end of a child process.

May import :mod:`shmreduce.descriptor`.
"""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

from shmreduce.descriptor import Descriptor

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess

__all__ = ["Sentinel", "signal_name"]


class Sentinel:
    """What is ready when a child process itself has ended.

    Parameters
    ----------
    process : multiprocessing.Process
        Which has been started.
    """

    def __init__(self, process: BaseProcess) -> None:
        self._process = process
        self._pidfd = _open_pidfd(process)

    def fileno(self) -> int:
        """Return the descriptor to wait for, until this is closed."""
        return self._process.sentinel if self._pidfd is None else self._pidfd.fileno()

    def close(self) -> None:
        """Close what was opened for it; the sentinel of multiprocessing stays open."""
        if self._pidfd is not None:
            self._pidfd.close()


def _open_pidfd(process: BaseProcess) -> Descriptor | None:
    """Return what is ready when the process itself ends; None where there is none.

    The sentinel of multiprocessing is a pipe that is inherited by what the
    child forks, and so is ready only when all of that has ended too; except
    with a fork server, which gives it to no child. Of a fork server's child,
    too, the pid may be another process's by now (pidfd_open(2)).
    """
    popen = getattr(process, "_popen", None)
    if getattr(popen, "method", None) not in {"fork", "spawn"} or process.pid is None:
        return None
    try:
        pidfd = os.pidfd_open(process.pid)
    except (AttributeError, OSError):
        # Not Linux, an old kernel, a sandbox: the sentinel will do.
        return None
    return Descriptor(pidfd)


def signal_name(exit_code: int | None) -> str | None:
    """Return which signal killed a process, None if its exit code tells of none."""
    if exit_code is None or exit_code >= 0:
        return None
    try:
        return signal.Signals(-exit_code).name
    except ValueError:
        return f"<Unknown signal {-exit_code}>"
