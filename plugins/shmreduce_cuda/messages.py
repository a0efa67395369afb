"""The description of an array in a message.

May import ``errors`` and ``layout`` of this plugin. Messages contain the fields in this
order, so ``VERSION`` must change with them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from shmreduce_cuda.errors import CudaMessageError
from shmreduce_cuda.layout import Layout

__all__ = ["VERSION", "Description", "Legacy", "Place", "Pooled", "Virtual", "read_description"]

VERSION = 2
"""Of the descriptions. One of another version is refused."""


class Legacy(NamedTuple):
    """Memory from ``cudaMalloc``: an IPC handle of its allocation."""

    handle: bytes

    @property
    def key(self) -> tuple[Any, ...]:
        """A key that identifies it among the memory of the same process and device."""
        return "legacy", self.handle


class Pooled(NamedTuple):
    """Memory of a pool: the offer with the pool's descriptor, and the exported pointer."""

    offer: int
    base: int
    data: bytes

    @property
    def key(self) -> tuple[Any, ...]:
        """A key that identifies it among the memory of the same process and device."""
        return "pool", self.offer, self.base


class Virtual(NamedTuple):
    """Virtual memory: the offers with the descriptors of its pieces, and their sizes."""

    offers: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def key(self) -> tuple[Any, ...]:
        """A key that identifies it among the memory of the same process and device."""
        return "virtual", self.offers


Place = Legacy | Pooled | Virtual
_PLACES = {"legacy": Legacy, "pool": Pooled, "virtual": Virtual}


class Description(NamedTuple):
    """An array in another process.

    Parameters
    ----------
    token, pid, namespace : bytes, int, int
        The process that owns the memory: its token, its pid, and the PID namespace of the
        pid.
    number : int
        The number of the export there.
    uuid : bytes
        The UUID of the device.
    place : Legacy, Pooled or Virtual
        How to open the memory.
    size : int
        Bytes of the memory.
    offset : int
        Bytes from the memory's beginning to the array's first element.
    layout : Layout
        The array's layout.
    read_only, library, extras : bool, str, dict
        As in ``Source``.
    event : (bytes, bytes) or None
        An event to wait for before the memory is read: the token of its process, and its
        handle. None if there is nothing to wait for.
    """

    token: bytes
    pid: int
    namespace: int
    number: int
    uuid: bytes
    place: Place
    size: int
    offset: int
    layout: Layout
    read_only: bool
    library: str
    extras: dict[str, Any]
    event: tuple[bytes, bytes] | None

    def fields(self) -> tuple[Any, ...]:
        """Return plain values for a message."""
        kind = self.place.key[0]
        plain = {"layout": tuple(self.layout), "place": (kind, *self.place)}
        return (VERSION, *(self._asdict() | plain).values())


def read_description(fields: tuple[Any, ...]) -> Description:
    """Return the description from the values of :meth:`Description.fields`.

    Raises
    ------
    CudaMessageError
        If they are of another version, or damaged.
    """
    version = fields[0] if fields else None
    if version != VERSION:
        raise _invalid(f"it is of version {version}, this process reads version {VERSION}")
    try:
        plain = Description(*fields[1:])
        kind, *place = plain.place
        found = plain._replace(layout=Layout(*plain.layout), place=_PLACES[str(kind)](*place))
        low, high = found.layout.extent
    except (TypeError, ValueError, KeyError) as error:
        raise _invalid(f"its fields do not fit: {error}") from error
    if found.offset + low < 0 or found.offset + high > found.size:
        raise _invalid(
            f"an array of bytes {found.offset + low} to {found.offset + high} does not fit into "
            f"{found.size}"
        )
    return found


def _invalid(reason: str) -> CudaMessageError:
    return CudaMessageError(
        f"not a message of a CUDA array: {reason}. It was damaged, or made by another version "
        "of shmreduce",
        reason=reason,
    )
