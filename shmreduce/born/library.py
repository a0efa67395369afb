"""Loads the compiled allocator, and declares its tables and functions.

May import errors, contracts, ``compiled``, ``fork_hooks``, ``free_descriptors``,
``interpreter``, ``thread_locks`` and :mod:`shmreduce.memory`.

Its functions are called with the interpreter lock held (``PyDLL``). None of them waits for
anything but memory, and no other thread, signal handler or finalizer can run Python code
meanwhile. The fork hooks are functions of the library itself, so Ctrl-C cannot interrupt
them.
"""

from __future__ import annotations

import ctypes
import os
import stat
import threading
from collections import deque
from functools import partial
from operator import call
from typing import Any

from shmreduce.compiled import ALLOCATOR
from shmreduce.contracts import AllocatorFunctions
from shmreduce.errors import AllocatorUnavailableError
from shmreduce.fork_hooks import also_prepare, renew_in_children
from shmreduce.free_descriptors import need_descriptors
from shmreduce.interpreter import is_free_threaded
from shmreduce.memory.mapping import PAGE_SIZE
from shmreduce.thread_locks import interrupt_safe

__all__ = [
    "EXPOSED",
    "FREED",
    "KNOWN",
    "LIVE",
    "PRIVATE",
    "VERSION",
    "Entry",
    "Library",
    "Status",
    "load",
]

LIBRARY = ALLOCATOR.library
VERSION = 4
"""Version of the tables and functions; the C source has the same number."""
LIVE, FREED = 2, 3
"""States of an entry, as in the C source."""
PRIVATE, KNOWN, EXPOSED = 2, 8, 16
"""Flags of an entry, as in the C source."""
_MOST_ENTRIES = 16384
"""``MOST_ENTRIES`` of the C source."""
_ADVICE = (
    "Run `shmreduce build-helper` (or `python -m shmreduce build-helper`), which needs a C "
    "compiler, or install shmreduce where there is one. Everything else works without it"
)


class Entry(ctypes.Structure):
    """One block of the allocator; ``struct entry`` of the source."""

    _fields_ = (
        ("address", ctypes.c_uint64),
        ("capacity", ctypes.c_uint64),
        ("size", ctypes.c_uint64),
        ("birth", ctypes.c_uint64),
        ("death", ctypes.c_uint64),
        ("range", ctypes.c_uint32),
        ("block", ctypes.c_uint32),
        ("next", ctypes.c_uint32),
        ("state", ctypes.c_uint16),
        ("flags", ctypes.c_uint16),
    )
    address: int
    capacity: int
    size: int
    birth: int
    death: int
    range: int
    block: int
    state: int
    flags: int


class Status(ctypes.Structure):
    """Counters of the allocator; ``struct status`` of the source, which explains them."""

    _fields_ = (
        ("forks", ctypes.c_uint64),
        ("idle_bytes", ctypes.c_uint64),
        ("carved_bytes", ctypes.c_uint64),
        ("largest", ctypes.c_uint64),
        ("missed", ctypes.c_uint64),
        ("exposed", ctypes.c_uint64),
        ("served", ctypes.c_uint64),
        ("unknown", ctypes.c_uint32),
        ("freed", ctypes.c_uint32),
        ("forking", ctypes.c_uint32),
    )
    forks: int
    idle_bytes: int
    carved_bytes: int
    largest: int
    missed: int
    exposed: int
    served: int
    unknown: int
    freed: int
    forking: int


