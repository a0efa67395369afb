"""Prints warnings of shmreduce as lines on standard error.

May import errors.
"""

from __future__ import annotations

import sys
import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING

from shmreduce.errors import ShmreduceWarning

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["warnings_told"]


@contextmanager
def warnings_told(command: str) -> Iterator[list[str]]:
    """At the end of the block, print each warning that was given in it, once and in one line.

    Yields
    ------
    list of str
        The printed warnings, which are added after the block has ended.
    """
    told: list[str] = []
    caught: list[warnings.WarningMessage] = []
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", ShmreduceWarning)
            yield told
    finally:
        _tell(command, caught, told)


def _tell(command: str, caught: list[warnings.WarningMessage], told: list[str]) -> None:
    for warning in caught:
        if not issubclass(warning.category, ShmreduceWarning):
            warnings.showwarning(
                warning.message, warning.category, warning.filename, warning.lineno
            )
        elif str(warning.message) not in told:
            told.append(str(warning.message))
            print(f"shmreduce {command}: {warning.message}", file=sys.stderr)
