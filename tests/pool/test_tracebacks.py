"""The traceback of a task's error reaches the parent, or the error does without it."""

from __future__ import annotations

import errno
import os
import traceback
import warnings
from typing import TYPE_CHECKING, Any

import pytest

from shmreduce.tracebacks import formatted

if TYPE_CHECKING:
    from collections.abc import Callable


def raised() -> ValueError:
    try:
        raise ValueError("the task's own")
    except ValueError as error:
        return error


def told(error: BaseException) -> str:
    return formatted(error, error.__traceback__)


@pytest.fixture
def formatting(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], object]], None]:
    """Has something done whenever Python formats an exception."""
    original = traceback.format_exception

    def first(action: Callable[[], object]) -> None:
        def format_exception(*arguments: Any) -> list[str]:
            action()
            return original(*arguments)

        monkeypatch.setattr(traceback, "format_exception", format_exception)

    return first


def test_it_is_what_python_prints() -> None:
    """With the line that raised."""
    error = raised()
    assert told(error) == "".join(traceback.format_exception(error))
    assert 'raise ValueError("the task\'s own")' in told(error)


def test_a_warning_is_not_in_its_way(
    formatting: Callable[[Callable[[], object]], None],
) -> None:
    """As that of CPython 3.15 about frames of a child's main module, if it is an error."""
    formatting(lambda: warnings.warn("no __spec__.loader", DeprecationWarning, stacklevel=1))
    text = told(raised())
    assert text.startswith("Traceback")
    assert text.endswith("ValueError: the task's own\n")


def test_an_error_that_cannot_be_formatted_is_named(
    formatting: Callable[[Callable[[], object]], None],
) -> None:
    """For want of a descriptor, say, to import what formats it."""

    def lack_descriptors() -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    formatting(lack_descriptors)
    text = told(raised())
    assert text.startswith("ValueError, of which there is no traceback")
    assert os.strerror(errno.EMFILE) in text
