"""What a sweep takes for the file of a maker that was killed before it was a segment."""

from __future__ import annotations

import os
import secrets
from typing import TYPE_CHECKING

import pytest

from shmreduce.memory.mapping import PAGE_SIZE
from shmreduce.memory.sweep import sweep
from shmreduce.strategies import find_strategy

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A directory for named segments that no other process uses."""
    monkeypatch.setenv("SHMREDUCE_DIRECTORY", str(tmp_path))
    return tmp_path


def old_zeros(directory: Path, size: int, mode: int) -> str:
    """Make a file of zeros that has a segment's name; return its path."""
    path = directory / f"shmreduce-{os.geteuid()}-1-{secrets.token_hex(16)}"
    path.write_bytes(bytes(size))
    path.chmod(mode)
    os.utime(path, (1, 1))
    return str(path)


@pytest.mark.parametrize("size", [0, PAGE_SIZE, 3 * PAGE_SIZE])
def test_what_a_strategy_had_just_made_is_removed(directory: Path, size: int) -> None:
    """A private file of zeros goes if it has no size yet or whole pages."""
    path = old_zeros(directory, size, 0o600)
    assert sweep(find_strategy("file_system")) == [path]


@pytest.mark.parametrize("size", [1, 300, PAGE_SIZE - 1, PAGE_SIZE + 1])
def test_a_file_without_whole_pages_stays(directory: Path, size: int) -> None:
    """No strategy makes a segment of such a size: it is somebody's own file."""
    old_zeros(directory, size, 0o600)
    assert sweep(find_strategy("file_system")) == []


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o700, 0o400, 0o1600])
@pytest.mark.parametrize("size", [0, PAGE_SIZE])
def test_a_file_that_is_not_private_stays(directory: Path, size: int, mode: int) -> None:
    """A segment is for its owner to read and to write: other modes are no segment's."""
    old_zeros(directory, size, mode)
    assert sweep(find_strategy("file_system")) == []
