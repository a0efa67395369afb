"""Calls prctl(2): names of threads, and a signal at the death of the parent.

May import :mod:`shmreduce.errors` only. Only Linux has this system call:
https://man7.org/linux/man-pages/man2/prctl.2.html
"""

from __future__ import annotations

import ctypes
import os
import sys

from shmreduce.errors import PlatformError

__all__ = ["LONGEST_NAME", "get_thread_name", "set_parent_death_signal", "set_thread_name"]

LONGEST_NAME = 15
"""Bytes that the kernel keeps of a thread's name."""
_SET_PARENT_DEATH_SIGNAL = 1
_SET_NAME = 15
_GET_NAME = 16
_NAME_SIZE = LONGEST_NAME + 1
"""Bytes of a name with its terminating zero."""


def set_thread_name(name: str) -> None:
    """Set the name of the calling thread that ``ps``, ``top`` and ``py-spy`` show.

    The name of the main thread is also that of the process. ``threading.Thread.name``
    does not change.

    Parameters
    ----------
    name : str
        The kernel keeps 15 bytes of it (prctl(2), ``PR_SET_NAME``). A character of which it
        would keep only some bytes is left out.

    Raises
    ------
    PlatformError
        On systems other than Linux.

    Examples
    --------
    >>> import shmreduce
    >>> before = shmreduce.get_thread_name()
    >>> shmreduce.set_thread_name("loader of images")
    >>> shmreduce.get_thread_name()
    'loader of image'
    >>> shmreduce.set_thread_name(before)
    """
    kept = os.fsencode(name)[:LONGEST_NAME].decode("utf-8", "ignore")
    buffer = ctypes.create_string_buffer(os.fsencode(kept), _NAME_SIZE)
    _prctl(_SET_NAME, ctypes.addressof(buffer))


def get_thread_name() -> str:
    """Return the name that the kernel has for the calling thread.

    Returns
    -------
    str
        At most 15 bytes long when encoded.

    Raises
    ------
    PlatformError
        If this is not Linux.

    Examples
    --------
    >>> import shmreduce
    >>> len(shmreduce.get_thread_name()) <= 15
    True
    """
    buffer = ctypes.create_string_buffer(_NAME_SIZE)
    _prctl(_GET_NAME, ctypes.addressof(buffer))
    return os.fsdecode(buffer.value)


def set_parent_death_signal(number: int) -> None:
    """Ask for a signal when the thread that made this process ends.

    Parameters
    ----------
    number : int
        The signal; 0 for none.

    Raises
    ------
    PlatformError
        If this is not Linux.
    """
    _prctl(_SET_PARENT_DEATH_SIGNAL, number)


def _prctl(option: int, argument: int) -> None:
    if sys.platform != "linux":
        raise PlatformError(
            "prctl() exists on Linux only: ask sys.platform before calling", missing="prctl"
        )
    function = ctypes.CDLL(None, use_errno=True).prctl
    function.argtypes = [ctypes.c_int, *[ctypes.c_ulong] * 4]
    function.restype = ctypes.c_int
    if function(option, argument, 0, 0, 0) < 0:
        error = ctypes.get_errno()
        raise PlatformError(
            f"prctl({option}) failed ({os.strerror(error)}): the system does not allow it to "
            "this process",
            missing=f"prctl({option})",
        )
