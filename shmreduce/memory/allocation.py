"""Allocates shared blocks, and finds the block in which a buffer lies.

May import errors, contracts, ``layout``, ``heap``, ``blocks`` and ``runtime``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shmreduce.contracts import check_mode, check_nbytes
from shmreduce.memory.blocks import Block, owner_record
from shmreduce.memory.heap import HeapBusyError
from shmreduce.memory.layout import SHARED
from shmreduce.memory.runtime import current

if TYPE_CHECKING:
    from shmreduce.contracts import Mode

__all__ = ["allocate", "find_block"]


def allocate(nbytes: int, mode: Mode = "rw") -> Block:
    """Make a shared block.

    Parameters
    ----------
    nbytes : int
        Number of bytes, which may be 0. The contents are undefined.
    mode : {"rw", "ro", "cow"}
        How receivers see the block. In this process it is always writable.

    Returns
    -------
    Block
        The caller owns it. Its memory stays while the Block, or anything derived from its
        buffer, is in use in this process or in one that received it, and while an unread
        message refers to it.

    Raises
    ------
    OutOfSharedMemoryError, BudgetExceededError, SegmentError
        If there is no room, or the system refuses a segment.
    UnknownStrategyError, StrategyUnusableError
        If the sharing strategy does not exist or does not work here.
    ConfigurationError
        If ``nbytes`` or ``mode`` is impossible.

    Examples
    --------
    >>> block = allocate(5)
    >>> block.buffer[:] = b"hello"
    >>> bytes(block.buffer), block.shared
    (b'hello', True)
    """
    nbytes = check_nbytes(nbytes)
    check_mode(mode)
    runtime = current()
    runtime.live.settle()
    heap = runtime.heap(SHARED)
    try:
        segment, block = heap.allocate(nbytes, whole_pages=mode == "cow")
    except HeapBusyError:
        # This thread was interrupted inside that heap, for example by a signal handler.
        heap = runtime.spare_heap(SHARED)
        segment, block = heap.allocate(nbytes, whole_pages=mode == "cow")
    try:
        return runtime.live.expose(owner_record(runtime.live, heap, segment, block, nbytes, mode))
    except BaseException:
        if segment.records.get(block, runtime) is None:
            # For example, the recursion limit was reached before watch() noted the block.
            heap.untake(segment, block)
        raise


def find_block(exporter: object) -> Block | None:
    """Return the block in which a buffer lies, or None if it lies in no block.

    Parameters
    ----------
    exporter : memoryview, array or object
        A memoryview, an array of NumPy, or the object at the base of a chain of views.

    Returns
    -------
    Block or None
        Its memory stays as long as the Block lives.

    Examples
    --------
    >>> block = allocate(8)
    >>> find_block(block.buffer[2:4]).nbytes
    8
    >>> find_block(bytearray(8)) is None
    True
    """
    return current().live.find_below(exporter)
