"""Which arrays are small enough to be pickled, in which channel."""

from __future__ import annotations

import multiprocessing
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import shmreduce

if TYPE_CHECKING:
    from collections.abc import Callable

KIBIBYTE = 1024
PIPES = pytest.mark.parametrize(
    ("make_pipe", "default"),
    [(multiprocessing.Pipe, 60 * KIBIBYTE), (shmreduce.Pipe, 80 * KIBIBYTE)],
    ids=["standard library", "shmreduce"],
)

pytestmark = pytest.mark.usefixtures("shmreduce_no_leaks")


def travels_in_block(make_pipe: Callable[[], tuple[Any, Any]], nbytes: int) -> bool:
    """Send an array to this very process, and return whether it lies in a block."""
    here, there = make_pipe()
    with here, there:
        here.send(np.ones(nbytes, np.uint8))
        received = there.recv()
    assert (received == 1).all()
    bottom = received
    while isinstance(bottom, np.ndarray) and bottom.base is not None:
        bottom = bottom.base
    return isinstance(bottom, memoryview) and shmreduce.find_block(bottom) is not None


@PIPES
def test_the_default_is_less_where_a_pipe_holds_64_kib(make_pipe: Any, default: int) -> None:
    """60 KiB in the standard library's channels, 80 KiB in those of shmreduce."""
    with shmreduce.install():
        assert not travels_in_block(make_pipe, default - 1)
        assert travels_in_block(make_pipe, default)


@PIPES
@pytest.mark.parametrize("limit", [40 * KIBIBYTE, 100 * KIBIBYTE])
def test_a_limit_that_is_set_counts_for_both(make_pipe: Any, default: int, limit: int) -> None:
    """Whether it is lower than the defaults or higher."""
    assert limit != default
    with shmreduce.install(inline_limit=limit):
        assert not travels_in_block(make_pipe, limit - 1)
        assert travels_in_block(make_pipe, limit)
