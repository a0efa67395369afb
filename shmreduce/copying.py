"""Copies many bytes: bypassing the caches, and in several threads, if that is faster.

May import errors, ``compiled``, ``copy_trials`` and ``processors``.

One processor cannot use all of a machine's memory bandwidth. So a copy that is large
enough is done in parts, each by its own thread. The threads end with the copy, so that
a later fork finds none. Plain bytes are copied by threads of the compiled module, other
arrays by threads of Python, which take longer to start.
"""

from __future__ import annotations

import _thread
import contextlib
import ctypes
import os
from collections import defaultdict
from functools import cache
from pickle import PickleBuffer
from time import perf_counter
from typing import TYPE_CHECKING, Any

from shmreduce.compiled import COPIES, find_module
from shmreduce.copy_trials import Trials
from shmreduce.errors import ConfigurationError
from shmreduce.processors import cache_size, usable_processors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["copy_bytes", "copy_in_parts", "copy_run"]

_PARALLEL_FROM = 24 << 20
"""Bytes, with threads of Python: starting one takes as long as copying a mebibyte, and it needs
a processor, which a polling reader of the message may occupy."""
_TWO_FROM = 6 << 20
"""Bytes, with the compiled module's threads and two processors. In a queue 8 MiB took a third
less than with one thread, 4 MiB a tenth less. Where both processors are busy without that,
as those of a pool with two workers, 8 MiB took a tenth more."""
_SPARE_FROM = 3 << 20
"""Bytes, with these threads and more processors."""
_SHARE = 1 << 20
"""Bytes for each of these threads at least: starting one takes half as long as copying them."""
_FEW = 2
"""With so many processors, none is to spare."""
_MOST_THREADS = 8
"""More threads do not make it faster, since the memory is the limit. With sixteen processors
eight threads copied 64 MiB in an eighth of the time of one, four in a quarter. That is worth it
even if other processes do the same: sixteen that copied at once took no longer for it."""
_SHARE_OF_CACHE = 4
"""A target of 1/4 of the cache fills half of it together with the source."""
_USUAL_CACHE = 32 << 20
"""Bytes. Assumed if the kernel does not report the size of the cache."""
_LEAST_CACHE, _MOST_CACHE = 16 << 20, 128 << 20
"""Limits of the assumed cache size: other programs, and on a virtual machine other machines,
use the cache too."""
_WAIT_SECONDS = 1.0
"""How long to wait for a thread before looking whether this is a forked child, which lacks it."""

_trials: defaultdict[int, Trials] = defaultdict(Trials)
"""Those of copies that caches do not keep, by the number of bits of their size."""


def copy_bytes(target: Any, source: Any) -> None:
    """Copy the bytes of one buffer into another of the same size, in the fastest way.

    This is for reducers that fill a block from contiguous memory. From some MiB on it
    is faster than ``target[:] = source``, and other threads run meanwhile (without the
    compiled module only if ``source`` is writable). When it returns or raises, no thread
    uses the buffers any more.

    Parameters
    ----------
    target : bytes-like
        Writable and C-contiguous. It must not overlap with ``source``.
    source : bytes-like
        C-contiguous, with as many bytes, of any format.

    Raises
    ------
    ConfigurationError
        If an argument is not such a buffer, or the sizes differ.

    Examples
    --------
    >>> from shmreduce import Message, copy_bytes
    >>> message = Message()
    >>> view, handle = message.allocate(5)
    >>> copy_bytes(view, b"hello")
    >>> bytes(view)
    b'hello'
    >>> message.rollback()
    """
    to, origin = _bytes_of(target, "target"), _bytes_of(source, "source")
    if to.readonly:
        raise _refused("target", target, "it is read-only")
    if to.nbytes != origin.nbytes:
        raise _refused("source", source, f"it has {origin.nbytes} bytes, target has {to.nbytes}")
    if _COMPILED is None:
        copy_in_parts(to, origin, _copy_plainly)
    elif to.nbytes > _kept_in_cache():
        _copy_large(to, origin, _threads_for(to.nbytes))
    else:
        _copy(to, origin, False, _threads_for(to.nbytes))


def copy_run(target: memoryview, source: memoryview) -> None:
    """Do what :func:`copy_bytes` does, but faster for small buffers, which are not checked.

    For callers that know that both are C-contiguous and of the same length, and that the target
    is writable.
    """
    if _COMPILED is not None and target.nbytes < _SPARE_FROM:
        # Many small buffers are sent, and checking one takes longer than copying it.
        _copy(target, source, False)
    else:
        copy_bytes(target, source)


def copy_in_parts(target: Any, source: Any, copy: Callable[[Any, Any], object]) -> None:
    """Copy by a function of your own, in several threads if the target is large.

    This is for reducers of arrays that are not contiguous, which their own library
    copies best. When it returns or raises, even ``KeyboardInterrupt``, no thread uses
    the arrays any more.

    Parameters
    ----------
    target : sized and sliceable
        Has ``nbytes``; its slices are views.
    source : sliceable
        Of the same length.
    copy : callable
        Called as ``copy(target, source)`` with a slice of each, which it copies. Several
        threads help only if it releases the interpreter's lock.

    Raises
    ------
    Exception
        What ``copy`` raises. The target may then be partly written.

    Examples
    --------
    >>> from shmreduce import copy_in_parts
    >>> target = memoryview(bytearray(6))
    >>> def copy(target, source):
    ...     target[:] = source
    >>> copy_in_parts(target, memoryview(b"hello!"), copy)
    >>> bytes(target)
    b'hello!'
    """
    count = 1 if target.nbytes < _PARALLEL_FROM else min(_MOST_THREADS, usable_processors())
    if count == 1:
        copy(target, source)
        return
    first, *others = _parts(target, source, count)
    copies = [_Copy(copy, *part) for part in others]
    try:
        for each in copies:
            each.start()
        copy(*first)
        for each in copies:
            each.help()
    finally:
        try:
            _finish(copies)
        except BaseException:
            # If Ctrl-C came when _finish() was entered, it has not waited for any thread.
            _finish(copies)
            raise
    for each in copies:
        if each.error is not None:
            raise each.error


