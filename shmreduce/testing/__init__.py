"""Contract suites for reducers and strategies, and a guard against leaks.

May import the public names of :mod:`shmreduce`, :mod:`shmreduce.memory.inspection`
and pytest. Nothing else of the package imports it.

A plugin's tests derive from :class:`ReducerContract` or
:class:`StrategyContract` and say how to make what is to be tested. Its
``conftest.py`` may load the fixture ``shmreduce_no_leaks``::

    pytest_plugins = ["shmreduce.testing.pytest_plugin"]

``leaks``         what this process holds, before and after
``guard``         fails a test that leaves something behind
``processes``     a child process that answers questions, with bounded waits
``reducers``      the suite for reducers
``strategies``    the suite for sharing strategies
``pytest_plugin`` the fixture
"""

from __future__ import annotations

import pytest

# Before the modules are imported, so that pytest can rewrite their asserts.
pytest.register_assert_rewrite("shmreduce.testing.reducers", "shmreduce.testing.strategies")

from shmreduce.testing.leaks import Census, find_leaks, take_census  # noqa: E402
from shmreduce.testing.processes import OtherProcess  # noqa: E402
from shmreduce.testing.reducers import ReducerContract  # noqa: E402
from shmreduce.testing.strategies import StrategyContract  # noqa: E402

__all__ = [
    "Census",
    "OtherProcess",
    "ReducerContract",
    "StrategyContract",
    "find_leaks",
    "take_census",
]
