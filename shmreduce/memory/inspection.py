"""Shows what is alive in this process and on this machine.

May import every module of the package. Reads segments without taking part:
it takes no locks, registers no importer and maps nothing.
"""

from __future__ import annotations

import os
import time
import warnings
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from shmreduce.errors import (
    ForeignSegmentError,
    InvalidHandleError,
    PluginError,
    SegmentError,
    ShmreduceWarning,
)
from shmreduce.memory import locks
from shmreduce.memory.layout import LOCK_OWNER, SHARED, Layout, SegmentHeader
from shmreduce.memory.lease_slots import MESSAGE, NONCE_MASK
from shmreduce.memory.runtime import current
from shmreduce.memory.segment_file import check_file, used_slots
from shmreduce.memory.sweep import abandoned, names_of, sweep
from shmreduce.process_registry import get_registry
from shmreduce.strategies import reason_against

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from shmreduce.contracts import SharingStrategy

__all__ = [
    "ProcessState",
    "SegmentState",
    "all_names",
    "leftovers",
    "list_segments",
    "look_at",
    "process_state",
    "remove_leftovers",
]

_MEMFD = "/memfd:shmreduce-"


@dataclass(frozen=True)
class SegmentState:
    """A segment as seen from outside.

    Parameters
    ----------
    token, strategy : str
        Its identity, and the name of the sharing strategy that made it.
    name : str or None
        Its name in a file system.
    shared : bool
        Whether it holds shared blocks. If not, each block carries one message.
    owner : int
        Pid of the process that made it.
    owner_alive : bool
        Whether the maker, or a forked child that inherited its memory, lives.
    age : float
        Seconds since it was made.
    size, reserved : int
        Bytes of address space, and of memory that is really allocated.
    blocks : int
        Blocks that were carved out of it, including free ones that are warm.
    messages, holds : int
        Leases of unread messages, and leases of arrays in use in other processes.
    holders : dict
        How many descriptors of it each process has open, by pid.
    """

    token: str
    strategy: str
    name: str | None
    shared: bool
    owner: int
    owner_alive: bool
    age: float
    size: int
    reserved: int
    blocks: int
    messages: int
    holds: int
    holders: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class ProcessState:
    """What this process has of shared memory.

    Parameters
    ----------
    segments : dict
        A descriptor of each open segment, by token.
    arrays : int
        Blocks that have views here.
    unread : int
        Messages of this process that nobody has read.
    out : int
        Blocks of this process that are in use, here or elsewhere.
    held : int
        Those of them that have no view here.
    reserved, warm : int
        Bytes of pages of this process's segments, and those of them that are free.
    waiting : int
        Dead blocks that wait for a busy lock or a forked child.
    descriptors : frozenset of int
        Descriptors of segments, their locks and the fork ledger. They stay open as long as
        they may be needed.
    """

    segments: dict[str, int]
    arrays: int
    unread: int
    out: int
    held: int
    reserved: int
    warm: int
    waiting: int
    descriptors: frozenset[int]


def process_state() -> ProcessState:
    """Return what this process has, after it has taken back what is free.

    Examples
    --------
    >>> process_state().arrays >= 0
    True
    """
    runtime = current()
    runtime.live.settle()
    heaps = runtime.heaps
    for heap in heaps:
        heap.collect()
        heap.reap()
    segments = runtime.attachments.segments()
    # Copied to lists, since other threads take and free blocks meanwhile.
    out = [
        (segment, block)
        for heap in heaps
        for segment in list(heap.segments)
        for block in list(segment.out)
    ]
    viewed, ledger = set(runtime.live.places()), runtime.live.ledger
    return ProcessState(
        segments={segment.token.hex(): segment.fd for segment in segments},
        arrays=len(runtime.live),
        unread=sum(len(segment.unread()) for segment in segments),
        out=len(out),
        held=sum(place not in viewed for place in out),
        reserved=sum(heap.reserved_bytes for heap in heaps),
        warm=sum(heap.warm_bytes for heap in heaps),
        waiting=runtime.live.unsettled,
        descriptors=frozenset(
            (*(fd for each in segments for fd in each.descriptors()), *ledger.descriptors())
        ),
    )


