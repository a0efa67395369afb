"""Files without a name, for what is neither a segment nor large.

May import ``standard_streams``.
"""

from __future__ import annotations

import errno
import os

from shmreduce.memory.standard_streams import clear_of_streams

__all__ = ["anonymous_file"]

_FORBIDDEN = frozenset((errno.ENOSYS, errno.EPERM, errno.EACCES, errno.EINVAL))
"""What sandboxes answer to a call that they do not let through."""


def anonymous_file(name: str) -> int:
    """Return a descriptor of a new, empty file; the caller's, close-on-exec.

    A memfd, which can be sealed, where there are any: a sandbox may forbid the
    call, and Pythons that are built for old C libraries do not know it.

    Parameters
    ----------
    name : str
        Shown in ``/proc/PID/fd``.

    Raises
    ------
    OSError
        If no descriptor is free.
    """
    create = getattr(os, "memfd_create", None)
    if create is not None:
        try:
            made: int = create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        except OSError as error:
            if error.errno not in _FORBIDDEN:
                raise
        else:
            return clear_of_streams(made)
    # Where it is needed: it imports a dozen modules, in each child that is spawned.
    import tempfile

    with tempfile.TemporaryFile(prefix=f"{name}-") as file:
        return clear_of_streams(os.dup(file.fileno()))
