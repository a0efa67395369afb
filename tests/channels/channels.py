"""What the tests of channels share: contexts of shmreduce, and waiting with bounds."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

import shmreduce

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.conftest import Children

__all__ = ["PATIENCE", "context_of", "eventually", "within"]

PATIENCE = 30.0
"""Seconds that a test waits for anything before it fails."""


def context_of(children: Children) -> Any:
    """Return the context of shmreduce that goes with the fixture, and have it used there."""
    children.context = shmreduce.get_context(children.method)
    return children.context


def within(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return what a call returns that may block; fail if it does."""
    answers: list[Any] = []

    def run() -> None:
        try:
            answers.append((True, function(*arguments)))
        except BaseException as error:
            answers.append((False, error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    assert answers, f"{function} did not return within {PATIENCE} s"
    succeeded, answer = answers[0]
    if not succeeded:
        raise answer
    return answer


def eventually(holds: Callable[[], Any]) -> Any:
    """Wait until a condition holds; return what it returns."""
    deadline = time.monotonic() + PATIENCE
    while not (answer := holds()):
        assert time.monotonic() < deadline, f"{holds} did not hold within {PATIENCE} s"
        time.sleep(0.005)
    return answer
