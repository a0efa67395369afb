"""One process of a fault run: the stress's actor, which counts every message and meets faults."""

from __future__ import annotations

import contextlib
import errno
import faulthandler
import gc
import os
import queue
import threading
import time
import traceback
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import TYPE_CHECKING, Any

import shmreduce
from shmreduce.memory import quick_slots, runtime
from shmreduce.memory.heap import HeapBusyError
from shmreduce.memory.inspection import process_state
from tests.faults import breaking, points
from tests.faults.injection import (
    EXPECTED,
    Failures,
    jump_clock,
    no_descriptors,
    stand_in_the_rain,
)
from tests.faults.systems import System, find_system
from tests.faults.tally import (
    CORRUPTED,
    INTACT,
    KILLED,
    LEFT,
    MESSAGES,
    PLAYING,
    REFUSED,
    SENT,
    TRYING,
    Tally,
)
from tests.stress.actor import Actor, Held, Part
from tests.stress.links import Link
from tests.stress.pattern import complaint, fill

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.faults.plan import Plan

__all__ = ["CountedLink", "FaultActor", "FaultPart", "perform", "play_part", "prepare"]

DRAIN_SECONDS = 20.0
_PAUSE = 0.001
_CHILD_SECONDS = 0.08
_STARVED_SECONDS = 0.03


@dataclass
class FaultPart(Part):
    """A part, and what is to happen to its actor."""

    plan: Plan = None  # type: ignore[assignment]
    folder: str = ""
    common: Any = None
    """A queue that everybody of the run writes and reads."""
    common_row: int = 0
    """The first of its rows; one for each actor."""
    counted: dict[int, CountedLink] = field(default_factory=dict)


class CountedLink(Link):
    """A link whose messages are counted in the tally.

    Parameters
    ----------
    link : Link
    row : int
        Its row in the tally.
    """

    def __init__(self, link: Link, row: int, kind: str, sender: int, receiver: int) -> None:
        self.link = link
        self.row = row
        self.kind = kind
        self.sender = sender
        self.receiver = receiver
        self.pickles_at_once = link.pickles_at_once
        self.tally: Tally = None  # type: ignore[assignment]
        self._count = 0

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "tally": None}

    def has_room(self) -> bool:
        return self._count < MESSAGES and self.link.has_room()

    def send(self, message: Any) -> None:
        if message[0] != "arrays":
            self.link.send(message)
            return
        with self._counted() as number:
            self.link.send((*message, self.row, number))

    def pass_on(self, held: list[Any]) -> None:
        with self._counted() as number:
            held.append((*held.pop(), self.row, number))
            self.link.pass_on(held)

    @contextmanager
    def _counted(self) -> Iterator[int]:
        """Yield the number of a message, and take note of what becomes of it."""
        number = self._count
        self._count += 1
        sent = self.tally.sent[self.row]
        # A feeder thread may fail to send it before send() is back.
        sent[number] = TRYING if self.pickles_at_once else SENT
        try:
            yield number
        except BaseException:
            sent[number] = REFUSED
            raise
        if self.pickles_at_once:
            sent[number] = SENT

    def watch_feeder(self, is_hit: Callable[[], bool]) -> None:
        """Take note of what a queue's feeder thread cannot send, instead of printing it."""
        channel: Any = getattr(self.link, "_queue", None)
        report = getattr(channel, "_on_queue_feeder_error", None)
        if report is None:
            return

        def take_note(error: BaseException, what: Any) -> None:
            if not is_hit() or not _is_expected(error):
                report(error, what)
            elif isinstance(what, tuple) and what[0] == "arrays":
                self.tally.sent[self.row, what[-1]] = REFUSED

        channel._on_queue_feeder_error = take_note

    def is_ready(self) -> bool:
        return self.link.is_ready()

    def receive(self) -> Any:
        return self.link.receive()

    def close(self) -> None:
        self.link.close()


