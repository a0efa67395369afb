"""Files without a name, for small data that is not a segment.

May import errors, signals and ``standard_streams``.
"""

from __future__ import annotations

import errno
import os

from shmreduce.errors import SegmentError
from shmreduce.memory.standard_streams import clear_of_streams
from shmreduce.signals import is_from_system

__all__ = ["anonymous_file", "anonymous_zeros"]

_FORBIDDEN = frozenset((errno.ENOSYS, errno.EPERM, errno.EACCES, errno.EINVAL))
"""The errors by which sandboxes refuse a call."""


def anonymous_file(name: str) -> int:
    """Return a descriptor of a new, empty file. It is close-on-exec, and the caller owns it.

    The file is a memfd, which can be sealed, if that is possible: a sandbox may forbid the
    call, and a Python that was built for an old C library does not have it.

    Parameters
    ----------
    name : str
        The name that ``/proc/PID/fd`` shows.

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
    # Imported only here, since it imports a dozen modules, in each spawned child.
    import tempfile

    with tempfile.TemporaryFile(prefix=f"{name}-") as file:
        # Whatever the umask is: the file is opened again by way of /proc.
        os.fchmod(file.fileno(), 0o600)
        return clear_of_streams(os.dup(file.fileno()))


def anonymous_zeros(name: str, size: int) -> int:
    """Return a descriptor of a new file of ``size`` zero bytes, as :func:`anonymous_file` does.

    Parameters
    ----------
    name : str
        The name that ``/proc/PID/fd`` shows.
    size : int
        Number of bytes.

    Raises
    ------
    OSError
        If no descriptor is free.
    SegmentError
        If files may not be as large as that (``ulimit -f``), or the file system is full.
    """
    made = anonymous_file(name)
    try:
        os.ftruncate(made, size)
        if os.fstatvfs(made).f_blocks:
            # No memfd, but a file of a file system that may be full: to touch a page for which
            # there is no room would kill the process.
            os.posix_fallocate(made, 0, size)
    except BaseException as error:
        os.close(made)
        if isinstance(error, OSError) and is_from_system(error):
            raise SegmentError(
                f"an anonymous file of {size} bytes ({name}) could not be made: {error}. If it "
                "is too large, raise the limit of file sizes (ulimit -f); if no space is left, "
                "set TMPDIR to a directory with room",
                operation="resize",
                errno=error.errno,
                segment=name,
            ) from error
        raise
    return made
