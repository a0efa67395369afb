"""The sending side: how an array is represented in a message.

May import public names of :mod:`shmreduce`, NumPy, and ``blocks``,
``classes``, ``copying``, ``dtypes``, ``pieces`` and ``rebuild`` of this plugin.
"""

from __future__ import annotations

import copyreg
import functools
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np

from shmreduce import find_block
from shmreduce_numpy import rebuild
from shmreduce_numpy.blocks import find_block_of, offset_in, owner_of
from shmreduce_numpy.classes import (
    Protocol,
    address_of,
    base_of,
    dtype_of,
    flags_of,
    is_masked,
    mask_of,
    nbytes_of,
    protocol_of,
    shape_of,
    strides_of,
)
from shmreduce_numpy.copying import copy_elements
from shmreduce_numpy.dtypes import describe_dtype
from shmreduce_numpy.pieces import ArrayPieces

if TYPE_CHECKING:
    from collections.abc import Callable

    from shmreduce import Block, Message

__all__ = ["buffer_of_array", "reduce_array"]

_KINDS = {id(dtype): kind for kind, dtype in rebuild.DTYPES.items()}
"""The characters of NumPy's built-in dtype objects, by ``id(dtype)``."""
_latest: tuple[Callable[[], Any], bool, int] = (lambda: None), False, 0
"""The memoryview that was last found to lie in a block, whether that is a shared one, and its
bytes: thousands of received arrays, sent on, may be pieces of one. While the memoryview lives
they do not change."""
_SMALLEST_PIECE = 256
"""Bytes. Ten thousand arrays of 100 bytes took as long as pieces as in the pickle."""


def reduce_array(array: np.ndarray[Any, Any], message: Message) -> Any:
    """Return how to rebuild ``array`` at the receiver, as ``__reduce__`` would.

    Parameters
    ----------
    array : numpy.ndarray
        An array of any class and layout. It is not changed.
    message : Message
        Allocates blocks, and makes handles of blocks.

    Returns
    -------
    tuple or NotImplemented
        A shared array is sent as a reference to its block, whatever its layout. Other
        arrays are copied into a block of the message. Small arrays, and arrays that hold
        Python objects, are pickled in the ordinary way; but small ones are not if that
        would lose that they are read-only, or their byte order.
    """
    cls = type(array)
    if cls is np.ndarray:
        # The common case first.
        nbytes = array.nbytes
        if nbytes < message.inline_limit:
            base: Any = array.base
            if base is None or type(base) is bytes or _must_be_copied(base, nbytes):
                if message.has_many and nbytes >= _SMALLEST_PIECE:
                    piece = _reduce_to_piece(array, nbytes, message)
                    if piece is not None:
                        return piece
                return _reduce_inline(array, message)
        whole = None if message.moves else buffer_of_array(array, 0)
        if whole is not None:
            reduced = _reduce_whole(array, message, *whole)
            if reduced is not None:
                return reduced
        protocol = Protocol.ARRAY
    else:
        if cls in copyreg.dispatch_table:
            # Somebody has registered how this class is pickled.
            return NotImplemented
        protocol = protocol_of(cls)
    if dtype_of(array).hasobject:
        return NotImplemented
    if protocol is Protocol.MASKED:
        return _reduce_masked(array) if message.shared_memory else NotImplemented
    nbytes = nbytes_of(array)
    if (
        protocol is Protocol.ARRAY
        and nbytes < message.inline_limit
        and _must_be_copied(base_of(array), nbytes)
    ):
        return _reduce_inline(array, message)
    block = find_block_of(array)
    if block is not None and block.shared:
        # With the size of the block, however little of it the array covers: a shared block
        # must never be copied.
        handle = message.refer(block, block.nbytes)
        if handle is not None:
            attributes = None if protocol is Protocol.ARRAY else _attributes(array)
            return _reference(array, block, handle, attributes)
        # It must be copied, for example because this process has private cow pages of it.
        block = None
    if protocol is Protocol.OWN:
        return _reduce_by_own_method(array, message)
    return _reduce_by_value(array, block, message)