class FaultActor(Actor):
    """Plays one part, faults included.

    Parameters
    ----------
    part : FaultPart
    tally : Tally
    report : int
        Descriptor that lines of JSON are written to.
    """

    part: FaultPart

    def __init__(self, part: FaultPart, tally: Tally, report: int) -> None:
        super().__init__(part, None, report)
        self.tally = tally
        self.system: System = find_system(part.plan.system, part.plan.strategy)
        self.patience = DRAIN_SECONDS
        self.child_seconds = _CHILD_SECONDS
        self.postponed: list[bytes] = []
        """Messages that could not be loaded for a reason that may pass."""
        self.failures: Failures | None = None
        self.is_hit = False
        """Whether errors are to be expected here."""
        self.is_over = False
        self._common_count = 0
        for link in (*part.outgoing.values(), *part.incoming.values()):
            link.tally = tally  # type: ignore[attr-defined]
        for link in part.outgoing.values():
            link.watch_feeder(lambda: self.is_hit)  # type: ignore[attr-defined]

    # What it does

    def actions(self) -> list[tuple[Callable[[], None], int]]:
        if self.part.plan.system != "shmreduce":
            return [
                (self.send_by_value, 26),
                (self.forward_as_it_is, 12),
                (self.receive_some, 34),
                (self.drop, 10),
                (self.check_one, 8),
                (self.collect, 2),
            ]
        common: list[tuple[Callable[[], None], int]] = []
        if self.part.common is not None:
            common = [(self.put, 10), (self.get, 14)]
        # A broadcast is pickled past the count.
        known = [each for each in super().actions() if each[0] != self.broadcast]
        return [*known, *common, (self.collect, 2), (self.shrink, 2)]

    def act(self, action: Callable[[], None]) -> None:
        try:
            action()
        except (OSError, shmreduce.ShmreduceError) as error:
            if not self.is_hit or not _is_expected(error):
                raise
            self.counts["refused"] += 1

    def rest(self) -> None:
        time.sleep(_PAUSE)

    def hear(self) -> None:
        for peer in set(self.part.outgoing) | set(self.part.incoming):
            status = self.tally.status[peer]
            if status == KILLED:
                self.learn(peer, killed=True)
            elif status > PLAYING:
                self.learn(peer, killed=False)

    def send(self, peer: int, helds: list[Held], *, shared: bool = False) -> None:
        if self.part.plan.system == "shmreduce":
            super().send(peer, helds, shared=shared)
            return
        items = [(self.system.outgoing(held.array), held.seed, "value") for held in helds]
        self.part.outgoing[peer].send(("arrays", items))
        self.sent[peer] += 1
        for held in helds:
            held.own = False

    def forward_as_it_is(self) -> None:
        """Send on what was received, where arrays are shared without asking."""
        peer = self.find_room()
        if peer is not None and self.held:
            self.send(peer, [self.random.choice(self.held)])

    def receive(self, peer: int) -> None:
        link = self.part.incoming[peer]
        if peer in self.ended:
            return
        try:
            message = link.receive() if link.is_ready() else None
        except self.system.named as error:
            self.note(error, link.row)  # type: ignore[attr-defined]
            return
        if message is None:
            return
        if message[0] == "end":
            self.ended.add(peer)
            return
        self.accept(message)

    def accept(self, message: Any) -> None:
        """Check and take what a message brought."""
        _, items, row, number = message
        before = self.counts["wrong"]
        self.take([(self.system.incoming(array), seed, kind) for array, seed, kind in items])
        got = self.tally.got[row]
        if got[number]:
            self.tell("twice", row=row, number=number)
        got[number] = CORRUPTED if self.counts["wrong"] > before else INTACT

    def note(self, error: BaseException, row: int) -> None:
        """Take note of an error that stands for a message."""
        if isinstance(error, shmreduce.ShmreduceError) and error.message_bytes is not None:
            self.postponed.append(error.message_bytes)
            self.counts["postponed"] += 1
            return
        self.tally.named[row] += 1
        self.counts["named"] += 1
        # Not known to be dead, if another process has its pid.
        reused = self.part.plan.reuse_pids and isinstance(error, shmreduce.SegmentGoneError)
        dead = reused or isinstance(error, shmreduce.ProducerDied)
        if self.part.plan.system == "shmreduce" and not (
            dead or (self.is_hit and _is_expected(error))
        ):
            self.tell("error", error=_describe(error), row=row)

    def load_postponed(self) -> None:
        """Load what could not be loaded when there was no room."""
        waiting, self.postponed = self.postponed, []
        for data in waiting:
            try:
                message = ForkingPickler.loads(data)
            except shmreduce.ProducerDied:
                self.counts["named later"] += 1
            except shmreduce.AttachError as error:
                # Not known to be dead, if another process has its pid.
                if not self.part.plan.reuse_pids or error.errno != errno.ENOENT:
                    self.tell("error", error=f"loading again: {_describe(error)}")
            except Exception as error:
                self.tell("error", error=f"loading again: {_describe(error)}")
            else:
                if message[0] == "arrays":
                    self.accept(message)

    def check(self, held: Held, when: str) -> None:
        before = held.seed
        super().check(held, when)
        if held.seed != before:
            self.counts["wrong"] += 1

    def put(self) -> None:
        """Put an array into the queue that everybody reads."""
        if self._common_count >= MESSAGES:
            return
        number = self._common_count
        self._common_count += 1
        row = self.part.common_row + self.part.index
        held = self.make()
        array, kind = held.array, "value"
        if self.random.random() < 0.3:
            array, kind = shmreduce.share(array), "rw"
        self.tally.sent[row, number] = TRYING
        try:
            self.part.common.put(("arrays", [(array, held.seed, kind)], row, number))
        except BaseException:
            self.tally.sent[row, number] = REFUSED
            raise
        self.tally.sent[row, number] = SENT

    def get(self) -> None:
        """Take something out of that queue, if there is anything."""
        self.take_out(0.0)

    def take_out(self, seconds: float) -> bool:
        """Wait for something in that queue; return whether there was anything."""
        try:
            message = self.part.common.get(timeout=seconds)
        except queue.Empty:
            return False
        except self.system.named as error:
            self.note(error, self.part.common_row + self.part.index)
            return True
        self.accept(message)
        return True

    def collect(self) -> None:
        """Run the garbage collector over a cycle that holds an array."""
        cycle: list[Any] = [self.make()]
        cycle.append(cycle)
        del cycle
        gc.collect()

    def shrink(self) -> None:
        """Allocate a lot, drop it, and give it back to the system."""
        block = shmreduce.zeros(self.random.choice((1, 4, 9)) << 20, "u1")
        block[:: 1 << 16] = 1
        del block
        for heap in runtime.current().heaps:
            with contextlib.suppress(HeapBusyError), heap.exclusive(wait=False):
                heap.cool(0)

    def fork(self) -> None:
        if self.part.index == 0 and self.failures is not None:
            # What is alive at a fork that cannot be noted is never used again,
            # and this process is looked at for leaks.
            return
        try:
            super().fork()
        except BlockingIOError:
            self.counts["no processes"] += 1

    # Faults and the end

    def each_turn(self) -> None:
        """Be struck by what is planned for this actor from inside."""
        starved = self.part.index in self.part.plan.starved and not self.is_over
        if starved and self.random.random() < 0.02:
            self.starve()

    def starve(self) -> None:
        """Go on without a free descriptor for a moment."""
        end = time.monotonic() + _STARVED_SECONDS
        self.tally.faults[self.part.index] += 1
        functions = [each for each, _ in self.actions() if each != self.fork]
        with no_descriptors():
            while time.monotonic() < end:
                self.act(self.random.choice(functions))

    def be_child(self, choice: int, writer: Any) -> None:
        # The tally and the rain are the actor's own.
        if self.failures is not None:
            self.failures.on = False
        super().be_child(choice, writer)

    def finish(self, each_turn: Callable[[], None] = lambda: None) -> None:
        """End in peace: what failed before must work now."""
        self.is_over = True
        if self.failures is not None:
            self.failures.on = False
        self.load_postponed()
        if self.part.leaves_early:
            self.tally.status[self.part.index] = LEFT
        super().finish(each_turn)
        if not self.part.leaves_early:
            self.drain()
        self.load_postponed()
        self.empty_common(each_turn)
        self.held.clear()

    def drain(self) -> None:
        """Read what those have sent who were killed and could not say that it was all."""
        end = time.monotonic() + self.patience
        for peer in self.gone:
            link = self.part.incoming.get(peer)
            while link is not None and link.is_ready() and time.monotonic() < end:
                self.receive(peer)

    def empty_common(self, each_turn: Callable[[], None]) -> None:
        """Read the common queue until nobody can put anything in any more."""
        if self.part.common is None:
            return
        self.tally.status[self.part.index] = LEFT
        end = time.monotonic() + self.patience
        while not self.part.leaves_early and time.monotonic() < end:
            over = not (self.tally.status[: self.part.plan.actors] <= PLAYING).any()
            if not self.take_out(0.005) and over and not self.is_something_to_come():
                return
            each_turn()

    def is_something_to_come(self) -> bool:
        """Whether a queue's thread has yet to write what was put, which no fault has taken."""
        plan, first = self.part.plan, self.part.common_row
        if plan.leaver or (self.tally.status[: plan.actors] == KILLED).any():
            return False
        rows = slice(first, first + plan.actors)
        return bool(((self.tally.sent[rows] == SENT) & (self.tally.got[rows] == 0)).any())

    def look_for_leaks(self) -> None:
        """Tell of what is still held here though nothing is in use."""
        if self.part.plan.system != "shmreduce":
            return
        end = time.monotonic() + 5.0
        while True:
            gc.collect()
            state = process_state()
            threads = [each.name for each in threading.enumerate() if _is_foreign(each)]
            waiting = state.waiting and not runtime.current().live.ledger._unguarded_until
            if not state.arrays and not waiting and not threads:
                return
            if time.monotonic() > end:
                self.tell("left", state=repr(state), threads=threads)
                return
            time.sleep(0.005)


