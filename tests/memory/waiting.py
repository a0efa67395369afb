"""Bounded waits for what other processes are about to do."""

from __future__ import annotations

import os
import signal
import time
import traceback
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection

__all__ = ["PATIENCE", "eventually", "in_forked_child", "receive", "wait_for_exit"]

PATIENCE = 30.0
"""Seconds after which a test fails instead of waiting on."""
_PAUSE = 0.002


def eventually(condition: Callable[[], object], what: str) -> None:
    """Look until a condition is true; fail the test if it does not become true."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > deadline:
            pytest.fail(f"not within {PATIENCE} s: {what}")
        time.sleep(_PAUSE)


def receive(connection: Connection) -> Any:
    """Return the next message of a connection, which must come in time."""
    if not connection.poll(PATIENCE):
        pytest.fail(f"no message within {PATIENCE} s")
    return connection.recv()


def wait_for_exit(pid: int) -> int:
    """Wait for a forked child and return its exit code, negative for a signal.

    One that does not end fails the test, and is killed.
    """
    status = 0

    def ended() -> bool:
        nonlocal status
        found, status = os.waitpid(pid, os.WNOHANG)
        return found == pid

    try:
        eventually(ended, f"end of child {pid}")
    except BaseException:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        raise
    return os.waitstatus_to_exitcode(status)


def in_forked_child(function: Callable[[], object]) -> int:
    """Call a function in a child made by ``os.fork``; return the child's pid.

    The child ends with 0 if the function returns something true, else with 1. If it raises,
    the child prints the traceback and ends with 2.
    """
    pid = os.fork()
    if pid:
        return pid
    try:
        os._exit(0 if function() else 1)
    except BaseException:
        # Not through sys.stderr, which pytest may have replaced by a file in memory.
        os.write(2, traceback.format_exc().encode())
    finally:
        os._exit(2)
