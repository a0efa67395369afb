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
    """An array in a named segment, and the segment."""

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

    def close(self) -> None:
        self.array = None
        self.memory.close()
        if self.kept and self.ours:
            self.memory.unlink()


class _HandQueue:
    """Puts arrays into segments, and the segments' names into a queue."""

    def __init__(self, queue: Any) -> None:
        self._queue = queue
        # Segments that are sent repeatedly are opened only once.
        self._known: dict[str, _Held] = {}

    def __reduce__(self) -> Any:
        return _HandQueue, (self._queue,)

    def put(self, message: Any) -> None:
        import numpy as np

        array = message.array if isinstance(message, _Held) and not message.kept else message
        if isinstance(array, np.ndarray):
            held = _copy(array, kept=False)
            self._queue.put((held.memory.name, array.shape, array.dtype.str, False))
            held.close()
        elif isinstance(array, _Held) and array.array is not None:
            self._queue.put((array.memory.name, array.array.shape, array.array.dtype.str, True))
        else:
            self._queue.put(message)

    def get(self) -> Any:
        message = self._queue.get()
        # The suite's own orders are shorter tuples.
        if not isinstance(message, tuple) or len(message) != 4:
            return message
        name, shape, dtype, kept = message
        if kept and name in self._known:
            return self._known[name]
        held = _Held(SharedMemory(name=name), shape, dtype, kept=kept)
        if kept:
            for other in self._known.values():
                other.close()
            self._known = {name: held}
        else:
            # This process is its only user. The memory is kept until it is closed.
            held.memory.unlink()
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
        """Return the array, or a segment that has it."""
        return payload if kind == "fresh" else self.shared(payload)

    def shared(self, array: Any) -> Any:
        """Return a segment that is sent repeatedly."""
        return _copy(array, kept=True)

    def spread(self, array: Any) -> Any:
        """Copy the array once, and not for each receiver."""
        return self.shared(array)

    def payload(self, message: Any) -> Any:
        """Return the array."""
        return message.array

    def release(self, message: Any) -> None:
        """Close a received segment, unless it is sent repeatedly: its maker unlinks such a one."""
        if isinstance(message, _Held) and (message.ours or not message.kept):
            message.close()


def _copy(array: Any, *, kept: bool) -> _Held:
    memory = SharedMemory(create=True, size=array.nbytes)
    held = _Held(memory, array.shape, array.dtype, kept=kept, ours=True)
    if held.array is not None:
        held.array[:] = array
    return held
