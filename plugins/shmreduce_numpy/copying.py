"""Copies the elements of arrays, large ones in several threads.

May import NumPy.

One core cannot use all of a machine's memory bandwidth. So an array that is
large enough to pay for starting threads is copied in parts, by the caller and by
threads that live as long as the copy: none is left for a later fork. Whoever is
ready takes the next part, for a thread may come late, or not at all while other
processes have the processor.
"""

from __future__ import annotations

import _thread
import contextlib
import os
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

    _Part = tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]

__all__ = ["copy_elements"]

_PARALLEL_FROM = 4 << 20
"""Bytes. Until a thread has started the caller has copied one or two mebibytes."""
_PART = 512 << 10
"""Bytes, at least. At the end the caller waits for a part of each thread at most."""
_MOST_PARTS = 64
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
    parts = list(_parts(target, source))
    helpers = [_Helper(parts) for _ in range(count - 1)]
    try:
        for helper in helpers:
            helper.start()
        _copy_parts(parts)
    finally:
        _finish(parts, helpers)
    for helper in helpers:
        if helper.error is not None:
            raise helper.error


def _usable_cpus() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _parts(target: np.ndarray[Any, Any], source: np.ndarray[Any, Any]) -> Iterator[_Part]:
    """Cut both arrays into equal parts; into fewer if they are not long enough."""
    if target.flags.f_contiguous and not target.flags.c_contiguous:
        target, source = target.T, source.T
    if source.flags.c_contiguous:
        target, source = target.reshape(-1), source.reshape(-1)
    length = len(target)
    count = max(1, min(_MOST_PARTS, target.nbytes // _PART))
    step = max(1, -(-length // count))
    for start in range(0, length, step):
        part = slice(start, start + step)
        yield target[part], source[part]


def _copy_parts(parts: list[_Part]) -> None:
    while True:
        try:
            target, source = parts.pop()
        except IndexError:
            return
        np.copyto(target, source, casting="no")


class _Helper:
    """A thread that takes parts of a copy as long as there are any."""

    def __init__(self, parts: list[_Part]) -> None:
        self._parts = parts
        self._begun = False
        self._running = _thread.allocate_lock()
        self._running.acquire()
        self._finished = False
        self.error: BaseException | None = None

    def start(self) -> None:
        """Start the thread, if one can be had."""
        with contextlib.suppress(RuntimeError):
            _thread.start_new_thread(self._run, ())

    def finish(self) -> None:
        """Wait for the thread, once no part is left: one that has not begun finds none."""
        while self._begun and not self._finished:
            self._running.acquire(timeout=_WAIT_SECONDS)

    def _run(self) -> None:
        # Before it takes a part: who sees it unset afterwards sees a thread without one.
        self._begun = True
        try:
            _copy_parts(self._parts)
        except BaseException as error:
            # The caller's, who is told of it.
            self.error = error
        finally:
            self._finished = True
            self._running.release()


def _finish(parts: list[_Part], helpers: list[_Helper]) -> None:
    """Wait for all, also when interrupted: they write into memory that is going to be reused."""
    interrupt: BaseException | None = None
    for helper in helpers:
        while True:
            try:
                # None are left, unless the copy has failed or was interrupted.
                parts.clear()
                helper.finish()
                break
            except BaseException as error:
                interrupt = error
    if interrupt is not None:
        raise interrupt
