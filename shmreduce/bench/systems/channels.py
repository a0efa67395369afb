"""Systems that send by queues between processes, and the loops of their workers.

May import ``base``, ``payloads`` and :mod:`shmreduce.fresh_process`.
"""

from __future__ import annotations

from abc import abstractmethod
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any, ClassVar

from shmreduce.bench.payloads import change_arrays, marks, renewed
from shmreduce.bench.systems.base import Ability, Kind, Session, System
from shmreduce.fresh_process import RunFailedError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from multiprocessing.connection import Connection

__all__ = ["ChannelSession", "ChannelSystem", "PoolSession"]

_PATIENCE = 30.0
"""Seconds to wait for a worker to end."""


@dataclass(frozen=True)
class ChannelSystem(System):
    """A system that has queues with ``put`` and ``get``."""

    abilities: ClassVar[frozenset[Ability]] = frozenset(
        {"echo", "read", "stream", "fan_out", "relay", "exchange"}
    )

    queues_have_room: ClassVar[bool] = False
    """Whether queues are made for a maximum size of messages."""

    def prepare(self) -> None:
        """Set up the system at the start of each process, as its users do."""

    def context(self) -> Any:
        """Return the context that starts workers."""
        return get_context("spawn")

    @abstractmethod
    def queue(self, room: int) -> Any:
        """Return a queue for messages with ``room`` bytes of arrays."""

    def message(self, payload: Any, kind: Kind) -> Any:
        """Return the object that is put into a queue for ``payload``."""
        return change_arrays(payload, {"fresh": self.fresh, "shared": self.shared}[kind])

    def fresh(self, array: Any) -> Any:
        """Return the object to send for an array that was not sent before."""
        return array

    def shared(self, array: Any) -> Any:
        """Return the object to send for an array in shared memory."""
        raise NotImplementedError

    def spread(self, array: Any) -> Any:
        """Return the object to put into each of several queues."""
        return self.fresh(array)

    def payload(self, message: Any) -> Any:
        """Return a received message's contents as NumPy arrays."""
        return message

    def release(self, message: Any) -> None:
        """Give a received message's memory back, if dropping the message does not."""

    def send_on(self, queue: Any, box: list[Any]) -> None:
        """Put a received message into another queue, release it, and empty the box."""
        message = box.pop()
        queue.put(message)
        self.release(message)

    def pool(self, workers: int) -> Any:
        """Return a pool with ``map``, for systems with the ability ``collect``."""
        raise NotImplementedError

    def open(self, ability: Ability, workers: int) -> Session:
        """Start the workers that an ability needs."""
        self.prepare()
        if ability == "collect":
            return PoolSession(self, workers)
        return ChannelSession(self, ability, workers)


class ChannelSession(Session):
    """Workers and queues between them.

    Parameters
    ----------
    system : ChannelSystem
        Makes queues and processes.
    ability : str
        What the workers will do.
    workers : int
        The number of workers, for abilities that do not fix it.
    """

    def __init__(self, system: ChannelSystem, ability: Ability, workers: int) -> None:
        self._system = system
        self._ability = ability
        self._workers = {"echo": 1, "read": 1, "stream": 1, "relay": 2}.get(ability, workers)
        self._room = -1
        self._processes: list[Any] = []
        if not system.queues_have_room:
            self._start(0)

    def prepare(self, nbytes: int) -> None:
        """Make new queues if these were made for messages of another size."""
        if self._system.queues_have_room and nbytes != self._room:
            self.close()
            self._start(nbytes)

    def _start(self, room: int) -> None:
        system = self._system
        self._room = room
        self._back = system.queue(room)
        self._inboxes = [system.queue(room) for _ in range(self._workers)]
        last = self._workers - 1
        loops: list[Callable[..., None]]
        if self._ability == "exchange":
            loops, outboxes = [_pass_round] * (last + 1), [*self._inboxes[1:], self._inboxes[0]]
        elif self._ability == "relay":
            loops, outboxes = [_echo] * last + [_tell], [*self._inboxes[1:], self._back]
        else:
            loops = [_LOOPS.get(self._ability, _tell)] * (last + 1)
            outboxes = [self._back] * (last + 1)
        context = system.context()
        # A pipe of plain multiprocessing, to wait for it and for the end of workers together.
        ready, theirs = get_context("spawn").Pipe(duplex=False)
        self._processes = []
        for loop, inbox, outbox in zip(loops, self._inboxes, outboxes, strict=True):
            arguments = (loop, system, inbox, outbox, self._back, theirs)
            process = context.Process(target=_work, args=arguments, daemon=True)
            process.start()
            self._processes.append(process)
        theirs.close()
        for _ in self._processes:
            self._await(ready)
        ready.close()

    def _await(self, ready: Connection) -> None:
        # The pipe alone is not enough: it stays open while any other worker has its end.
        wait([ready, *(process.sentinel for process in self._processes)])
        try:
            if ready.poll():
                ready.recv()
                return
        except EOFError:
            pass  # all workers have ended
        for process in self._processes:
            process.join(1)
        codes = [process.exitcode for process in self._processes]
        raise RunFailedError(
            f"a worker ended before it was ready; exit codes: {codes}",
            process=self._system.name,
            reason="a worker ended",
        )

    def message(self, payload: Any, kind: Kind) -> Any:
        """See :meth:`ChannelSystem.message`."""
        return self._system.message(payload, kind)

    def payload(self, message: Any) -> Any:
        """See :meth:`ChannelSystem.payload`."""
        return self._system.payload(message)

    def release(self, message: Any) -> None:
        """See :meth:`ChannelSystem.release`."""
        self._system.release(message)

    def echo(self, box: list[Any]) -> Any:
        """Put a message into the worker's queue and get it from the other one."""
        self._inboxes[0].put(box.pop())
        return self._back.get()

    def read(self, payload: Any) -> Any:
        """Put an array, and get its sum."""
        self._inboxes[0].put(self._system.fresh(payload))
        return self._back.get()

    def stream(self, payload: Any, count: int) -> Any:
        """Put messages, and get one answer."""
        put, fresh = self._inboxes[0].put, self._system.fresh
        put(count)
        for _ in range(count):
            put(fresh(renewed(payload)))
        return self._back.get()

    def fan_out(self, payload: Any) -> list[Any]:
        """Put one array into every worker's queue."""
        message = self._system.spread(payload)
        for inbox in self._inboxes:
            inbox.put(message)
        answers = [self._back.get() for _ in self._inboxes]
        self._system.release(message)
        return answers

    def relay(self, payload: Any) -> Any:
        """Put an array into the first queue of a chain."""
        self._inboxes[0].put(self._system.fresh(payload))
        return self._back.get()

    def exchange(self, payload: Any, laps: int) -> tuple[int, list[Any]]:
        """Let half as many messages as there are workers go round.

        More could block for ever: if a worker waits for room in the pipe of the next one,
        some worker must be reading.
        """
        workers = len(self._inboxes)
        tokens = workers // 2
        for number, inbox in enumerate(self._inboxes):
            # A worker with an odd number ends the messages that began at the next worker.
            inbox.put((laps * tokens, number % 2 == 1))
        for inbox in self._inboxes[::2]:
            inbox.put(self._system.fresh(payload))
        answers = [self._back.get() for _ in self._inboxes]
        return laps * tokens * workers, [told for told in answers if told is not None]

    def processes(self) -> list[Any]:
        """Return the workers."""
        return self._processes

    def close(self) -> None:
        """Tell the workers to leave."""
        processes, self._processes = self._processes, []
        if not processes:
            return
        for inbox in self._inboxes:
            # The worker may be gone.
            with suppress(BrokenPipeError, ConnectionError):
                inbox.put(None)
        for process in processes:
            process.join(_PATIENCE)