def _bytes_of(buffer: Any, name: str) -> memoryview:
    try:
        view = memoryview(buffer)
    except TypeError as error:
        raise _refused(name, buffer, str(error)) from error
    if not view.c_contiguous:
        raise _refused(name, buffer, "it has gaps, or is in another order")
    # Unlike memoryview.cast(), this accepts any format, and shapes with a length of 0.
    return PickleBuffer(view).raw()


def _refused(name: str, value: object, reason: str) -> ConfigurationError:
    return ConfigurationError(
        f"{name} must be a C-contiguous buffer, and the target must be writable and as long as "
        f"the source: {reason}",
        setting=name,
        value=type(value).__qualname__,
    )


@cache
def _kept_in_cache() -> int:
    """Return the size up to which a copy is left in the caches for its reader."""
    found = cache_size() or _USUAL_CACHE
    return min(max(found, _LEAST_CACHE), _MOST_CACHE) // _SHARE_OF_CACHE


def _threads_for(nbytes: int) -> int:
    """Return how many threads of the compiled module make a copy, with the caller."""
    if nbytes < _SPARE_FROM:
        return 1
    processors = usable_processors()
    if processors <= _FEW:
        return processors if nbytes >= _TWO_FROM else 1
    # One processor is left for the reader of the message, who may be polling for it.
    return min(processors - 1, _MOST_THREADS, nbytes // _SHARE)


def _copy_plainly(target: memoryview, source: memoryview) -> None:
    """Copy one part without the compiled module."""
    if source.readonly or not source.nbytes:
        # from_buffer() needs writable memory, and at least one byte.
        target[:] = source
        return
    to, origin = map(ctypes.c_char.from_buffer, (target, source))
    # Unlike the assignment, memmove() releases the interpreter lock.
    ctypes.memmove(ctypes.addressof(to), ctypes.addressof(origin), source.nbytes)


_COMPILED = find_module(COPIES)[0]
_copy: Any = getattr(_COMPILED, "copy", None)
"""The compiled module's function: target, source, whether past the caches, how many threads."""


def _copy_large(target: Any, source: Any, threads: int) -> None:
    """Copy more than caches keep, bypassing them if that is faster for such a size here."""
    size = target.nbytes
    trials = _trials[size.bit_length()]
    past_caches = trials.choose()
    started = perf_counter()
    _copy(target, source, past_caches, threads)
    seconds = perf_counter() - started
    if seconds > 0:
        trials.note(past_caches, size / seconds)


def _parts(target: Any, source: Any, count: int) -> Iterator[tuple[Any, Any]]:
    """Cut both into ``count`` equal parts, or into fewer if they are too short."""
    length = len(target)
    step = max(1, -(-length // count))
    for start in range(0, length, step):
        part = slice(start, start + step)
        yield target[part], source[part]


class _Copy:
    """The copy of one part, by a thread or by the caller, whichever begins first."""

    def __init__(self, copy: Callable[[Any, Any], object], target: Any, source: Any) -> None:
        self._copy = copy
        self._memory: list[Any] = [target, source]
        # Who makes the copy. setdefault() is atomic, so the first one decides: a thread
        # that begins after the caller has made the copy does nothing.
        self._maker: dict[str, str] = {}
        self._finished = False
        self._pid = os.getpid()
        self._running = _thread.allocate_lock()
        self._running.acquire()
        self.error: BaseException | None = None

    def start(self) -> None:
        """Start a thread that makes it, if one can be started."""
        with contextlib.suppress(RuntimeError):
            _thread.start_new_thread(self._run, ())

    def help(self) -> None:
        """Make it here if no thread has begun."""
        if self._maker.setdefault("is", "caller") == "caller":
            self._make()

    def finish(self) -> None:
        """Wait for the thread if it has begun; otherwise it will never begin."""
        while self._maker.setdefault("is", "caller") == "thread" and not self._finished:
            if os.getpid() != self._pid:
                # A signal handler has forked, and this is the child, which lacks the thread.
                self._make()
                break
            self._running.acquire(timeout=_WAIT_SECONDS)
        # The thread refers to this object until it has ended. Memory that this object
        # referred to would count as in use; in a child that is forked now, for ever.
        self._memory.clear()

    def _make(self) -> None:
        self._copy(*self._memory)

    def _run(self) -> None:
        if self._maker.setdefault("is", "thread") != "thread":
            return
        try:
            self._make()
        except BaseException as error:
            # copy_in_parts() raises it in the caller.
            self.error = error
        finally:
            self._finished = True
            self._running.release()


def _finish(copies: list[_Copy]) -> None:
    """Wait for all, even if interrupted: they write into memory that will be reused."""
    interrupt: BaseException | None = None
    left = list(copies)
    while left:
        try:
            while left:
                left[-1].finish()
                left.pop()
        except BaseException as error:
            interrupt = error
    if interrupt is not None:
        raise interrupt
