"""The child process that answers a test's questions."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from shmreduce.testing import OtherProcess
from tests.conftest import START_METHODS

SOON = 0.3


def _wait() -> None:
    threading.Event().wait(60.0)


@pytest.mark.parametrize("method", START_METHODS)
def test_it_answers_or_raises(method: str) -> None:
    """One question after another."""
    with OtherProcess(method) as other:
        assert other.ask(os.getpid) == other.process.pid
        with pytest.raises(ZeroDivisionError):
            other.ask(divmod, 1, 0)
        assert other.ask(divmod, 7, 2) == (3, 1)


def test_a_late_answer_is_not_taken_for_the_next() -> None:
    """A child that has not answered in time is killed; further questions say that it is dead."""
    with OtherProcess("fork") as other:
        assert other.ask(os.getpid) == other.process.pid
        other._patience = SOON
        with pytest.raises(pytest.fail.Exception, match=r"within 0\.3 s, and was killed"):
            other.ask(_wait)
        assert other.process.exitcode == -signal.SIGKILL
        for _ in range(2):
            with pytest.raises(pytest.fail.Exception, match="died with exit code -9"):
                other.ask(os.getpid)


def test_a_death_is_told() -> None:
    """With the exit code."""
    with (
        OtherProcess("fork") as other,
        pytest.raises(pytest.fail.Exception, match="died with exit code 5"),
    ):
        other.ask(os._exit, 5)
