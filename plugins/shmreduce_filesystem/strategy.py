"""Segments as named files in a memory file system.

May import public names of :mod:`shmreduce` only.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
import struct
import tempfile
from importlib.util import find_spec
from pathlib import Path

from shmreduce import (
    ForeignSegmentError,
    InvalidHandleError,
    SegmentFile,
    SharingStrategy,
    open_process_descriptor,
)

# Not every system has it: see unusable_reason().
with contextlib.suppress(ImportError):
    import fcntl

__all__ = ["FileSystemStrategy"]

_DIRECTORY_VARIABLE = "SHMREDUCE_DIRECTORY"
_SHARED_MEMORY_DIRECTORY = Path("/dev/shm")  # noqa: S108 (files are exclusive, 0600, unguessable)

_NAME = re.compile(r"shmreduce-([0-9]+)-([0-9]+)-([0-9a-f]{32})", re.ASCII)
_LOCATOR = re.compile(r"(?:([0-9]+):([0-9]+):)?(/[^\0]+)?", re.ASCII)


class FileSystemStrategy(SharingStrategy):
    """Files that every process of the same user can open by name.

    It is for processes that cannot look into each other's ``/proc/PID/fd``, and for
    systems without memfd. A segment is a file ``shmreduce-UID-PID-TOKEN`` with mode 0600.
    Its directory is the one that ``SHMREDUCE_DIRECTORY`` names; by default ``/dev/shm`` or,
    if that does not exist, the temporary directory. All processes of a family must use the
    same directory.

    Files of killed processes stay until the next process that uses the strategy, or
    ``shmreduce gc``, removes them. See
    `shm_overview(7) <https://man7.org/linux/man-pages/man7/shm_overview.7.html>`_.

    Examples
    --------
    >>> import os
    >>> strategy = FileSystemStrategy()
    >>> file = strategy.create(4096, token="0" * 32)
    >>> other = strategy.open(strategy.locator(file))
    >>> os.fstat(other.fd).st_size
    4096
    >>> strategy.unlink(file.name)
    >>> os.close(file.fd)
    >>> os.close(other.fd)
    """

    name = "file_system"

    def unusable_reason(self) -> str | None:
        """Return why named files do not work here, or None if they do.

        Makes one small file in the directory, locks it, and removes it.
        """
        if not hasattr(os, "geteuid") or not hasattr(os, "O_NOFOLLOW"):
            return "this system has no POSIX file ownership"
        if find_spec("fcntl") is None:
            return "this system has no fcntl"
        if not Path("/proc/self/fd").is_dir():
            return "/proc/self/fd is missing, which is needed to reopen files: mount /proc"
        directory = _directory()
        if not directory.is_absolute():
            return f"{_DIRECTORY_VARIABLE}={str(directory)!r} is not an absolute path"
        if not directory.is_dir():
            return f"{directory} is not a directory: set {_DIRECTORY_VARIABLE} to one that exists"
        try:
            refused = self._probe()
        except OSError as error:
            return (
                f"a trial file in {directory} failed: {error}. "
                f"Set {_DIRECTORY_VARIABLE} to a directory where this user may make files"
            )
        if refused is not None:
            return (
                f"a trial lock in {directory} failed: {refused}. Segments need open file "
                "description locks (fcntl F_OFD_SETLK)"
            )
        return None

    def create(self, size: int, token: str) -> SegmentFile:
        """Make a new file of ``size`` bytes; the caller owns its descriptor and its name.

        Parameters
        ----------
        size : int
            Bytes, a multiple of the page size. The file is sparse.
        token : str
            The unguessable part of the file's name.

        Raises
        ------
        OSError
            The system call's error. Neither a descriptor nor a file is left.
        """
        path = str(_directory() / f"shmreduce-{os.geteuid()}-{os.getpid()}-{token}")
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(path, flags, 0o600)
        try:
            # The umask may have cleared bits that the owner needs.
            os.fchmod(fd, 0o600)
            os.ftruncate(fd, size)
        except BaseException:
            os.close(fd)
            self.unlink(path)
            raise
        return SegmentFile(fd=fd, name=path)

    def locator(self, file: SegmentFile) -> str:
        """Return ``"PID:FD:PATH"``.

        The segment is opened by its path. If its name has been removed, it is opened through
        the calling process's descriptor. If this process does not know the name, the path
        is empty.
        """
        return f"{os.getpid()}:{file.fd}:{file.name or ''}"

    def open(self, locator: str) -> SegmentFile:
        """Open a segment by its path or, if that is gone, through its sender's descriptor.

        Parameters
        ----------
        locator : str
            A result of :meth:`locator`, or one of :meth:`names`.

        Raises
        ------
        InvalidHandleError
            If it is not the path of a segment in this process's directory.
        ForeignSegmentError
            If the file belongs to another user.
        OSError
            ``FileNotFoundError`` if the file is gone and no process holds it;
            ``PermissionError`` if it is not a private regular file.
        """
        holder, path = _parse(locator)
        try:
            fd = _open_path(path)
        except FileNotFoundError:
            if holder is None:
                raise
            return SegmentFile(fd=_open_of_process(*holder), name=path)
        try:
            _check_owner(fd, path or locator)
        except BaseException:
            os.close(fd)
            raise
        return SegmentFile(fd=fd, name=path)

    def unlink(self, name: str) -> None:
        """Remove a segment's file; do nothing if it has been removed already.

        Raises
        ------
        InvalidHandleError
            If ``name`` is not the path of a segment of this user. Nothing is removed then.
        """
        match = _NAME.fullmatch(Path(name).name)
        if match is None or int(match[1]) != os.geteuid():
            raise _not_a_segment(name, "it is not named like a segment of this user")
        Path(name).unlink(missing_ok=True)

    def names(self) -> list[str]:
        """List the paths of this user's segments, including those of dead processes.

        Raises
        ------
        OSError
            If the directory cannot be read.
        """
        mine = f"shmreduce-{os.geteuid()}-"
        with os.scandir(_directory()) as entries:
            return sorted(
                entry.path
                for entry in entries
                if entry.name.startswith(mine) and _NAME.fullmatch(entry.name)
            )

    def _probe(self) -> OSError | None:
        """Make a trial file; return why it cannot be locked, None if it can."""
        file = self.create(os.sysconf("SC_PAGE_SIZE"), os.urandom(16).hex())
        try:
            _lock_first_byte(file.fd)
        except OSError as error:
            return error
        finally:
            os.close(file.fd)
            if file.name is not None:
                self.unlink(file.name)
        return None


def _lock_first_byte(fd: int) -> None:
    # A Python that was built with a C library before glibc 2.20 has no name for it.
    command = getattr(fcntl, "F_OFD_SETLK", 37)
    # struct flock: l_type, l_whence, l_start, l_len, l_pid (0 for these locks).
    fcntl.fcntl(fd, command, struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 1, 0))


def _directory() -> Path:
    chosen = os.environ.get(_DIRECTORY_VARIABLE)
    if chosen:
        return Path(chosen)
    if _SHARED_MEMORY_DIRECTORY.is_dir():
        return _SHARED_MEMORY_DIRECTORY
    return Path(tempfile.gettempdir())


def _parse(locator: str) -> tuple[tuple[int, int] | None, str | None]:
    """Return process and descriptor, and path; either may be missing, not both."""
    match = _LOCATOR.fullmatch(locator)
    if match is None or not locator:
        raise _not_a_segment(locator, "it is not of the form PID:FD:PATH")
    holder = None if match[1] is None else (int(match[1]), int(match[2]))
    if match[3] is None:
        return holder, None
    path = Path(match[3])
    # A forged handle must not be able to choose which file this process opens.
    if path.parent != _directory():
        raise _not_a_segment(
            str(path),
            f"it is not in {_directory()}, the directory of this process "
            f"(set {_DIRECTORY_VARIABLE} to the same directory everywhere)",
        )
    if _NAME.fullmatch(path.name) is None:
        raise _not_a_segment(str(path), "it is not named like a segment")
    return holder, str(path)


def _open_path(path: str | None) -> int:
    if path is None:
        raise FileNotFoundError(errno.ENOENT, "the segment has no name")
    # O_NONBLOCK: if somebody has put a FIFO there, open() must not wait.
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    try:
        return os.open(path, flags)
    except PermissionError as error:
        owner = os.lstat(path).st_uid
        if owner == os.geteuid():
            raise
        raise _foreign(path, owner) from error


def _open_of_process(pid: int, number: int) -> int:
    fd = open_process_descriptor(pid, number, named="shmreduce-")
    try:
        _check_owner(fd, f"/proc/{pid}/fd/{number}")
    except PermissionError as error:
        os.close(fd)
        # The process has closed it and reused the number, or another process has its pid.
        raise FileNotFoundError(errno.ENOENT, "the number means another file now") from error
    except BaseException:
        os.close(fd)
        raise
    return fd


def _check_owner(fd: int, path: str) -> None:
    status = os.fstat(fd)
    if status.st_uid != os.geteuid():
        raise _foreign(path, status.st_uid)
    if not stat.S_ISREG(status.st_mode) or stat.S_IMODE(status.st_mode) & 0o077:
        raise PermissionError(
            errno.EPERM,
            "not a regular file that only its owner can open, so not made by shmreduce "
            f"({stat.filemode(status.st_mode)})",
            path,
        )


def _foreign(path: str, owner: int) -> ForeignSegmentError:
    return ForeignSegmentError(
        f"The segment {path} belongs to user {owner}, this process runs as user "
        f"{os.geteuid()}. Segments of other users are not trusted: run both "
        "processes as the same user.",
        segment=path,
        uid=owner,
        expected=os.geteuid(),
        locator=path,
        reason="other owner",
        errno=None,
    )


def _not_a_segment(name: str, reason: str) -> InvalidHandleError:
    return InvalidHandleError(
        f"{name!r} is not a segment of the file_system strategy: {reason}. "
        "The handle was damaged, or made by another strategy.",
        reason=reason,
    )
