"""The result of one check of the doctor.

May import the standard library only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["Finding", "Verdict"]

Verdict = Literal["ok", "warning", "problem"]
"""``ok``: nothing to do. ``warning``: works, but not always. ``problem``: does not work."""


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Parameters
    ----------
    name : str
        What was checked.
    verdict : {"ok", "warning", "problem"}
        Whether something must be done.
    value : str
        What was found.
    remedy : str
        What to do about it; empty if nothing need be done.
    """

    name: str
    verdict: Verdict
    value: str
    remedy: str = ""