def list_segments() -> list[SegmentState]:
    """Return this user's segments on this machine, oldest first."""
    found: dict[bytes, tuple[SegmentState, dict[int, int]]] = {}
    for path, pid in _candidates():
        state = look_at(path)
        if state is None:
            continue
        token = bytes.fromhex(state.token)
        _, holders = found.setdefault(token, (state, state.holders))
        if pid is not None:
            holders[pid] = holders.get(pid, 0) + 1
    return sorted((state for state, _ in found.values()), key=lambda state: -state.age)


def all_names() -> set[str]:
    """Return the names of this user's segments, under every strategy.

    Warns
    -----
    ShmreduceWarning
        About a strategy that cannot list its names; the names of the others are returned.
    """
    return set(_of_all_strategies(names_of))


def leftovers() -> list[str]:
    """Return the names of segments whose owners were killed."""
    return [name for name in all_names() if abandoned(name)]


def remove_leftovers() -> list[str]:
    """Remove the names that killed owners left; return the removed names.

    Readers that have such a segment open can still use it.

    Warns
    -----
    ShmreduceWarning
        About a strategy that cannot list its names.
    """
    return _of_all_strategies(sweep)


def _of_all_strategies(names: Callable[[SharingStrategy], list[str]]) -> list[str]:
    found = []
    for strategy in _strategies():
        try:
            found += names(strategy)
        except PluginError as error:
            # The other strategies are in use; this one perhaps never was.
            warnings.warn(f"{error}. Its segments are left out", ShmreduceWarning, stacklevel=3)
    return found


def _strategies() -> Iterable[SharingStrategy]:
    claims = get_registry().strategies().values()
    # A strategy that does not work here has no segments, and may have no place to look in.
    return [claim.strategy for claim in claims if reason_against(claim.strategy) is None]


def _candidates() -> Iterator[tuple[str, int | None]]:
    """Yield paths that may be segments, with the process that has them open."""
    names = all_names()
    for name in names:
        yield name, None
    for entry in os.listdir("/proc") if os.path.isdir("/proc/self/fd") else ():
        if not entry.isdigit():
            continue
        for path, target in _open_files(entry):
            unlinked = "/shmreduce-" in target and target.endswith(" (deleted)")
            if unlinked or target in names or target.startswith(_MEMFD):
                yield path, int(entry)


def _open_files(pid: str) -> Iterator[tuple[str, str]]:
    """Yield the paths of a process's descriptors in /proc, with what they have open."""
    folder = f"/proc/{pid}/fd"
    try:
        numbers = os.listdir(folder)
    except OSError:
        # The process has ended meanwhile, or belongs to another user.
        return
    for number in numbers:
        path = f"{folder}/{number}"
        try:
            target = os.readlink(path)
        except OSError:
            # The descriptor was closed meanwhile.
            continue
        yield path, target


def look_at(path: str) -> SegmentState | None:
    """Return the state of the segment in a file, or None if the file is none that can be read.

    ``holders`` is empty: this does not search for the processes that have it open.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError:
        return None
    try:
        header = check_file(fd, None)
        return _describe(fd, header, path)
    except (OSError, InvalidHandleError, ForeignSegmentError, SegmentError):
        # The file is not a segment, or one that is just being made.
        return None
    finally:
        os.close(fd)


def _describe(fd: int, header: SegmentHeader, path: str) -> SegmentState:
    layout = Layout.of(header)
    capacities = _table(fd, layout.capacities, layout.blocks)
    used = list(used_slots(fd, layout))
    messages = sum(1 for word in used if word & ~NONCE_MASK == MESSAGE)
    return SegmentState(
        token=header.token.hex(),
        strategy=header.strategy,
        name=None if path.startswith("/proc/") else path,
        shared=header.kind == SHARED,
        owner=header.owner_pid,
        owner_alive=locks.first_locked(fd, LOCK_OWNER) is not None,
        age=max(0.0, (time.time_ns() - header.created_ns) / 1e9),
        size=header.size,
        reserved=os.fstat(fd).st_blocks * 512,
        blocks=sum(1 for capacity in capacities.tolist() if capacity),
        messages=messages,
        holds=len(used) - messages,
    )


def _table(fd: int, offset: int, count: int) -> memoryview:
    data = os.pread(fd, 8 * count, offset)
    return memoryview(data.ljust(8 * count, b"\0")).cast("Q")
