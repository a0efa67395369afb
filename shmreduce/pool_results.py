"""The results that a pool's asynchronous calls return before they have arrived.

May import ``thread_locks``. The pool's thread calls ``answer``, and what else is for the pool;
everything else is for users, and behaves as in the classes of the same names in
:mod:`multiprocessing.pool`.
"""

from __future__ import annotations

import collections
import contextlib
import sys
import threading
from multiprocessing.context import TimeoutError  # noqa: A004 - the one that users catch
from typing import TYPE_CHECKING, Any, Generic, Protocol, Self, TypeVar

from shmreduce.thread_locks import interrupt_safe

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "ApplyResult",
    "AsyncResult",
    "IMapIterator",
    "IMapUnorderedIterator",
    "MapResult",
    "Receiver",
    "call",
]

_T = TypeVar("_T")


class Receiver(Protocol):
    """What receives the answers to tasks: a result, or the promise of a future."""

    @property
    def cancelled(self) -> bool:
        """Whether its tasks that have not begun are not wanted any more."""

    def begin(self) -> bool:
        """Return whether a task that is about to be sent to a worker is still wanted."""

    def answer(self, index: int, succeeded: bool, value: Any) -> None:
        """Take the value of one task, or its exception."""

    def abandon(self, error: BaseException) -> None:
        """Fail with this error: no more answers will come."""


class MakerOfResults(Protocol):
    """The pool of a result."""

    def _check_made_here(self) -> None:
        """Raise InheritedPoolError in a child that was forked from the pool's process."""


def call(callback: Callable[[Any], object] | None, value: Any) -> None:
    """Call a user's callback; report what it raises, and go on."""
    if callback is None:
        return
    try:
        callback(value)
    except BaseException:  # even SystemExit, which would end the pool's thread
        report = (*sys.exc_info(), threading.current_thread())
        # The hook may raise as well, for example if standard error is closed.
        with contextlib.suppress(BaseException):
            threading.excepthook(threading.ExceptHookArgs(report))


class _Event:
    """As :class:`threading.Event`, but Ctrl-C in a waiting thread never leaves it locked."""

    def __init__(self) -> None:
        # Never ``with self._condition``, see interrupt_safe().
        self._lock = threading.Lock()
        self._locked = interrupt_safe(self._lock)
        # Made by the first thread that waits: most results arrive before anybody waits.
        self._condition: threading.Condition | None = None
        self._is_set = False

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        with self._locked:
            self._is_set = True
            if self._condition is not None:
                self._condition.notify_all()

    def wait(self, timeout: float | None) -> None:
        # In a forked child the lock may never be released.
        if self._is_set:
            return
        with self._locked:
            if not self._is_set:
                if self._condition is None:
                    self._condition = threading.Condition(self._lock)
                self._condition.wait(timeout)


class ApplyResult(Generic[_T]):
    """The result of :meth:`Pool.apply_async`.

    Parameters
    ----------
    pool : MakerOfResults, optional
        Kept alive until the result has arrived.
    callback, error_callback : callable, optional
        Called in the pool's thread with the value, or the exception.
    """

    def __init__(
        self,
        pool: MakerOfResults | None,
        callback: Callable[[_T], object] | None = None,
        error_callback: Callable[[BaseException], object] | None = None,
    ) -> None:
        self._pool = pool
        self._event = _Event()
        self._callback = callback
        self._error_callback = error_callback
        self._success = True
        self._value: Any = None

    def ready(self) -> bool:
        """Return whether the result has arrived."""
        return self._event.is_set()

    def successful(self) -> bool:
        """Return whether the call raised no exception; ValueError if it is not ready."""
        if not self.ready():
            raise ValueError(f"{self!r} not ready")
        return self._success

    def wait(self, timeout: float | None = None) -> None:
        """Wait for the result, for ``timeout`` seconds at most.

        Raises
        ------
        InheritedPoolError
            If it had not arrived when this process was forked from the pool's.
        """
        pool = self._pool
        # Before the event's lock is taken, which may have been held at the fork.
        if pool is not None and not self.ready():
            pool._check_made_here()
        self._event.wait(timeout)

    def get(self, timeout: float | None = None) -> _T:
        """Return the result, or raise what the call raised.

        Raises
        ------
        multiprocessing.TimeoutError
            If it has not arrived after ``timeout`` seconds.
        InheritedPoolError
            If it had not arrived when this process was forked from the pool's.
        """
        self.wait(timeout)
        if not self.ready():
            raise TimeoutError
        if not self._success:
            raise self._value
        value: _T = self._value
        return value

    # For the pool

    cancelled = False

    def begin(self) -> bool:
        """Return whether a task is still wanted: it always is."""
        return True

    def answer(self, index: int, succeeded: bool, value: Any) -> None:  # noqa: ARG002
        """Take the value, or the exception."""
        if self.ready():
            # The pool was terminated meanwhile.
            return
        self._success, self._value = succeeded, value
        self._finish()

    def abandon(self, error: BaseException) -> None:
        """Fail without calling a callback: the user has terminated the pool."""
        if not self.ready():
            self._success, self._value = False, error
            self._event.set()
            self._pool = None

    def _finish(self) -> None:
        call(self._callback if self._success else self._error_callback, self._value)
        self._event.set()
        self._pool = None


