"""Makes system calls fail, clocks jump and signals rain, in this process.

Functions of the standard library are replaced for callers of the product
alone, so that tests need not run in a special environment: the errors are
raised where the kernel would raise them. What can be had from the kernel
itself, a process without a free descriptor, is.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import random
import resource
import signal
import struct
import sys
import time
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from shmreduce import packet_socket
from shmreduce.memory import mapping

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from types import FrameType

    from tests.faults.plan import Injection
    from tests.faults.tally import Tally

__all__ = ["EXPECTED", "Failures", "jump_clock", "no_descriptors", "stand_in_the_rain"]

_WRITE_LOCK = struct.pack("h", fcntl.F_WRLCK)
EXPECTED = frozenset(
    (
        errno.EFBIG,
        errno.EMFILE,
        errno.ENFILE,
        errno.ENOBUFS,
        errno.ENOLCK,
        errno.ENOMEM,
        errno.ENOSPC,
        errno.ETOOMANYREFS,
    )
)
"""Numbers of errors that come from here."""


class Failures:
    """Calls that fail while :attr:`on` is true.

    Parameters
    ----------
    injections : sequence of Injection
        All of this process.
    seed : str
        Of the choice which calls fail.
    tally : Tally
        Where failures are counted.
    """

    def __init__(self, injections: Sequence[Injection], seed: str, tally: Tally) -> None:
        self.on = False
        self._random = random.Random(seed)
        self._tally = tally
        for injection in injections:
            self._install(injection)

    def _install(self, injection: Injection) -> None:
        module: Any
        match injection.call:
            case "fallocate":
                module, name = os, "posix_fallocate"
            case "mmap":
                self._install_mmap(injection)
                return
            case "sendmsg" | "recvmsg":
                module = packet_socket.PacketSocket
                name = "write" if injection.call == "sendmsg" else "read"
            case "fcntl":
                module, name = fcntl, "fcntl"
            case name:
                module = os
        setattr(module, name, self._failing(getattr(module, name), injection))

    def _install_mmap(self, injection: Injection) -> None:
        fixed = mapping._mmap
        patched: Any = mapping
        patched._mmap = self._failing(fixed, injection, in_c=True)
        namespace = SimpleNamespace(**vars(patched.mmap))
        namespace.mmap = self._failing(patched.mmap.mmap, injection)
        patched.mmap = namespace

    def _failing(self, function: Any, injection: Injection, *, in_c: bool = False) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            if _can_fail(injection.call, arguments) and self._strikes(injection):
                if in_c:
                    ctypes.set_errno(injection.errno)
                    return ctypes.c_void_p(-1).value
                raise OSError(injection.errno, os.strerror(injection.errno))
            return function(*arguments, **options)

        return call

    def _strikes(self, injection: Injection) -> bool:
        if not self.on or self._random.random() >= injection.share:
            return False
        caller = sys._getframe(2).f_globals.get("__name__", "")
        if not caller.startswith("shmreduce"):
            return False
        self._tally.faults[injection.actor] += 1
        return True


def _can_fail(call: str, arguments: tuple[Any, ...]) -> bool:
    """Whether the kernel could refuse this very call."""
    if call == "sendmsg":
        # With descriptors, of which too many may be under way.
        return bool(arguments[2])
    if call != "fcntl":
        return True
    # To take a lock needs memory in the kernel; to ask and to unlock does not.
    is_lock = arguments[1] == fcntl.F_OFD_SETLK
    return bool(is_lock and arguments[2][:2] == _WRITE_LOCK)


@contextmanager
def no_descriptors() -> Iterator[None]:
    """Leave no descriptor free, for the processes forked meanwhile too."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def stand_in_the_rain() -> Callable[[], None]:
    """Handle SIGUSR1 as a program's own handler would; return what ends that.

    The handler allocates and takes its time. Whoever watches the run sends the
    signals. System calls of this process see EINTR.
    """

    def handle(_number: int, _frame: FrameType | None) -> None:
        sum(range(50))

    signal.signal(signal.SIGUSR1, handle)

    def end() -> None:
        # Not the default: the interpreter's own end takes a while.
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)

    return end


def jump_clock(seed: str) -> None:
    """Let the wall clock of this process jump by up to a week, to and fro."""
    chooser = random.Random(seed)
    real, real_ns = time.time, time.time_ns
    week = 7 * 24 * 3600.0
    patched: Any = time
    patched.time = lambda: real() + chooser.uniform(-week, week)
    patched.time_ns = lambda: real_ns() + int(chooser.uniform(-week, week) * 1e9)
