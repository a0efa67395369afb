"""The context manager ``shared_allocations()``.

May import errors, process_registry and the other modules of the package.

An array library's current memory handler belongs to a context of :mod:`contextvars`, and
contexts do not nest as ``with`` blocks do: a generator may be left in the middle of its
block, and closed in another thread. So each context notes the blocks that were entered in
it, and gets the library's own handler back when the last of them is left. In addition, the
allocator gives out ordinary memory while no block is open anywhere in the process. That is
so even if an interrupt prevented a context from getting its handler back.
"""

from __future__ import annotations

import itertools
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Self

from shmreduce.born import moving
from shmreduce.born.heap import BornHeap, get_heap
from shmreduce.born.library import load
from shmreduce.errors import PluginError
from shmreduce.process_registry import get_memory_handlers

if TYPE_CHECKING:
    from types import TracebackType

    from shmreduce.contracts import MemoryHandlers

__all__ = ["SharedAllocations", "check_allocator", "shared_allocations"]

_numbers = itertools.count()
_open: dict[int, BornHeap] = {}
"""The blocks that are open in this process, by number, as they were entered; and their heaps."""
_here: ContextVar[tuple[int, ...]] = ContextVar("shmreduce_shared_allocations", default=())
"""The numbers of the blocks that were entered in this context."""
_before: ContextVar[Any] = ContextVar("shmreduce_allocation_before", default=None)
"""The memory handler of this context before the first of them."""


class SharedAllocations:
    """A block in which arrays are born in shared memory.

    It can be entered again after it was left.

    Parameters
    ----------
    handlers : MemoryHandlers
        Changes the array library's handler.
    handler : object
        The handler that allocates from shared memory.

    Raises
    ------
    RuntimeError
        From entering it while it is open, as for :func:`asyncio.timeout`.
    """

    # On the class: if __init__ is interrupted, __del__ is called nevertheless.
    _entered = _closed = False
    _number = -1
    _heap: BornHeap | None = None

    def __init__(self, handlers: MemoryHandlers, handler: Any) -> None:
        self._number = next(_numbers)
        self._handlers = handlers
        self._handler = handler

    def __enter__(self) -> Self:
        if self._number in _open:
            raise RuntimeError("this block has been entered; make another by shared_allocations()")
        self._heap = get_heap()
        moving.started = True
        try:
            self._entered, self._closed = True, False
            _open[self._number] = self._heap
            self._heap.start_lending()
            _here.set((*_still_open(), self._number))
            previous = self._handlers.get()
            if previous is not self._handler:
                _before.set(previous)
                self._handlers.set(self._handler)
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._close()

    def __del__(self) -> None:
        # An interrupt came at the beginning of __exit__, or in it. The context in which the
        # block was entered cannot be restored here, since this may run in another one.
        if self._entered and not self._closed:
            _open.pop(self._number, None)
            _lend_from_last(self._heap)

    def _close(self) -> None:
        _open.pop(self._number, None)
        still = _still_open()
        _here.set(still)
        if not still and self._handlers.get() is self._handler and _before.get() is not None:
            self._handlers.set(_before.get())
        _lend_from_last(self._heap)
        self._closed = True


def shared_allocations() -> SharedAllocations:
    """Return a context manager inside which NumPy makes large arrays in shared memory.

    Otherwise these are ordinary arrays: sent by value, and private to this process. But
    if one is sent by :class:`shmreduce.Pool` or a channel of shmreduce, and nothing
    refers to it any more once it is pickled, it is moved instead of copied. With
    ``Pool(..., shared_allocations=True)`` so are results.

    Returns
    -------
    context manager
        Enter it in the thread that makes the arrays. It can be entered again after it
        was left; entering it twice at a time raises RuntimeError. Arrays outlive it.

    Raises
    ------
    AllocatorUnavailableError
        If the compiled allocator is missing; ``shmreduce build-helper`` builds it.
    PluginError
        If no plugin has the memory handlers of an array library.
    SegmentError
        If no descriptor is free to load the allocator.

    Notes
    -----
    An array is large if it has at least ``inline_limit`` bytes and at least 64 KiB. If
    there is no shared memory left, it gets ordinary memory. NumPy allocates through the
    functions that NEP 49 (https://numpy.org/neps/nep-0049.html) lets it change.

    Examples
    --------
    >>> import numpy as np
    >>> import shmreduce
    >>> here, there = shmreduce.Pipe()
    >>> with shmreduce.shared_allocations():
    ...     here.send(np.ones(1_000_000))
    >>> there.recv().sum()
    np.float64(1000000.0)
    >>> here.close(), there.close()
    (None, None)
    """
    functions = load().functions
    handlers = get_memory_handlers()
    if handlers is None:
        raise PluginError(
            "no plugin lets an array library allocate in shared memory: install numpy, or a "
            "plugin that implements shmreduce_memory_handlers",
            plugin=None,
            distribution=None,
            reason="no memory handlers",
        )
    return SharedAllocations(handlers, handlers.make(functions))


def check_allocator() -> None:
    """Raise the error that :func:`shared_allocations` would raise here, if any."""
    shared_allocations()


def _still_open() -> tuple[int, ...]:
    return tuple(number for number in _here.get() if number in _open)


def _lend_from_last(closed: BornHeap | None) -> None:
    """Let arrays be born in the heap of the last block still open; in none if there is none.

    A block may have been open in the process that this one was forked from: then its heap
    belongs to that process.
    """
    heaps = [heap for heap in list(_open.values()) if heap.is_own]
    if heaps:
        heaps[-1].start_lending()
    elif closed is not None and closed.is_own:
        closed.stop_lending()
