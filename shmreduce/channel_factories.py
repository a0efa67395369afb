"""The methods of the contexts that make pipes, queues, pools and managers.

May import ``channel_support``, ``importing`` and errors, and, in the methods that need them,
``connection``, ``queues``, ``pool`` and ``managers``. Where the channels of shmreduce do not work,
the methods make those of :mod:`multiprocessing`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from shmreduce import channel_support
from shmreduce.errors import PlatformError
from shmreduce.importing import import_late

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from multiprocessing import context, managers

    from shmreduce import connection, pool, queues

    _Base = context.BaseContext
else:
    # A mixin: super() finds the standard context, which comes next in the MRO.
    _Base = object

__all__ = ["ChannelFactories"]


class ChannelFactories(_Base):
    """What the contexts of shmreduce make differently."""

    def Pipe(  # noqa: N802
        self, duplex: bool = True
    ) -> tuple[connection.Connection, connection.Connection]:
        """Return the two ends of a new pipe.

        Parameters
        ----------
        duplex : bool
            Whether both ends can send and receive; if not, the first can only
            receive and the second only send.

        Returns
        -------
        (Connection, Connection)
            The caller's. Their methods are those of
            :class:`multiprocessing.connection.Connection`.

        Raises
        ------
        OSError
            If no descriptor is free.

        Examples
        --------
        >>> import shmreduce
        >>> here, there = shmreduce.Pipe()
        >>> here.send([1, 2])
        >>> there.recv()
        [1, 2]
        >>> here.close(), there.close()
        (None, None)
        """
        import_late("shmreduce.connection")
        from shmreduce.connection import Pipe

        return Pipe(duplex)

    def SimpleQueue(self) -> queues.SimpleQueue[Any]:  # noqa: N802
        """Return a queue that is only a pipe: ``put`` waits if the pipe is full.

        Returns
        -------
        shmreduce.queues.SimpleQueue
            The caller's. Any number of processes may put and get.

        Raises
        ------
        OSError
            If no descriptor is free.

        Examples
        --------
        >>> import shmreduce
        >>> queue = shmreduce.get_context("fork").SimpleQueue()
        >>> queue.put("hello")
        >>> queue.get()
        'hello'
        >>> queue.close()
        """
        if not channel_support.supported():
            return cast("queues.SimpleQueue[Any]", super().SimpleQueue())
        import_late("shmreduce.queues")
        from shmreduce.queues import SimpleQueue

        return SimpleQueue(ctx=self.get_context())

    def Queue(self, maxsize: int = 0) -> queues.Queue[Any]:  # noqa: N802
        """Return a queue whose ``put`` does not wait for a reader.

        Parameters
        ----------
        maxsize : int
            The largest number of objects that may be in the queue; 0 for any number.

        Returns
        -------
        shmreduce.queues.Queue
            The caller's. If the pipe is full, a thread writes to it.

        Raises
        ------
        OSError
            If no descriptor is free.

        Examples
        --------
        >>> import shmreduce
        >>> queue = shmreduce.get_context("fork").Queue()
        >>> queue.put("hello")
        >>> queue.get()
        'hello'
        >>> queue.close()
        """
        if not channel_support.supported():
            return cast("queues.Queue[Any]", super().Queue(maxsize))
        import_late("shmreduce.queues")
        from shmreduce.queues import Queue

        return Queue(maxsize, ctx=self.get_context())

    def JoinableQueue(self, maxsize: int = 0) -> queues.JoinableQueue[Any]:  # noqa: N802
        """Return a queue that also counts the objects for which ``task_done`` was not called.

        Parameters
        ----------
        maxsize : int
            The largest number of objects that may be in the queue; 0 for any number.

        Returns
        -------
        shmreduce.queues.JoinableQueue
            The caller's. Its ``join`` waits until the count is zero.

        Raises
        ------
        OSError
            If no descriptor is free.

        Examples
        --------
        >>> import shmreduce
        >>> queue = shmreduce.get_context("fork").JoinableQueue()
        >>> queue.put("hello")
        >>> queue.get()
        'hello'
        >>> queue.task_done()
        >>> queue.join()
        >>> queue.close()
        """
        if not channel_support.supported():
            return cast("queues.JoinableQueue[Any]", super().JoinableQueue(maxsize))
        import_late("shmreduce.queues")
        from shmreduce.queues import JoinableQueue

        return JoinableQueue(maxsize, ctx=self.get_context())

    def Pool(  # type: ignore[override]  # noqa: N802
        self,
        processes: int | None = None,
        initializer: Callable[..., object] | None = None,
        initargs: Iterable[Any] = (),
        maxtasksperchild: int | None = None,
        *,
        retries: int = 0,
        shared_allocations: bool = False,
    ) -> pool.Pool:
        """Return a pool of worker processes, which this context starts.

        Parameters
        ----------
        processes : int, optional
            The number of workers; by default the number of processors, from Python
            3.13 on of those that this process may use.
        initializer : callable, optional
            Each worker calls ``initializer(*initargs)`` when it starts.
        initargs : iterable
            Its arguments.
        maxtasksperchild : int, optional
            After this many tasks a worker leaves, and a new one takes its place.
        retries : int
            How often a task is tried again if its worker was killed.
        shared_allocations : bool
            Run tasks in :func:`shmreduce.shared_allocations`, so that large
            arrays that they return are moved instead of copied.

        Returns
        -------
        shmreduce.pool.Pool
            The caller's; a context manager, which terminates the pool.

        Raises
        ------
        ValueError, TypeError
            If an argument is impossible.
        AllocatorUnavailableError
            With ``shared_allocations``, if the compiled allocator is missing.
        PlatformError
            If ``retries`` or ``shared_allocations`` is given on a system on which only the
            pool of multiprocessing works.

        Examples
        --------
        >>> import shmreduce
        >>> with shmreduce.get_context("fork").Pool(2, retries=1) as pool:
        ...     pool.map(abs, [-1, 2, -3])
        [1, 2, 3]
        """
        if not channel_support.supported():
            if retries or shared_allocations:
                raise PlatformError(
                    "the pool of multiprocessing, which is used on this platform, has neither "
                    "retries nor shared_allocations: leave them out, or make the pool on Linux",
                    missing="SOCK_SEQPACKET and locks of open file descriptions",
                )
            return cast(
                "pool.Pool", super().Pool(processes, initializer, initargs, maxtasksperchild)
            )
        import_late("shmreduce.pool")
        from shmreduce.pool import Pool

        return Pool(
            processes,
            initializer,
            initargs,
            maxtasksperchild,
            context=self.get_context(),
            retries=retries,
            shared_allocations=shared_allocations,
        )

    def Manager(self) -> managers.SyncManager:  # noqa: N802
        """Return a manager whose process has been started.

        Returns
        -------
        shmreduce.managers.SyncManager
            The caller's; a context manager, which ends the process.

        Raises
        ------
        OSError, EOFError
            If the process cannot be started, or ends at once.

        Examples
        --------
        >>> import shmreduce
        >>> with shmreduce.get_context("fork").Manager() as manager:
        ...     shelf = manager.list([1, 2])
        ...     shelf.append(3)
        ...     len(shelf)
        3
        """
        if not channel_support.supported():
            return super().Manager()
        import_late("shmreduce.managers")
        from shmreduce.managers import SyncManager

        manager = SyncManager(ctx=self.get_context())
        manager.start()
        return manager
