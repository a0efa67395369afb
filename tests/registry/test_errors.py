"""Errors keep what they carry on their way to another process."""

from __future__ import annotations

import pickle
import threading
from typing import Any

import pytest

import shmreduce
from shmreduce import errors

ERRORS = [getattr(errors, name) for name in errors.__all__ if name != "ShmreduceWarning"]


def make(kind: type[errors.ShmreduceError]) -> errors.ShmreduceError:
    """Return an error of a kind, with fields."""
    if issubclass(kind, errors.ProcessException):
        fields: dict[str, Any] = {"exit_code": -9, "signal_name": "SIGKILL"}
        return kind("what happened", 3, 4321, **fields)
    return kind("what happened", reason="none", requested=4096)


@pytest.mark.parametrize("kind", ERRORS)
@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_errors_survive_pickling(kind: type[errors.ShmreduceError], protocol: int) -> None:
    """Class, message, fields and notes arrive, as those of Python's own exceptions do."""
    error = make(kind)
    error.add_note("in the third image")
    arrived = pickle.loads(pickle.dumps(error, protocol))
    assert type(arrived) is kind
    assert str(arrived) == arrived.message == "what happened"
    assert arrived.fields == error.fields
    assert arrived.__notes__ == ["in the third image"]


@pytest.mark.parametrize("kind", ERRORS)
def test_an_error_without_notes_gets_none(kind: type[errors.ShmreduceError]) -> None:
    """Where nobody has added a note there is no list of them afterwards, either."""
    assert not hasattr(pickle.loads(pickle.dumps(make(kind))), "__notes__")


def test_an_error_about_what_cannot_be_pickled_survives() -> None:
    """A wrong argument may be anything: it arrives as text, and all else as it is."""
    wrong = threading.Lock()
    with pytest.raises(errors.ConfigurationError) as caught:
        shmreduce.Settings(strategy=wrong)  # type: ignore[arg-type]
    assert caught.value.value is wrong
    arrived = pickle.loads(pickle.dumps(caught.value))
    assert str(arrived) == str(caught.value)
    assert arrived.fields == {"setting": "strategy", "value": repr(wrong)}
