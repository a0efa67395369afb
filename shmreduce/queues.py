"""Queues whose messages bring the memory they refer to.

May import ``connection``, ``packets`` and everything below them, and
:mod:`multiprocessing.queues`.

Each message is one packet, so writers and readers of a queue take no lock, and
one that is killed blocks nobody. ``put`` pickles the object in the thread that
calls it, so the receiver gets the object as it was then, even if it is changed
afterwards.
"""

from __future__ import annotations

import collections
import multiprocessing.queues
import os
import threading
import time
import weakref
from multiprocessing import context, synchronize
from multiprocessing.util import Finalize, debug, register_after_fork
from queue import Empty, Full
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from shmreduce.connection import Connection, Pipe, give_buffer, take_buffer
from shmreduce.errors import ShmreduceError
from shmreduce.memory.loading import discard_message
from shmreduce.packets import Packet, pack_last
from shmreduce.queue_feeder import Feeder, Unsendable, end_feeder, join_feeder
from shmreduce.queue_locks import QueueLocks
from shmreduce.signals import is_from_handler, is_from_system
from shmreduce.standard_names import names_of
from shmreduce.thread_locks import interrupt_safe
from shmreduce.unpickling import loads

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from shmreduce.packets import Received
    from shmreduce.receive_buffer import ReceiveBuffer

    _StandardQueue = multiprocessing.queues.Queue[Any]
    _StandardJoinableQueue = multiprocessing.queues.JoinableQueue[Any]
    _StandardSimpleQueue = multiprocessing.queues.SimpleQueue[Any]
else:
    # These classes are not generic before Python 3.13.
    _StandardQueue = multiprocessing.queues.Queue
    _StandardJoinableQueue = multiprocessing.queues.JoinableQueue
    _StandardSimpleQueue = multiprocessing.queues.SimpleQueue

__all__ = ["JoinableQueue", "Queue", "SimpleQueue"]

_T = TypeVar("_T")

_ANY_NUMBER: int = synchronize.SEM_VALUE_MAX  # type: ignore[attr-defined]
_FLUSH_PRIORITY = -5
_CLOSE_PRIORITY = 10
"""As in multiprocessing.queues: at exit, queues are closed first and then flushed."""


class SimpleQueue(QueueLocks, _StandardSimpleQueue, Generic[_T]):
    """A queue that is only a pipe; see :class:`multiprocessing.SimpleQueue`.

    ``put`` waits when the pipe is full: after thousands of small messages, or after some
    hundreds if ``net.core.wmem_max`` is small.

    Parameters
    ----------
    ctx : multiprocessing context
        The context of the processes that share the queue.

    Raises
    ------
    OSError
        If no descriptor is free.

    Examples
    --------
    >>> import shmreduce
    >>> queue = SimpleQueue(ctx=shmreduce.get_context("fork"))
    >>> queue.put("hello")
    >>> queue.empty(), queue.get()
    (False, 'hello')
    >>> queue.close()
    """

    _reader: Connection
    _writer: Connection
    _poll: Callable[..., bool]

    def __init__(self, *, ctx: Any) -> None:
        self._reader, self._writer = Pipe(duplex=False)
        self._poll = self._reader.poll
        self._promise_locks(ctx, __name__)

    def __getstate__(self) -> Any:
        context.assert_spawning(self)
        return (self._reader, self._writer, *self._made_locks())

    def __setstate__(self, state: Any) -> None:
        self._reader, self._writer, *locks = state
        self._poll = self._reader.poll
        self._take_over_locks(*locks)

    def _note_lock(self, name: str, lock: Any) -> None:
        if name == "_rlock":
            # empty() calls _poll.
            self._poll = _LockHoldersReader.become(self._reader, lock).peek

    def get(self) -> _T:
        """Take the next object out; wait for it.

        Raises
        ------
        EOFError
            If there is none and nobody can put one in any more.
        AttachError
            If its memory cannot be opened here; see :meth:`Connection.recv`.
        OSError
            If the queue is closed.
        """
        obj: _T = self._reader.recv()
        return obj

    def put(self, obj: _T) -> None:
        """Put an object in, as it is now; wait while the pipe is full.

        Parameters
        ----------
        obj : object
            It stays the caller's.

        Raises
        ------
        OutOfSharedMemoryError, BudgetExceededError
            If it is large and there is no shared memory for it.
        BrokenPipeError
            If nobody can take it out any more.
        OSError
            If the queue is closed.
        """
        held = [obj]
        # Arrays without any other reference are moved: keep none in this frame.
        del obj
        self._writer.send_last(held)


