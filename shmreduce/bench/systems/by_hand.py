"""``multiprocessing.shared_memory`` by hand, as the standard library's page on it shows.

May import ``base`` and ``channels``.
"""

from __future__ import annotations

from dataclasses import dataclass
from multiprocessing.shared_memory import SharedMemory
from typing import TYPE_CHECKING, Any, ClassVar

from shmreduce.bench.systems.channels import ChannelSystem

if TYPE_CHECKING:
    import numpy as np

    from shmreduce.bench.systems.base import Ability, Kind

__all__ = ["ByHand"]


class _Held:
    """An array in a named segment, and the segment.

    One that is ``kept`` is sent repeatedly, and its maker unlinks it. Others are unlinked by
    their last receiver.
    """

    def __init__(
        self, memory: SharedMemory, shape: Any, dtype: Any, *, kept: bool, ours: bool = False
    ) -> None:
        import numpy as np

        # Set before the segment, so that it is freed before it: a segment cannot be closed
        # while an array uses it.
        self.array: np.ndarray[Any, Any] | None = np.ndarray(shape, dtype, buffer=memory.buf)
        self.memory = memory
        self.kept = kept
        self.ours = ours
        self.label = (memory.name, shape, np.dtype(dtype).str, kept)

    def close(self) -> None:
        _OPEN.pop(self.memory.name, None)
        self.array = None
        self.memory.close()


_OPEN: dict[str, _Held] = {}
"""Segments of this process that it will get by name: those that it made and sent, until they
come back, and the one that it gets repeatedly. They are opened only once."""


class _HandQueue:
    """Puts arrays into segments, and the segments' names into a queue."""

    def __init__(self, queue: Any) -> None:
        self._queue = queue

    def __reduce__(self) -> Any:
        return _HandQueue, (self._queue,)

    def put(self, message: Any) -> None:
        import numpy as np

        if isinstance(message, np.ndarray):
            held = _copy(message, kept=False)
            self._queue.put(held.label)
            held.close()
        elif isinstance(message, _Held):
            self._queue.put(message.label)
            if message.ours and not message.kept:
                _OPEN[message.memory.name] = message
        else:
            self._queue.put(message)

    def get(self) -> Any:
        message = self._queue.get()
        # The suite's own orders are shorter tuples.
        if not isinstance(message, tuple) or len(message) != 4:
            return message
        name, shape, dtype, kept = message
        if name in _OPEN:
            return _OPEN[name]
        held = _Held(SharedMemory(name=name), shape, dtype, kept=kept)
        if kept:
            for other in [each for each in _OPEN.values() if each.kept]:
                other.close()
            _OPEN[name] = held
        return held


@dataclass(frozen=True)
class ByHand(ChannelSystem):
    """A segment for each array: made, filled, named in a queue, opened, closed, unlinked."""

    name: str = "SharedMemory by hand"

    abilities: ClassVar[frozenset[Ability]] = ChannelSystem.abilities
    kinds: ClassVar[frozenset[Kind]] = frozenset({"fresh", "shared", "born"})
    sends_objects: ClassVar[bool] = False

    def queue(self, room: int) -> Any:  # noqa: ARG002 - only names go through
        """Return a queue for names of segments."""
        return _HandQueue(self.context().SimpleQueue())

    def message(self, payload: Any, kind: Kind) -> Any:
        """Return the array, or a segment that has it: one for ever, or one for this message."""
        return payload if kind == "fresh" else _copy(payload, kept=kind == "shared")

    def shared(self, array: Any) -> Any:
        """Return a segment that is sent repeatedly."""
        return _copy(array, kept=True)

    def spread(self, array: Any) -> Any:
        """Copy the array once, and not for each receiver."""
        return self.shared(array)

    def payload(self, message: Any) -> Any:
        """Return the array."""
        return message.array

    def send_on(self, queue: Any, box: list[Any]) -> None:
        """Pass the name on, and close the segment, which the last receiver unlinks."""
        message = box.pop()
        queue.put(message)
        if not message.kept:
            message.close()

    def release(self, message: Any) -> None:
        """Close and unlink a segment, unless another process sends it repeatedly."""
        if isinstance(message, _Held) and (message.ours or not message.kept):
            message.close()
            message.memory.unlink()


def _copy(array: Any, *, kept: bool) -> _Held:
    memory = SharedMemory(create=True, size=array.nbytes)
    held = _Held(memory, array.shape, array.dtype, kept=kept, ours=True)
    if held.array is not None:
        held.array[:] = array
    return held