AsyncResult = ApplyResult


class MapResult(ApplyResult[list[_T]]):
    """The result of :meth:`Pool.map_async`: a list, which arrives chunk by chunk.

    Parameters
    ----------
    pool, callback, error_callback
        As for :class:`ApplyResult`.
    chunksize : int
        How many items one task has.
    length : int
        How many items there are.
    progress : callable, optional
        Called in the pool's thread with the number of items of each chunk that arrives.
    """

    def __init__(
        self,
        pool: MakerOfResults | None,
        chunksize: int,
        length: int,
        callback: Callable[[list[_T]], object] | None = None,
        error_callback: Callable[[BaseException], object] | None = None,
        progress: Callable[[int], object] | None = None,
    ) -> None:
        super().__init__(pool, callback, error_callback)
        self._value = [None] * length
        self._chunksize = chunksize
        self._progress = progress
        self._left = -(-length // chunksize)
        # Any thread may abandon the result while the pool's thread takes an answer. Reentrant,
        # since what is dropped meanwhile may have finalizers that wake the pool.
        self._locked = interrupt_safe(threading.RLock())
        self._decided = False
        """Whether all has been answered, or the result was abandoned."""
        if not length:
            # As in the standard library, no callback is called for no items.
            self._event.set()
            self._pool = None

    @property
    def _number_left(self) -> int:
        # A private name of the standard library's that programs use to show progress.
        return self._left

    def answer(self, index: int, succeeded: bool, value: Any) -> None:
        """Take the values of one chunk, or the exception of one of its items."""
        with self._locked:
            if self._decided:
                return
            if succeeded and self._success:
                start = index * self._chunksize
                self._value[start : start + self._chunksize] = value
            elif not succeeded and self._success:
                # get() raises the first exception, after all chunks have been answered.
                self._success, self._value = False, value
            self._left -= 1
            last = self._decided = self._left == 0
        if self._progress is not None and succeeded:
            call(self._progress, len(value))
        if last:
            self._finish()

    def abandon(self, error: BaseException) -> None:
        """Fail without calling a callback: the user has terminated the pool."""
        # Dropped without the lock.
        kept = self._pool, self._value
        with self._locked:
            if self._decided:
                return
            self._decided = True
            super().abandon(error)
        del kept

    def end_at(self, length: int, chunks: int) -> None:
        """Expect ``length`` items, and ``chunks`` fewer: ``len()`` had returned too much."""
        with self._locked:
            if self._decided:
                return
            if self._success:
                del self._value[length:]
            self._left -= chunks
            last = self._decided = self._left == 0
        if last:
            self._finish()

    def fail_rest(self, error: BaseException, chunks: int) -> None:
        """Take what the iterable has raised, instead of the last chunks."""
        with self._locked:
            self._left -= chunks - 1
        self.answer(-1, False, error)


class IMapIterator(Generic[_T]):
    """The results of :meth:`Pool.imap`, in order, as they come.

    Parameters
    ----------
    pool : MakerOfResults, optional
        Kept alive until the last result has arrived.
    in_chunks : bool
        Whether an answer is a list of results. Then the iterator ends after the error of a
        chunk, since the number of results that are missing there is not known.
    bar : tqdm.tqdm, optional
        Advanced by each result that is taken, closed at the end.
    """

    def __init__(
        self, pool: MakerOfResults | None, *, in_chunks: bool = False, bar: Any = None
    ) -> None:
        self._pool = pool
        self._in_chunks = in_chunks
        self._bar = bar
        # Never ``with self._condition``, see interrupt_safe().
        lock = threading.Lock()
        self._locked = interrupt_safe(lock)
        self._condition = threading.Condition(lock)
        self._items: collections.deque[tuple[bool, Any]] = collections.deque()
        self._early: dict[int, tuple[bool, Any]] = {}
        self._arrived = 0
        self._length: int | None = None
        self._abandoned: BaseException | None = None
        self._broken_off = False

    @property
    def _index(self) -> int:
        # Programs that show the progress use this name of the standard library.
        return self._arrived

    def __iter__(self) -> Self:
        return self

    def next(self, timeout: float | None = None) -> _T:
        """Return the next result, or raise what that call raised.

        Raises
        ------
        multiprocessing.TimeoutError
            If it has not arrived after ``timeout`` seconds.
        StopIteration
            If there are no more.
        InheritedPoolError
            If not all had arrived when this process was forked from the pool's.
        """
        succeeded, value = self._take(timeout)
        if self._bar is not None:
            if succeeded:
                self._bar.update(1)
            elif not self._items and self._ended():
                self._bar.close()
        if not succeeded:
            raise value
        result: _T = value
        return result

    def __next__(self) -> _T:
        return self.next()

    def _take(self, timeout: float | None) -> tuple[bool, Any]:
        pool = self._pool
        # Before the lock is taken, which may have been held at the fork.
        if pool is not None:
            pool._check_made_here()
        with self._locked:
            if not self._items and not self._ended():
                self._condition.wait_for(lambda: self._items or self._ended(), timeout)
            if self._items:
                item = self._items.popleft()
                if self._in_chunks and not item[0]:
                    self._broken_off = True
                    self._items.clear()
                return item
            if self._broken_off or self._arrived == self._length:
                return False, StopIteration()
            return False, self._abandoned or TimeoutError()

    def _ended(self) -> bool:
        return self._broken_off or self._all_arrived()

    def _all_arrived(self) -> bool:
        return self._arrived == self._length or self._abandoned is not None

    # For the pool

    cancelled = False

    def begin(self) -> bool:
        """Return whether a task is still wanted: it always is."""
        return True

    def answer(self, index: int, succeeded: bool, value: Any) -> None:
        """Take the value of one task, or its exception."""
        with self._locked:
            self._early[index] = (succeeded, value)
            self._add_early()
            self._news()

    def expect(self, length: int) -> None:
        """Take the number of answers that there will be."""
        with self._locked:
            self._length = length
            self._news()

    def end_with(self, length: int, error: BaseException) -> None:
        """Take what the iterable raised after ``length`` tasks: it comes after their results."""
        with self._locked:
            self._early[length] = (False, error)
            self._length = length + 1
            self._add_early()
            self._news()

    def abandon(self, error: BaseException) -> None:
        """Fail after the results that have arrived."""
        with self._locked:
            self._abandoned = error
            self._news()

    def _add_early(self) -> None:
        while self._arrived in self._early:
            self._add(*self._early.pop(self._arrived))

    def _add(self, succeeded: bool, value: Any) -> None:
        self._arrived += 1
        if self._broken_off:
            return
        if self._in_chunks and succeeded:
            self._items.extend((True, each) for each in value)
        else:
            self._items.append((succeeded, value))

    def _news(self) -> None:
        self._condition.notify_all()
        if self._all_arrived():
            self._pool = None


class IMapUnorderedIterator(IMapIterator[_T]):
    """The results of :meth:`Pool.imap_unordered`, as they come."""

    def answer(self, index: int, succeeded: bool, value: Any) -> None:  # noqa: ARG002
        """Take the value of one task, or its exception."""
        with self._locked:
            self._add(succeeded, value)
            # Only what the iterable raised may be there: it is the last to come.
            self._add_early()
            self._news()
