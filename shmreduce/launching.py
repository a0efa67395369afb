"""Starts the children of shmreduce's own contexts.

May import ``children``, ``pickling``, ``forking``, ``context`` and
:mod:`multiprocessing`.

A child that is not forked gets its process object as a pickle, which the
standard library makes by ``ForkingPickler``. What is put in its place here
brings the settings, the family and the start method of the parent, and then the
process object as the pickler of shmreduce made it.
"""

from __future__ import annotations

from multiprocessing import context, popen_forkserver, popen_spawn_posix
from typing import TYPE_CHECKING, Any

from shmreduce.children import Call
from shmreduce.context import adopt_start_method, get_start_method
from shmreduce.forking import as_child
from shmreduce.pickling import dumps, loads

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess

__all__ = ["ForkServerPopen", "SpawnPopen"]


class _Packed:
    """Pickles as what the pickler of shmreduce makes of an object."""

    def __init__(self, obj: Any) -> None:
        self._obj = obj

    def __reduce__(self) -> tuple[Any, ...]:
        data, message = dumps(self._obj)
        if message is not None:
            message.commit()
        return loads, (bytes(data),)


class _Argument:
    """Pickles as a process object, with what the child must do before it."""

    def __init__(self, process: BaseProcess) -> None:
        self._process = process
        # The standard library looks at it.
        self._name = process.name

    def __reduce__(self) -> tuple[Any, ...]:
        method = get_start_method(allow_none=True)
        child = as_child(_Packed(self._process), Call(adopt_start_method, method))
        return child.__reduce__()


class _Launch:
    """Has the process object pickled by shmreduce."""

    def _launch(self, process_obj: BaseProcess) -> None:
        standard: Any = context._default_context
        unset = standard._actual_context is None
        try:
            super()._launch(_Argument(process_obj))  # type: ignore[misc]
        finally:
            # By asking for the start method, the standard library settles it.
            if unset and standard._actual_context is standard._default_context:
                standard._actual_context = None


class SpawnPopen(_Launch, popen_spawn_posix.Popen):
    """Starts a child with an interpreter of its own."""


class ForkServerPopen(_Launch, popen_forkserver.Popen):
    """Has a child forked by the fork server."""
