"""What a check of the doctor says.

May import the standard library only.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

__all__ = ["Finding", "Machine", "Verdict"]

Verdict = Literal["ok", "warning", "problem"]
"""``ok``: nothing to do. ``warning``: works, but not always. ``problem``: does not work."""


@dataclass(frozen=True)
class Finding:
    """The answer of one check.

    Parameters
    ----------
    name : str
        What was looked at.
    verdict : {"ok", "warning", "problem"}
        How it is.
    value : str
        What was found.
    remedy : str
        What to do about it; empty if nothing need be done.
    """

    name: str
    verdict: Verdict
    value: str
    remedy: str = ""


class Machine:
    """The files in which the kernel tells about itself.

    Parameters
    ----------
    root : path
        Where the file system begins; tests put files of their own there.
    """

    def __init__(self, root: Path = Path("/")) -> None:
        self.root = root

    def path(self, name: str) -> Path:
        """Return where the file of this absolute name is."""
        return self.root / name.lstrip("/")

    def text(self, name: str) -> str | None:
        """Return a file's text, or None if it cannot be read."""
        try:
            return self.path(name).read_text(errors="replace").strip()
        except OSError:
            return None

    def number(self, name: str) -> int | None:
        """Return a file's number, or None if there is none (``max``, say)."""
        text = self.text(name)
        return int(text) if text is not None and text.isdigit() else None

    def field(self, name: str, key: str) -> str | None:
        """Return the text after ``key:`` in a file of such lines."""
        for line in (self.text(name) or "").splitlines():
            before, colon, after = line.partition(":")
            if colon and before == key:
                return after.strip()
        return None

    def memory(self, key: str) -> int | None:
        """Return a line of ``/proc/meminfo`` in bytes (proc_meminfo(5))."""
        text = self.field("/proc/meminfo", key)
        return None if text is None else int(text.split()[0]) * 1024
