"""Keeps a pool's thread from its work while the test gives the pool tasks."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING

from tests.channels.channels import eventually
from tests.conftest import PATIENCE
from tests.pool.work import square

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shmreduce.pool import Pool


@contextlib.contextmanager
def held(pool: Pool, count: int) -> Iterator[None]:
    """Keep the pool's thread from its work until so many tasks have been given to the pool."""
    holding, ready = threading.Event(), threading.Event()

    def hold(_: object) -> None:
        holding.set()
        ready.wait(PATIENCE)

    pool.apply_async(square, (1,), callback=hold)
    assert holding.wait(PATIENCE)
    try:
        yield
        inbox = pool._supervisor._dispatcher._inbox
        eventually(lambda: inbox.qsize() == count)
    finally:
        ready.set()
