"""What the kernel tells about other processes.

Imports nothing of shmreduce.

A killed process ends in steps: it closes its descriptors one after another, becomes a
zombie, and is gone when its parent has waited for it. So its lock may be free while another
descriptor is still open. See proc_pid_stat(5).
"""

from __future__ import annotations

import os

__all__ = ["is_alive", "is_closing", "is_hidden"]

_EXITING = 0x4
"""The flag of a thread that is ending (PF_EXITING in linux/sched.h)."""
_OVER = frozenset((b"Z", b"X"))


def is_alive(pid: int) -> bool:
    """Return whether a process lives: it is not gone, not a zombie, and not ending.

    kill(2) still finds a zombie, and a process that is about to become one.

    Examples
    --------
    >>> is_alive(os.getpid())
    True
    """
    found = _status(f"/proc/{pid}/stat")
    return found is not None and found[0] not in _OVER and not found[1] & _EXITING


def is_hidden(pid: int) -> bool:
    """Return whether a process lives that /proc does not show, so that nothing is known of it.

    It is another user's or not dumpable, and /proc is mounted with ``hidepid``; or this process
    has no /proc.

    Examples
    --------
    >>> is_hidden(os.getpid())
    False
    """
    if os.path.exists(f"/proc/{pid}"):
        return False
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        # Or a number that no process has.
        return False
    except PermissionError:
        # It is another user's.
        return True
    return True


def is_closing(pid: int) -> bool:
    """Return whether a process is ending and may still have files open.

    The threads share the files. The last thread closes them, and the first may be a zombie by
    then.

    Examples
    --------
    >>> is_closing(os.getpid())
    False
    """
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return False
    found = [_status(f"/proc/{pid}/task/{thread}/stat") for thread in threads]
    return any(
        status is not None and status[0] not in _OVER and status[1] & _EXITING for status in found
    )


def _status(path: str) -> tuple[bytes, int] | None:
    """Return the state and the flags of a process or thread, None if it is gone."""
    try:
        with open(path, "rb") as file:
            # The process's name, in parentheses, may contain anything.
            state, *numbers = file.read().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return state, int(numbers[5])
