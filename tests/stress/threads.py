"""Runs the stress of threads: ``python -m tests.stress.threads --seed 1 --seconds 10``.

The threads of one process receive from producers that soon end or are killed, have arrays
sent back by echoes and made by a pool, pass them from one to another and fork, while other
threads close and give back whatever is not in use. The last reference goes in any of them,
and in the garbage collector. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import faulthandler
import gc
import multiprocessing
import os
import random
import signal
import sys
import threading
import time
import traceback
import warnings
from dataclasses import dataclass, field
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any

import shmreduce
from shmreduce.errors import (
    AlreadyLoadedError,
    AttachError,
    ProducerDied,
    StaleHandleError,
)
from shmreduce.memory import runtime
from shmreduce.memory.inspection import process_state
from tests.stress.actor import end_by_alarm
from tests.stress.links import KINDS, Link, make_link
from tests.stress.partners import (
    END,
    MISMATCH_EXIT,
    Item,
    echo,
    join_in,
    made,
    make,
    produce,
    shared,
)
from tests.stress.pattern import complaint, fill
from tests.stress.reports import leave

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["main"]

_THREADS = 6
_PRODUCERS = 4
_ECHOES = ("own queue", "queue", "own pipe")
_LOCAL = ("own queue", "own pipe", "simple queue")
_MOST_HELD = 8
_SWITCH_SECONDS = 1e-6
_PATIENCE = 20.0


@dataclass
class Source:
    """Where messages come from."""

    link: Link
    process: Any = None
    """Who sends them; None for this process itself."""
    is_mortal: bool = False
    """Whether that may be killed."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    ended: bool = False


class Stress:
    """One run.

    Parameters
    ----------
    seed : int
        Of everything that is chosen; not of the instants at which threads take turns.
    strategy : str
        Sharing strategy.
    seconds : float
        For how long it goes on.
    """

    def __init__(self, seed: int, strategy: str, seconds: float) -> None:
        self.bad: list[str] = []
        self.counts: collections.Counter[str] = collections.Counter()
        self.sources: list[Source] = []
        self.targets: list[tuple[Link, threading.Lock]] = []
        self.exchange: collections.deque[Item] = collections.deque()
        self.is_over = threading.Event()
        # Of workers that stay: to start another the pool's thread would ask for exit codes, and
        # where two ask a fork server for one at the same time, multiprocessing loses it.
        self.pool: Any = shmreduce.get_context("forkserver").Pool(2)
        self._seed = seed
        self._strategy = strategy
        self._seconds = seconds
        self._context: Any = multiprocessing.get_context("forkserver")
        self._started = 0

    def complain(self, what: str) -> None:
        """Take note of what is wrong, and bring the run to an end."""
        self.bad.append(what)
        self.is_over.set()

    def run(self) -> None:
        """Play, in this thread the part of who starts and buries the producers."""
        self._make_links()
        threads = [
            threading.Thread(target=self._work, args=(number,)) for number in range(_THREADS)
        ]
        for thread in threads:
            thread.start()
        end = time.monotonic() + self._seconds
        while self._look_after_producers(most=_PRODUCERS if time.monotonic() < end else 0):
            # Nothing else to do, and others have the processor.
            time.sleep(0.005)
            if time.monotonic() > end + _PATIENCE:
                self.complain("producers do not end, or what they have sent is not received")
        self.is_over.set()
        for thread in threads:
            thread.join(_PATIENCE)
        if any(thread.is_alive() for thread in threads):
            self.complain("threads do not end")
            faulthandler.dump_traceback()
        if not self.bad:
            self._finish()

    def _make_links(self) -> None:
        for kind in _ECHOES:
            there, back = (make_link(kind, self._context) for _ in range(2))
            seconds = self._seconds + 4 * _PATIENCE
            process = self._start(echo, there, back, self._strategy, seconds)
            self.sources.append(Source(back, process))
            self.targets.append((there, threading.Lock()))
        for kind in _LOCAL:
            link = make_link(kind, self._context)
            self.sources.append(Source(link))
            self.targets.append((link, threading.Lock()))

    def _start(self, function: Callable[..., None], *arguments: Any) -> Any:
        process = self._context.Process(target=function, args=arguments, daemon=True)
        process.start()
        return process

    def _look_after_producers(self, most: int) -> bool:
        """Start some up to a number; return whether there are any, and nothing is wrong."""
        producers = [each for each in self.sources if each.is_mortal]
        for source in producers:
            code = source.process.exitcode
            killed = code == -signal.SIGKILL
            if code not in (None, 0, -signal.SIGKILL):
                self.complain(f"a producer ended with {code}")
            if code is not None and (source.ended or (killed and not source.link.is_ready())):
                with source.lock:
                    source.ended = True
                self.sources.remove(source)
                source.link.close()
                self.counts["killed" if killed else "ended"] += 1
        if len(producers) < most:
            self._started += 1
            link = make_link(list(KINDS)[self._started % len(KINDS)], self._context)
            seed = f"{self._seed}/{self._started}"
            process = self._start(produce, link, seed, self._strategy)
            self.sources.append(Source(link, process, is_mortal=True))
        return not self.bad and bool(most or producers)

    def _work(self, number: int) -> None:
        try:
            Worker(self, random.Random(f"{self._seed}/thread {number}")).play()
        except BaseException:
            self.complain(traceback.format_exc())

    def _finish(self) -> None:
        """Receive what is left, and see that nothing is held then."""
        self.pool.terminate()
        self.pool.join()
        for link, _ in self.targets:
            link.send(END)
        worker = Worker(self, random.Random(self._seed))
        end = time.monotonic() + _PATIENCE
        while not all(source.ended for source in self.sources):
            for source in self.sources:
                worker.receive(source)
            if time.monotonic() > end:
                self.complain("an echo is silent")
                return
        for source in self.sources:
            if source.process is not None:
                source.process.join(_PATIENCE)
                if source.process.exitcode != 0:
                    self.complain(f"an echo ended with {source.process.exitcode}")
            source.link.close()
        for link, _ in self.targets[: len(_ECHOES)]:
            link.close()
        worker.held.clear()
        self.exchange.clear()
        self._look_at_what_is_left()

    def _look_at_what_is_left(self) -> None:
        end = time.monotonic() + _PATIENCE
        while True:
            gc.collect()
            attachments = runtime.current().attachments
            attachments.close_idle(0)
            state = process_state()
            others = [each for each in attachments.segments() if not each.owner]
            if not (state.arrays or state.out or state.waiting or others):
                return
            if time.monotonic() > end:
                self.complain(f"left: {state}, {others}")
                return
            time.sleep(0.01)


