"""What the tests of the memory layer share."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

import pytest

import shmreduce
from shmreduce.memory import runtime
from tests.memory.own_heaps import forget_heaps

if TYPE_CHECKING:
    from collections.abc import Iterator

STRATEGIES = ("file_descriptor", "file_system")


@pytest.fixture(autouse=True)
def _nothing_is_there() -> None:
    """Give up what tests elsewhere have pickled and never loaded: blocks are counted here."""
    gc.collect()
    for segment in list(runtime.current().directory.values()):
        segment.give_up(0.0)


@pytest.fixture(autouse=True)
def _own_heaps_are_forgotten() -> Iterator[None]:
    """Leave the whole budget to the next test."""
    yield
    forget_heaps()


@pytest.fixture(autouse=True)
def _nothing_is_left(_nothing_is_there: None, shmreduce_no_leaks: None) -> None:
    """Fail every test of this folder that leaves a block, message or file."""


@pytest.fixture
def shmreduce_patience() -> float:
    """Killed processes and forked children take a moment to be noticed."""
    return 10.0


@pytest.fixture
def installed(shmreduce_no_leaks: None) -> Iterator[None]:
    """Arrays of 4 KiB and more travel by shared memory, with the default strategy."""
    with shmreduce.install(inline_limit=4096):
        yield


@pytest.fixture(params=STRATEGIES)
def strategy(request: pytest.FixtureRequest, shmreduce_no_leaks: None) -> Iterator[str]:
    """As ``installed``, with each strategy."""
    with shmreduce.install(strategy=request.param, inline_limit=4096):
        yield request.param
