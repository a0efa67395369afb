"""Keeps Ctrl-C waiting while it would do harm.

May import :mod:`shmreduce.descriptor`, :mod:`shmreduce.signals`, and ``standard_streams`` of
the memory.

``KeyboardInterrupt`` can come between any two instructions, for example after a fork and
before the program has noted that there is a new process. In a hook of fork() and in a
destructor, Python prints it and drops it. So while processes are started and joined, the
signal is only noted, and passed on at places where it can be handled.

If another thread than the main one forks, it may take signals from the main thread: the
kernel restarts a fork when a signal is pending (ERESTARTNOINTR), and delivers the signal
to the thread that forks. The main thread, which alone runs handlers, is not woken then,
and goes on waiting for a lock. So such a thread blocks signals while it forks. Afterwards
it sends those that have arrived to the main thread, and only then unblocks them: the
kernel would deliver them to the thread that unblocks them.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from typing import TYPE_CHECKING, Any, Self

from shmreduce.descriptor import Descriptor
from shmreduce.memory.standard_streams import pipe
from shmreduce.signals import is_from_handler

if TYPE_CHECKING:
    from types import FrameType

__all__ = ["Interrupts", "take_over"]


class Interrupts:
    """Holds SIGINT back during a ``with`` block.

    At the end of the block, a signal that has arrived is passed on to the handler that was
    set before.

    Parameters
    ----------
    every : bool
        Hold back any number of signals, for blocks that are sure to end. If False, a
        second one is passed on at once, since user code in the block may hang.

    to_children : bool
        Processes that are forked in the block go on holding the signal back until they
        call :func:`take_over`. If False, they have the handler that was set before.

    Notes
    -----
    The block does nothing in subinterpreters, and in threads other than the main one, which
    alone handles signals; nor if SIGINT has no handler in Python.

    Examples
    --------
    >>> import signal
    >>> with Interrupts() as interrupts:
    ...     signal.raise_signal(signal.SIGINT)
    ...     try:
    ...         interrupts.pass_on()
    ...     except KeyboardInterrupt:
    ...         print("interrupted here")
    interrupted here
    """

    def __init__(self, *, every: bool = False, to_children: bool = False) -> None:
        self._every = every
        self._to_children = to_children
        self._handler: Any = None
        """The handler to which the signal is passed on."""
        self._mask = _Mask()
        self._kept: tuple[int, FrameType | None] | None = None
        self._pipe: tuple[Descriptor, Descriptor] | None = None

    def __enter__(self) -> Self:
        handler = signal.getsignal(signal.SIGINT)
        if callable(handler) and threading.current_thread() is threading.main_thread():
            self._handler = handler
            try:
                signal.signal(signal.SIGINT, self._keep)
            except ValueError as error:
                if is_from_handler(error):
                    raise
                # This is a subinterpreter, in which no handler ever runs.
                self._handler = None
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if self._handler is not None:
            # If code in the block has set another handler, that one stays.
            if signal.getsignal(signal.SIGINT) == self._keep:
                signal.signal(signal.SIGINT, self._handler)
            self.pass_on()

    def leave_children_alone(self) -> None:
        """Let processes that are forked from now on have the handler that was set before."""
        self._to_children = False

    def fileno(self) -> int:
        """Return a descriptor that is readable once a signal has arrived."""
        if self._pipe is None:
            reader, writer = pipe()
            os.set_blocking(reader, False)
            self._pipe = Descriptor(reader), Descriptor(writer)
            if self._kept is not None:
                os.write(writer, b"!")
        return self._pipe[0].fileno()

    def pass_on(self) -> None:
        """Pass on a signal if one has arrived, which usually raises KeyboardInterrupt."""
        if self._pipe is not None:
            # The pipe is empty if no signal has arrived.
            with contextlib.suppress(BlockingIOError):
                os.read(self._pipe[0].fileno(), 16)
        kept, self._kept = self._kept, None
        if kept is not None:
            self._handler(*kept)

    def _keep(self, number: int, frame: FrameType | None) -> None:
        if self._kept is not None:
            if not self._every:
                self._handler(number, frame)
            return
        self._kept = number, frame
        if self._pipe is not None:
            os.write(self._pipe[1].fileno(), b"!")


def take_over() -> None:
    """End the blocks in which this process was forked, since it never reaches their end.

    A signal that has arrived since the fork is passed on.
    """
    inner = _innermost()
    if inner is None:
        return
    _restore()
    handler = signal.getsignal(signal.SIGINT)
    if inner._kept is not None and callable(handler):
        handler(*inner._kept)


def _innermost() -> Interrupts | None:
    owner = getattr(signal.getsignal(signal.SIGINT), "__self__", None)
    return owner if isinstance(owner, Interrupts) else None


def _restore() -> None:
    while (owner := _innermost()) is not None:
        signal.signal(signal.SIGINT, owner._handler)


def _for_children() -> Interrupts | None:
    """Return the block of this thread that forked children go on with, if there is one."""
    inner = _innermost()
    here = threading.current_thread() is threading.main_thread()
    return inner if inner is not None and inner._to_children and here else None


_FAULTS = {signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT}
"""Signals for a fault of the thread itself, which must not be blocked."""
_FROM_OUTSIDE = signal.valid_signals() - _FAULTS
_CAN_PASS_ON = hasattr(signal, "sigtimedwait")
"""Without sigtimedwait(), signals that have arrived cannot be taken, so they are not blocked."""


class _Mask:
    """Blocks signals during a fork, and restores the mask of before."""

    before: set[int] | None = None
    depth = 0
    """How many forks are under way: a signal handler may fork while its thread does."""

    def block(self, numbers: set[signal.Signals]) -> None:
        self.depth += 1
        before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
        if self.depth == 1:
            self.before = before

    def restore(self) -> None:
        self.depth = max(self.depth - 1, 0)
        if self.depth:
            return
        # Cleared first: unblocking a signal may run its handler, which may fork.
        before, self.before = self.before, None
        if before is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def restore_in_child(self) -> None:
        """Restore it although the fork of the parent that was interrupted is not over."""
        self.depth = 0
        self.restore()


class _ForkingHere(threading.local, _Mask):
    """The mask of the current thread, if it is not the main one."""


_here = _ForkingHere()


def _before_fork() -> None:
    if _CAN_PASS_ON and threading.get_ident() != threading.main_thread().ident:
        _here.block(_FROM_OUTSIDE)
    inner = _for_children()
    if inner is not None:
        # Blocked, since CPython drops signals that arrive in the child before its hooks run.
        inner._mask.block({signal.SIGINT})


def _after_fork_in_parent() -> None:
    if _here.before is not None:
        main = threading.main_thread().ident
        # Signals that were blocked before the fork are left to whoever waits for them.
        ours = _FROM_OUTSIDE - _here.before
        # sigpending() ends the loop, not an empty sigtimedwait(): that releases the
        # interpreter lock, and more signals could arrive before they are unblocked.
        while main is not None and signal.sigpending() & ours:
            found = signal.sigtimedwait(ours, 0)
            if found is not None:
                signal.pthread_kill(main, found.si_signo)
        _here.restore()
    inner = _for_children()
    if inner is not None:
        inner._mask.restore()


def _after_fork_in_child() -> None:
    _here.restore_in_child()
    inner = _innermost()
    if inner is None:
        return
    # A signal that arrived before the fork was for the parent.
    inner._kept = None
    if inner._mask.before is None:
        _restore()
    else:
        inner._mask.restore_in_child()


os.register_at_fork(
    before=_before_fork,
    after_in_parent=_after_fork_in_parent,
    after_in_child=_after_fork_in_child,
)
