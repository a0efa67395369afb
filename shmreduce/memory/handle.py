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
# mark, checksum, token, boot, generation, nonce, nbytes, block, slot, pid, shared, mode,
# lengths of the strategy's name and of the locator
_FIXED = struct.Struct("<15sI16s16sQQQIIIBBHH")
_MODES: tuple[Mode, ...] = ("rw", "ro", "cow")
_CHECKED_FROM = 19


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
        data = _FIXED.pack(
            MARK,
            0,
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
        rest = data[_CHECKED_FROM:] + name + where
        return MARK + struct.pack("<I", zlib.crc32(rest)) + rest

    @staticmethod
    def size_at(data: bytes, start: int) -> int:
        """Return how long the handle at ``start`` says it is, 0 if truncated."""
        if len(data) - start < _FIXED.size:
            return 0
        *_, name_size, where_size = _FIXED.unpack_from(data, start)
        return _FIXED.size + int(name_size) + int(where_size)

    @classmethod
    def unpack(cls, data: bytes) -> Handle:
        """Read a handle from anybody.

        Raises
        ------
        InvalidHandleError
            If the bytes are not a handle, are truncated or damaged.
        """
        if not isinstance(data, bytes) or len(data) < _FIXED.size or not data.startswith(MARK):
            raise _invalid("it is too short or does not begin with a handle's mark")
        (
            _,
            checksum,
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
        ) = _FIXED.unpack_from(data)
        if len(data) != _FIXED.size + name_size + where_size:
            raise _invalid("its length is wrong")
        if zlib.crc32(memoryview(data)[_CHECKED_FROM:]) != checksum:
            raise _invalid("its checksum does not match")
        if mode >= len(_MODES):
            raise _invalid(f"its mode is {mode}")
        try:
            name = data[_FIXED.size : _FIXED.size + name_size].decode()
            where = data[_FIXED.size + name_size :].decode()
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