def buffer_of_array(array: np.ndarray[Any, Any], at_least: int) -> Any:
    """Return the one buffer of an array, if it has one; see :meth:`Reducer.buffer_of`.

    That is so for a plain ``numpy.ndarray`` with a built-in dtype in C order, if NumPy
    allocated its memory or it fills a block.
    """
    if type(array) is not np.ndarray:
        return None
    base: Any = array.base
    if array.nbytes < at_least and (base is None or type(base) is bytes):
        # Of small ones, only a shared block is of use.
        return None
    kind = _KINDS.get(id(array.dtype))
    flags = array.flags
    if kind is None or not flags.c_contiguous:
        return None
    memory: Any = array
    shape = array.shape
    if base is not None:
        memory = None if flags.owndata else _whole_memory(base, array)
        # Not with an axis of length 1: its stride may be any number, and would be lost.
        if memory is None or (memory is not array and 1 in shape):
            return None
        if memory is array and array.nbytes < at_least:
            return None
    return memory, rebuild.rebuild_copy, (shape, "C", kind, flags.writeable)


def _must_be_copied(base: Any, nbytes: int) -> bool:
    """Return whether an array of this base certainly has no block that can be sent instead."""
    global _latest
    bottom = base
    while type(bottom) is np.ndarray:
        bottom = bottom.base
    if bottom is None or type(bottom) is bytes:
        # NumPy allocated its memory, or the array came in a pickle.
        return True
    if type(bottom) is not memoryview or isinstance(bottom.obj, np.ndarray):
        # Unusual: see find_block_of().
        return False
    reference, shared, found = _latest
    if reference() is not bottom:
        block = find_block(bottom)
        if block is None:
            return True
        shared, found = block.shared, block.nbytes
        _latest = weakref.ref(bottom), shared, found
    return not (shared or found == nbytes)


