"""The pytest fixture that fails a test which leaks shared memory.

May import :mod:`shmreduce.testing.guard` and pytest. A ``conftest.py`` loads it:
``pytest_plugins = ["shmreduce.testing.pytest_plugin"]``.
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
    """Return how many seconds to wait for other processes to release what they hold: 5.

    Override it if tests need more.
    """
    return 5.0


@pytest.fixture
def shmreduce_no_leaks(
    request: pytest.FixtureRequest, shmreduce_patience: float
) -> Iterator[None]:
    """Fail the test if it leaves blocks, messages, descriptors or segments behind.

    A test that failed is not checked, since its traceback keeps its objects.

    To guard all tests of a module:
    ``pytestmark = pytest.mark.usefixtures("shmreduce_no_leaks")``.
    """
    with no_leaks(request, shmreduce_patience):
        yield
