"""The cases of the verification, and their results.

May import the standard library only.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Case", "Outcome", "Scale", "SkippedCaseError", "UnexpectedResultError", "expect"]


class UnexpectedResultError(Exception):
    """A fact that the plugin relies on is not true."""


class SkippedCaseError(Exception):
    """The case cannot be run here; the text says what is missing."""


def expect(condition: object, text: str) -> None:
    """Fail the case unless a condition holds."""
    if not condition:
        raise UnexpectedResultError(text)


@dataclass(frozen=True)
class Scale:
    """How much is done.

    Parameters
    ----------
    trials : int
        How often something is tried that may fail occasionally.
    sends : int
        How often something is sent that must leave nothing behind.
    messages : int
        How many messages are timed.
    largest : int
        Bytes of the largest array.
    busy : int
        Bytes that a stream writes repeatedly, so that it is busy for some time.
    """

    trials: int = 1000
    sends: int = 10_000
    messages: int = 200
    largest: int = 1 << 30
    busy: int = 256 << 20


@dataclass(frozen=True)
class Case:
    """One fact to be verified.

    Parameters
    ----------
    name : str
        Its name for ``--only``.
    about : str
        The fact, in one sentence.
    run : callable
        Checks it; takes a scale, and returns figures.
    timeout : float
        Seconds after which it has failed.
    """

    name: str
    about: str
    run: Callable[[Scale], dict[str, Any]]
    timeout: float = 60.0


@dataclass(frozen=True)
class Outcome:
    """The result of a case.

    Parameters
    ----------
    name, about : str
        Those of the case.
    status : {"passed", "failed", "skipped"}
        The result.
    detail : str
        Why it failed or was skipped; empty if it passed.
    figures : dict
        What was measured or observed.
    seconds : float
        How long it took.
    """

    name: str
    about: str
    status: str
    detail: str = ""
    figures: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
