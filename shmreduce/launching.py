"""Starts the children of shmreduce's own contexts.

May import ``pickling``, ``process_ends``, ``unpickling``, ``forking``, :mod:`shmreduce.memory`
and :mod:`multiprocessing`.

A child that is not forked gets its process object as a pickle, which the standard
library makes by ``ForkingPickler``. Here the process object is replaced by one that
pickles as the settings and the family of the parent, followed by the process object as
pickled by shmreduce.
"""

from __future__ import annotations

import os
from multiprocessing import forkserver, popen_forkserver, popen_spawn_posix
from multiprocessing.connection import wait
from multiprocessing.context import get_spawning_popen
from typing import TYPE_CHECKING, Any

from shmreduce.forking import as_child
from shmreduce.pickling import dumps
from shmreduce.process_ends import once_stored
from shmreduce.unpickling import loads

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess

    from shmreduce.memory.lease import Lease

__all__ = ["ForkServerPopen", "SpawnPopen"]


class _Packed:
    """Pickles as an object, by the pickler of shmreduce."""

    def __init__(self, obj: Any) -> None:
        self._obj = obj
        self._leases: list[Lease] = []

    def __reduce__(self) -> tuple[Any, ...]:
        data, message = dumps(self._obj)
        if message is not None:
            self._leases += message.leases()
            message.commit(child=get_spawning_popen())
        return loads, (bytes(data),)

    def discard(self) -> None:
        """Give back the leases of the message, which nobody will read."""
        for lease in self._leases:
            lease.undo()


class _Argument:
    """Pickles as a process object, with the calls that the child must make before it."""

    def __init__(self, process: BaseProcess) -> None:
        self.packed = _Packed(process)
        # The standard library's Popen reads it.
        self._name = process.name

    def __reduce__(self) -> tuple[Any, ...]:
        return as_child(self.packed).__reduce__()


class _Launch:
    """Lets shmreduce pickle the process object."""

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
    """Lets the fork server fork a child."""

    def poll(self, flag: int = os.WNOHANG) -> int | None:
        """Return the exit code; None if the child runs and ``flag`` says not to wait for it."""
        if self.returncode is None:
            if not wait([self.sentinel], 0 if flag == os.WNOHANG else None):
                return None
            try:
                self.returncode = forkserver.read_signed(self.sentinel)
            except (OSError, EOFError):
                # Another thread has read it, or the server was killed before it wrote it. The
                # standard library's poll() takes both for the latter.
                code = once_stored(lambda: self.returncode)
                self.returncode = 255 if code is None else code
        return self.returncode
