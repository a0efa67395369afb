"""Handles: the bytes in a pickled message that name a block.

May import errors and contracts.

A handle is small and flat. It begins with a mark, by which it is found in a pickle, and has
a checksum against damage. A receiver relies on nothing in it without looking at the segment's
own tables::

    mark | checksum | slot, nonce | token, block, generation | the rest

Slot and nonce belong to the lease alone. All that follows is the same in all handles that
one process makes for one block, so a sender packs it once. Token, block and generation are
the *key*, by which a receiver finds a block that it has already.
"""

from __future__ import annotations

import re
import struct
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple
from zlib import crc32

from shmreduce.errors import InvalidHandleError

if TYPE_CHECKING:
    from collections.abc import Callable

    from shmreduce.contracts import Mode

__all__ = [
    "LONGEST_LOCATOR",
    "MARK",
    "ROOM_FOR_ANOTHER",
    "Handle",
    "block_key",
    "check_handle",
    "find_mark",
    "has_mark",
    "join_locators",
    "key_of",
    "lease_of",
    "pack_constant",
    "pack_handle",
    "padded",
    "rest_of",
]

MARK = b"shmreduce\0hdl\x02\n"
_PATTERN = re.escape(MARK)
_SEARCHED_BY_THE_SYSTEM = 2 << 10
"""In so many bytes memmem(3) takes 2 us, nearly all of it for the call. ``bytes.find`` takes 1 us,
but 5 us if most are zero, as in many arrays: it skips only what does not occur in the mark."""
_CHECKSUM = struct.Struct("<I")
# slot, nonce
_LEASE = struct.Struct("<IQ")
# token, block, generation
_KEY = struct.Struct("<16sIQ")
# boot, nbytes, pid, shared, mode, lengths of the strategy's name and of the locators
_REST = struct.Struct("<16sQIBBHH")
LONGEST_LOCATOR = 1 << 15
"""Bytes: half of what the length field can say. A handle has two at most, and may be
:func:`padded`."""
ROOM_FOR_ANOTHER = 16
"""A handle that replaces another in a pickle may be this many bytes longer."""
_FROM_LEASE = len(MARK) + _CHECKSUM.size
_FROM_KEY = _FROM_LEASE + _LEASE.size
_FROM_REST = _FROM_KEY + _KEY.size
_SHORTEST = _FROM_REST + _REST.size
_MODES: tuple[Mode, ...] = ("rw", "ro", "cow")
_KEPT = 256
"""For how many handles the last part is cached, packed and unpacked."""


def block_key(token: bytes, block: int, generation: int) -> bytes:
    """Return the bytes that stand for one life of one block in every handle."""
    return _KEY.pack(token, block, generation)


def key_of(handle: bytes) -> bytes:
    """Return the key of a handle; the bytes are not checked."""
    return handle[_FROM_KEY:_FROM_REST]


def rest_of(constant: bytes) -> bytes:
    """Return the part of :func:`pack_constant`'s result that all blocks of a segment share."""
    return constant[_KEY.size :]


def lease_of(handle: bytes) -> tuple[int, int]:
    """Return slot and nonce of a handle that passed :func:`check_handle`."""
    slot, nonce = _LEASE.unpack_from(handle, _FROM_LEASE)
    return slot, nonce


def pack_constant(
    key: bytes, boot: bytes, nbytes: int, pid: int, shared: bool, mode: Mode, name: str, where: str
) -> bytes:
    """Return the bytes that are the same in all handles of one process for one block.

    ``key`` is from :func:`block_key`, ``name`` the strategy's, ``where`` from
    :func:`join_locators`, perhaps padded with NUL; for the others see :class:`Handle`.
    """
    return key + _pack_rest(boot, nbytes, pid, shared, mode, name, where)


# The rest is the same for all blocks of one size and for all their lives. With it in the
# cache, packing and unpacking a handle takes two thirds of the time.
@lru_cache(_KEPT)
def _pack_rest(
    boot: bytes, nbytes: int, pid: int, shared: bool, mode: Mode, name: str, where: str
) -> bytes:
    # A path may have bytes that are not text (os.fsencode).
    encoded, located = name.encode(), where.encode(errors="surrogateescape")
    sizes = len(encoded), len(located)
    return _REST.pack(boot, nbytes, pid, shared, _MODES.index(mode), *sizes) + encoded + located


@lru_cache(_KEPT)
def _unpack_rest(rest: bytes) -> tuple[bytes, int, int, bool, Mode, str, str, str]:
    boot, nbytes, pid, shared, mode, name_size, where_size = _REST.unpack_from(rest)
    end = _REST.size + name_size
    if len(rest) != end + where_size:
        raise _invalid("its length is wrong")
    if mode >= len(_MODES):
        raise _invalid(f"its mode is {mode}")
    try:
        name = rest[_REST.size : end].decode()
        where = rest[end:].decode(errors="surrogateescape").rstrip("\0")
    except UnicodeDecodeError as error:
        raise _invalid("its names are not text") from error
    locator, _, makers = where.partition("\0")
    return boot, nbytes, pid, bool(shared), _MODES[mode], name, locator, makers


def join_locators(own: str, makers: str) -> str:
    """Return what a handle says of where its segment is.

    ``own`` is the sender's locator, ``makers`` that of the process that made the segment, or
    empty if that is the sender.
    """
    return f"{own}\0{makers}" if makers else own


