"""Starts the children of shmreduce's own contexts.

May import ``pickling``, ``forking``, :mod:`shmreduce.memory` and :mod:`multiprocessing`.

A child that is not forked gets its process object as a pickle, which the
standard library makes by ``ForkingPickler``. What is put in its place here
brings the settings and the family of the parent, and then the process object as
the pickler of shmreduce made it.
"""

from __future__ import annotations

from multiprocessing import popen_forkserver, popen_spawn_posix
from typing import TYPE_CHECKING, Any

from shmreduce.forking import as_child
from shmreduce.pickling import dumps, loads

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess

    from shmreduce.memory.lease import Lease

__all__ = ["ForkServerPopen", "SpawnPopen"]


class _Packed:
    """Pickles as what the pickler of shmreduce makes of an object."""

    def __init__(self, obj: Any) -> None:
        self._obj = obj
        self._leases: list[Lease] = []

    def __reduce__(self) -> tuple[Any, ...]:
        data, message = dumps(self._obj)
        if message is not None:
            self._leases += message.leases()
            message.commit()
        return loads, (bytes(data),)

    def discard(self) -> None:
        """Give back what was given out: nobody is going to read it."""
        for lease in self._leases:
            lease.undo()


class _Argument:
    """Pickles as a process object, with what the child must do before it."""

    def __init__(self, process: BaseProcess) -> None:
        self.packed = _Packed(process)
        # The standard library looks at it.
        self._name = process.name

    def __reduce__(self) -> tuple[Any, ...]:
        return as_child(self.packed).__reduce__()


class _Launch:
    """Has the process object pickled by shmreduce."""

    def _launch(self, process_obj: BaseProcess) -> None:
        argument = _Argument(process_obj)
        try:
            super()._launch(argument)  # type: ignore[misc]
        except BaseException:
            argument.packed.discard()
            raise


class SpawnPopen(_Launch, popen_spawn_posix.Popen):
    """Starts a child with an interpreter of its own."""


class ForkServerPopen(_Launch, popen_forkserver.Popen):
    """Has a child forked by the fork server."""
