"""What all tests of born arrays start from."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

import pytest

import shmreduce
from tests.born.allocator import handler_name, live_arrays, needs_allocator

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def allocator() -> Iterator[None]:
    """The compiled allocator; afterwards no array is left, and NumPy allocates by itself."""
    needs_allocator()
    before = live_arrays()
    yield
    gc.collect()
    assert live_arrays() <= before
    assert handler_name() == "default_allocator"


@pytest.fixture
def pipe() -> Iterator[tuple[Any, Any]]:
    """Both ends of a pipe of ours."""
    ends = shmreduce.Pipe()
    yield ends
    for end in ends:
        end.close()