class Trouble:
    """Stands in a message behind its array, which has arrived when loading fails here.

    Parameters
    ----------
    tries : int
        How many it takes; 0 if the message cannot be loaded at all.
    """

    def __init__(self, tries: int) -> None:
        self.tries = tries

    def __reduce__(self) -> Any:
        return _fail, (self.tries,)


class NeverMindError(Exception):
    """A message cannot be loaded at all."""


_tried = threading.local()


def _fail(tries: int) -> None:
    if not tries:
        raise NeverMindError
    _tried.before = getattr(_tried, "before", 0) + 1
    if _tried.before % tries:
        raise AttachError("not now", segment=None, locator=None, reason="test", errno=0)


class Cycle:
    """Has an array until the garbage collector comes."""

    def __init__(self, array: Any) -> None:
        self.array = array
        self.itself = self


class Worker:
    """What one thread does.

    Parameters
    ----------
    stress : Stress
        What all of them share.
    chance : random.Random
        Of its own.
    """

    def __init__(self, stress: Stress, chance: random.Random) -> None:
        self.held: list[Item] = []
        self._stress = stress
        self._random = chance
        self._children: list[int] = []

    def play(self) -> None:
        """Act until the run is over, then drop everything."""
        actions: list[tuple[Callable[[], object], int]] = [
            (lambda: self.receive(self._random.choice(list(self._stress.sources))), 40),
            (lambda: self._send(make(self._random)), 10),
            (self._send_shared, 6),
            (self._send_on, 14),
            (lambda: self._send(self._take_out()), 8),
            (self._take_out, 10),
            (self._drop_in_cycle, 5),
            (self._rewrite, 5),
            (self._swap, 12),
            (self._fail_to_load, 6),
            (self._have_made, 6),
            (self._tidy, 4),
            (self._fork, 1),
        ]
        functions, weights = zip(*actions, strict=True)
        while not self._stress.is_over.is_set():
            self._random.choices(functions, weights)[0]()
            for held in self._random.sample(self.held, min(1, len(self.held))):
                self._check(held, "while held")
            self._bury(os.WNOHANG)
        for held in self.held:
            self._check(held, "at the end")
        self.held.clear()
        self._bury(0)

    def receive(self, source: Source) -> None:
        """Receive a message, if one is there and nobody else does."""
        if not source.lock.acquire(blocking=False):
            return
        try:
            if source.ended or not source.link.is_ready():
                return
            message = source.link.receive()
            source.ended = message == END
        except ProducerDied:
            self._stress.counts["lost"] += 1
            if not source.is_mortal:
                raise
            return
        finally:
            source.lock.release()
        for item in () if message in (None, END) else message:
            self._stress.counts["received"] += 1
            self._take(item, "on arrival")

    def _check(self, item: Item, when: str) -> None:
        self._stress.counts["checks"] += 1
        wrong = complaint(item.array, item.seed)
        if wrong is not None:
            self._stress.complain(f"mismatch {when}, own={item.own}: {wrong}")

    def _take(self, item: Item, whence: str) -> None:
        """Check an array, and keep it in another's place if there are many."""
        self._check(item, whence)
        self.held.append(item)
        if len(self.held) > _MOST_HELD:
            self._take_out()

    def _take_out(self) -> Item | None:
        return self.held.pop(self._random.randrange(len(self.held))) if self.held else None

    # Sending

    def _send(self, item: Item | None) -> None:
        """Send an array to an echo, or to another thread, if there is room."""
        link, lock = self._random.choice(self._stress.targets)
        with lock:
            if item is not None and link.has_room():
                message = [[item]]
                del item
                link.pass_on(message)
                self._stress.counts["sent"] += 1

    def _send_shared(self) -> None:
        item = shared(make(self._random), self._random)
        self._send(item)
        self._take(item, "when it was sent")

    def _send_on(self) -> None:
        """Send an array on and keep it; what is written to it from now on may be too early."""
        item = self._take_out()
        if item is not None:
            self._send(item)
            self._take(item._replace(own=False), "when it was sent on")

    # What becomes of arrays

    def _drop_in_cycle(self) -> None:
        item = self._take_out()
        if item is not None:
            Cycle(item.array)

    def _rewrite(self) -> None:
        item = self._take_out()
        if item is not None and item.own and item.array.flags.writeable:
            item = item._replace(seed=self._random.getrandbits(64))
            fill(item.array, item.seed)
            self._take(item, "when it was written")

    def _swap(self) -> None:
        """Give an array to the other threads, and have one of theirs."""
        item = self._take_out()
        if item is not None:
            self._stress.exchange.append(item)
        if item is None or len(self._stress.exchange) > _MOST_HELD:
            with contextlib.suppress(IndexError):
                self._take(self._stress.exchange.popleft(), "from another thread")

    def _fail_to_load(self) -> None:
        """Load a message that something is wrong with behind its array, as often as it takes."""
        item = self._take_out()
        if item is None:
            return
        item = item._replace(own=item.own and not shmreduce.is_shared(item.array))
        trouble = Trouble(self._random.randrange(4))
        data: Any = bytes(ForkingPickler.dumps((item, trouble)))
        del item
        while data is not None:
            try:
                item, _ = ForkingPickler.loads(data)
            except AttachError as error:
                self._stress.counts["failed"] += 1
                data = error.message_bytes
            except (NeverMindError, AlreadyLoadedError, StaleHandleError):
                # What a child has that was forked meanwhile is not loaded again, nor is it
                # there when the child has gone.
                return
            else:
                self._take(item, "after a failure")
                return

    def _have_made(self) -> None:
        seeds = [self._random.getrandbits(64) for _ in range(2)]
        for item in self._stress.pool.apply(made, (seeds,)):
            self._take(item, "from the pool")

    # What else goes on

    def _tidy(self) -> None:
        state = runtime.current()
        choices: list[Any] = ["close", "mailbox", "collect", "look", *state.heaps]
        chosen = self._random.choice(choices)
        if chosen == "close":
            state.attachments.close_idle(0)
        elif chosen == "mailbox":
            state.attachments.tidy_mailbox(at_once=True)
        elif chosen == "collect":
            gc.collect()
        elif chosen == "look":
            process_state()
        else:
            with chosen.exclusive():
                chosen.reap()
                chosen.cool(0)

    def _fork(self) -> None:
        """Have a child look at what this thread has, while it goes on."""
        if self._children:
            return
        live = runtime.current().live
        pid = os.fork()
        if pid:
            self._children.append(pid)
            self._stress.counts["forks"] += 1
            return
        code = 0
        try:
            if not live.exposed:
                wrong = [complaint(item.array, item.seed) for item in self.held if item.own]
                time.sleep(self._random.uniform(0.0, 0.01))
                wrong += [complaint(item.array, item.seed) for item in self.held if item.own]
                code = MISMATCH_EXIT if any(wrong) else 0
        finally:
            os._exit(code)

    def _bury(self, flags: int) -> None:
        for pid in self._children[:]:
            ended, status = os.waitpid(pid, flags)
            if ended:
                self._children.remove(pid)
                if status:
                    code = os.waitstatus_to_exitcode(status)
                    self._stress.complain(f"a forked child ended with {code}")


