"""The pytest fixture that fails a test which leaks shared memory.

May import :mod:`shmreduce.testing.guard` and pytest. To be loaded by a
``conftest.py``: ``pytest_plugins = ["shmreduce.testing.pytest_plugin"]``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from shmreduce.testing.guard import no_leaks

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["shmreduce_no_leaks", "shmreduce_patience"]


@pytest.fixture
def shmreduce_patience() -> float:
    """Return the seconds that other processes get to give back what they hold: 5.

    To be overridden where tests need more.
    """
    return 5.0


@pytest.fixture
def shmreduce_no_leaks(
    request: pytest.FixtureRequest, shmreduce_patience: float
) -> Iterator[None]:
    """Fail the test if it leaves blocks, messages, descriptors or segments behind.

    A test that failed is not looked at: its traceback holds what it had.

    To guard all tests of a module:
    ``pytestmark = pytest.mark.usefixtures("shmreduce_no_leaks")``.
    """
    with no_leaks(request, shmreduce_patience):
        yield
