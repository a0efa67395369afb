"""Fixtures for processes that are started and joined as one."""

from __future__ import annotations

import multiprocessing
from multiprocessing.connection import Pipe
from typing import TYPE_CHECKING

import psutil
import pytest

from tests.conftest import PATIENCE, START_METHODS, descendants

if TYPE_CHECKING:
    from collections.abc import Iterator
    from multiprocessing.connection import Connection


@pytest.fixture(params=START_METHODS)
def method(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each start method; fails if a process survives the test."""
    yield request.param
    multiprocessing.active_children()
    survivors = [each.pid for each in descendants()]
    for pid in survivors:
        psutil.Process(pid).kill()
    assert not survivors, f"processes survived the test: {survivors}"


class Line:
    """A line from the processes of a test to the test.

    Attributes
    ----------
    writer : Connection
        For the processes; in the test it must be closed before :meth:`wait_until_all_gone`.
    """

    def __init__(self) -> None:
        self.reader: Connection
        self.writer: Connection
        self.reader, self.writer = Pipe(duplex=False)

    def receive(self) -> object:
        """Return what a process has sent."""
        assert self.reader.poll(PATIENCE), f"no word within {PATIENCE} s"
        return self.reader.recv()

    def wait_until_all_gone(self) -> None:
        """Wait until no process holds the writing end any more: until all have ended."""
        self.writer.close()
        assert self.reader.poll(PATIENCE), f"processes are still there after {PATIENCE} s"
        with pytest.raises(EOFError):
            self.reader.recv()


@pytest.fixture
def line() -> Iterator[Line]:
    """A line from processes to the test."""
    line = Line()
    yield line
    line.reader.close()
    line.writer.close()