def _reduce_whole(
    array: np.ndarray[Any, Any],
    message: Message,
    memory: Any,
    rebuilt: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> Any:
    """Reduce an array for which :func:`buffer_of_array` returned a buffer."""
    if memory is array or _must_be_copied(array.base, array.nbytes):
        piece = _reduce_to_piece(array, array.nbytes, message) if message.has_many else None
        if piece is not None:
            return piece
        part = _reduce_to_part(array, array.nbytes, array.flags, message)
        if part is not None:
            return part
    handle = message.carry(memory)
    return None if handle is None else (rebuilt, (handle, *arguments))


def _whole_memory(base: Any, array: np.ndarray[Any, Any]) -> Any:
    """Return an object with exactly the bytes of a gapless array; None if there may be none.

    That is the array itself if NumPy allocated the memory, or else the memoryview that the
    array is a view of.
    """
    bottom = base
    while type(bottom) is np.ndarray:
        # An array that owns its memory may have a base, see _bottom_of() in blocks.
        if bottom.flags.owndata:
            return array
        bottom = bottom.base
    if (
        type(bottom) is memoryview
        and bottom.nbytes == array.nbytes
        and bottom.c_contiguous
        # That array may be a view of a block, see find_block_of().
        and not isinstance(bottom.obj, np.ndarray)
    ):
        return bottom
    return None


def _reference(
    array: np.ndarray[Any, Any],
    block: Block,
    handle: bytes,
    attributes: tuple[Callable[[Any, Any], None], Any] | None = None,
) -> Any:
    flags = flags_of(array)
    # With an axis of length 1, a contiguous array may have any stride there.
    usual = flags.c_contiguous and (1 not in shape_of(array) or not nbytes_of(array))
    strides = None if usual else strides_of(array)
    # Offset 0 also for an array without bytes: it may point anywhere, and NumPy would raise
    # for an offset outside the block.
    fills = nbytes_of(array) in (0, block.nbytes) and flags.forc
    arguments = (
        handle,
        0 if fills else offset_in(block, array),
        shape_of(array),
        strides,
        describe_dtype(dtype_of(array)),
        flags.writeable,
    )
    if type(array) is np.ndarray:
        return rebuild.rebuild_view, arguments
    reduced = rebuild.rebuild_view, (*arguments, type(array))
    if attributes is None:
        return reduced
    take, state = attributes
    # As state, not as an argument, since an attribute may refer to the array.
    return *reduced, state, None, None, take


def _reduce_by_value(array: np.ndarray[Any, Any], block: Block | None, message: Message) -> Any:
    nbytes = nbytes_of(array)
    if nbytes < message.inline_limit or nbytes == 0:
        return _reduce_inline(array, message)
    flags = flags_of(array)
    # Only gapless arrays: ordinary pickling would make a gapless array of any other, too.
    if block is not None and flags.forc:
        handle = message.refer(block, nbytes)
        if handle is not None:
            return _reference(array, block, handle)
    if block is None and message.moves and flags.forc:
        moved = _move(array, message)
        if moved is not None:
            return moved
    part = _reduce_to_part(array, nbytes, flags, message)
    if part is not None:
        return part
    taken = message.allocate(nbytes, functools.partial(_elements, array))
    if taken is None:
        return _reduce_inline(array, message)
    memory, handle = taken
    order = _order(flags)
    if memory is not None:
        _copy(array, memory, order)
    arguments = (handle, shape_of(array), order, describe_dtype(dtype_of(array)), flags.writeable)
    if type(array) is np.ndarray:
        return rebuild.rebuild_copy, arguments
    return rebuild.rebuild_copy, (*arguments, type(array))


def _reduce_to_part(array: np.ndarray[Any, Any], nbytes: int, flags: Any, message: Message) -> Any:
    """Copy an array into a block with others of the message, if the message has many."""
    part = message.allocate_part(nbytes)
    if part is None:
        return None
    memory, block, start = part
    # Without bytes, memoryview.cast() refuses the shape.
    if nbytes and type(array) is np.ndarray and flags.c_contiguous:
        kind = _KINDS.get(id(array.dtype))
        if kind is not None:
            # Takes half as long as NumPy, which would have to make an array of the target.
            memory[:] = array.data.cast("B")
            shape, writeable = array.shape, flags.writeable
            return rebuild.rebuild_part, (block, start, nbytes, shape, "C", kind, writeable)
    order = _order(flags)
    _copy(array, memory, order)
    dtype = describe_dtype(dtype_of(array))
    arguments = (block, start, nbytes, shape_of(array), order, dtype, flags.writeable)
    if type(array) is np.ndarray:
        return rebuild.rebuild_part, arguments
    return rebuild.rebuild_part, (*arguments, type(array))


def _move(array: np.ndarray[Any, Any], message: Message) -> Any:
    """Move an array: put a handle of the memory that NumPy allocated into the message.

    The memory may belong to an array of which this one is a view.
    """
    owner = owner_of(array)
    if owner is None:
        return None
    address = address_of(owner)
    handle = message.move(address, nbytes_of(array))
    if handle is None:
        return None
    offset = 0 if array is owner else address_of(array) - address
    dtype = describe_dtype(dtype_of(array))
    arguments = (
        handle,
        offset,
        shape_of(array),
        strides_of(array),
        dtype,
        flags_of(array).writeable,
    )
    if type(array) is np.ndarray:
        return rebuild.rebuild_view, arguments
    return rebuild.rebuild_view, (*arguments, type(array))


def _reduce_inline(array: np.ndarray[Any, Any], message: Message) -> Any:
    if not message.shared_memory:
        # The message goes to another host, where this plugin may not be installed.
        return NotImplemented
    dtype = dtype_of(array)
    kind = _KINDS.get(id(dtype))
    if kind is None and dtype.hasobject:
        return NotImplemented
    flags = flags_of(array)
    nbytes = nbytes_of(array)
    if nbytes >= message.smallest_part:
        part = _reduce_to_part(array, nbytes, flags, message)
        if part is not None:
            return part
    if flags.writeable:
        # NumPy's own reduction has more objects.
        fortran = flags.fnc
        if kind is not None and type(array) is np.ndarray:
            data = array.tobytes("F" if fortran else "C")
            return rebuild.rebuild_small, (kind, array.shape, fortran, data)
        if dtype.isnative:
            described = kind or describe_dtype(dtype)
            if type(described) is not str and dtype.names is None:
                # Another package's dtype: it may have its own rules.
                return NotImplemented
            data = np.ndarray.tobytes(array, "F" if fortran else "C")
            arguments = described, shape_of(array), fortran, data
            if type(array) is np.ndarray:
                return rebuild.rebuild_any_small, arguments
            return rebuild.rebuild_any_small, (*arguments, type(array))
    # With protocols up to 4, ordinary pickling makes read-only arrays writeable, and
    # changes the byte order to the native one.
    order = _order(flags)
    plain = np.ndarray.view(array, np.ndarray)
    return rebuild.rebuild_inline, (
        plain.tobytes(order),
        shape_of(array),
        order,
        describe_dtype(dtype),
        flags.writeable,
        type(array),
    )


def _reduce_to_piece(array: np.ndarray[Any, Any], nbytes: int, message: Message) -> Any:
    """Copy a plain array into a block with others like it, if the message has many of them.

    That is for those that a slice of a larger array would be, but for their shape: with a
    built-in dtype, aligned, writeable and in C order.
    """
    kind = _KINDS.get(id(array.dtype))
    if kind is None or not (array.flags.carray and nbytes):
        return None
    found = message.add_piece(kind, nbytes, ArrayPieces)
    if found is None:
        return None
    pieces, offset = found
    itemsize = pieces.itemsize
    # The offset is a multiple, since the sizes of all pieces are.
    start = offset // itemsize
    stop = (offset + nbytes) // itemsize
    apart = pieces.short or nbytes < message.smallest_part
    rebuilt = rebuild.rebuild_piece_apart if apart else rebuild.rebuild_piece
    shape = array.shape
    if len(shape) == 1:
        pieces.array[start:stop] = array
        return rebuilt, (pieces, start, stop)
    pieces.array[start:stop] = array.reshape(-1)
    return rebuilt, (pieces, start, stop, shape)


def _order(flags: Any) -> Any:
    """Return the layout, C or F, that ordinary pickling would give an array of these flags."""
    return "F" if flags.fnc else "C"


def _copy(array: np.ndarray[Any, Any], memory: memoryview, order: Any) -> None:
    # A plain view, since a subclass may redefine how it is copied.
    source = np.ndarray.view(array, np.ndarray)
    dtype = source.dtype
    if dtype.names is not None:
        # As opaque elements, as in sharing.py. Copying field by field is slow, and the gaps
        # between fields would keep what the memory held before, perhaps another array's data.
        source = source.view(f"V{source.itemsize}")
        dtype = source.dtype
    # By position, as in array_over().
    copy_elements(np.ndarray(source.shape, dtype, memory, 0, None, order), source)


def _elements(array: np.ndarray[Any, Any]) -> Any:
    """Return the bytes of an array without copying; None if it has gaps."""
    flags = flags_of(array)
    if not flags.forc:
        return None
    # A plain view, since a subclass may redefine its methods.
    plain = np.ndarray.view(array, np.ndarray)
    return (plain if flags.c_contiguous else plain.T).reshape(-1).view(np.uint8)


def _reduce_masked(array: Any) -> Any:
    """Send data and mask as two arrays, each shared or by value as its memory is."""
    mask = mask_of(array)
    return rebuild.rebuild_masked, (
        type(array),
        np.ndarray.view(array, array.baseclass),
        # A new view for each: ``a`` and ``-a`` share a mask, but must arrive independent.
        None if mask is None else np.ndarray.view(mask),
        # The private attribute, as NumPy pickles it. It may be None, which means the dtype's
        # default; reading the public fill_value would fix that default.
        array._fill_value,
        array.hardmask,
    )


def _attributes(array: np.ndarray[Any, Any]) -> tuple[Callable[[Any, Any], None], Any]:
    """Return a function and a state that give an array the attributes of a view of ``array``.

    The state is an empty array with these attributes, as its class pickles it. If the class
    has no empty arrays with them, because one has the shape of the array, or cannot pickle
    such an array, because it pickles the elements in its own way, the state is the
    attributes themselves.
    """
    if is_masked(type(array)):
        # An empty array would have no mask, or an empty one.
        return rebuild.set_attributes, object.__getstate__(array)
    empty = array
    try:
        empty = _without_data(array)
        reduced = empty.__reduce_ex__(4)
    except (ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError):
        # If the class cannot be pickled at all, this raises the error.
        array.__reduce_ex__(4)
    else:
        if isinstance(reduced, tuple):
            return rebuild.take_attributes, _Reduced(*reduced)
    return rebuild.set_attributes, object.__getstate__(empty)


def _without_data(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return an empty array with the attributes that a view of ``array`` would have."""
    empty = np.ndarray.__new__(type(array), (0,), dtype_of(array))
    rebuild.take_attributes(empty, array)
    return empty


def _reduce_by_own_method(array: np.ndarray[Any, Any], message: Message) -> Any:
    """Let the class pickle the array, but carry large ``bytes`` in the result in a block.

    The receiver makes equal ``bytes`` of them, so the class does not notice.
    """
    if nbytes_of(array) < message.inline_limit or nbytes_of(array) == 0:
        return NotImplemented
    reduced = array.__reduce_ex__(4)
    if not isinstance(reduced, tuple):
        return reduced
    return _move_bytes(reduced, message)


def _move_bytes(value: Any, message: Message) -> Any:
    if type(value) is tuple:
        return tuple(_move_bytes(item, message) for item in value)
    if type(value) is bytes and len(value) >= message.inline_limit:
        taken = message.allocate(len(value))
        if taken is not None:
            memory, handle = taken
            memory[:] = value
            return _Reduced(rebuild.rebuild_bytes, (handle,))
    return value


class _Reduced:
    """Takes an object's place in a message: pickles as the result of its ``__reduce__``."""

    def __init__(self, *reduced: Any) -> None:
        self._reduced = reduced

    def __reduce__(self) -> Any:
        return self._reduced
