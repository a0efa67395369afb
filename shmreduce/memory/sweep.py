"""Removes the names of segments whose owners were killed.

May import contracts, errors, signals, ``locks``, ``mapping``, ``layout`` and ``segment_file``.

Only strategies with names need this: what has no name is freed by the kernel.
Whoever makes a segment, and whoever ends normally, sweeps first, so leftovers
do not pile up and nobody has to ask.
"""

from __future__ import annotations

import os
import stat
import time
from typing import TYPE_CHECKING

from shmreduce.errors import InvalidHandleError, ShmreduceError
from shmreduce.memory import locks
from shmreduce.memory.layout import LOCK_OWNER, MAGIC
from shmreduce.memory.mapping import PAGE_SIZE
from shmreduce.memory.segment_file import check_file, contract_broken
from shmreduce.signals import is_from_handler, is_from_system

if TYPE_CHECKING:
    from shmreduce.contracts import SharingStrategy

__all__ = ["abandoned", "names_of", "sweep"]

_UNFINISHED_SECONDS = 2.0
"""How old a file without a header must be to count as left: its maker may be about to write it."""
_SEGMENT_MODE = 0o600
"""Permission bits. Where a strategy gives others its file is left behind, no more."""


def sweep(strategy: SharingStrategy) -> list[str]:
    """Remove what killed owners left under this strategy; return the names.

    Whoever has such a segment open keeps it. A name that this process must not remove is
    left: what somebody else has not tidied up must not fail what is done here.
    """
    try:
        names = names_of(strategy)
    except OSError as error:
        if not is_from_system(error):
            raise
        # No descriptor is free, say: for the next who sweeps. What this process
        # is about to do may not need one.
        return []
    return [name for name in names if abandoned(name) and _remove(strategy, name)]


def names_of(strategy: SharingStrategy) -> list[str]:
    """Return the names that a strategy lists.

    Raises
    ------
    OSError
        If the system refuses to list them.
    PluginError
        If the strategy fails in another way, or lists what is no name: whoever asks has
        asked for something else, and is to be told which strategy it is.
    """
    try:
        names = list(strategy.names())
    except Exception as error:
        if isinstance(error, OSError) or is_from_handler(error):
            raise
        what = f"raised {type(error).__name__}: {error}"
        raise contract_broken(strategy, "names()", what) from error
    for name in names:
        if not isinstance(name, str):
            raise contract_broken(
                strategy, "names()", f"listed {name!r}: it must list absolute paths"
            )
    return names


def _remove(strategy: SharingStrategy, name: str) -> bool:
    try:
        strategy.unlink(name)
    except OSError as error:
        if not is_from_system(error):
            raise
        return False
    return True


def abandoned(name: str) -> bool:
    """Return whether the named segment's owner, and every fork of it, is dead."""
    try:
        fd = os.open(name, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
    except OSError as error:
        if not is_from_system(error):
            raise
        # Removed meanwhile.
        return False
    try:
        # The owner locks its byte before it writes the header.
        if locks.first_locked(fd, LOCK_OWNER) is not None:
            return False
        check_file(fd, None)
    except InvalidHandleError:
        # Killed while making it, or about to finish making it. One that was only
        # stopped loses the name, no more: its locators lead to its descriptor too.
        return _is_unfinished(fd) and time.time() - os.fstat(fd).st_mtime > _UNFINISHED_SECONDS
    except (OSError, ShmreduceError):
        return False
    finally:
        os.close(fd)
    return True


def _is_unfinished(fd: int) -> bool:
    """Return whether a file without a whole header can have been meant for a segment.

    A strategy may list what is none, such as a file of the user's that happens to have
    such a name: that is not to be removed. What a strategy makes has whole pages, or no
    size yet, and is its owner's alone.
    """
    status = os.fstat(fd)
    if status.st_size % PAGE_SIZE or stat.S_IMODE(status.st_mode) != _SEGMENT_MODE:
        return False
    start = os.pread(fd, PAGE_SIZE, 0)
    return start.startswith(MAGIC) or not start.strip(b"\0")
