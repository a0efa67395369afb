"""Lets a child process die with its parent.

May import :mod:`shmreduce.descriptor`, :mod:`shmreduce.prctl`, ``fork_hooks``, ``importing``,
and ``standard_streams`` of the memory.

The parent holds the writing end of a pipe, the *lifeline*, and never writes to it. The
child asks the kernel for a signal on the reading end (``F_SETSIG``, ``O_ASYNC``:
https://man7.org/linux/man-pages/man2/fcntl.2.html). When the parent ends, in whatever
way, the kernel closes the pipe and sends the signal. No thread waits for it, so the child
can fork without a warning about threads.

If Python handles the wanted signal, as it does SIGINT, the kernel sends another signal
instead, the *notice*, whose handler raises the wanted one. That is because a
KeyboardInterrupt can be lost: if it is raised in a finalizer or in a hook of fork(), the
interpreter prints and drops it. Then the signal is raised again. A child that is still
alive half a minute later is killed.

``PR_SET_PDEATHSIG`` alone would not be enough. It follows the *thread* that started the
child, and sends the signal when that thread ends, although the process lives on. The
parent of a fork server's child is the server, which lives as long as its children. And a
process that must die, but waits for its own children first, could not make them die. It
is used only if the kernel does not offer the signal on the pipe.

There is a race: the parent may die before the child has asked for the signal. So the child
looks at the pipe after asking.
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
from shmreduce.importing import while_importing
from shmreduce.memory.standard_streams import pipe
from shmreduce.prctl import set_parent_death_signal

if TYPE_CHECKING:
    from types import FrameType

__all__ = ["Lifeline", "cut_lifelines", "die_with_parent", "parent_is_gone"]


class Lifeline:
    """The parent's side: the child gets its signal when this is cut.

    Attributes
    ----------
    reader : Descriptor
        For the child. The parent closes its own copy when the child has been started.
    """

    def __init__(self) -> None:
        # Forks of other threads wait, as for imports: a process that was forked before the
        # lifeline is listed would keep the writing end, and the child outlive its parent.
        while_importing(self._make)

    def _make(self) -> None:
        reader, writer = pipe()
        self.reader = Descriptor(reader)
        self._writer = Descriptor(writer)
        _lifelines.add(self)

    def cut(self) -> None:
        """Let the child get its signal now; do nothing if it has ended."""
        self._writer.close()


_lifelines: weakref.WeakSet[Lifeline] = weakref.WeakSet()


def cut_lifelines() -> None:
    """Cut the lifelines of all children of this process."""
    for lifeline in list(_lifelines):
        lifeline.cut()


_held: list[Descriptor] = []
"""In a child, the reading end of its lifeline, which stays open until the child ends."""


def _forget_in_forked_child() -> None:
    # If a forked process kept the writing ends, the parent's other children would not notice
    # the parent's death. The reading end belongs to the process that forked it.
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
        The signal. If this process ignores it, SIGTERM is used; if it ignores that too,
        SIGKILL. (Programs that a shell runs in the background ignore SIGINT.) A process
        that handles the signal has 30 seconds to end.
    parent : int
        The parent's process id.
    group : bool
        Whether all processes of this one's group get it, if the kernel offers that.

    Raises
    ------
    SystemExit
        If the parent is gone already.

    Notes
    -----
    Must be called by the main thread, since it sets signal handlers.
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
        # Some sandboxes do not offer it.
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
        """Raise the wanted signal, and start a thread that makes sure the process ends."""
        self._previous_hook, sys.unraisablehook = sys.unraisablehook, self._look_at_lost_errors
        # Not threading.Thread, whose locks the interrupted code may hold. RuntimeError
        # during interpreter shutdown, when the process ends anyway.
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
"""The time for a process's ``finally`` clauses after the death of its parent."""
_PAUSE = 0.05
"""Seconds between two checks whether the signal was lost."""


def parent_is_gone() -> bool:
    """Return whether this process has a lifeline and it has been cut."""
    poll = select.poll()
    for reader in _held:
        poll.register(reader, 0)
    return bool(poll.poll(0)) if _held else False
