"""Segments as sealed memfds, which other processes open through ``/proc/PID/fd``.

May import public names of :mod:`shmreduce` only.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import struct
from pathlib import Path

from shmreduce import InvalidHandleError, SegmentFile, SharingStrategy, open_process_descriptor

__all__ = ["FileDescriptorStrategy"]

_LOCATOR = re.compile(r"([0-9]+):([0-9]+)", re.ASCII)

# From Linux 6.3 on; Python has a name for it from 3.14 on. Implies MFD_ALLOW_SEALING.
_MFD_NOEXEC_SEAL = 0x0008


class FileDescriptorStrategy(SharingStrategy):
    """Anonymous memory: it has no name, so nothing can be left behind.

    A segment is a memfd, sealed so that nobody can shrink it while others read it. The
    kernel frees it with its last descriptor and mapping, even if processes are killed. Its
    size is not limited by that of ``/dev/shm``. See
    `memfd_create(2) <https://man7.org/linux/man-pages/man2/memfd_create.2.html>`_.

    A process can open the segment as long as a process that it may inspect
    (``/proc/PID/fd``, see proc_pid_fd(5)) has a descriptor of it.

    Examples
    --------
    >>> import os
    >>> strategy = FileDescriptorStrategy()
    >>> file = strategy.create(4096, token="0" * 32)
    >>> other = strategy.open(strategy.locator(file))
    >>> os.fstat(other.fd).st_size
    4096
    >>> os.close(file.fd)
    >>> os.close(other.fd)
    """

    name = "file_descriptor"

    def unusable_reason(self) -> str | None:
        """Return why memfds do not work here, or None if they do.

        It makes a small segment, opens it and locks it, since containers may forbid system
        calls that the kernel has.
        """
        if not hasattr(os, "memfd_create"):
            return (
                "this Python has no os.memfd_create: it needs Linux 3.17 or later, and a Python "
                "that was built with glibc 2.27 or later"
            )
        if not hasattr(fcntl, "F_OFD_SETLK"):
            return "this system has no open file description locks (fcntl F_OFD_SETLK)"
        if not Path("/proc/self/fd").is_dir():
            return "/proc/self/fd is missing: mount /proc"
        try:
            self._probe()
        except OSError as error:
            return f"a trial segment failed: {error}"
        return None

    def create(self, size: int, token: str) -> SegmentFile:
        """Make a sealed memfd of ``size`` bytes; the caller owns its descriptor.

        Parameters
        ----------
        size : int
            Bytes, a multiple of the page size.
        token : str
            Shown in ``/proc/PID/maps`` as part of ``memfd:shmreduce-TOKEN``.

        Raises
        ------
        OSError
            The system call's error. No descriptor is left open.
        """
        fd = _new_memfd(f"shmreduce-{token}")
        try:
            os.fchmod(fd, 0o600)
            os.ftruncate(fd, size)
            fcntl.fcntl(
                fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
            )
        except BaseException:
            os.close(fd)
            raise
        return SegmentFile(fd=fd, name=None)

    def locator(self, file: SegmentFile) -> str:
        """Return ``"PID:FD"`` of the calling process's descriptor.

        It is valid as long as the calling process keeps ``file.fd`` open.
        """
        return f"{os.getpid()}:{file.fd}"

    def open(self, locator: str) -> SegmentFile:
        """Open the memfd behind ``"PID:FD"``; the caller owns the new descriptor.

        Raises
        ------
        InvalidHandleError
            If ``locator`` was not made by :meth:`locator`.
        OSError
            ``FileNotFoundError`` if the process is gone or closed its
            descriptor.
        """
        match = _LOCATOR.fullmatch(locator)
        if match is None:
            reason = f"{locator!r} is not of the form PID:FD"
            raise InvalidHandleError(
                f"Cannot open a segment of the file_descriptor strategy: {reason}. "
                "The handle was damaged, or made by another strategy.",
                reason=reason,
            )
        fd = open_process_descriptor(int(match[1]), int(match[2]), named="shmreduce-")
        return SegmentFile(fd=fd, name=None)

    def _probe(self) -> None:
        made = self.create(os.sysconf("SC_PAGE_SIZE"), "trial")
        try:
            opened = self.open(self.locator(made))
        finally:
            os.close(made.fd)
        try:
            fcntl.fcntl(opened.fd, fcntl.F_OFD_SETLK, _write_lock_on_first_byte())
        finally:
            os.close(opened.fd)


def _new_memfd(name: str) -> int:
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        return os.memfd_create(name, flags | _MFD_NOEXEC_SEAL)
    except OSError as error:
        # EINVAL: the kernel does not know the flag. A kernel that knows it may require it
        # (vm.memfd_noexec=2).
        if error.errno != errno.EINVAL:
            raise
    return os.memfd_create(name, flags)


def _write_lock_on_first_byte() -> bytes:
    # struct flock: l_type, l_whence, l_start, l_len, l_pid (0 for OFD locks).
    return struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 1, 0)
