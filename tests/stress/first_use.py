"""One process of the stress of first uses; see ``tests.stress.first_uses``.

Its seed replays what every thread does; not the instants at which threads take turns.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import gc
import logging
import multiprocessing.connection
import multiprocessing.pool
import multiprocessing.popen_fork
import multiprocessing.popen_spawn_posix
import multiprocessing.queues
import multiprocessing.resource_tracker
import os
import pickle
import random
import signal
import sys
import threading
import traceback
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

import shmreduce
from tests.stress.actor import end_by_alarm
from tests.stress.pattern import complaint, fill

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["SECONDS", "main"]

# The standard library imports these late, beside forks and without a guard. Its logging prints
# an error in the parent where a fork happens while it is imported.
_IMPORTED_EARLY = (
    logging,
    multiprocessing.connection,
    multiprocessing.pool,
    multiprocessing.popen_fork,
    multiprocessing.popen_spawn_posix,
    multiprocessing.queues,
    multiprocessing.resource_tracker,
)

SECONDS = 40
"""For how long the process and its children live at most."""
_WORDS = (4, 600, 9000, 33_000, 140_000)
_MODES: tuple[Any, ...] = ("rw", "ro", "cow")
_MOST_GENERATIONS = 2
_FAILED = 34


class Held(NamedTuple):
    """An array, and what it must look like."""

    array: Any
    seed: int
    whence: str


class User:
    """What one thread does.

    Parameters
    ----------
    seed : str
        Of everything that is chosen.
    generation : int
        How many forks away the first process is.
    others : list
        Arrays that other threads of the process look at, too.
    """

    def __init__(self, seed: str, generation: int, others: list[Held]) -> None:
        self._seed = seed
        self._random = random.Random(seed)
        self._generation = generation
        self._others = others
        self._held: list[Held] = []
        self._children: list[int] = []

    def play(self) -> None:
        """Do some things, then look at every array and every child again."""
        actions: list[tuple[Callable[[], None], int]] = [
            (self._send_through_pipe, 3),
            (self._send_through_queue, 3),
            (self._send_through_stock_pipe, 3),
            (self._pickle, 3),
            (self._send_many, 2),
            (self._send_parts, 2),
            (self._share, 3),
            (self._make_born_shared, 2),
            (self._exchange_with_child, 3 if self._generation < _MOST_GENERATIONS else 0),
            (self._fork, 3 if self._generation < _MOST_GENERATIONS else 0),
            (self._start_process, 1 if self._generation < _MOST_GENERATIONS else 0),
            (self._use_pool, 1 if self._generation < 1 else 0),
            (self._swap, 2),
            (self._drop, 2),
        ]
        functions, weights = zip(*actions, strict=True)
        for _ in range(self._random.randrange(2, 7)):
            self._random.choices(functions, weights)[0]()
            self.look()
        for pid in self._children:
            _, status = os.waitpid(pid, 0)
            if status:
                raise RuntimeError(
                    f"a forked child ended with {os.waitstatus_to_exitcode(status)}"
                )
        self.look()
        self._others.extend(self._held)
        self._held.clear()

    def look(self) -> None:
        """Raise an error if an array has other bytes than it must have."""
        for held in (*self._held, *self._others):
            wrong = complaint(held.array, held.seed)
            if wrong is not None:
                raise RuntimeError(f"mismatch, {held.whence}: {wrong}")

    def _make(self) -> tuple[Any, int]:
        seed = self._random.getrandbits(64)
        array = np.empty(self._random.choice(_WORDS), np.uint64)
        fill(array, seed)
        return array, seed

    def _hold(self, array: Any, seed: int, whence: str) -> None:
        self._held.append(Held(array, seed, whence))

    # Sending

    def _send_through_pipe(self) -> None:
        here, there = shmreduce.Pipe(duplex=self._random.random() < 0.5)
        self._there_and_back("pipe", there.send, here.recv)

    def _send_through_queue(self) -> None:
        name = self._random.choice(("SimpleQueue", "Queue", "JoinableQueue"))
        queue = getattr(shmreduce, name)()
        self._there_and_back(name, queue.put, queue.get)

    def _send_through_stock_pipe(self) -> None:
        # Not a queue: to make its locks, the standard library takes one that another thread
        # may hold when this process is forked, and that nobody releases in the child.
        here, there = multiprocessing.Pipe(duplex=False)
        self._there_and_back("stock pipe", there.send, here.recv)

    def _there_and_back(
        self, whence: str, send: Callable[[Any], None], receive: Callable[[], Any]
    ) -> None:
        array, seed = self._message_array()
        # More than a pipe has room for needs somebody who reads meanwhile.
        sender = threading.Thread(target=self._send, args=(send, array))
        sender.start()
        received = receive()
        sender.join()
        self._hold(received["array"], seed, whence)

    def _message_array(self) -> tuple[Any, int]:
        array, seed = self._make()
        if self._random.random() < 0.3:
            array = shmreduce.share(array, mode=self._random.choice(_MODES))
        return array, seed

    def _send(self, send: Callable[[Any], None], array: Any) -> None:
        send({"array": array, "name": self._seed})

    def _pickle(self) -> None:
        array, seed = self._message_array()
        data = bytes(ForkingPickler.dumps([array]))
        (loaded,) = ForkingPickler.loads(data)
        self._hold(loaded, seed, "pickle")

    def _send_many(self) -> None:
        """Send small arrays in one list, over the channel of both libraries."""
        seeds = [self._random.getrandbits(64) for _ in range(30)]
        arrays = [np.empty(self._random.choice(_WORDS[:2]), np.uint64) for _ in seeds]
        for array, seed in zip(arrays, seeds, strict=True):
            fill(array, seed)
        library: Any = self._random.choice((shmreduce, multiprocessing))
        here, there = library.Pipe(duplex=False)
        sender = threading.Thread(target=there.send, args=(arrays,))
        sender.start()
        received = here.recv()
        sender.join()
        for array, seed in zip(received, seeds, strict=True):
            self._hold(array, seed, f"one of many, {library.__name__}")

    def _send_parts(self) -> None:
        """Send a memoryview, an object that has its buffer apart, and an array of fields."""
        array, seed = self._make()
        record = np.zeros(len(array), [("word", np.uint64), ("rest", "m8[s]")])
        record["word"] = array
        message = (memoryview(array), pickle.PickleBuffer(array), record, collections.Counter("a"))
        here, there = shmreduce.Pipe(duplex=False)
        sender = threading.Thread(target=there.send, args=(message,))
        sender.start()
        view, buffer, record, _ = here.recv()
        sender.join()
        self._hold(np.frombuffer(view, np.uint64), seed, "memoryview")
        self._hold(np.frombuffer(buffer, np.uint64), seed, "buffer")
        self._hold(record["word"], seed, "record")

    def _share(self) -> None:
        array, seed = self._make()
        shared: Any = shmreduce.share(array, mode=self._random.choice(_MODES))
        self._hold(shared, seed, "share")
        empty: Any = shmreduce.empty(len(array), np.uint64)
        fill(empty, seed)
        self._hold(empty, seed, "empty")

    def _make_born_shared(self) -> None:
        with contextlib.suppress(shmreduce.AllocatorUnavailableError):
            with shmreduce.shared_allocations():
                array, seed = self._make()
            self._hold(array, seed, "born shared")

    # Processes

    def _fork(self) -> None:
        number = len(self._children)
        pid = os.fork()
        if pid:
            self._children.append(pid)
            return
        code = _FAILED
        try:
            code = self._be_child(f"{self._seed}/{number}")
        finally:
            os._exit(code)

    def _be_child(self, seed: str) -> int:
        """See the arrays of the parent, and be a first process again."""
        end_by_alarm(SECONDS)
        self.look()
        code = play(seed, self._generation + 1, threads=self._random.randrange(1, 3))
        self.look()
        return code

    def _exchange_with_child(self) -> None:
        """Send an array to a forked child, which sends one of its own, and may be killed."""
        library: Any = self._random.choice((shmreduce, multiprocessing))
        there, back = library.Pipe(duplex=False), library.Pipe(duplex=False)
        array, seed = self._message_array()
        own, own_seed = self._message_array()
        is_killed = self._random.random() < 0.3
        pid = os.fork()
        if not pid:
            code = _FAILED
            try:
                end_by_alarm(SECONDS)
                (received,) = there[0].recv()
                wrong = complaint(received, seed)
                back[1].send([own])
                if library is multiprocessing:
                    # There the memory goes with its sender, unless the message is read before.
                    there[0].recv()
                if is_killed and wrong is None:
                    os.kill(os.getpid(), signal.SIGKILL)
                code = _FAILED if wrong is not None else 0
            finally:
                os._exit(code)
        there[1].send([array])
        (received,) = back[0].recv()
        self._hold(received, own_seed, f"from a child, {library.__name__}")
        there[1].send(None)
        self.look()
        _, status = os.waitpid(pid, 0)
        if os.waitstatus_to_exitcode(status) != (-signal.SIGKILL if is_killed else 0):
            raise RuntimeError(f"a child that answers ended with {status}")

    def _start_process(self) -> None:
        array, seed = self._message_array()
        # A process is spawned behind the same lock of the standard library.
        methods = ("fork", "fork", "fork", "spawn") if not self._generation else ("fork",)
        method = self._random.choice(methods)
        context: Any = shmreduce.get_context(method)
        process = context.Process(target=_child, args=(array, seed, self._seed, self._generation))
        process.start()
        process.join()
        if process.exitcode:
            raise RuntimeError(f"a process ({method}) ended with {process.exitcode}")

    def _use_pool(self) -> None:
        array, seed = self._message_array()
        context = shmreduce.get_context("fork")
        if self._random.random() < 0.5:
            with context.Pool(2, shared_allocations=self._random.random() < 0.3) as pool:
                results = pool.map(_same, [array, array])
        else:
            with shmreduce.ProcessPoolExecutor(2, mp_context=context) as executor:
                results = list(executor.map(_same, [array, array]))
        for received in results:
            self._hold(received, seed, "pool")

    # What else goes on

    def _swap(self) -> None:
        self._others.extend(self._held[:1])
        del self._held[:1]

    def _drop(self) -> None:
        del self._held[:1], self._others[:1]
        if self._random.random() < 0.3:
            gc.collect()


def _same(array: Any) -> Any:
    return array


def _child(array: Any, seed: int, name: str, generation: int) -> None:
    end_by_alarm(SECONDS)
    wrong = complaint(array, seed)
    if wrong is not None:
        raise RuntimeError(f"mismatch in a process: {wrong}")
    sys.exit(play(f"{name}/process", generation + 1, threads=1))


def play(seed: str, generation: int, threads: int) -> int:
    """Let some threads begin at the same time; return the exit code."""
    begin = threading.Barrier(threads)
    failed: list[str] = []
    others: list[Held] = []

    def work(number: int) -> None:
        try:
            begin.wait(SECONDS)
            User(f"{seed}.{number}", generation, others).play()
        except BaseException:
            failed.append(traceback.format_exc())
            os.write(2, f"{os.getpid()}, seed {seed}.{number}: {failed[-1]}".encode())

    workers = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return _FAILED if failed else 0


def main() -> int:
    """Play the first process."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--strategy", default="file_descriptor")
    options = parser.parse_args()
    end_by_alarm(SECONDS)
    chance = random.Random(options.seed)
    if chance.random() < 0.5:
        sys.setswitchinterval(chance.choice((1e-6, 1e-4)))
    shmreduce.set_sharing_strategy(options.strategy)
    shmreduce.install()
    return play(str(options.seed), 0, threads=chance.randrange(2, 6))


if __name__ == "__main__":
    sys.exit(main())
