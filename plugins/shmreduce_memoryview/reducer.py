"""The reducer of memoryviews: the sending side, and how they become shared.

May import public names of :mod:`shmreduce`, ``layout`` and ``rebuild`` of this
plugin; NumPy inside functions, for views that only an array can describe.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shmreduce import NotShareableError, Reducer, allocate, copy_bytes, find_block, share
from shmreduce_memoryview.layout import (
    Elements,
    Rows,
    address_of,
    bottom_of,
    is_castable,
    rows_of,
    structure_of,
)
from shmreduce_memoryview.rebuild import cast, rebuild_inline, rebuild_view

if TYPE_CHECKING:
    from shmreduce import Block, Message, Mode

__all__ = ["MemoryviewReducer"]


class MemoryviewReducer(Reducer):
    """Lets memoryviews travel: format, shape and ``readonly`` are kept.

    A view of a shared block keeps its strides and stays a view of that block.
    Other views are copied, without gaps. Formats and layouts that
    :meth:`memoryview.cast` and slicing cannot make (structures, complex
    numbers, Fortran order) travel as the NumPy array behind them. The elements
    are bytes without a type where NumPy cannot tell others of their fields.
    """

    types = (memoryview,)

    def reduce(self, obj: memoryview, message: Message) -> Any:
        """Return how to rebuild the view; NotImplemented if NumPy cannot read it either."""
        block = self.find_block(obj)
        if block is not None and block.shared:
            rows = rows_of(obj)
            if not is_castable(obj) or (rows is None and obj.ndim > 0):
                return _as_array(obj)
            handle = message.refer(block, obj.nbytes)
            if handle is not None:
                return rebuild_view, _place(obj, block, handle, rows)
            block = None
        if not _is_made_by_cast(obj):
            return _as_array(obj)
        return _reduce_by_value(obj, block, message)

    def buffer_of(self, obj: memoryview, at_least: int) -> Any:
        """Return the view itself if it has no gaps, and is of no array that may lie in a block."""
        if (
            obj.nbytes < at_least
            or not obj.c_contiguous
            or not is_castable(obj)
            or bottom_of(obj) is not obj.obj
        ):
            return None
        return obj, rebuild_view, (0, obj.format, obj.shape, 1, obj.readonly)

    def share(self, obj: Any, mode: Mode) -> memoryview:
        """Return a writable view of a shared copy of any object with a buffer."""
        view: Any = memoryview(obj)
        if not _is_made_by_cast(view):
            return memoryview(share(_array_of(view), mode=mode))
        rows = rows_of(view)
        # A table without rows has a width all the same.
        nbytes = rows.size if rows is not None and view.nbytes == 0 else view.nbytes
        block = allocate(nbytes, mode)
        _copy(view, block.buffer)
        return cast(block.buffer, view.format, view.shape)

    def find_block(self, obj: memoryview) -> Block | None:
        """Return the block below the view, also through arrays that it is a view of."""
        block = find_block(bottom_of(obj))
        if block is None or not obj.nbytes:
            return block
        # What has a ``base`` may have its bytes elsewhere all the same.
        inside = block.address <= address_of(obj) < block.address + block.nbytes
        return block if inside else None


def _reduce_by_value(view: memoryview, block: Block | None, message: Message) -> Any:
    if view.nbytes >= message.inline_limit and view.nbytes > 0:
        if block is not None and view.c_contiguous:
            handle = message.refer(block, view.nbytes)
            if handle is not None:
                return rebuild_view, _place(view, block, handle, rows_of(view))
        taken = message.allocate(
            view.nbytes, lambda: view.cast("B") if view.c_contiguous else None
        )
        if taken is not None:
            memory, handle = taken
            if memory is not None:
                _copy(view, memory)
            return rebuild_view, (handle, 0, view.format, view.shape, 1, view.readonly)
    return rebuild_inline, (view.tobytes(), view.format, view.shape, view.readonly)


def _place(view: Any, block: Block, handle: bytes, rows: Rows | None) -> tuple[Any, ...]:
    offset = address_of(view) - block.address if view.nbytes else 0
    step = 1 if rows is None else rows.step
    if rows is not None and step < 0:
        # Named by its lowest row, as a slice is.
        offset += (view.shape[0] - 1) * step * rows.size
    return handle, offset, view.format, view.shape, step, view.readonly


def _is_made_by_cast(view: memoryview) -> bool:
    """Return whether a gapless copy of the view can be made by ``cast`` alone."""
    if not is_castable(view) or view.suboffsets:
        return False
    if view.nbytes == 0:
        return rows_of(view) is not None
    return view.c_contiguous or not view.f_contiguous


def _copy(view: Any, memory: memoryview) -> None:
    if view.nbytes == 0:
        return
    if view.c_contiguous:
        copy_bytes(memory, view)
    elif view.ndim == 1:
        memory.cast(view.format)[:] = view
    else:
        memory[:] = view.tobytes()


def _as_array(view: memoryview) -> Any:
    """Leave the view to the reducer of NumPy's arrays."""
    try:
        return memoryview, (_array_of(view),)
    except NotShareableError:
        # Ordinary pickling then says what it says of all memoryviews.
        return NotImplemented


def _array_of(view: memoryview) -> Any:
    import numpy as np

    try:
        kind = structure_of(view)
        array: Any = (
            np.asarray(view) if kind is None else np.asarray(Elements(view)).view(np.dtype(kind))
        )
    except (ValueError, RuntimeError, TypeError, NotImplementedError) as error:
        raise NotShareableError(
            f"A memoryview of format {view.format!r} cannot be shared: NumPy does not know "
            f"the format ({error}). Cast it to bytes first: view.cast('B').",
            type_name="builtins.memoryview",
            reason=f"format {view.format!r} is not known to NumPy",
        ) from error
    if array.dtype.names is None or _can_be_viewed(array.dtype):
        return array
    # What NumPy takes for fields is more than it can tell others: the bytes go.
    return array.view(f"V{view.itemsize}")


def _can_be_viewed(dtype: Any) -> bool:
    """Return whether a memoryview of an array of this dtype can be read again.

    Not where fields overlap (of a union), where there are none (opaque bytes), nor
    always where there are gaps.
    """
    import numpy as np

    sample: Any = np.empty(0, dtype)
    try:
        again: Any = np.asarray(memoryview(sample))
    except (ValueError, RuntimeError):
        return False
    return bool(again.dtype.itemsize == dtype.itemsize)
