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
    "fresh 8 MiB: shmreduce / one copy": (
        "Beside the copy stand two wake-ups and the interpreter's work for a message, 0.4 ms on "
        "a machine that was idle. Needed: that work compiled."
    ),
    "shared *: shmreduce / ten bytes": (
        "The bare pipe is a loop whose two processes may stay on one processor. Ours is two "
        "wake-ups, and some 0.1 ms of interpreter for handle, lease and array. Needed: that work "
        "compiled."
    ),
    "born *: shmreduce born shared / ten bytes": (
        "As for shared arrays. Beyond that, the pages are mapped anew on both sides for each "
        "message. Needed: mappings that are kept."
    ),
    "fresh 1 MiB: *torch*": (
        "Two wake-ups and the interpreter's work for a message, 0.4 ms, decide at this size. "
        "Needed: that work compiled."
    ),
    "fresh *: *torch*": (
        "One copy alone takes more than a tenth of torch's whole time on this machine. Ours "
        "from 64 MiB on takes no longer than one copy by one thread."
    ),
    "shared *: best of torch / shmreduce": (
        "torch's file_system strategy sends a name in as many wake-ups, and takes as long. "
        "Needed: our work compiled."
    ),
    "first-use 1 MiB*": (
        "A new process imports the reducer for its first array, and makes and maps a segment. "
        "When this was measured it imported numpy.ma, too, which it no longer does."
    ),
    "results 64 MiB filled: *": (
        "The workers write 64 MiB each; `bare` is the same without, and takes less than half."
    ),
    "live arrays: descriptors of a process": (
        "Channels of shmreduce keep a third descriptor of each segment, the one that travels. "
        "After install() there are two of each, 27 in all."
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
