"""Makes segments: the file, its header, its locks, and the pages of its tables.

May import errors, signals, ``free_descriptors``, contracts, ``standard_streams``, ``locks``,
``layout``, ``mapping``, ``segment_file``, ``size_classes``, ``owned_segment``, ``family`` and
``reservation``.

If something fails, each function takes back what it has made. Otherwise it passes that on
by a plain ``return``, because Ctrl-C cannot come in between, as it could in the methods of
an ``ExitStack``.
"""

from __future__ import annotations

import errno
import os
import time
from typing import TYPE_CHECKING, Protocol

from shmreduce.contracts import SegmentFile
from shmreduce.errors import SegmentError
from shmreduce.free_descriptors import EXHAUSTED
from shmreduce.memory import locks
from shmreduce.memory.layout import LOCK_OWNER, Layout, SegmentHeader
from shmreduce.memory.mapping import PAGE_SIZE, page_ceil
from shmreduce.memory.owned_segment import OwnedSegment
from shmreduce.memory.reservation import check_headroom, no_room
from shmreduce.memory.segment_file import (
    check_answer,
    check_new_file,
    check_opened,
    locator_of,
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
    """What making a segment needs from its process."""

    @property
    def family(self) -> Family:
        """The family with which reservations are booked."""

    @property
    def boot(self) -> bytes:
        """Identity of the current boot of this host, 16 bytes."""

    def budget(self) -> int:
        """Return how many bytes the family may reserve."""


def create_segment(
    kind: int, data: int, needed: int, strategy: SharingStrategy, host: SegmentHost
) -> OwnedSegment:
    """Make a segment with room for ``data`` bytes, of which ``needed`` will be used now.

    Parameters
    ----------
    kind : int
        ``BY_VALUE`` or ``SHARED``.
    data, needed : int
        Numbers of bytes. Only the pages of the tables are reserved here.
    strategy : SharingStrategy
        The strategy that makes the file.
    host : SegmentHost
        The state of the process.

    Raises
    ------
    OutOfSharedMemoryError, BudgetExceededError
        If there is no room for the tables and ``needed`` bytes.
    SegmentError
        If the strategy or the kernel refuses the file or its mappings.
    PluginError
        If the strategy returns something else than it must.
    """
    blocks, slots = table_sizes(kind, data)
    layout = Layout.plan(blocks, slots)
    tables = layout.slot_words
    # Checked before anything is reserved. Otherwise a part of what does not fit could fill
    # the memory.
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
        header = header._replace(locator=locator_of(strategy, file))
        return _open_new(file, header, tables, strategy, host)
    except BaseException as error:
        _discard_file(strategy, file)
        # Not for a TimeoutError from a busy lock or a signal handler.
        if isinstance(error, OSError) and is_from_system(error):
            if error.errno in EXHAUSTED:
                raise _failure(strategy, header.size, header.token.hex(), error) from error
            raise no_room(tables, None, error.errno or 0, strategy) from error
        raise


def try_strategy(strategy: SharingStrategy) -> None:
    """Make a file with a strategy, open it as another process would, and remove it.

    Raises
    ------
    SegmentError, PluginError, OSError
        As :func:`create_segment`, or the strategy's own error.
    """
    file = _create_file(PAGE_SIZE, os.urandom(16).hex(), strategy)
    try:
        os.close(check_opened(strategy, strategy.open(locator_of(strategy, file))).fd)
    finally:
        _discard_file(strategy, file)


def _create_file(size: int, token: str, strategy: SharingStrategy) -> SegmentFile:
    """Have the strategy make the file, which is still empty."""
    try:
        made = check_answer(strategy, "create()", strategy.create(size, token))
        file = _clear_of_streams(strategy, made)
    except OSError as error:
        if not is_from_system(error):
            raise
        raise _failure(strategy, size, token, error) from error
    try:
        check_new_file(strategy, file, size)
    except BaseException:
        _discard_file(strategy, file)
        raise
    return file


def _failure(strategy: SharingStrategy, size: int, token: str, error: OSError) -> SegmentError:
    advice = (
        "Close files, or raise the limit of open files (ulimit -n)"
        if error.errno in EXHAUSTED
        else "'shmreduce doctor' lists the limits that matter"
    )
    return SegmentError(
        f"strategy {strategy.name!r} could not make a segment of {size} bytes: "
        f"{error.strerror or error}. {advice}",
        operation="create",
        errno=error.errno,
        segment=token,
    )


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
    """Turn an empty file into a segment, and reserve its tables' pages; the caller owns it."""
    reserve_pages(file.fd, 0, tables)
    # Locked before there is a header: a file with a header but without the lock counts as a
    # dead owner's, see sweep.
    locks.try_lock(file.fd, LOCK_OWNER)
    os.pwrite(file.fd, header.pack(), 0)
    segment = OwnedSegment(file, header, strategy)
    try:
        host.family.reserve(tables, host.budget(), segment)
    except BaseException:
        # The caller closes the file, once.
        segment.give_up_locks()
        # Ctrl-C may have come after the bytes were booked.
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
