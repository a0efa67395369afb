"""Lets a child process die with its parent.

May import :mod:`shmreduce.descriptor`, :mod:`shmreduce.prctl` and ``fork_hooks``.

The parent holds the writing end of a pipe, the *lifeline*, into which nothing is
ever written; the child has asked the kernel for a signal (``F_SETSIG``,
``O_ASYNC``: https://man7.org/linux/man-pages/man2/fcntl.2.html) on the reading
end. When the parent is gone, however it went, the kernel closes the pipe and
sends the signal. No thread waits for it, so that the child can fork without a
warning about threads.

Where Python handles the wanted signal, as it does SIGINT, the kernel sends a
*notice* instead, whose handler raises the wanted one. For KeyboardInterrupt can
be lost: one that is raised in a finalizer or in a hook of fork() is printed and
dropped by the interpreter. Then it is raised again; and a child that is still
there half a minute later is killed.

``PR_SET_PDEATHSIG`` alone would not do. It follows the *thread* that started
the child, and fires when that thread ends while the process lives on. A child
of the fork server has the server as its parent, and the server lives as long as
its children. And a process that is told to die, but waits for its own children
first, could not pass the message on. It is used where the kernel does not
offer the signal on the pipe.

The race, the parent's death before the child has asked, is closed by looking at
the pipe after asking.
"""

from __future__ import annotations

import _thread
import contextlib
import fcntl
import os
import select
import signal
import sys
import time
import weakref
from typing import TYPE_CHECKING

from shmreduce.descriptor import Descriptor
from shmreduce.fork_hooks import renew_in_children
from shmreduce.prctl import set_parent_death_signal

if TYPE_CHECKING:
    from types import FrameType

__all__ = ["Lifeline", "cut_lifelines", "die_with_parent", "parent_is_gone"]


class Lifeline:
    """The parent's side: as long as it is not cut, the child does not get the signal.

    Attributes
    ----------
    reader : Descriptor
        For the child. The parent closes its own copy when the child is started.
    """

    def __init__(self) -> None:
        reader, writer = os.pipe()
        self.reader = Descriptor(reader)
        self._writer = Descriptor(writer)
        _lifelines.add(self)

    def cut(self) -> None:
        """Let the child get its signal now; nothing happens if it has ended."""
        self._writer.close()


_lifelines: weakref.WeakSet[Lifeline] = weakref.WeakSet()


def cut_lifelines() -> None:
    """Cut all lifelines of children of this process."""
    for lifeline in list(_lifelines):
        lifeline.cut()


_held: list[Descriptor] = []
"""In a child: the reading end of its lifeline, kept open to its end."""


def _forget_in_forked_child() -> None:
    # A forked process that kept the writing ends would keep its parent's other children
    # alive; the reading end is that of the process that it was forked from.
    cut_lifelines()
    _held.clear()


renew_in_children(_forget_in_forked_child)


def die_with_parent(reader: Descriptor, number: int, parent: int, *, group: bool = False) -> None:
    """Ask for a signal to this process at the death of its parent.

    Parameters
    ----------
    reader : Descriptor
        The reading end of the lifeline. It is kept open from now on.
    number : int
        The signal. If this process ignores it, as programs do with SIGINT that
        a shell has put into the background, SIGTERM is taken, else SIGKILL.
        A process that handles it has 30 seconds to end.
    parent : int
        The parent's process id.
    group : bool
        Whether all processes of this one's group get it, where the kernel offers that.

    Raises
    ------
    SystemExit
        If the parent is gone already.

    Notes
    -----
    To be called by the main thread, as handlers of signals are set here.
    """
    _held.append(reader)
    if sys.platform == "linux":
        _ask_for_signal(reader.fileno(), number, parent, -os.getpgrp() if group else os.getpid())
    if parent_is_gone():
        raise SystemExit(1)


def _ask_for_signal(reader: int, number: int, parent: int, receiver: int) -> None:
    wanted = (number, signal.SIGTERM, signal.SIGKILL)
    chosen = next(each for each in wanted if signal.getsignal(each) is not signal.SIG_IGN)
    if callable(signal.getsignal(chosen)):
        signal.signal(_Notice.number, _Notice(chosen).arrived)
        chosen = _Notice.number
    try:
        fcntl.fcntl(reader, fcntl.F_SETOWN, receiver)
        fcntl.fcntl(reader, fcntl.F_SETSIG, chosen)
        flags = fcntl.fcntl(reader, fcntl.F_GETFL)
        fcntl.fcntl(reader, fcntl.F_SETFL, flags | os.O_ASYNC)
    except OSError:
        # Some sandboxes do not have it.
        if os.getppid() == parent:
            set_parent_death_signal(chosen)


class _Notice:
    """The kernel's notice of the parent's death, to a process that handles a signal itself.

    Parameters
    ----------
    wanted : int
        The signal that the process handles.
    """

    # A real-time signal that the C library leaves alone; unhandled, it ends the process.
    number = getattr(signal, "SIGRTMAX", 64) - 4

    def __init__(self, wanted: int) -> None:
        self._wanted = wanted
        self._lost = False
        self._previous_hook = sys.unraisablehook

    def arrived(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        """Raise the wanted signal and see to it that the process ends."""
        self._previous_hook, sys.unraisablehook = sys.unraisablehook, self._look_at_lost_errors
        # Not threading.Thread, whose locks the interrupted code may hold. While the
        # interpreter ends no thread can be started, nor is one needed.
        with contextlib.suppress(RuntimeError):
            _thread.start_new_thread(self._see_to_the_end, ())
        signal.raise_signal(self._wanted)

    def _look_at_lost_errors(self, lost: sys.UnraisableHookArgs) -> None:
        if issubclass(lost.exc_type, KeyboardInterrupt):
            self._lost = True
        else:
            self._previous_hook(lost)

    def _see_to_the_end(self) -> None:
        end = time.monotonic() + _SECONDS_TO_END
        while time.monotonic() < end:
            time.sleep(_PAUSE)
            if self._lost:
                self._lost = False
                os.kill(os.getpid(), self._wanted)
        os.kill(os.getpid(), signal.SIGKILL)


_SECONDS_TO_END = 30.0
"""What a process has for its ``finally`` clauses after the death of its parent."""
_PAUSE = 0.05
"""Seconds between two looks at whether the signal was lost."""


def parent_is_gone() -> bool:
    """Whether this process has a lifeline and it has been cut."""
    poll = select.poll()
    for reader in _held:
        poll.register(reader, 0)
    return bool(poll.poll(0)) if _held else False
