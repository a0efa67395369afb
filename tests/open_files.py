"""What a process has opened, told apart from what others of its threads close meanwhile."""

from __future__ import annotations

import gc
from pathlib import Path

__all__ = ["OpenFile", "open_files"]

OpenFile = tuple[int, int, int]
"""Descriptor, device, inode."""


def open_files() -> set[OpenFile]:
    """Return the files that this process has open.

    Take an earlier answer from a later one for what is open in addition. Numbers alone
    do not tell: memory that tests before have left is given back when it has been idle
    for a while, by a thread, and its descriptors with it.
    """
    # What other tests have left in cycles is not to be closed in between.
    gc.collect()
    found = set()
    for entry in Path("/proc/self/fd").iterdir():
        try:
            status = entry.stat()
        except FileNotFoundError:
            # That of the listing itself, or closed since.
            continue
        found.add((int(entry.name), status.st_dev, status.st_ino))
    return found
