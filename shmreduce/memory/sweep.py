"""Removes the names of segments whose owners were killed.

May import contracts, errors, signals, ``locks``, ``mapping``, ``layout`` and ``segment_file``.

Only strategies with names need this; the kernel frees a segment without a name. A process
sweeps before it makes a segment, and when it ends normally. So leftovers do not pile up, and
users need not ask for it.
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
"""A file without a header counts as left only after this time: its maker may be writing it."""
_SEGMENT_MODE = 0o600
"""Permission bits. If a strategy uses others, its unfinished files are left behind, no more."""


def sweep(strategy: SharingStrategy) -> list[str]:
    """Remove the names of this strategy that killed owners left; return the removed names.

    Processes that have such a segment open can still use it. A name that this process may not
    remove is left: another process's leftovers must not make this one fail.
    """
    try:
        names = names_of(strategy)
    except OSError as error:
        if not is_from_system(error):
            raise
        # For example, no descriptor is free. The next process that sweeps will do it. What
        # this process is about to do may not need a descriptor.
        return []
    return [name for name in names if abandoned(name) and _remove(strategy, name)]


def names_of(strategy: SharingStrategy) -> list[str]:
    """Return the names that a strategy lists.

    Raises
    ------
    OSError
        If the system refuses to list them.
    PluginError
        If the strategy raises another error, or lists something that is not a name. The
        caller has asked for something else, so the error says which strategy it is.
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
    """Return whether the owner of the named segment, and every fork of it, is dead."""
    try:
        fd = os.open(name, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
    except OSError as error:
        if not is_from_system(error):
            raise
        # It was removed meanwhile.
        return False
    try:
        # The owner locks its byte before it writes the header.
        if locks.first_locked(fd, LOCK_OWNER) is not None:
            return False
        check_file(fd, None)
    except InvalidHandleError:
        # Its maker was killed, or has not finished it. If the maker was only stopped, it just
        # loses the name: the locators lead to its descriptor, too.
        return _is_unfinished(fd) and time.time() - os.fstat(fd).st_mtime > _UNFINISHED_SECONDS
    except (OSError, ShmreduceError):
        return False
    finally:
        os.close(fd)
    return True


def _is_unfinished(fd: int) -> bool:
    """Return whether a file without a whole header may be an unfinished segment.

    A strategy may list other files, such as a file of the user that happens to have such a
    name; they must not be removed. A segment's file has whole pages or is still empty, and
    only its owner may access it.
    """
    status = os.fstat(fd)
    if status.st_size % PAGE_SIZE or stat.S_IMODE(status.st_mode) != _SEGMENT_MODE:
        return False
    start = os.pread(fd, PAGE_SIZE, 0)
    return start.startswith(MAGIC) or not start.strip(b"\0")