def _is_foreign(thread: threading.Thread) -> bool:
    """Whether a thread is one that nobody should find at the end."""
    known = (threading.main_thread(), threading.current_thread())
    # Feeders of queues end with their queues, the others by themselves.
    return thread not in known and thread.name.startswith("companion")


def _is_expected(error: BaseException) -> bool:
    """Whether an error is one that was injected, or says so."""
    seen: BaseException | None = error
    while seen is not None:
        if getattr(seen, "errno", None) in EXPECTED:
            return True
        seen = seen.__cause__ or seen.__context__
    return False


def _describe(error: BaseException) -> str:
    where = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({Path(where.filename).name}:{where.lineno})"


def prepare(plan: Plan, index: int, folder: str) -> Tally:
    """Get a process of a run ready: installed, counted, and struck as planned."""
    faulthandler.enable()
    tally = Tally(Path(folder) / "tally")
    tally.enter(index, os.getpid())
    breaking.apply_break(plan.broken)
    if plan.long_way:
        quick_slots._module = None
    if index in plan.jumps:
        jump_clock(f"{plan.key}/clock/{index}")
    find_system(plan.system, plan.strategy).install(idle=plan.idle)
    points.arm((each for each in plan.strikes if each.actor == index), index, tally)
    return tally


def perform(actor: FaultActor, each_turn: Callable[[], None] = lambda: None) -> None:
    """Play a part with its faults."""
    plan, index = actor.part.plan, actor.part.index
    end_rain = stand_in_the_rain() if index in plan.storms else None
    actor.tally.in_rain[index] = end_rain is not None
    injections = [each for each in plan.injections if each.actor == index]
    actor.is_hit = bool(injections) or index in plan.starved
    if injections:
        actor.failures = Failures(injections, f"{plan.key}/calls/{index}", actor.tally)
        actor.failures.on = True
    companions = [
        threading.Thread(target=_accompany, args=(actor, number), name=f"companion {number}")
        for number in range(plan.companions)
    ]
    for each in companions:
        each.daemon = True
        each.start()

    def turn() -> None:
        actor.each_turn()
        each_turn()

    actor.play(turn)
    for each in companions:
        each.join(5.0)
    # Theirs; those of the actor itself have been loaded.
    actor.load_postponed()
    actor.tally.in_rain[index] = 0
    if end_rain is not None:
        end_rain()