class _LockHoldersReader(Connection):
    """The reader of a queue whose lock for reading somebody has asked for.

    Whoever holds that lock may poll and then receive, without waiting: the standard library's
    pool does when it is terminated. But readers of our queues take no lock, so one of them could
    get the message in between. So for the holder, :meth:`poll` takes it out. ``fileno`` and
    ``wait`` do not know of it then, and if the holder does not receive it, only another thread
    of the same process can.
    """

    _lock: Any
    _taken: collections.deque[tuple[int, bytes]]
    """Messages that poll() has taken out, and the processes in which it did."""

    @classmethod
    def become(cls, reader: Connection, lock: Any) -> _LockHoldersReader:
        """Make a reader one of this class; two threads may do so at the same time."""
        vars(reader).setdefault("_taken", collections.deque())
        vars(reader)["_lock"] = lock
        reader.__class__ = cls
        return cast("_LockHoldersReader", reader)

    def __reduce__(self) -> tuple[Any, ...]:
        # The queue that gets it makes it one of this class, if the lock comes with the queue.
        rebuild, (_, *arguments) = super().__reduce__()
        return rebuild, (Connection, *arguments)

    def recv(self) -> Any:
        """Return what :meth:`poll` has taken out, or the next object."""
        data = self._taken_out()
        return super().recv() if data is None else loads(data)

    def _contents(self) -> bytes:
        data = self._taken_out()
        return super()._contents() if data is None else data

    def peek(self) -> bool:
        """Return whether there is a message, and take none out."""
        return self._has_taken() or super()._poll(0.0)

    def _taken_out(self) -> bytes | None:
        while not self.closed and self._has_taken():
            try:
                pid, data = self._taken.popleft()
            except IndexError:
                # Another thread was quicker.
                break
            # A forked child must not have its parent's message.
            if pid == os.getpid():
                return data
        return None

    def _has_taken(self) -> bool:
        """Return whether there is a message here for this thread."""
        semaphore = self._lock._semlock
        if semaphore._count() and not semaphore._is_mine():
            # Another thread of this process holds the lock.
            return False
        return any(pid == os.getpid() for pid, _ in tuple(self._taken))

    def _poll(self, timeout: float | None) -> bool:
        if self._has_taken():
            return True
        if not self._lock._semlock._is_mine():
            return super()._poll(timeout)
        deadline = None if timeout is None else time.monotonic() + timeout
        while super()._poll(timeout):
            if self._take():
                return True
            # Another process was quicker.
            timeout = None if deadline is None else max(0.0, deadline - time.monotonic())
        return False

    def _take(self) -> bool:
        buffer = take_buffer()
        try:
            arrival = self.receive(buffer, wait=False)
            if arrival is None:
                return False
            self._taken.append((os.getpid(), arrival.contents()))
        except EOFError:
            # recv() raises it again.
            pass
        finally:
            give_buffer(buffer)
        return True

    def _close(self) -> None:
        super()._close()
        while self._taken:
            pid, data = self._taken.popleft()
            if pid == os.getpid():
                discard_message(data)


