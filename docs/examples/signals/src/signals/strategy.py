"""Segments as files in the user's runtime directory."""

from __future__ import annotations

import os
from pathlib import Path

from shmreduce import SegmentFile, SharingStrategy, open_process_descriptor


class RuntimeDirectoryStrategy(SharingStrategy):
    """Files in ``$XDG_RUNTIME_DIR``, which the system removes when the user logs out."""

    name = "runtime_directory"

    def unusable_reason(self) -> str | None:
        directory = os.environ.get("XDG_RUNTIME_DIR")
        if not directory:
            return "XDG_RUNTIME_DIR is not set: log in, or set it to a directory of yours"
        if not os.access(directory, os.W_OK | os.X_OK):
            return f"XDG_RUNTIME_DIR is {directory}, where files cannot be made"
        return None

    def create(self, size: int, token: str) -> SegmentFile:
        path = directory() / f"signals-{token}"
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.fchmod(fd, 0o600)  # whatever the umask
            os.ftruncate(fd, size)
        except BaseException:
            os.close(fd)
            path.unlink()
            raise
        return SegmentFile(fd, str(path))

    def locator(self, file: SegmentFile) -> str:
        # The name may be removed before the message is read. Then this
        # process's descriptor leads to the file.
        return f"{os.getpid()}:{file.fd}:{file.name or ''}"

    def open(self, locator: str) -> SegmentFile:
        pid, fd, name = locator.split(":", 2)
        # Only files of our own directory, whatever the message says.
        if name and Path(name).parent == directory():
            try:
                flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
                return SegmentFile(os.open(name, flags), name)
            except FileNotFoundError:
                pass
        return SegmentFile(open_process_descriptor(int(pid), int(fd)), name or None)

    def unlink(self, name: str) -> None:
        Path(name).unlink(missing_ok=True)

    def names(self) -> list[str]:
        if self.unusable_reason() is not None:
            return []
        return [str(path) for path in directory().glob("signals-" + 32 * "[0-9a-f]")]


def directory() -> Path:
    return Path(os.environ["XDG_RUNTIME_DIR"])
