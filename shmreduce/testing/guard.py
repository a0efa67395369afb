"""Compares what the process holds before and after a test.

May import ``leaks`` of this package and pytest.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from shmreduce.testing.leaks import find_leaks, take_census

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["no_leaks"]


@contextmanager
def no_leaks(request: pytest.FixtureRequest, patience: float = 5.0) -> Iterator[None]:
    """Fail a test that leaves something behind, for use around a fixture's ``yield``.

    Parameters
    ----------
    request : pytest.FixtureRequest
        The test's request. If the test fails by itself, nothing is compared, since its
        traceback keeps the test's objects.
    patience : float
        Seconds to wait for other processes to release what they hold.
    """
    failed = request.session.testsfailed
    before = take_census()
    yield
    if request.session.testsfailed > failed:
        return
    # pytest keeps the values of fixtures that have ended here, until all have.
    getattr(request.node, "funcargs", {}).clear()
    leaks = find_leaks(before, patience)
    if leaks:
        listed = "\n".join(f"  {leak}" for leak in leaks)
        pytest.fail(f"the test left shared memory behind:\n{listed}", pytrace=False)
