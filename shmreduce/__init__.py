"""Arrays travel through :mod:`multiprocessing` by shared memory.

This module only names the public interface. Each name is imported from the
module that defines it when it is first used (PEP 562), so that
``import shmreduce`` imports next to nothing. It may import ``importing``.

Examples
--------
>>> import shmreduce
>>> with shmreduce.install():
...     strategy = shmreduce.get_sharing_strategy()
>>> strategy in shmreduce.get_all_sharing_strategies()
True
"""

from __future__ import annotations

import os

if not hasattr(os, "fork"):
    # Such as Windows. Before anything else is imported, which needs fork() and fcntl().
    raise ImportError(
        "shmreduce needs an operating system with fork() and fcntl(), such as Linux. Where there "
        "is none, use multiprocessing: catch this ImportError",
        name=__name__,
    )

# At once: its hook of forks must be there before anything is imported late.
from shmreduce.importing import import_late

TYPE_CHECKING = False  # as typing's; importing typing takes longer than all of this module

if TYPE_CHECKING:
    # With `as`, which tells type checkers that users may import them from here.
    from multiprocessing import dummy as dummy
    from multiprocessing import forkserver as forkserver
    from multiprocessing import heap as heap
    from multiprocessing import process as process
    from multiprocessing import reduction as reduction
    from multiprocessing import resource_sharer as resource_sharer
    from multiprocessing import resource_tracker as resource_tracker
    from multiprocessing import shared_memory as shared_memory
    from multiprocessing import sharedctypes as sharedctypes
    from multiprocessing import synchronize as synchronize
    from multiprocessing import util as util

    from shmreduce import connection as connection
    from shmreduce import context as context
    from shmreduce import managers as managers
    from shmreduce import pool as pool
    from shmreduce import queues as queues
    from shmreduce.arrays import (
        array,
        empty,
        full,
        is_shared,
        ones,
        share,
        zeros,
    )
    from shmreduce.born.allocations import shared_allocations
    from shmreduce.context import (
        Array,
        AuthenticationError,
        Barrier,
        BoundedSemaphore,
        BufferTooShort,
        Condition,
        Event,
        JoinableQueue,
        Lock,
        Manager,
        Pipe,
        Pool,
        Process,
        ProcessError,
        Queue,
        RawArray,
        RawValue,
        RLock,
        Semaphore,
        SimpleQueue,
        TimeoutError,  # noqa: A004
        Value,
        active_children,
        allow_connection_pickling,
        cpu_count,
        current_process,
        freeze_support,
        get_all_start_methods,
        get_context,
        get_logger,
        get_start_method,
        log_to_stderr,
        parent_process,
        reducer,
        set_executable,
        set_forkserver_preload,
        set_start_method,
    )
    from shmreduce.contracts import (
        AllocatorFunctions,
        ArrayFactory,
        MemoryHandlers,
        Mode,
        Reducer,
        SegmentFile,
        SharingStrategy,
    )
    from shmreduce.copying import copy_bytes, copy_in_parts
    from shmreduce.errors import (
        AllocatorUnavailableError,
        AlreadyLoadedError,
        AttachError,
        BudgetExceededError,
        CompilationError,
        ConfigurationError,
        ForeignSegmentError,
        InheritedPoolError,
        InvalidHandleError,
        LeaseTimeoutError,
        MissingExtraError,
        NotShareableError,
        OutOfLeasesError,
        OutOfSharedMemoryError,
        PlatformError,
        PluginError,
        ProcessException,
        ProcessExitedException,
        ProcessRaisedException,
        ProcessTimeoutError,
        ProducerDied,
        ReducerConflictError,
        ReducerError,
        SegmentError,
        SegmentGoneError,
        ShmreduceError,
        ShmreduceWarning,
        StaleHandleError,
        StrategyConflictError,
        StrategyUnusableError,
        TaskAbandonedError,
        UnknownStrategyError,
        WorkerDied,
        WrongHostError,
    )
    from shmreduce.executor import ProcessPoolExecutor
    from shmreduce.forking import Installation, install, uninstall
    from shmreduce.hookspecs import hookimpl
    from shmreduce.memory.allocation import allocate, find_block
    from shmreduce.memory.attachments import open_process_descriptor
    from shmreduce.memory.blocks import Block
    from shmreduce.memory.loading import import_block
    from shmreduce.memory.message import Message
    from shmreduce.prctl import get_thread_name, set_thread_name
    from shmreduce.process_registry import register_reducer, unregister_reducer
    from shmreduce.settings import Settings, get_settings
    from shmreduce.spawning import (
        ENV_VAR_PARALLEL_START,
        ProcessContext,
        SpawnContext,
        spawn,
        start_processes,
    )
    from shmreduce.strategies import (
        get_all_sharing_strategies,
        get_sharing_strategy,
        set_sharing_strategy,
    )

