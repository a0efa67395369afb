"""Fixtures for the tests of channels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

import shmreduce

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def ends(shmreduce_no_leaks: None) -> Iterator[tuple[Any, Any]]:
    """The reader and the writer of a pipe within this process."""
    reader, writer = shmreduce.Pipe(duplex=False)
    yield reader, writer
    reader.close()
    writer.close()
