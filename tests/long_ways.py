"""Which messages are pickled, instead of taking the shorter way of one buffer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shmreduce import packets

if TYPE_CHECKING:
    import pytest

__all__ = ["note_long_ways"]


def note_long_ways(monkeypatch: pytest.MonkeyPatch) -> list[type]:
    """Return a list that gets the type of each object that is pickled from now on."""
    seen: list[type] = []
    dumps: Any = vars(packets)["dumps"]

    def note(obj: Any, *others: Any) -> Any:
        seen.append(type(obj))
        return dumps(obj, *others)

    monkeypatch.setattr(packets, "dumps", note)
    return seen