class Queue(QueueLocks, _StandardQueue, Generic[_T]):
    """A queue of any length or a bounded one; see :class:`multiprocessing.Queue`.

    ``put`` pickles the object, and writes it to the pipe if that is possible without
    waiting; otherwise a thread writes it.

    Parameters
    ----------
    maxsize : int
        The largest number of objects in the queue; 0 for any number.
    ctx : multiprocessing context
        The context of the processes that share the queue.

    Raises
    ------
    OSError
        If no descriptor is free.

    Examples
    --------
    >>> import shmreduce
    >>> queue = Queue(ctx=shmreduce.get_context("fork"))
    >>> queue.put("hello")
    >>> queue.get()
    'hello'
    >>> queue.close()
    """

    _reader: Connection
    _writer: Connection
    _buffer: collections.deque[Any]
    _locked: AbstractContextManager[Any]
    _notempty: threading.Condition
    _sem: Any
    _close: Any
    _thread: threading.Thread | None

    def __init__(self, maxsize: int = 0, *, ctx: Any) -> None:
        self._maxsize = maxsize if maxsize > 0 else _ANY_NUMBER
        self._reader, self._writer = Pipe(duplex=False)
        self._promise_locks(ctx, __name__)
        self._opid = os.getpid()
        self._sem = ctx.BoundedSemaphore(self._maxsize)
        self._ignore_epipe = False
        self._reset()
        register_after_fork(self, _reset_after_fork)

    def __getstate__(self) -> Any:
        context.assert_spawning(self)
        channel = (self._ignore_epipe, self._maxsize, self._reader, self._writer)
        return (*channel, *self._made_locks(), self._sem, self._opid)

    def __setstate__(self, state: Any) -> None:
        self._ignore_epipe, self._maxsize, self._reader, self._writer, *locks = state[:6]
        self._take_over_locks(*locks)
        self._sem, self._opid = state[6:]
        self._reset()

    def _reset(self, after_fork: bool = False) -> None:
        super()._reset(after_fork)  # type: ignore[misc]
        if not after_fork:
            # put() uses _locked, never ``with self._notempty``, see interrupt_safe().
            lock = threading.Lock()
            self._locked = interrupt_safe(lock)
            self._notempty = threading.Condition(lock)
        self._busy = [False]
        self._used = False

    def put(self, obj: _T, block: bool = True, timeout: float | None = None) -> None:
        """Put an object in, as it is now.

        If it cannot be pickled, the object is dropped and the error is printed on standard
        error, as by :class:`multiprocessing.Queue`.

        Parameters
        ----------
        obj : object
            It stays the caller's.
        block : bool
            Whether to wait for room in a bounded queue.
        timeout : float, optional
            The most seconds to wait; None to wait without a limit.

        Raises
        ------
        Full
            If there is no room (within ``timeout`` seconds).
        OutOfSharedMemoryError, BudgetExceededError
            If it is large and there is no shared memory for it.
        RuntimeError
            If the pipe is full and no thread can be started. The object is not put into
            the queue then.
        ValueError
            If the queue is closed.
        """
        self._reserve(block, timeout)
        held = [obj]
        del obj
        item = self._pack(held)
        try:
            self._add(item)
        except BaseException:
            if self._is_unseen(item):
                self._take_back(item)
            raise
        item.finish()

    def get(self, block: bool = True, timeout: float | None = None) -> _T:
        """Take the next object out.

        Parameters
        ----------
        block : bool
            Whether to wait for one.
        timeout : float, optional
            The most seconds to wait; None to wait without a limit.

        Raises
        ------
        Empty
            If there is none (within ``timeout`` seconds).
        AttachError
            If its memory cannot be opened here; see :meth:`Connection.recv`.
        ValueError
            If the queue is closed.
        """
        self._check_open()
        buffer = take_buffer()
        try:
            try:
                arrival = self._reader.receive(buffer, wait=block and timeout is None)
                if arrival is None:
                    seconds = timeout if block and timeout is not None else 0.0
                    arrival = self._receive_within(buffer, seconds)
            finally:
                # buffer[0] is set once a message has been read. Its place is free then, even
                # if Ctrl-C has interrupted this.
                if buffer[0]:
                    self._sem.release()
            obj: _T = arrival.load()
            return obj
        finally:
            give_buffer(buffer)

    def close(self) -> None:
        """Let this process put nothing more in; what it has put is still sent."""
        super().close()
        if self._used and self._thread is None:
            # If there is a thread, it does this when everything has been sent.
            self._reader.close()
            self._writer.close()

    def _receive_within(self, buffer: ReceiveBuffer, seconds: float) -> Received:
        deadline = time.monotonic() + seconds
        # A loop, since another reader may take the message after poll() has seen it.
        while self._reader.poll(max(0.0, deadline - time.monotonic())):
            arrival = self._reader.receive(buffer, wait=False)
            if arrival is not None:
                return arrival
        raise Empty

    def _check_open(self) -> None:
        if self._closed:  # type: ignore[attr-defined]
            raise ValueError(f"Queue {self!r} is closed")

    def _reserve(self, block: bool, timeout: float | None) -> None:
        self._check_open()
        if not self._sem.acquire(block, timeout):
            raise Full

    def _pack(self, held: list[Any]) -> Packet | Unsendable:
        try:
            return pack_last(held)
        except ShmreduceError:
            # No shared memory, for example: the caller can do something about that.
            self._sem.release()
            raise
        except Exception as error:
            if is_from_handler(error):
                self._sem.release()
                raise
            return Unsendable(held[0] if held else None, error)
        except BaseException:
            self._sem.release()
            raise

    def _add(self, item: Packet | Unsendable) -> None:
        with self._locked:
            self._used = True
            if not self._sent_at_once(item):
                if self._thread is None:
                    self._start_thread()
                self._buffer.append(item)
                self._notempty.notify()

    def _is_unseen(self, item: Packet | Unsendable) -> bool:
        """Take an item out of the buffer, if it is there; return whether nobody has seen it.

        For a ``put`` that has failed, wherever that was: by Ctrl-C, or since no thread can be
        started (RLIMIT_NPROC).
        """
        with self._locked:
            if item in self._buffer:
                self._buffer.remove(item)
            return not item.is_under_way

    def _take_back(self, item: Packet | Unsendable) -> None:
        """Undo a ``put`` whose item nobody has seen."""
        try:
            if isinstance(item, Packet):
                item.discard()
        finally:
            self._sem.release()

    def _sent_at_once(self, item: Packet | Unsendable) -> bool:
        if self._buffer or self._busy[0] or isinstance(item, Unsendable):
            return False
        try:
            self._writer.transmit(item, wait=False)
        except OSError as error:
            if not is_from_system(error):
                # A signal handler has raised it, perhaps after the packet was sent.
                raise
            # The pipe is full; after any other error the thread tries, and reports it.
            item.is_under_way = False
            return False
        return True

    def _start_thread(self) -> None:
        debug("Queue._start_thread()")
        feeder = Feeder(
            self._buffer,
            self._notempty,
            self._busy,
            self._writer,
            self._reader.close,
            self._ignore_epipe,
            self._on_queue_feeder_error,  # type: ignore[attr-defined]
            self._sem,
            [],
        )
        thread = threading.Thread(target=feeder.run, name="QueueFeederThread", daemon=True)
        try:
            thread.start()
            self._thread = thread
            if not self._joincancelled:  # type: ignore[attr-defined]
                self._jointhread = Finalize(
                    thread, join_feeder, [weakref.ref(thread)], exitpriority=_FLUSH_PRIORITY
                )
            self._close = Finalize(
                self, end_feeder, [self._buffer, self._notempty], exitpriority=_CLOSE_PRIORITY
            )
        except BaseException:
            # After Ctrl-C the thread may run, or be about to: start() waits for it. Two threads
            # would send in any order. This one has done nothing yet, as the lock is held here.
            feeder.called_off.append(True)
            self._thread = None
            raise


