"""Copies many bytes: past the caches, and in several threads, where that is quicker.

May import errors, ``compiled`` and ``processors``.

One processor cannot use all of a machine's memory bandwidth. So what is large
enough to pay for starting threads is copied in parts, each by a thread of its own
that lives as long as the copy: none is left for a later fork.
"""

from __future__ import annotations

import _thread
import contextlib
import ctypes
import os
from functools import cache
from pickle import PickleBuffer
from time import perf_counter
from typing import TYPE_CHECKING, Any

from shmreduce.compiled import COPIES, find_module
from shmreduce.errors import ConfigurationError
from shmreduce.processors import cache_size, usable_processors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["copy_bytes", "copy_in_parts", "copy_run"]

_PARALLEL_FROM = 24 << 20
"""Bytes. Two threads copy a quarter faster, but to start one takes as long as to copy a
mebibyte, and it needs a processor: the reader of the message may have it, who looks for that."""
_MOST_THREADS = 4
"""More than these do not make it quicker: the memory is the limit."""
_SHARE_OF_CACHE = 4
"""Source and target of a copy fill half of the cache if one of them fills this part of it."""
_USUAL_CACHE = 32 << 20
_LEAST_CACHE, _MOST_CACHE = 16 << 20, 128 << 20
"""What a cache is taken for, at least and at most: other programs, and on a virtual machine
other machines, have a part in it."""
_TRIAL = 2 << 20
"""Bytes of a piece that is copied to see how long it takes."""
_TRIALS = 3
_GAIN = 1.1
"""How much quicker it has to be: what was copied past the caches is not in them for its reader."""
_WAIT_SECONDS = 1.0

_rates: dict[bool, list[float]] = {False: [], True: []}
"""Bytes per second of trials, by whether they went past the caches."""


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
    large = _COMPILED is not None and to.nbytes > _kept_in_cache()
    copy_in_parts(to, origin, _copy_large if large else _copy_through_caches)


def copy_run(target: memoryview, source: memoryview) -> None:
    """Do as :func:`copy_bytes` for buffers that are known to be as it wants them."""
    if _COMPILED is not None and target.nbytes < _LEAST_CACHE // _SHARE_OF_CACHE:
        # Many are sent, and to look at them again takes longer than the copy of a few.
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
        threads help only if it releases the interpreter's lock. If it raises an error,
        this function raises it.

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
            # Ctrl-C, as it was entered perhaps: then it has waited for nobody.
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
    # Unlike cast() it takes elements of any format, and tables without rows.
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
    """Return up to how many bytes it pays to leave a copy in the caches for its reader."""
    found = cache_size() or _USUAL_CACHE
    return min(max(found, _LEAST_CACHE), _MOST_CACHE) // _SHARE_OF_CACHE


def _copy_plainly(target: memoryview, source: memoryview, _past_caches: bool) -> None:
    """Copy one part without the compiled module; only memory that is writable has an address."""
    if source.readonly or not source.nbytes:
        target[:] = source
        return
    to, origin = map(ctypes.c_char.from_buffer, (target, source))
    # Unlike the assignment it lets other threads run.
    ctypes.memmove(ctypes.addressof(to), ctypes.addressof(origin), source.nbytes)


_COMPILED = find_module(COPIES)[0]
_copy: Callable[[Any, Any, bool], object] = getattr(_COMPILED, "copy", _copy_plainly)


def _copy_through_caches(target: Any, source: Any) -> None:
    _copy(target, source, False)


def _copy_large(target: Any, source: Any) -> None:
    """Copy what caches do not keep: past them where that is quicker, which is found out by use.

    With one maker's processors it takes two thirds of the time, with another's twice
    as long. So the first copies begin with a piece of either kind.
    """
    done = 0
    if len(_rates[True]) < _TRIALS and target.nbytes > 2 * _TRIAL:
        for past_caches in (False, True):
            piece = slice(done, done + _TRIAL)
            started = perf_counter()
            _copy(target[piece], source[piece], past_caches)
            _rates[past_caches].append(_TRIAL / (perf_counter() - started))
            done += _TRIAL
    _copy(target[done:], source[done:], _past_caches_is_quicker())


def _past_caches_is_quicker() -> bool:
    # The best of each: what comes between makes a copy slower, never quicker.
    return max(_rates[True], default=0.0) > _GAIN * max(_rates[False], default=0.0)


def _parts(target: Any, source: Any, count: int) -> Iterator[tuple[Any, Any]]:
    """Cut both into equal parts; into fewer if they are not long enough."""
    length = len(target)
    step = max(1, -(-length // count))
    for start in range(0, length, step):
        part = slice(start, start + step)
        yield target[part], source[part]


class _Copy:
    """The copy of one part, by a thread or by its caller, whoever comes first."""

    def __init__(self, copy: Callable[[Any, Any], object], target: Any, source: Any) -> None:
        self._copy = copy
        self._memory: list[Any] = [target, source]
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
        self._memory.clear()

    def _make(self) -> None:
        self._copy(*self._memory)

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
