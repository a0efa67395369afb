"""The bytes that name a block in a pickled message.

May import errors and contracts.

A handle is small, flat and self-checking: a mark by which it can be found in a
pickle, a checksum against damage, and nothing that a receiver believes without
looking at the segment's own tables.
"""

from __future__ import annotations

import struct
import zlib
from typing import TYPE_CHECKING, NamedTuple

from shmreduce.errors import InvalidHandleError

if TYPE_CHECKING:
    from shmreduce.contracts import Mode

__all__ = ["MARK", "Handle"]

MARK = b"shmreduce\0hdl\x01\n"
# Behind mark and checksum: token, boot, generation, nonce, nbytes, block, slot, pid, shared, mode,
# lengths of the strategy's name and of the locator
_FIXED = struct.Struct("<16s16sQQQIIIBBHH")
_CHECKSUM = struct.Struct("<I")
_FIXED_FROM = len(MARK) + _CHECKSUM.size
_SHORTEST = _FIXED_FROM + _FIXED.size
_MODES: tuple[Mode, ...] = ("rw", "ro", "cow")


class Handle(NamedTuple):
    """One lease on one block, on its way to somebody.

    Parameters
    ----------
    token, boot : bytes
        Identity of the segment, and of the boot of the host it lives on.
    block, generation : int
        Which block, and in which of its lives.
    slot, nonce : int
        The message's lease.
    nbytes : int
        Bytes of the block that are in use.
    shared : bool
        A shared block, as against one that carries an array by value.
    mode : Mode
        How the block appears to the receiver.
    strategy, locator : str
        How to open the segment.
    pid : int
        The sender, for error messages.
    """

    token: bytes
    boot: bytes
    generation: int
    nonce: int
    nbytes: int
    block: int
    slot: int
    pid: int
    shared: bool
    mode: Mode
    strategy: str
    locator: str

    def pack(self) -> bytes:
        """Return the handle's bytes."""
        name = self.strategy.encode()
        where = self.locator.encode()
        checked = (
            _FIXED.pack(
                self.token,
                self.boot,
                self.generation,
                self.nonce,
                self.nbytes,
                self.block,
                self.slot,
                self.pid,
                self.shared,
                _MODES.index(self.mode),
                len(name),
                len(where),
            )
            + name
            + where
        )
        return MARK + _CHECKSUM.pack(zlib.crc32(checked)) + checked

    @staticmethod
    def size_at(data: bytes, start: int) -> int:
        """Return how long the handle at ``start`` says it is, 0 if truncated."""
        if len(data) - start < _SHORTEST:
            return 0
        *_, name_size, where_size = _FIXED.unpack_from(data, start + _FIXED_FROM)
        return _SHORTEST + int(name_size) + int(where_size)

    @classmethod
    def unpack(cls, data: bytes) -> Handle:
        """Read a handle from anybody.

        Raises
        ------
        InvalidHandleError
            If the bytes are not a handle, are truncated or damaged.
        """
        if not isinstance(data, bytes) or len(data) < _SHORTEST or not data.startswith(MARK):
            raise _invalid("it is too short or does not begin with a handle's mark")
        (
            token,
            boot,
            generation,
            nonce,
            nbytes,
            block,
            slot,
            pid,
            shared,
            mode,
            name_size,
            where_size,
        ) = _FIXED.unpack_from(data, _FIXED_FROM)
        end = _SHORTEST + name_size
        if len(data) != end + where_size:
            raise _invalid("its length is wrong")
        (checksum,) = _CHECKSUM.unpack_from(data, len(MARK))
        if zlib.crc32(data[_FIXED_FROM:]) != checksum:
            raise _invalid("its checksum does not match")
        if mode >= len(_MODES):
            raise _invalid(f"its mode is {mode}")
        try:
            name = data[_SHORTEST:end].decode()
            where = data[end:].decode()
        except UnicodeDecodeError as error:
            raise _invalid("its names are not text") from error
        return cls(
            token,
            boot,
            generation,
            nonce,
            nbytes,
            block,
            slot,
            pid,
            bool(shared),
            _MODES[mode],
            name,
            where,
        )


def _invalid(reason: str) -> InvalidHandleError:
    return InvalidHandleError(
        f"not a handle of a shared block: {reason}. The message was damaged or made up",
        reason=reason,
    )
