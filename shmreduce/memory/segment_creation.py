"""Makes a segment: its file, its header, its locks, the pages of its tables.

May import errors, signals, contracts, ``standard_streams``, ``locks``, ``layout``,
``mapping``, ``segment_file``, ``size_classes``, ``owned_segment``, ``family`` and
``reservation``.

Each function takes back what it has made if something fails, and hands it on by
a plain ``return``: there Ctrl-C does not come in between, as it would in the
methods of an ``ExitStack``.
"""

from __future__ import annotations

import errno
import os
import time
from typing import TYPE_CHECKING, Protocol

from shmreduce.contracts import SegmentFile
from shmreduce.errors import SegmentError
from shmreduce.memory import locks
from shmreduce.memory.layout import LOCK_OWNER, Layout, SegmentHeader
from shmreduce.memory.mapping import PAGE_SIZE, page_ceil
from shmreduce.memory.owned_segment import OwnedSegment
from shmreduce.memory.reservation import check_headroom, no_room
from shmreduce.memory.segment_file import (
    check_answer,
    check_new_file,
    check_opened,
    reserve_pages,
)
from shmreduce.memory.size_classes import table_sizes
from shmreduce.memory.standard_streams import clear_of_streams
from shmreduce.signals import is_from_system

if TYPE_CHECKING:
    from shmreduce.contracts import SharingStrategy
    from shmreduce.memory.family import Family

__all__ = ["SegmentHost", "create_segment", "try_strategy"]


class SegmentHost(Protocol):
    """What making a segment needs of the process that it belongs to."""

    @property
    def family(self) -> Family:
        """Where reservations are booked."""

    @property
    def boot(self) -> bytes:
        """Identity of this boot of this host, 16 bytes."""

    def budget(self) -> int:
        """Return how many bytes the family may reserve."""


def create_segment(
    kind: int, data: int, needed: int, strategy: SharingStrategy, host: SegmentHost
) -> OwnedSegment:
    """Make a segment with room for ``data`` bytes, of which ``needed`` are asked for now.

    Parameters
    ----------
    kind : int
        ``BY_VALUE`` or ``SHARED``.
    data, needed : int
        Bytes. Only the pages of the tables are reserved here.
    strategy : SharingStrategy
        Makes the file.
    host : SegmentHost
        The process's state.

    Raises
    ------
    OutOfSharedMemoryError, BudgetExceededError
        If there is no room for the tables and what is needed.
    SegmentError
        If the strategy, or the kernel, refuses the file or its mappings.
    PluginError
        If what the strategy returns is not what was asked for.
    """
    blocks, slots = table_sizes(kind, data)
    layout = Layout.plan(blocks, slots)
    tables = layout.slot_words
    # Before a part of what there is no room for fills the memory.
    host.family.check(tables + needed, host.budget())
    check_headroom(tables + needed, strategy)
    token = os.urandom(16)
    header = SegmentHeader(
        kind,
        token,
        host.boot,
        host.family.identity,
        os.getpid(),
        time.time_ns(),
        layout.data_offset + page_ceil(data) + PAGE_SIZE,
        blocks,
        slots,
        strategy.name,
    )
    file = _create_file(header.size, token.hex(), strategy)
    try:
        return _open_new(file, header, tables, strategy, host)
    except BaseException as error:
        _discard_file(strategy, file)
        # Not a TimeoutError: of a lock that stays taken, or of a signal handler.
        if isinstance(error, OSError) and is_from_system(error):
            raise no_room(tables, None, error.errno or 0, strategy) from error
        raise


def try_strategy(strategy: SharingStrategy) -> None:
    """Make a file with a strategy, open it as another process would, and remove it.

    Raises
    ------
    SegmentError, PluginError, OSError
        As :func:`create_segment`, or as the strategy gave it.
    """
    file = _create_file(PAGE_SIZE, os.urandom(16).hex(), strategy)
    try:
        os.close(check_opened(strategy, strategy.open(strategy.locator(file))).fd)
    finally:
        _discard_file(strategy, file)


def _create_file(size: int, token: str, strategy: SharingStrategy) -> SegmentFile:
    """Have the file made, still empty."""
    try:
        made = check_answer(strategy, "create()", strategy.create(size, token))
        file = _clear_of_streams(strategy, made)
    except OSError as error:
        if not is_from_system(error):
            raise
        raise SegmentError(
            f"strategy {strategy.name!r} could not make a segment of {size} bytes: "
            f"{error.strerror or error}. 'shmreduce doctor' lists the limits that matter",
            operation="create",
            errno=error.errno,
            segment=token,
        ) from error
    try:
        check_new_file(strategy, file, size)
    except BaseException:
        _discard_file(strategy, file)
        raise
    return file


def _clear_of_streams(strategy: SharingStrategy, file: SegmentFile) -> SegmentFile:
    try:
        return SegmentFile(clear_of_streams(file.fd), file.name)
    except BaseException:
        if file.name is not None:
            strategy.unlink(file.name)
        raise


def _open_new(
    file: SegmentFile,
    header: SegmentHeader,
    tables: int,
    strategy: SharingStrategy,
    host: SegmentHost,
) -> OwnedSegment:
    """Make an empty file a segment, with pages for its tables; it stays the caller's to close."""
    reserve_pages(file.fd, 0, tables)
    # Before there is a header: a file with one and without the lock is
    # a dead owner's, see sweep.
    locks.try_lock(file.fd, LOCK_OWNER)
    os.pwrite(file.fd, header.pack(), 0)
    segment = OwnedSegment(file, header, strategy)
    try:
        host.family.reserve(tables, host.budget(), segment)
    except BaseException:
        # The file itself is closed by the caller, once.
        segment.give_up_locks()
        # Ctrl-C may have come when that was done.
        host.family.book(-segment.reserved, segment)
        raise
    return segment


def _discard_file(strategy: SharingStrategy, file: SegmentFile) -> None:
    try:
        os.close(file.fd)
    except OSError as error:
        if error.errno != errno.EBADF:
            raise
    if file.name is not None:
        strategy.unlink(file.name)
