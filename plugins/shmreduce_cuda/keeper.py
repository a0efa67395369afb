"""The thread that frees memory while the program does something else.

May import public names of :mod:`shmreduce`, and ``descriptors``, ``locks`` and ``offers`` of
this plugin.

A process that waits for its next message cannot notice that its receivers have dropped
an array, or were killed; nor that it should close what it has received and dropped. So
while there are arrays that were sent, or idle mappings, a thread checks several times a
second. It also passes descriptors to receivers. If there is nothing to do, it rests
until it is woken. It is ended during a fork, because CPython 3.12 and later warn about
forking with other threads.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from typing import TYPE_CHECKING

from shmreduce import ShmreduceError
from shmreduce_cuda.descriptors import open_listener, serve
from shmreduce_cuda.locks import InterruptibleLock

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

    from shmreduce_cuda.offers import Offers

__all__ = ["Keeper"]

_PAUSE = 0.2
"""Seconds between two checks."""
_SHARE = 4
"""A pause is at least this many times as long as the check before, up to the longest pause."""
_LONGEST_PAUSE = 0.5
"""Seconds."""
_DEAF = 0.05
"""Seconds for which requests are not listened to when one could not be accepted."""
_PATIENCE = 0.5
"""Seconds to wait for the thread to end."""


class Keeper:
    """The thread of one process.

    Parameters
    ----------
    token : bytes
        This process's token.
    offers : Offers
        The descriptors to be passed to receivers.
    check : callable
        Frees what can be freed; returns whether there is more to come.
    """

    def __init__(self, token: bytes, offers: Offers, check: Callable[[], bool]) -> None:
        self._token = token
        self._offers = offers
        self._check = check
        self._thread: threading.Thread | None = None
        self._resting = False
        self._starting = InterruptibleLock("starting to hand over device memory")
        self._bell = -1
        self._ending = False
        self._stopped_for_fork = False
        self.listener: socket.socket | None = None
        self.fault: Exception | None = None
        """The error of the last check, None if there was none."""

    def look_after(self) -> None:
        """Start the thread if it does not run, and wake it if it rests.

        Where no thread can be started, as at the end of the interpreter (CPython 3.12 and
        later), there is none: whoever sends, receives, drops, and ends, frees too.
        """
        # Twice: a fork in another thread may end the thread that was found to run, and go by.
        for _ in range(2):
            # Whoever has the lock calls this function afterwards, or looks again here. It may
            # be the code that this call, in a signal handler that forks, has interrupted.
            if self.attend() or not self._starting.attempt():
                return
            try:
                self._start()
            except RuntimeError:
                return
            finally:
                self._starting.release()

    def attend(self) -> bool:
        """Wake the thread if it rests; return whether it runs. For destructors, too."""
        thread = self._thread
        if thread is None or not thread.is_alive():
            return False
        if self._resting:
            os.eventfd_write(self._bell, 1)
        return True

    def listen(self) -> None:
        """Open the socket at which receivers ask for descriptors, if it is not open.

        The caller calls :meth:`look_after` then.
        """
        # Locked: several threads may be the first to send, but the name can be bound only once.
        with self._starting:
            if self.listener is None:
                self.listener = open_listener(self._token)
                if self._bell != -1:
                    # The thread may be waiting, for anything but the new socket.
                    os.eventfd_write(self._bell, 1)

    def stop(self) -> bool:
        """End the thread, waiting for a limited time; return whether there was one."""
        thread, self._thread = self._thread, None
        if thread is None or not thread.is_alive():
            return False
        self._ending = True
        os.eventfd_write(self._bell, 1)
        if thread is not threading.current_thread():
            thread.join(_PATIENCE)
        return True

    def before_fork(self) -> None:
        """End the thread for the duration of a fork."""
        self._stopped_for_fork = self.stop()

    def after_fork_in_parent(self) -> None:
        """Go on after a fork."""
        if self._stopped_for_fork:
            self._stopped_for_fork = False
            self.look_after()

    def forget(self) -> None:
        """In a forked child, close what it inherited: it does not answer requests."""
        listener, self.listener = self.listener, None
        if listener is not None:
            listener.close()
        bell, self._bell = self._bell, -1
        if bell != -1:
            os.close(bell)

    def _start(self) -> None:
        if self._thread is not None and self._thread.is_alive():
            # Another thread has started it.
            return
        if self._bell == -1:
            self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._ending = False
        self._thread = threading.Thread(target=self._run, name="shmreduce-cuda", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        pause: float | None = 0.0
        me = threading.current_thread()
        while not self._ending and self._thread is me:
            self._wait(pause)
            if self._ending:
                return
            began = time.monotonic()
            # Said first: what comes after the check, by another thread, finds it said.
            self._resting = True
            busy = self._looked()
            if busy:
                self._resting = False
            took = time.monotonic() - began
            pause = min(max(_PAUSE, _SHARE * took), _LONGEST_PAUSE) if busy else None

    def _looked(self) -> bool:
        """Check; return whether there is more to come."""
        try:
            busy = self._check()
        except (ShmreduceError, OSError) as error:
            # stats() reports it. The next check may succeed.
            self.fault = error
            return True
        self.fault = None
        return busy

    def _wait(self, pause: float | None) -> None:
        """Wait until there is something to do; answer requests for descriptors meanwhile."""
        deadline = None if pause is None else time.monotonic() + pause
        deaf_until = 0.0
        while True:
            poll = select.poll()
            poll.register(self._bell, select.POLLIN)
            listener = self.listener
            now = time.monotonic()
            moments = [] if deadline is None else [deadline]
            if listener is not None and now < deaf_until:
                moments.append(deaf_until)
            elif listener is not None:
                poll.register(listener, select.POLLIN)
            # Rounded up, so that the moment has come when the wait is over.
            left = 1000 * max(0.0, min(moments) - now) + 1 if moments else None
            ready = poll.poll(left)
            if (
                listener is not None
                and (listener.fileno(), select.POLLIN) in ready
                and not serve(listener, self._token, self._offers)
            ):
                # Who waits there goes on waiting, and would be reported again at once.
                deaf_until = time.monotonic() + _DEAF
            if (self._bell, select.POLLIN) in ready:
                # The thread before this one may have read it: stop() waits only so long.
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._bell)
                if deadline is None or self._ending:
                    return
            if deadline is not None and time.monotonic() >= deadline:
                return