_u32, _u64, _int = ctypes.c_uint32, ctypes.c_uint64, ctypes.c_int
_SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "version": (_int, ()),
    "start": (None, (_u32,)),
    "entries": (ctypes.c_void_p, ()),
    "status": (ctypes.c_void_p, ()),
    "size_class": (_u64, (_u64,)),
    "enable": (None, (_int,)),
    "allow": (None, (_u64, _u64)),
    "add_range": (ctypes.c_int32, (_u64, _u64, _int, _u64)),
    "drop_range": (_int, (_u32,)),
    "retire": (None, (_u32, _int)),
    "lend": (_u32, (_u32, _u32, _u64, _u64)),
    "lend_region": (None, (_u32, _u64, _u64, _int, ctypes.POINTER(_u32), _u32)),
    "region_left": (_u64, ()),
    "take_region": (
        _int,
        (
            ctypes.POINTER(_u32),
            ctypes.POINTER(_u64),
            ctypes.POINTER(_u64),
            ctypes.POINTER(_u32),
        ),
    ),
    "unknown": (_u32, ()),
    "known": (_int, (_u32,)),
    "take_freed": (_u32, ()),
    "take_idle": (_u32, ()),
    "release": (None, (_u32,)),
    "restore": (_int, (_u32,)),
    "send": (_u32, (_u64,)),
    "unsend": (None, (_u32,)),
    "before_fork": (None, ()),
    "prepare_fork": (None, (_u32,)),
    "after_fork_in_parent": (None, ()),
    "after_fork_in_child": (None, ()),
    "end": (None, ()),
    "malloc": (None, ()),
    "calloc": (None, ()),
    "realloc": (None, ()),
    "free": (None, ()),
}
"""Result and arguments of each function. The last four are not called from Python."""


class Library:
    """The allocator of this process.

    Each function of the library is an attribute, without its prefix.
    """

    def __init__(self, dll: ctypes.PyDLL) -> None:
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(dll, f"shmreduce_{name}")
            function.restype = result
            function.argtypes = arguments
            setattr(self, name, function)
        self.start(PAGE_SIZE)
        entries = (Entry * (_MOST_ENTRIES + 1)).from_address(self.entries())
        self.table: Any = entries
        """Entries by their numbers, from 1 on."""
        self.counters = Status.from_address(self.status())
        self.functions = AllocatorFunctions(
            0, *(_address(getattr(self, name)) for name in ("malloc", "calloc", "realloc", "free"))
        )
        if not _hooked:
            # The hooks of the memory package are registered already. So before a fork this one
            # runs first, and after a fork it runs last.
            register = partial(
                os.register_at_fork,
                before=self.before_fork,
                after_in_parent=self.after_fork_in_parent,
                after_in_child=self.after_fork_in_child,
            )
            # Both calls in one step of the interpreter, after which Ctrl-C may come: hooks that
            # are registered twice would count each fork twice, and none must be missing.
            deque(map(call, (register, partial(_hooked.append, True))), maxlen=0)
        also_prepare(self.prepare_fork)

    def __getattr__(self, name: str) -> Any:
        # Only for type checkers: __init__ has set all functions.
        raise AttributeError(name)


def _address(function: Any) -> int:
    address: int | None = ctypes.cast(function, ctypes.c_void_p).value
    return address or 0


_library: Library | None = None
_hooked: list[bool] = []
"""Whether the fork hooks are registered; another try to load the allocator has no other ones."""
_loading = interrupt_safe(threading.Lock())


def load() -> Library:
    """Return the allocator; the first call loads it.

    Raises
    ------
    AllocatorUnavailableError
        If it was not built, or was built for another version of shmreduce.
    SegmentError
        If no descriptor is free, which says nothing about the library.
    """
    global _library
    if _library is not None:
        return _library
    need_descriptors(1, "load the allocator")
    if is_free_threaded():
        raise _unavailable("this Python is a free-threaded build")
    try:
        if os.stat(LIBRARY).st_mode & stat.S_IWOTH:
            raise _unavailable("every user may write to it")
        dll = ctypes.PyDLL(LIBRARY)
        version = dll.shmreduce_version()
    except (OSError, AttributeError) as error:
        reason = str(error) if os.path.exists(LIBRARY) else "it was not built"
        raise _unavailable(reason) from error
    if version != VERSION:
        raise _unavailable(f"it is of version {version}, this is version {VERSION}")
    with _loading:
        if _library is None:
            _library = Library(dll)
    return _library


def _renew_lock() -> None:
    # At the fork, another thread of the parent may have held it.
    global _loading
    _loading = interrupt_safe(threading.Lock())


renew_in_children(_renew_lock)


def _unavailable(reason: str) -> AllocatorUnavailableError:
    return AllocatorUnavailableError(
        f"shared_allocations needs the allocator at {LIBRARY}, which cannot be used: {reason}. "
        f"{_ADVICE}",
        path=LIBRARY,
        reason=reason,
    )