def _hear_of_errors(stress: Stress) -> None:
    """Have errors in threads and in destructors count, which nobody else would see."""

    def complain(told: Any) -> None:
        stress.complain("".join(traceback.format_exception(told.exc_value)))

    sys.unraisablehook = complain
    threading.excepthook = complain


def main() -> int:
    """Run, print the report, and say by the exit code whether all was well."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--strategy", default="file_descriptor")
    options = parser.parse_args()
    end_by_alarm(options.seconds + 4 * _PATIENCE)
    # Of forks beside threads, which are what this is about.
    warnings.simplefilter("ignore", DeprecationWarning)
    warnings.simplefilter("ignore", shmreduce.ShmreduceWarning)
    multiprocessing.set_forkserver_preload(["tests.stress.partners"])
    join_in(options.strategy, idle_seconds=0.05, idle_keep=0)
    stress = Stress(options.seed, options.strategy, options.seconds)
    _hear_of_errors(stress)
    sys.setswitchinterval(_SWITCH_SECONDS)
    try:
        stress.run()
    except BaseException:
        stress.complain(traceback.format_exc())
    report = {"seed": options.seed, "bad": stress.bad[:20], "counts": dict(stress.counts)}
    return leave(report)


if __name__ == "__main__":
    sys.exit(main())
