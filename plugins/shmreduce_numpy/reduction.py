"""The sending side: what an array turns into in a message.

May import public names of :mod:`shmreduce`, NumPy, and ``blocks``,
``classes``, ``copying``, ``dtypes`` and ``rebuild`` of this plugin.
"""

from __future__ import annotations

import copyreg
import functools
from typing import TYPE_CHECKING, Any

import numpy as np

from shmreduce_numpy import rebuild
from shmreduce_numpy.blocks import find_block_of, offset_in, owner_of
from shmreduce_numpy.classes import (
    Protocol,
    address_of,
    dtype_of,
    flags_of,
    is_masked,
    nbytes_of,
    protocol_of,
    shape_of,
    strides_of,
)
from shmreduce_numpy.copying import copy_elements
from shmreduce_numpy.dtypes import describe_dtype

if TYPE_CHECKING:
    from collections.abc import Callable

    from shmreduce import Block, Message

__all__ = ["buffer_of_array", "reduce_array"]

_KINDS = {id(dtype): kind for kind, dtype in rebuild.DTYPES.items()}
"""Characters of NumPy's own dtype objects, by identity."""


def reduce_array(array: np.ndarray[Any, Any], message: Message) -> Any:
    """Return how to rebuild ``array`` at the receiver, as ``__reduce__`` would.

    Parameters
    ----------
    array : numpy.ndarray
        An array of any class and layout; it is left as it is.
    message : Message
        Where blocks are taken from and referred to.

    Returns
    -------
    tuple or NotImplemented
        A shared array goes as a reference to its block, whatever its layout.
        Other arrays are copied into a block of the message. Small ones, and
        those with Python objects inside, are left to ordinary pickling, unless
        it would forget that they are read-only, or their byte order.
    """
    cls = type(array)
    if cls is np.ndarray:
        # Most arrays by far, so first of all.
        if array.nbytes < message.inline_limit:
            bottom: Any = array.base
            while type(bottom) is np.ndarray:
                bottom = bottom.base
            if bottom is None or type(bottom) is bytes:
                # In memory of NumPy's own, that is, or in what came with a pickle.
                return _reduce_inline(array, message)
        whole = None if message.moves else buffer_of_array(array, 0)
        if whole is not None:
            reduced = _reduce_whole(array, message, *whole)
            if reduced is not None:
                return reduced
        protocol = Protocol.ARRAY
    else:
        if cls in copyreg.dispatch_table:
            # Said to be pickled in another way than its base class.
            return NotImplemented
        protocol = protocol_of(cls)
    if dtype_of(array).hasobject:
        return NotImplemented
    if protocol is Protocol.MASKED:
        return _reduce_masked(array) if message.shared_memory else NotImplemented
    block = find_block_of(array)
    if block is not None and block.shared:
        # However little of it the array covers: a shared block is never copied.
        handle = message.refer(block, block.nbytes)
        if handle is not None:
            attributes = None if protocol is Protocol.ARRAY else _attributes(array)
            return _reference(array, block, handle, attributes)
        # Only a copy will do: a receiver's cow pages are its own.
        block = None
    if protocol is Protocol.OWN:
        return _reduce_by_own_method(array, message)
    return _reduce_by_value(array, block, message)


def buffer_of_array(array: np.ndarray[Any, Any], at_least: int) -> Any:
    """Return what an array is made of, if that is one buffer; see :meth:`Reducer.buffer_of`.

    That is so for arrays of NumPy's own class and dtypes in C order that lie in memory of
    NumPy's own, or fill a block.
    """
    if type(array) is not np.ndarray or array.nbytes < at_least:
        return None
    kind = _KINDS.get(id(array.dtype))
    flags = array.flags
    if kind is None or not flags.c_contiguous:
        return None
    memory: Any = array
    shape = array.shape
    base = array.base
    if base is not None:
        memory = None if flags.owndata else _whole_memory(base, array)
        # The strides of an axis of length 1 may be anything, and would be lost.
        if memory is None or (memory is not array and 1 in shape):
            return None
    return memory, rebuild.rebuild_copy, (shape, "C", kind, flags.writeable)


