"""What tests share that compile."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from shmreduce.building import compile_command
from shmreduce.compiled import ALLOCATOR, SLOTS
from shmreduce.errors import CompilationError

if TYPE_CHECKING:
    from shmreduce.compiled import Part

__all__ = ["needs_compiler", "needs_headers"]


def needs_compiler() -> None:
    """Skip the test where there is no C compiler."""
    _needs(ALLOCATOR)


def needs_headers() -> None:
    """Skip the test where modules of Python cannot be compiled."""
    _needs(SLOTS)


def _needs(part: Part) -> None:
    try:
        compile_command(part)
    except CompilationError as error:
        pytest.skip(str(error))