def _accompany(actor: FaultActor, number: int) -> None:
    """Be another thread: make arrays, pass them to oneself, look at them."""
    plan = actor.part.plan
    end = time.monotonic() + plan.seconds
    turn = 0
    while time.monotonic() < end:
        turn += 1
        seed = number << 32 | turn
        try:
            array = shmreduce.empty(2000 + 700 * (turn % 3), "u8")
            fill(array, seed)
            data = bytes(ForkingPickler.dumps(("to oneself", array, array.copy())))
            _, shared, plain = ForkingPickler.loads(data)
        except (OSError, shmreduce.ShmreduceError) as error:
            if not actor.is_hit or not _is_expected(error):
                actor.tell("error", error=f"companion: {_describe(error)}")
            elif isinstance(error, shmreduce.ShmreduceError) and error.message_bytes is not None:
                actor.postponed.append(error.message_bytes)
            continue
        except BaseException as error:
            actor.tell("error", error=f"companion: {_describe(error)}")
            return
        for each in (shared, plain):
            wrong = complaint(each, seed)
            if wrong is not None:
                actor.tell("mismatch", when="companion", kind="", wrong=wrong, depth=0)
        time.sleep(_PAUSE)


def play_part(part: FaultPart, report: Any) -> None:
    """Be an actor; what a child process runs."""
    tally = prepare(part.plan, part.index, part.folder)
    actor = FaultActor(part, tally, report.fileno())
    try:
        perform(actor)
        actor.look_for_leaks()
    except BaseException as error:
        with contextlib.suppress(OSError):
            actor.tell("error", error=traceback.format_exc()[-3400:], kind=type(error).__name__)
        raise