class JoinableQueue(Queue[_T], _StandardJoinableQueue):
    """A queue that counts unfinished tasks; see :class:`multiprocessing.JoinableQueue`.

    Parameters
    ----------
    maxsize : int
        The largest number of objects in the queue; 0 for any number.
    ctx : multiprocessing context
        The context of the processes that share the queue.

    Raises
    ------
    OSError
        If no descriptor is free.

    Examples
    --------
    >>> import shmreduce
    >>> queue = JoinableQueue(ctx=shmreduce.get_context("fork"))
    >>> queue.put("hello")
    >>> queue.get()
    'hello'
    >>> queue.task_done()
    >>> queue.join()
    >>> queue.close()
    """

    _cond: Any
    _unfinished_tasks: Any

    def __init__(self, maxsize: int = 0, *, ctx: Any) -> None:
        Queue.__init__(self, maxsize, ctx=ctx)
        self._unfinished_tasks = ctx.Semaphore(0)
        self._cond = ctx.Condition()

    def __getstate__(self) -> Any:
        return (*super().__getstate__(), self._cond, self._unfinished_tasks)

    def __setstate__(self, state: Any) -> None:
        *of_queue, self._cond, self._unfinished_tasks = state
        super().__setstate__(tuple(of_queue))

    def put(self, obj: _T, block: bool = True, timeout: float | None = None) -> None:
        """Put an object in, as it is now, and count it; see :meth:`Queue.put`."""
        self._reserve(block, timeout)
        held = [obj]
        del obj
        item = self._pack(held)
        counted = False
        try:
            with self._cond:
                # Counted before anybody can get the item and call task_done(). No signal
                # handler runs between these two.
                counted = True
                self._unfinished_tasks.release()
                self._add(item)
        except BaseException:
            if self._is_unseen(item):
                try:
                    if counted:
                        # It tells those who have begun to wait for this item.
                        super().task_done()
                finally:
                    self._take_back(item)
            raise
        item.finish()


def _reset_after_fork(queue: Queue[Any]) -> None:
    debug("Queue._after_fork()")
    queue._reset(after_fork=True)


if not TYPE_CHECKING:
    __getattr__ = names_of("queues")
