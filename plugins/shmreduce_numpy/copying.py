"""Copies the elements of arrays, large ones in several threads.

May import NumPy.

One core cannot use all of a machine's memory bandwidth. So an array that is
large enough to pay for starting threads is copied in parts, each by a thread of
its own that lives as long as the copy: none is left for a later fork.
"""

from __future__ import annotations

import _thread
import contextlib
import os
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["copy_elements"]

_PARALLEL_FROM = 16 << 20
"""Bytes. Two threads copy half again as fast, but to start one takes as long as to copy a
mebibyte, and it needs a processor: the reader of the message may have it, who looks for that."""
_MOST_THREADS = 4
"""More than these do not make it quicker: the memory is the limit."""
_WAIT_SECONDS = 1.0


def copy_elements(target: np.ndarray[Any, Any], source: np.ndarray[Any, Any]) -> None:
    """Copy ``source`` into ``target``, of the same shape and dtype.

    When it returns or raises, no thread uses either array any more.
    """
    count = 1 if target.nbytes < _PARALLEL_FROM else min(_MOST_THREADS, _usable_cpus())
    if count == 1:
        np.copyto(target, source, casting="no")
        return
    first, *others = _parts(target, source, count)
    copies = [_Copy(*part) for part in others]
    try:
        for copy in copies:
            copy.start()
        np.copyto(*first, casting="no")
        for copy in copies:
            copy.help()
    finally:
        _finish(copies)
    for copy in copies:
        if copy.error is not None:
            raise copy.error


def _usable_cpus() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _parts(
    target: np.ndarray[Any, Any], source: np.ndarray[Any, Any], count: int
) -> Iterator[tuple[Any, Any]]:
    """Cut both arrays into equal parts; into fewer if they are not long enough."""
    if target.flags.f_contiguous and not target.flags.c_contiguous:
        target, source = target.T, source.T
    if source.flags.c_contiguous:
        target, source = target.reshape(-1), source.reshape(-1)
    length = len(target)
    step = max(1, -(-length // count))
    for start in range(0, length, step):
        part = slice(start, start + step)
        yield target[part], source[part]


class _Copy:
    """The copy of one part, by a thread or by its caller, whoever comes first."""

    def __init__(self, target: np.ndarray[Any, Any], source: np.ndarray[Any, Any]) -> None:
        self._arrays: list[Any] = [target, source]
        # One entry, never changed: who makes the copy. A thread that begins
        # after the caller has come back finds itself too late.
        self._maker: dict[str, str] = {}
        self._finished = False
        self._pid = os.getpid()
        self._running = _thread.allocate_lock()
        self._running.acquire()
        self.error: BaseException | None = None

    def start(self) -> None:
        """Have a thread make it, if one can be had."""
        with contextlib.suppress(RuntimeError):
            _thread.start_new_thread(self._run, ())

    def help(self) -> None:
        """Make it here if no thread has begun."""
        if self._maker.setdefault("is", "caller") == "caller":
            self._make()

    def finish(self) -> None:
        """Wait for the thread; one that has not begun will not."""
        while self._maker.setdefault("is", "caller") == "thread" and not self._finished:
            if os.getpid() != self._pid:
                # A signal handler has forked, and the child goes on. The thread is not there.
                self._make()
                break
            self._running.acquire(timeout=_WAIT_SECONDS)
        # The thread may be there for a while, and keeps this object: memory that it
        # referred to would count as in use, for a child forked now as long as that lives.
        self._arrays.clear()

    def _make(self) -> None:
        target, source = self._arrays
        np.copyto(target, source, casting="no")

    def _run(self) -> None:
        if self._maker.setdefault("is", "thread") != "thread":
            return
        try:
            self._make()
        except BaseException as error:
            # The caller's, who is told of it.
            self.error = error
        finally:
            self._finished = True
            self._running.release()


def _finish(copies: list[_Copy]) -> None:
    """Wait for all, also when interrupted: they write into memory that is going to be reused."""
    interrupt: BaseException | None = None
    for copy in copies:
        while True:
            try:
                copy.finish()
                break
            except BaseException as error:
                interrupt = error
    if interrupt is not None:
        raise interrupt
