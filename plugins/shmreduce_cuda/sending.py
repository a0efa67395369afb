"""The sending side of a message.

May import public names of :mod:`shmreduce`, and ``devices``, ``driver``, ``errors``,
``exports``, ``imports``, ``messages``, ``runtime`` and ``sources`` of this
plugin, and ``rebuild`` for the functions that messages name.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from shmreduce_cuda.devices import current_context, synchronise, uuid_of
from shmreduce_cuda.driver import get_driver
from shmreduce_cuda.errors import CudaMemoryError
from shmreduce_cuda.exports import synchronise_export
from shmreduce_cuda.messages import Description
from shmreduce_cuda.rebuild import rebuild_cuda_array, rebuild_empty_cuda_array
from shmreduce_cuda.runtime import current

if TYPE_CHECKING:
    from shmreduce import Block, Message
    from shmreduce_cuda.exports import Export
    from shmreduce_cuda.imports import Attachment
    from shmreduce_cuda.sources import Source

__all__ = ["Outgoing", "OwnArray", "prepare"]


class Outgoing(ABC):
    """An array that can be put into messages.

    Parameters
    ----------
    source : Source
        The array.
    """

    def __init__(self, source: Source) -> None:
        self.source = source

    @abstractmethod
    def wait(self) -> None:
        """Wait until the device has done the earlier work of this process."""

    @abstractmethod
    def record(self, stream: int) -> tuple[bytes, bytes] | None:
        """Return an event that occurs when a stream has done its earlier work.

        Returns None if receivers need not wait.
        """

    @abstractmethod
    def reduce(self, message: Message, event: tuple[bytes, bytes] | None) -> tuple[Any, ...]:
        """Return how to rebuild the array, with a lease for the message.

        Raises
        ------
        CudaForkError
            If this process was forked from the one that prepared the array.
        """


class EmptyArray(Outgoing):
    """An array without elements, and so without memory."""

    def wait(self) -> None:
        """Do nothing: nothing can write to it."""

    def record(self, stream: int) -> None:
        """Return None: nothing can write to it."""

    def reduce(self, message: Message, event: Any) -> tuple[Any, ...]:  # noqa: ARG002 - as above
        """Return how to rebuild the array."""
        source = self.source
        uuid = None if source.device is None else uuid_of(source.device)
        layout = tuple(source.layout)
        return rebuild_empty_cuda_array, (source.library, layout, source.extras, uuid)


class OwnArray(Outgoing):
    """An array in memory of this process."""

    def __init__(self, source: Source, export: Export) -> None:
        super().__init__(source)
        self.export = export

    def wait(self) -> None:
        """Wait for all streams of the device."""
        synchronise_export(self.export)

    def record(self, stream: int) -> tuple[bytes, bytes] | None:
        """Return an event of the stream."""
        runtime = current()
        handle = runtime.events.record(self.export.ordinal, stream)
        return None if handle is None else (runtime.token, handle)

    def reduce(self, message: Message, event: tuple[bytes, bytes] | None) -> tuple[Any, ...]:
        """Return how to rebuild the array."""
        # In a forked child the state is not the one that this export belongs to.
        get_driver()
        source, export, runtime = self.source, self.export, current()
        description = Description(
            runtime.token,
            runtime.pid,
            runtime.namespace,
            export.number,
            export.uuid,
            export.place,
            export.size,
            source.pointer - export.base,
            source.layout,
            source.read_only,
            source.library,
            source.extras,
            event,
        )
        return _with_lease(description, export.lease, message)


class ReceivedArray(Outgoing):
    """An array in memory of another process, which is forwarded.

    A receiver opens the memory of that process, and gets a lease of that process. So this
    process may end before the receiver is done.
    """

    def __init__(self, source: Source, attachment: Attachment) -> None:
        super().__init__(source)
        self.attachment = attachment

    def wait(self) -> None:
        """Wait for all streams of the device."""
        synchronise(self.attachment.mapping.ordinal)

    def record(self, stream: int) -> None:
        """Wait for the stream, and return None: an event would end with this process."""
        with current_context(self.attachment.mapping.ordinal) as driver:
            driver.call("cuStreamSynchronize", stream)

    def reduce(self, message: Message, event: tuple[bytes, bytes] | None) -> tuple[Any, ...]:
        """Return how to rebuild the array."""
        get_driver()
        source, attachment = self.source, self.attachment
        received = attachment.description
        description = received._replace(
            offset=source.pointer - attachment.mapping.base,
            layout=source.layout,
            read_only=source.read_only or received.read_only,
            library=source.library or received.library,
            extras=source.extras,
            event=event,
        )
        return _with_lease(description, attachment.lease, message)


def _with_lease(description: Description, lease: Block, message: Message) -> tuple[Any, ...]:
    return rebuild_cuda_array, (description.fields(), message.refer(lease, lease.nbytes))


def prepare(source: Source) -> Outgoing:
    """Return an object by which an array can be put into messages.

    The export of an :class:`OwnArray` is not live yet: after putting it into a message, the
    caller calls ``exports.hold``; or, if that fails, ``exports.discard``.

    Raises
    ------
    CudaMemoryError
        If its memory is of a kind that cannot be sent.
    """
    if not source.layout.nbytes:
        return EmptyArray(source)
    low, high = (source.pointer + offset for offset in source.layout.extent)
    runtime = current()
    mapping = runtime.imports.find_mapping(low)
    if mapping is None:
        return OwnArray(source, runtime.exports.make(source))
    attachment = runtime.imports.find_attachment(mapping, low, high)
    if attachment is not None:
        return ReceivedArray(source, attachment)
    raise CudaMemoryError(
        "an array in memory that was received from another process cannot be forwarded unless "
        "it lies within a single received array: copy it first",
        kind="memory of another process",
        remedy="copy it first",
    )