def _reduce_whole(
    array: np.ndarray[Any, Any],
    message: Message,
    memory: Any,
    rebuilt: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> Any:
    """Reduce an array that :func:`buffer_of_array` knows."""
    if memory is array:
        part = _reduce_to_part(array, array.nbytes, array.flags, message)
        if part is not None:
            return part
    handle = message.carry(memory)
    return None if handle is None else (rebuilt, (handle, *arguments))


def _whole_memory(base: Any, array: np.ndarray[Any, Any]) -> Any:
    """Return what has the bytes of an array that has no gaps, and nothing else; None if unsure.

    That is the array if the memory is of NumPy's own, else the memoryview at its bottom.
    """
    bottom = base
    while type(bottom) is np.ndarray:
        # One may have a base all the same, see owner_of().
        if bottom.flags.owndata:
            return array
        bottom = bottom.base
    if (
        type(bottom) is memoryview
        and bottom.nbytes == array.nbytes
        and bottom.c_contiguous
        # Which may be a view of a block itself, see find_block_of().
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
    # Those of an axis of length 1 may be anything.
    usual = flags.c_contiguous and (1 not in shape_of(array) or not nbytes_of(array))
    strides = None if usual else strides_of(array)
    # One that fills its block begins where that does. Where one without bytes
    # points to is anywhere, and NumPy checks it.
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
    # As state, not as an argument: an attribute may lead back to the array.
    return *reduced, state, None, None, take


def _reduce_by_value(array: np.ndarray[Any, Any], block: Block | None, message: Message) -> Any:
    nbytes = nbytes_of(array)
    if nbytes < message.inline_limit or nbytes == 0:
        return _reduce_inline(array, message)
    flags = flags_of(array)
    # Pickling would make a gapless array of any other.
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
    """Copy an array into a block that it shares with others, if the message has many."""
    part = message.allocate_part(nbytes)
    if part is None:
        return None
    memory, block, start = part
    order = _order(flags)
    _copy(array, memory, order)
    dtype = describe_dtype(dtype_of(array))
    arguments = (block, start, nbytes, shape_of(array), order, dtype, flags.writeable)
    if type(array) is np.ndarray:
        return rebuild.rebuild_part, arguments
    return rebuild.rebuild_part, (*arguments, type(array))


def _move(array: np.ndarray[Any, Any], message: Message) -> Any:
    """Name the memory that NumPy allocated for an array, or for what it is a view of."""
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
        # To another host, where this plugin may not be.
        return NotImplemented
    flags = flags_of(array)
    dtype = dtype_of(array)
    nbytes = nbytes_of(array)
    if nbytes >= message.smallest_part and not dtype.hasobject:
        part = _reduce_to_part(array, nbytes, flags, message)
        if part is not None:
            return part
    if flags.writeable:
        kind = _KINDS.get(id(dtype))
        if kind is not None and type(array) is np.ndarray:
            # Fewer objects than NumPy's own reduction has, each of which the
            # pickler would ask about.
            fortran = flags.fnc
            data = array.tobytes("F" if fortran else "C")
            return rebuild.rebuild_small, (kind, array.shape, fortran, data)
        if dtype.isnative:
            return NotImplemented
    if dtype.hasobject:
        return NotImplemented
    # Up to protocol 4 ordinary pickling makes writeable arrays of read-only
    # ones, and native ones of those in the other byte order.
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


def _order(flags: Any) -> Any:
    """Return the layout, C or F, that ordinary pickling would give an array of these flags."""
    return "F" if flags.fnc else "C"


def _copy(array: np.ndarray[Any, Any], memory: memoryview, order: Any) -> None:
    # A plain view: a subclass may redefine what copying means.
    source = np.ndarray.view(array, np.ndarray)
    dtype = source.dtype
    if dtype.names is not None:
        # Opaque elements: field by field is slow and leaves the gaps between
        # fields with what the memory held before, perhaps of another array.
        source = source.view(f"V{source.itemsize}")
        dtype = source.dtype
    # By position, as in array_over().
    copy_elements(np.ndarray(source.shape, dtype, memory, 0, None, order), source)


def _elements(array: np.ndarray[Any, Any]) -> Any:
    """Return the bytes of an array if there is nothing between them."""
    flags = flags_of(array)
    if not flags.forc:
        return None
    # A plain view: a subclass may redefine what a buffer is.
    plain = np.ndarray.view(array, np.ndarray)
    return (plain if flags.c_contiguous else plain.T).reshape(-1).view(np.uint8)


def _reduce_masked(array: Any) -> Any:
    """Send data and mask as arrays of their own, each as its memory asks for."""
    mask = np.ma.getmask(array)
    return rebuild.rebuild_masked, (
        type(array),
        np.ndarray.view(array, array.baseclass),
        # A view: arrays that share a mask, as ``a`` and ``-a`` do, arrive independent.
        None if mask is np.ma.nomask else np.ndarray.view(mask),
        # As NumPy pickles it: None, unlike the public fill_value, leaves the
        # default to follow the dtype.
        array._fill_value,
        array.hardmask,
    )


def _attributes(array: np.ndarray[Any, Any]) -> tuple[Callable[[Any, Any], None], Any]:
    """Return what gives an array the attributes that a view of ``array`` would have.

    As its class pickles them, with an empty array. Where that cannot be, since it is
    the elements that the class pickles, they go as they are.
    """
    if is_masked(type(array)):
        # An empty array has no mask, or no room for it.
        return rebuild.set_attributes, object.__getstate__(array)
    empty = _without_data(array)
    try:
        reduced = empty.__reduce_ex__(4)
    except (ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError):
        # Where the class cannot be pickled at all, this says so.
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
    """Let the class pickle itself, but carry the bytes of the array in a block.

    Bytes are values: it makes no difference to the class where they travelled.
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
    """Stands in a message for an object that has been reduced already."""

    def __init__(self, *reduced: Any) -> None:
        self._reduced = reduced

    def __reduce__(self) -> Any:
        return self._reduced