class PoolSession(Session):
    """The pool of a system."""

    def __init__(self, system: ChannelSystem, workers: int) -> None:
        self._system = system
        self._pool = system.pool(workers)

    def collect(self, function: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
        """Call the pool's ``map`` with one item per task."""
        results: list[Any] = self._pool.map(_Prepared(self._system, function), items, chunksize=1)
        return results

    def payload(self, message: Any) -> Any:
        """See :meth:`ChannelSystem.payload`."""
        return self._system.payload(message)

    def close(self) -> None:
        """End the pool."""
        self._pool.close()
        self._pool.join()


@dataclass(frozen=True)
class _Prepared:
    """Calls a function, and returns the result in the form in which the system sends it."""

    system: ChannelSystem
    function: Callable[[Any], Any]

    def __call__(self, item: Any) -> Any:
        # Not kept in a variable: a result without any other reference can be moved.
        return self.system.message(self.function(item), "fresh")


# Workers


def _work(
    loop: Callable[..., None],
    system: ChannelSystem,
    inbox: Any,
    outbox: Any,
    home: Any,
    ready: Connection,
) -> None:
    system.prepare()
    ready.send("ready")
    ready.close()
    loop(system, inbox, outbox, home)


def _echo(system: ChannelSystem, inbox: Any, outbox: Any, _home: Any) -> None:
    while True:
        box = [inbox.get()]
        if box[0] is None:
            break
        system.send_on(outbox, box)


def _swallow(system: ChannelSystem, inbox: Any, outbox: Any, _home: Any) -> None:
    while True:
        count = inbox.get()
        if count is None:
            break
        for _ in range(count - 1):
            message = inbox.get()
            system.release(message)
            del message
        outbox.put(_marks_of(system, [inbox.get()]))


def _sum(system: ChannelSystem, inbox: Any, outbox: Any, _home: Any) -> None:
    while True:
        message = inbox.get()
        if message is None:
            break
        total = system.payload(message).sum().item()
        system.release(message)
        del message
        outbox.put(total)


def _tell(system: ChannelSystem, inbox: Any, outbox: Any, _home: Any) -> None:
    while True:
        box = [inbox.get()]
        if box[0] is None:
            break
        outbox.put(_marks_of(system, box))


def _marks_of(system: ChannelSystem, box: list[Any]) -> list[Any]:
    """Return the marks of the message in a box, and release it."""
    message = box.pop()
    told = marks(system.payload(message))
    system.release(message)
    return told


def _pass_round(system: ChannelSystem, inbox: Any, outbox: Any, home: Any) -> None:
    early = []
    while True:
        order = inbox.get()
        if order is None:
            break
        if not isinstance(order, tuple):
            # A message from a neighbour that got its order before this worker.
            early.append(order)
            continue
        count, ends_here = order
        told = None
        for number in range(count):
            box = [early.pop(0) if early else inbox.get()]
            if not ends_here or number < count - 1:
                system.send_on(outbox, box)
            else:
                told = _marks_of(system, box)
        home.put(told)


_LOOPS: dict[Ability, Callable[..., None]] = {"echo": _echo, "read": _sum, "stream": _swallow}
"""What a worker does for an ability, if it does not tell the marks of what it gets."""
