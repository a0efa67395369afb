"""Takes guards away on purpose, so that tests can see the harness notice."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.stress import breaking

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["BREAKS", "apply_break"]

BREAKS: dict[str, Callable[[], None]] = {**breaking.BREAKS}


def apply_break(name: str) -> None:
    """Break this process, once, unless the name is empty."""
    if name and name not in _broken:
        _broken.add(name)
        BREAKS[name]()


_broken: set[str] = set()