__all__ = [
    "ENV_VAR_PARALLEL_START",
    "AllocatorFunctions",
    "AllocatorUnavailableError",
    "AlreadyLoadedError",
    "Array",
    "ArrayFactory",
    "AttachError",
    "AuthenticationError",
    "Barrier",
    "Block",
    "BoundedSemaphore",
    "BudgetExceededError",
    "BufferTooShort",
    "CompilationError",
    "Condition",
    "ConfigurationError",
    "Event",
    "ForeignSegmentError",
    "InheritedPoolError",
    "Installation",
    "InvalidHandleError",
    "JoinableQueue",
    "LeaseTimeoutError",
    "Lock",
    "Manager",
    "MemoryHandlers",
    "Message",
    "MissingExtraError",
    "Mode",
    "NotShareableError",
    "OutOfLeasesError",
    "OutOfSharedMemoryError",
    "Pipe",
    "PlatformError",
    "PluginError",
    "Pool",
    "Process",
    "ProcessContext",
    "ProcessError",
    "ProcessException",
    "ProcessExitedException",
    "ProcessPoolExecutor",
    "ProcessRaisedException",
    "ProcessTimeoutError",
    "ProducerDied",
    "Queue",
    "RLock",
    "RawArray",
    "RawValue",
    "Reducer",
    "ReducerConflictError",
    "ReducerError",
    "SegmentError",
    "SegmentFile",
    "SegmentGoneError",
    "Semaphore",
    "Settings",
    "SharingStrategy",
    "ShmreduceError",
    "ShmreduceWarning",
    "SimpleQueue",
    "SpawnContext",
    "StaleHandleError",
    "StrategyConflictError",
    "StrategyUnusableError",
    "TaskAbandonedError",
    "TimeoutError",
    "UnknownStrategyError",
    "Value",
    "WorkerDied",
    "WrongHostError",
    "__version__",
    "active_children",
    "allocate",
    "allow_connection_pickling",
    "array",
    "copy_bytes",
    "copy_in_parts",
    "cpu_count",
    "current_process",
    "empty",
    "find_block",
    "freeze_support",
    "full",
    "get_all_sharing_strategies",
    "get_all_start_methods",
    "get_context",
    "get_logger",
    "get_settings",
    "get_sharing_strategy",
    "get_start_method",
    "get_thread_name",
    "hookimpl",
    "import_block",
    "import_late",
    "install",
    "is_shared",
    "log_to_stderr",
    "ones",
    "open_process_descriptor",
    "parent_process",
    "reducer",
    "register_reducer",
    "set_executable",
    "set_forkserver_preload",
    "set_sharing_strategy",
    "set_start_method",
    "set_thread_name",
    "share",
    "shared_allocations",
    "spawn",
    "start_processes",
    "uninstall",
    "unregister_reducer",
    "zeros",
]

__version__ = "0.1.0"

_DEFINED_IN = {
    "shmreduce.arrays": ("array", "empty", "full", "is_shared", "ones", "share", "zeros"),
    "shmreduce.born.allocations": ("shared_allocations",),
    "shmreduce.context": (
        "Array",
        "AuthenticationError",
        "Barrier",
        "BoundedSemaphore",
        "BufferTooShort",
        "Condition",
        "Event",
        "JoinableQueue",
        "Lock",
        "Manager",
        "Pipe",
        "Pool",
        "Process",
        "ProcessError",
        "Queue",
        "RLock",
        "RawArray",
        "RawValue",
        "Semaphore",
        "SimpleQueue",
        "TimeoutError",
        "Value",
        "active_children",
        "allow_connection_pickling",
        "cpu_count",
        "current_process",
        "freeze_support",
        "get_all_start_methods",
        "get_context",
        "get_logger",
        "get_start_method",
        "log_to_stderr",
        "parent_process",
        "reducer",
        "set_executable",
        "set_forkserver_preload",
        "set_start_method",
    ),
    "shmreduce.contracts": (
        "AllocatorFunctions",
        "ArrayFactory",
        "MemoryHandlers",
        "Mode",
        "Reducer",
        "SegmentFile",
        "SharingStrategy",
    ),
    "shmreduce.copying": ("copy_bytes", "copy_in_parts"),
    "shmreduce.process_registry": ("register_reducer", "unregister_reducer"),
    "shmreduce.executor": ("ProcessPoolExecutor",),
    "shmreduce.forking": ("Installation", "install", "uninstall"),
    "shmreduce.hookspecs": ("hookimpl",),
    "shmreduce.memory.attachments": ("open_process_descriptor",),
    "shmreduce.memory.blocks": ("Block",),
    "shmreduce.memory.allocation": ("allocate", "find_block"),
    "shmreduce.memory.loading": ("import_block",),
    "shmreduce.memory.message": ("Message",),
    "shmreduce.prctl": ("get_thread_name", "set_thread_name"),
    "shmreduce.settings": ("Settings", "get_settings"),
    "shmreduce.spawning": (
        "ENV_VAR_PARALLEL_START",
        "ProcessContext",
        "SpawnContext",
        "spawn",
        "start_processes",
    ),
    "shmreduce.strategies": (
        "get_all_sharing_strategies",
        "get_sharing_strategy",
        "set_sharing_strategy",
    ),
}
_SHARED_MODULES = frozenset(("connection", "context", "managers", "pool", "queues"))
"""Our modules that replace one of multiprocessing, and take the rest of its names from there."""
_OTHER_MODULES = frozenset(
    (
        "dummy",
        "forkserver",
        "heap",
        "process",
        "reduction",
        "resource_sharer",
        "resource_tracker",
        "shared_memory",
        "sharedctypes",
        "synchronize",
        "util",
    )
)
"""Modules of multiprocessing that its users also use as attributes of the package."""
_LEVELS = frozenset(("SUBDEBUG", "SUBWARNING"))
"""Logging levels that multiprocessing has although its ``__all__`` does not list them."""
_MODULE_OF = {name: module for module, names in _DEFINED_IN.items() for name in names}


def __getattr__(name: str) -> object:
    """Import a public name from the module that defines it (PEP 562)."""
    if name in _SHARED_MODULES:
        module = f"shmreduce.{name}"
    elif name in _OTHER_MODULES:
        module = f"multiprocessing.{name}"
    elif name in _LEVELS:
        module = "multiprocessing"
    elif name in __all__:
        module = _MODULE_OF.get(name, "shmreduce.errors")
    else:
        raise AttributeError(f"module 'shmreduce' has no attribute {name!r}")
    found: object = import_late(module)
    value = found if name in _SHARED_MODULES | _OTHER_MODULES else getattr(found, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List the public names, imported or not."""
    return sorted(set(globals()) | set(__all__))
