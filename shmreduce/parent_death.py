"""Lets a child process die with its parent.

May import :mod:`shmreduce.descriptor` and :mod:`shmreduce.prctl`.

The parent holds the writing end of a pipe, the *lifeline*, into which nothing is
ever written; the child has asked the kernel for a signal (``F_SETSIG``,
``O_ASYNC``: https://man7.org/linux/man-pages/man2/fcntl.2.html) on the reading
end. When the parent is gone, however it went, the kernel closes the pipe and
sends the signal. No thread waits for it, so that the child can fork without a
warning about threads.

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

import fcntl
import os
import select
import signal
import weakref

from shmreduce.descriptor import Descriptor
from shmreduce.prctl import set_parent_death_signal

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


os.register_at_fork(after_in_child=_forget_in_forked_child)


def die_with_parent(reader: Descriptor, number: int, parent: int) -> None:
    """Ask for a signal to this process at the death of its parent.

    Parameters
    ----------
    reader : Descriptor
        The reading end of the lifeline. It is kept open from now on.
    number : int
        The signal. If this process ignores it, as programs do with SIGINT that
        a shell has put into the background, SIGTERM is taken, else SIGKILL.
    parent : int
        The parent's process id.

    Raises
    ------
    SystemExit
        If the parent is gone already.
    """
    _held.append(reader)
    wanted = (number, signal.SIGTERM, signal.SIGKILL)
    chosen = next(each for each in wanted if signal.getsignal(each) is not signal.SIG_IGN)
    try:
        descriptor = reader.fileno()
        fcntl.fcntl(descriptor, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(descriptor, fcntl.F_SETSIG, chosen)
        flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_ASYNC)
    except (AttributeError, OSError):
        # Some sandboxes and other systems do not have it.
        if os.getppid() == parent:
            set_parent_death_signal(chosen)
    if parent_is_gone():
        raise SystemExit(1)


def parent_is_gone() -> bool:
    """Whether this process has a lifeline and it has been cut."""
    poll = select.poll()
    for reader in _held:
        poll.register(reader, 0)
    return bool(poll.poll(0)) if _held else False
