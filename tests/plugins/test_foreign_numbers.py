"""A locator whose descriptor number means another file by now."""

from __future__ import annotations

import fcntl
import os
from typing import TYPE_CHECKING

import pytest

from shmreduce.strategies import find_strategy
from tests.memory.waiting import in_forked_child, wait_for_exit

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("name", ["file_descriptor", "file_system"])
def test_a_process_keeps_its_locks_of_another_file(name: str, tmp_path: Path) -> None:
    """Which it would lose if it opened and closed the file, as a database that it writes to."""
    fd = os.open(tmp_path / "database", os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.lockf(fd, fcntl.LOCK_EX)
    with pytest.raises(FileNotFoundError):
        find_strategy(name).open(f"{os.getpid()}:{fd}" + (":" if name == "file_system" else ""))

    def is_locked() -> bool:
        # A forked child has none of its parent's record locks.
        with pytest.raises(BlockingIOError):
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True

    assert wait_for_exit(in_forked_child(is_locked)) == 0
    os.close(fd)


@pytest.mark.parametrize("name", ["file_descriptor", "file_system"])
def test_nothing_but_a_file_is_opened(name: str, tmp_path: Path) -> None:
    """To open a device may do something."""
    path = tmp_path / "shmreduce-pipe"
    os.mkfifo(path)
    fd = os.open(path, os.O_RDWR)
    with pytest.raises(FileNotFoundError):
        find_strategy(name).open(f"{os.getpid()}:{fd}" + (":" if name == "file_system" else ""))
    os.close(fd)
