"""Why a figure is not met, where that is known, and what would be needed.

May import the standard library only.
"""

from __future__ import annotations

from fnmatch import fnmatch

__all__ = ["REASONS", "reason_for"]

REASONS: dict[str, str] = {
    "shared * SharedMemory by hand": (
        "By hand, nothing but a name is sent: no receiver is counted, so nobody may ever free "
        "or reuse the memory. A lease is taken and ended here for each message."
    ),
    "born * SharedMemory by hand": (
        "By hand, the segment is made before and the same name is sent again and again. "
        "Here each message is a new array, and its memory comes back."
    ),
}
"""Patterns of what is told beside the figure: workload, row and quickest peer, or the
title of a target. The first that fits counts."""


def reason_for(*words: str) -> str:
    """Return the reason that fits, or an empty string.

    Examples
    --------
    >>> reason_for("shared", "1 MiB", "SharedMemory by hand").split(":")[0]
    'By hand, nothing but a name is sent'
    >>> reason_for("shared", "1 MiB", "torch")
    ''
    """
    text = " ".join(words)
    return next((reason for pattern, reason in REASONS.items() if fnmatch(text, pattern)), "")
