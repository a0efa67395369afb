"""The reducer of memoryviews: the sending side, and shared copies.

May import public names of :mod:`shmreduce`, ``layout`` and ``rebuild`` of this plugin;
NumPy only inside functions, for views that only an array can describe.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shmreduce import (
    NotShareableError,
    Reducer,
    allocate,
    copy_bytes,
    find_block,
    import_late,
    share,
)
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
    """Lets memoryviews travel with their format, shape and ``readonly``.

    A view of a shared block arrives as a view of the same block, with the same strides.
    Other views are copied without gaps. If :meth:`memoryview.cast` and slicing cannot make
    the format or layout (structures, complex numbers, Fortran order), the view travels as
    a NumPy array over its memory. If the array's dtype cannot be described in a buffer's
    format, its elements are opaque bytes.
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
        """Return the view itself if it has no gaps, and its exporter owns the memory."""
        if (
            (obj.nbytes < at_least and isinstance(obj.obj, bytes | bytearray))
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
        # For a view without rows cast() needs the memory of one row.
        nbytes = rows.size if rows is not None and view.nbytes == 0 else view.nbytes
        block = allocate(nbytes, mode)
        _copy(view, block.buffer)
        return cast(block.buffer, view.format, view.shape)

    def find_block(self, obj: memoryview) -> Block | None:
        """Return the block that the view's memory lies in, also for a view of an array."""
        block = find_block(bottom_of(obj))
        if block is None or not obj.nbytes:
            return block
        # An object with a ``base`` may nevertheless have its own memory.
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
        # The address is that of the highest row then; the offset is that of the lowest.
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
    """Reduce the view to a NumPy array, which NumPy's reducer sends."""
    try:
        return memoryview, (_array_of(view),)
    except NotShareableError:
        # Ordinary pickling raises its usual TypeError for memoryviews.
        return NotImplemented


def _array_of(view: memoryview) -> Any:
    np = import_late("numpy")
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
    if array.dtype.names is None or _can_be_viewed(np, array.dtype):
        return array
    # NumPy cannot export this dtype's fields through a buffer, so send opaque bytes.
    return array.view(f"V{view.itemsize}")


def _can_be_viewed(np: Any, dtype: Any) -> bool:
    """Return whether NumPy can read a memoryview of an array of this dtype.

    It cannot if fields overlap (a union), if there are none (opaque bytes), and sometimes
    if there are gaps.
    """
    sample: Any = np.empty(0, dtype)
    try:
        again: Any = np.asarray(memoryview(sample))
    except (ValueError, RuntimeError):
        return False
    return bool(again.dtype.itemsize == dtype.itemsize)
