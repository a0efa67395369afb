"""The pytest fixture that fails a test which leaks shared memory.

May import :mod:`shmreduce.testing.leaks` and pytest. To be loaded by a
``conftest.py``: ``pytest_plugins = ["shmreduce.testing.pytest_plugin"]``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from shmreduce.testing.leaks import find_leaks, take_census

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
def shmreduce_no_leaks(shmreduce_patience: float) -> Iterator[None]:
    """Fail the test if it leaves blocks, messages, descriptors or segments behind.

    To guard all tests of a module:
    ``pytestmark = pytest.mark.usefixtures("shmreduce_no_leaks")``.
    """
    before = take_census()
    yield
    leaks = find_leaks(before, shmreduce_patience)
    if leaks:
        listed = "\n".join(f"  {leak}" for leak in leaks)
        pytest.fail(f"the test left shared memory behind:\n{listed}", pytrace=False)
