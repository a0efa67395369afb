"""The hooks that a plugin may implement, and the marker for doing so.

May import :mod:`shmreduce.contracts` and pluggy.

A plugin is a module, or any object, that an installed distribution names in
its metadata::

    [project.entry-points.shmreduce]
    signals = "signals_shmreduce"

and that implements one or more of the functions below. The hooks for reducers
and strategies are called once, when the plugin is loaded; those for the array
factory and the memory handlers when these are first needed, and again after the
settings or the plugins have changed. A plugin is broken if it marks a function
of any other name with :data:`hookimpl`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from collections.abc import Iterable

    from shmreduce.contracts import ArrayFactory, MemoryHandlers, Reducer, SharingStrategy

__all__ = [
    "PROJECT",
    "hookimpl",
    "shmreduce_array_factory",
    "shmreduce_memory_handlers",
    "shmreduce_reducers",
    "shmreduce_strategies",
]

PROJECT = "shmreduce"
"""The name of the entry-point group and of the pluggy project."""

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)
"""Marks a plugin's implementation of a hook."""


@hookspec
def shmreduce_reducers() -> Iterable[Reducer]:
    """Return the reducers that the plugin provides.

    A reducer lists its types as classes, or as qualified names, for which their
    module need not be imported. If two reducers claim the same type, shmreduce
    raises an error that names both.

    Returns
    -------
    iterable of Reducer
        Instances. The registry keeps them as long as the plugin is loaded.

    Examples
    --------
    A plugin for one type of another package:

    >>> from shmreduce import Reducer, hookimpl
    >>> class SignalReducer(Reducer):
    ...     types = ("signals.Signal",)
    ...     def reduce(self, obj, message):
    ...         return NotImplemented
    >>> @hookimpl
    ... def shmreduce_reducers():
    ...     return [SignalReducer()]
    """
    raise NotImplementedError


@hookspec
def shmreduce_strategies() -> Iterable[SharingStrategy]:
    """Return the sharing strategies that the plugin provides.

    Return a strategy even if it does not work on this machine: its
    ``unusable_reason()`` tells users why. If two strategies have the same name,
    shmreduce raises an error that names both.

    Returns
    -------
    iterable of SharingStrategy
        Instances. The registry keeps them as long as the plugin is loaded.

    Examples
    --------
    A strategy that makes files in a folder of the user:

    >>> import os
    >>> from pathlib import Path
    >>> from shmreduce import SegmentFile, SharingStrategy, hookimpl, open_process_descriptor
    >>> class FolderStrategy(SharingStrategy):
    ...     name = "folder"
    ...     folder = Path.home() / ".segments"
    ...     def unusable_reason(self):
    ...         return None if self.folder.is_dir() else f"there is no folder {self.folder}"
    ...     def create(self, size, token):
    ...         path = self.folder / token
    ...         fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    ...         try:
    ...             os.fchmod(fd, 0o600)  # whatever the umask
    ...             os.ftruncate(fd, size)
    ...         except OSError:
    ...             os.close(fd)
    ...             path.unlink()
    ...             raise
    ...         return SegmentFile(fd, str(path))
    ...     def locator(self, file):
    ...         return file.name or f"{os.getpid()}:{file.fd}"
    ...     def open(self, locator):
    ...         if Path(locator).parent == self.folder:
    ...             return SegmentFile(os.open(locator, os.O_RDWR | os.O_CLOEXEC), locator)
    ...         pid, _, fd = locator.partition(":")
    ...         return SegmentFile(open_process_descriptor(int(pid), int(fd)), None)
    ...     def unlink(self, name):
    ...         Path(name).unlink(missing_ok=True)
    ...     def names(self):
    ...         return [str(path) for path in self.folder.glob(32 * "[0-9a-f]")]
    >>> @hookimpl
    ... def shmreduce_strategies():
    ...     return [FolderStrategy()]
    """
    raise NotImplementedError


@hookspec(firstresult=True)
def shmreduce_array_factory() -> ArrayFactory | None:
    """Return the factory that makes the arrays of ``shmreduce.empty``, ``zeros`` and the like.

    Plugins are called in order of their names, those with ``hookimpl(tryfirst=True)``
    before the others. The first factory that one of them returns is used.

    Returns
    -------
    ArrayFactory or None
        With None the next plugin is called.

    Examples
    --------
    A factory that makes one-dimensional memoryviews of bytes:

    >>> from shmreduce import allocate, hookimpl
    >>> class Bytes:
    ...     def full(self, shape, fill_value, dtype, order, mode):
    ...         view = allocate(shape, mode).buffer
    ...         view[:] = bytes([fill_value]) * shape
    ...         return view
    ...     def empty(self, shape, dtype, order, mode):
    ...         return self.full(shape, 0, dtype, order, mode)
    ...     zeros = empty
    ...     def ones(self, shape, dtype, order, mode):
    ...         return self.full(shape, 1, dtype, order, mode)
    ...     def array(self, obj, dtype, order, mode):
    ...         view = self.empty(len(obj), dtype, order, mode)
    ...         view[:] = bytes(obj)
    ...         return view
    >>> @hookimpl
    ... def shmreduce_array_factory():
    ...     return Bytes()
    >>> shmreduce_array_factory().ones(3, None, "C", "rw").tolist()
    [1, 1, 1]
    """
    raise NotImplementedError


@hookspec(firstresult=True)
def shmreduce_memory_handlers() -> MemoryHandlers | None:
    """Return an object that changes an array library's allocator, for ``shared_allocations``.

    Plugins are called in order of their names, those with ``hookimpl(tryfirst=True)``
    before the others. The first object that one of them returns is used.

    Returns
    -------
    MemoryHandlers or None
        With None the next plugin is called.

    Examples
    --------
    >>> from shmreduce import hookimpl
    >>> class Handlers:
    ...     handler = None
    ...     def make(self, functions):
    ...         return functions
    ...     def get(self):
    ...         return self.handler
    ...     def set(self, handler):
    ...         self.handler = handler
    >>> @hookimpl
    ... def shmreduce_memory_handlers():
    ...     return Handlers()
    """
    raise NotImplementedError
