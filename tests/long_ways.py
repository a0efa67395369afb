"""Which messages take the long way, and what a message needs for the short one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shmreduce import packets
from shmreduce.memory.runtime import current

if TYPE_CHECKING:
    import pytest

__all__ = ["list_slots", "note_long_ways"]

_MANY = 64
"""More than a test sends messages."""


def list_slots() -> None:
    """List free lease slots in the segments of this process.

    A message takes the long way if none is listed, which happens once in some five hundred
    messages. Tests before may have used up nearly all of them.
    """
    for segment in current().attachments.segments():
        if segment.owner and len(segment._free_slots) < _MANY:
            segment._find_slots()


def note_long_ways(monkeypatch: pytest.MonkeyPatch) -> list[type]:
    """Return a list that gets the type of each object that is pickled in parts from now on.

    Free slots are listed, so that no message is pickled for want of one.
    """
    list_slots()
    seen: list[type] = []
    dump_parts: Any = vars(packets)["dump_parts"]

    def note(obj: Any, *others: Any) -> Any:
        seen.append(type(obj))
        return dump_parts(obj, *others)

    monkeypatch.setattr(packets, "dump_parts", note)
    return seen
