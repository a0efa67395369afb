"""What a case of the verification finds.

May import the standard library only.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Case", "Outcome", "Scale", "SkippedCaseError", "UnexpectedResultError", "expect"]


class UnexpectedResultError(Exception):
    """Something is not as the plugin relies on."""


class SkippedCaseError(Exception):
    """The case cannot be made here; the text says what is missing."""


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
        Of what may go wrong now and then.
    sends : int
        Of what must not leave anything.
    messages : int
        Whose times are taken.
    largest : int
        Bytes of the largest array.
    busy : int
        Bytes that a stream writes again and again, to be at work for some time.
    """

    trials: int = 1000
    sends: int = 10_000
    messages: int = 200
    largest: int = 1 << 30
    busy: int = 256 << 20


@dataclass(frozen=True)
class Case:
    """One thing to be verified.

    Parameters
    ----------
    name : str
        By which it is called.
    about : str
        What must be so, in one sentence.
    run : callable
        Takes a scale; returns figures.
    timeout : float
        Seconds after which it has failed.
    """

    name: str
    about: str
    run: Callable[[Scale], dict[str, Any]]
    timeout: float = 60.0


@dataclass(frozen=True)
class Outcome:
    """What a case found.

    Parameters
    ----------
    name, about : str
        As of the case.
    status : {"passed", "failed", "skipped"}
        How it went.
    detail : str
        Why it failed or was skipped; empty if it passed.
    figures : dict
        What was measured or seen.
    seconds : float
        How long it took.
    """

    name: str
    about: str
    status: str
    detail: str = ""
    figures: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
