"""One message through the pickler of multiprocessing, within one process."""

from __future__ import annotations

from multiprocessing.reduction import ForkingPickler
from typing import Any

__all__ = ["loads", "message_of", "round_trip"]


def message_of(obj: Any) -> bytes:
    """Return what would be sent."""
    return bytes(ForkingPickler.dumps(obj))


def loads(message: bytes) -> Any:
    """Return what would be received."""
    return ForkingPickler.loads(message)


def round_trip(obj: Any) -> Any:
    """Return an object as its receiver gets it."""
    return loads(message_of(obj))