def pack_handle(slot: int, nonce: int, constant: bytes) -> bytes:
    """Return the handle of a lease; ``constant`` is from :func:`pack_constant`."""
    checked = _LEASE.pack(slot, nonce) + constant
    return MARK + _CHECKSUM.pack(crc32(checked)) + checked


def padded(handle: bytes, size: int) -> bytes:
    """Return an equal handle of ``size`` bytes, which is at least its own size."""
    more = size - len(handle)
    *fields, where_size = _REST.unpack_from(handle, _FROM_REST)
    rest = _REST.pack(*fields, where_size + more) + handle[_SHORTEST:] + bytes(more)
    return pack_handle(*lease_of(handle), key_of(handle) + rest)


def check_handle(data: bytes | None) -> None:
    """Raise unless the bytes are a handle that is complete and undamaged.

    Raises
    ------
    InvalidHandleError
        If the bytes are not a handle, or are truncated or damaged.
    """
    if data is None:
        raise InvalidHandleError(
            "None is not a handle of a shared block. The reducer at the sender put it into the "
            "message: Message.carry() and its other methods return None for what is better "
            "pickled in the ordinary way, for small objects for example; then reduce() must do "
            "that, or return NotImplemented",
            reason="it is None",
        )
    if not isinstance(data, bytes) or len(data) < _SHORTEST or not data.startswith(MARK):
        raise _invalid("it is too short or does not begin with a handle's mark")
    (checksum,) = _CHECKSUM.unpack_from(data, len(MARK))
    if crc32(data[_FROM_LEASE:]) != checksum:
        raise _invalid("its checksum does not match")


class Handle(NamedTuple):
    """A lease on a block, on its way to a receiver.

    Parameters
    ----------
    token, boot : bytes
        Identity of the segment, and of its host's boot when it was made.
    block, generation : int
        Number of the block, and which of its lives.
    slot, nonce : int
        The message's lease.
    nbytes : int
        How many bytes of the block are in use.
    shared : bool
        Whether the block is shared. If not, it carries an array by value.
    mode : Mode
        How the block appears to the receiver.
    strategy, locator : str
        How to open the segment, which the sender has open.
    pid : int
        The sender's pid, for error messages.
    maker_locator : str
        How to open it at the process that made it, which may outlive the sender; empty if
        that is the sender.
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
    maker_locator: str = ""

    def pack(self) -> bytes:
        """Return the handle's bytes."""
        constant = pack_constant(
            block_key(self.token, self.block, self.generation),
            self.boot,
            self.nbytes,
            self.pid,
            self.shared,
            self.mode,
            self.strategy,
            join_locators(self.locator, self.maker_locator),
        )
        return pack_handle(self.slot, self.nonce, constant)

    @staticmethod
    def size_at(data: bytes, start: int) -> int:
        """Return the size that the handle at ``start`` says it has, 0 if it is truncated."""
        if len(data) - start < _SHORTEST:
            return 0
        *_, name_size, where_size = _REST.unpack_from(data, start + _FROM_REST)
        return _SHORTEST + int(name_size) + int(where_size)

    @classmethod
    def unpack(cls, data: bytes) -> Handle:
        """Read a handle that any process may have made.

        Raises
        ------
        InvalidHandleError
            If the bytes are not a handle, or are truncated or damaged.
        """
        check_handle(data)
        return cls.unpack_checked(data)

    @classmethod
    def unpack_checked(cls, data: bytes) -> Handle:
        """Read a handle that passed :func:`check_handle`. It may still be forged.

        Raises
        ------
        InvalidHandleError
            If its fields make no sense.
        """
        slot, nonce = lease_of(data)
        token, block, generation = _KEY.unpack_from(data, _FROM_KEY)
        boot, nbytes, pid, shared, mode, name, *locators = _unpack_rest(data[_FROM_REST:])
        return cls(
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
            name,
            *locators,
        )


def _invalid(reason: str) -> InvalidHandleError:
    return InvalidHandleError(
        f"not a handle of a shared block: {reason}. The message was damaged or made up: send it "
        "again, by the same version of shmreduce",
        reason=reason,
    )


def find_mark(text: bytes, start: int) -> int:
    """Return where the next handle may begin, -1 if nowhere, as ``text.find(MARK, start)``.

    Examples
    --------
    >>> find_mark(b"..." + MARK, 0), find_mark(b"...", 0)
    (3, -1)
    """
    search = _memmem() if len(text) - start >= _SEARCHED_BY_THE_SYSTEM else None
    if search is None:
        return text.find(MARK, start)
    import ctypes

    begin = ctypes.cast(ctypes.c_char_p(text), ctypes.c_void_p).value or 0
    found = search(begin + start, len(text) - start, MARK, len(MARK))
    return -1 if found is None else int(found) - begin


def has_mark(text: bytes | memoryview) -> bool:
    """Return whether bytes have a handle, or what looks like one; a view is not copied.

    Examples
    --------
    >>> has_mark(memoryview(b"..." + MARK)), has_mark(b"...")
    (True, False)
    """
    if isinstance(text, bytes):
        return find_mark(text, 0) != -1
    return re.search(_PATTERN, text) is not None


@lru_cache(maxsize=1)
def _memmem() -> Callable[..., int | None] | None:
    """Return memmem(3), or None if the C library does not have it: no standard requires it."""
    import ctypes

    try:
        search = ctypes.CDLL(None).memmem
    except AttributeError:
        return None
    search.restype = ctypes.c_void_p
    search.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p, ctypes.c_size_t)
    found: Callable[..., int | None] = search
    return found
