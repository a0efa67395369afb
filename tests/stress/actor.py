"""One process of the stress: sends, holds, forwards, forks, drops, and checks it all."""

from __future__ import annotations

import collections
import faulthandler
import gc
import json
import os
import pickle
import random
import signal
import time
import traceback
import warnings
from dataclasses import dataclass, field
from multiprocessing import Pipe
from typing import TYPE_CHECKING, Any

import numpy as np

import shmreduce
from shmreduce.errors import (
    AlreadyLoadedError,
    ProducerDied,
    StaleHandleError,
)
from shmreduce.memory import runtime
from tests.stress import breaking
from tests.stress.links import BROADCAST, Link, PipeLink, pickle_once
from tests.stress.pattern import complaint, fill, seed_of_slice

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection

__all__ = ["Actor", "Part", "end_by_alarm", "play"]

INLINE_LIMIT = 4096
_WORDS = (600, 600, 2000, 2000, 9000, 33_000, 40_000, 140_000, 300_000)
"""The largest has room for a huge page, and more."""
_ALIKE = ((60, 100), (500, 60), (2000, 400))
"""Words of an array, and how many arrays: pieces that are copied, or that stay in blocks."""
_MOST_HELD = 14
_MOST_CHILDREN = 3
_DRAIN_SECONDS = 10.0
_MISMATCH_EXIT = 33


@dataclass
class Part:
    """What one actor has to do in one round.

    Parameters
    ----------
    index : int
        Which actor.
    seed : str
        Of its random choices.
    seconds : float
        For how long it sends.
    leaves_early : bool
        Ends without reading what others still send to it.
    kills_itself : bool
        May die by its own SIGKILL.
    outgoing, incoming : dict
        Links by the index of the peer.
    """

    index: int
    seed: str
    seconds: float
    leaves_early: bool
    kills_itself: bool
    outgoing: dict[int, Link] = field(default_factory=dict)
    incoming: dict[int, Link] = field(default_factory=dict)


@dataclass
class Held:
    """An array that an actor has, and what it must look like."""

    array: Any
    seed: int
    kind: str
    own: bool
    """Whether nobody else may see what is written here."""


class Actor:
    """Plays one part.

    Parameters
    ----------
    part : Part
    news : Connection
        Tells which peers are gone.
    report : int
        Descriptor that lines of JSON are written to.
    """

    def __init__(self, part: Part, news: Connection | None, report: int) -> None:
        self.part = part
        self.random = random.Random(part.seed)
        self.held: list[Held] = []
        self.children: dict[int, Connection] = {}
        self.gone: set[int] = set()
        self.deaf: set[int] = set()
        """Peers that read no more, those that are gone among them."""
        self.ended: set[int] = set()
        self.sent: collections.Counter[int] = collections.Counter()
        self.received: collections.Counter[int] = collections.Counter()
        self.counts: collections.Counter[str] = collections.Counter()
        self.patience = _DRAIN_SECONDS
        self.child_seconds = 0.4
        self.depth = 0
        """How many forks away from the actor itself this process is."""
        self._news = news
        self._report = report

    # Reporting

    def tell(self, what: str, **facts: Any) -> None:
        """Write one line of the report; atomic, also if this process is killed."""
        line = json.dumps({"what": what, "actor": self.part.index, "pid": os.getpid(), **facts})
        os.write(self._report, line.encode()[:4000] + b"\n")

    def check(self, held: Held, when: str) -> None:
        """Report an array that does not look as it must."""
        self.counts["checks"] += 1
        wrong = complaint(held.array, held.seed)
        if wrong is not None:
            self.tell("mismatch", when=when, kind=held.kind, wrong=wrong, depth=self.depth)
            # Once is enough.
            held.seed = int(held.array[0])
            self.held = [each for each in self.held if each is not held]

    def check_everything(self, when: str) -> None:
        for held in list(self.held):
            self.check(held, when)

    # Playing

    def actions(self) -> list[tuple[Callable[[], None], int]]:
        """Return what this actor may do, and how often in proportion."""
        return [
            (self.send_by_value, 22),
            (self.send_alike, 2),
            (self.send_shared, 8),
            (self.broadcast, 5),
            (self.forward, 14),
            (self.pass_on, 10),
            (self.receive_some, 30),
            (self.drop, 10),
            (self.rewrite, 6),
            (self.check_one, 8),
            (self.fork, 3),
            (self.reap, 4),
        ]

    def act(self, action: Callable[[], None]) -> None:
        """Do one thing."""
        action()

    def rest(self) -> None:
        """Called where there is nothing to do but to wait for others."""

    def play(self, each_turn: Callable[[], None] = lambda: None) -> None:
        """Act until the time is over, then say goodbye on all links."""
        end = time.monotonic() + self.part.seconds
        functions, weights = zip(*self.actions(), strict=True)
        turns = 0
        while time.monotonic() < end:
            self.act(self.random.choices(functions, weights)[0])
            turns += 1
            if turns % 50 == 0:
                self.check_everything("while held")
                self.hear()
                gc.collect()
                if self.part.kills_itself and self.random.random() < 0.05:
                    self.tell("suicide")
                    os.kill(os.getpid(), signal.SIGKILL)
            each_turn()
        self.finish(each_turn)

    def finish(self, each_turn: Callable[[], None] = lambda: None) -> None:
        """Tell the peers that nothing more comes, and read what they still send."""
        end = time.monotonic() + self.patience
        waiting = set(self.part.outgoing)
        while waiting - self.deaf and time.monotonic() < end:
            for peer in waiting - self.deaf:
                link = self.part.outgoing[peer]
                if link.has_room():
                    link.send(("end", self.sent[peer]))
                    waiting.discard(peer)
            if not self.part.leaves_early:
                self.receive_all()
            self.hear()
            each_turn()
            self.rest()
        while not self.part.leaves_early and time.monotonic() < end:
            self.receive_all()
            self.hear()
            each_turn()
            if not set(self.part.incoming) - self.gone - self.ended:
                break
            if not self.random.randrange(4):
                self.check_everything("while draining")
            self.rest()
        while self.children and time.monotonic() < end:
            self.reap()
            self.check_everything("while children end")
            self.rest()
        self.check_everything("at the end")
        missing = sorted(set(self.part.incoming) - self.gone - self.ended)
        if missing and not self.part.leaves_early:
            self.tell("silent", peers=missing)
        self.held.clear()
        self.tell("done", counts=dict(self.counts), children=len(self.children), turns=self.counts)

    def hear(self) -> None:
        """Learn which peers are gone."""
        while self._news is not None and self._news.poll(0):
            self.learn(*self._news.recv())

    def learn(self, peer: int, killed: bool) -> None:
        """Take note that a peer has ended."""
        self.deaf.add(peer)
        if killed:
            self.gone.add(peer)

    def make(self, words: int | None = None) -> Held:
        array = np.empty(words or self.random.choice(_WORDS), np.uint64)
        seed = self.random.getrandbits(64)
        fill(array, seed)
        return Held(array, seed, "born", own=True)

    def find_room(self, *, own: bool = False) -> int | None:
        peers = [
            peer
            for peer, link in self.part.outgoing.items()
            if peer not in self.deaf and link.has_room() and (link.is_own or not own)
        ]
        return self.random.choice(peers) if peers else None

    def send(self, peer: int, helds: list[Held], *, shared: bool = False) -> None:
        kind = "shared" if shared else "value"
        items = [(held.array, held.seed, held.kind if shared else kind) for held in helds]
        self.part.outgoing[peer].send(("arrays", items))
        self.sent[peer] += 1
        self.counts["sent"] += 1
        if not self.part.outgoing[peer].pickles_at_once:
            for held in helds:
                held.own = False

    def send_by_value(self) -> None:
        peer = self.find_room()
        if peer is None:
            return
        helds = [self.make() for _ in range(self.random.choice((1, 1, 2, 3)))]
        self.send(peer, helds)
        for held in helds:
            if held.own and self.random.random() < 0.7:
                # Must not show at the receiver.
                fill(held.array, self.random.getrandbits(64))

    def send_alike(self) -> None:
        """Send many of one length, of which most are pieces of blocks."""
        # A pipe of the standard library would be too short for those that are not.
        peer = self.find_room(own=True)
        if peer is None:
            return
        words, count = self.random.choice(_ALIKE)
        helds = [self.make(words) for _ in range(count)]
        self.send(peer, helds)
        for held in helds[::7]:
            if held.own:
                # Must not show at the receiver.
                fill(held.array, self.random.getrandbits(64))

    def send_shared(self) -> None:
        peer = self.find_room()
        if peer is None:
            return
        born = self.make()
        mode: Any = self.random.choice(("rw", "ro", "cow"))
        held = Held(shmreduce.share(born.array, mode=mode), born.seed, mode, own=False)
        self.send(peer, [held], shared=True)
        if self.random.random() < 0.5:
            self.keep(held)

    def broadcast(self) -> None:
        peers = [
            peer
            for peer, link in self.part.outgoing.items()
            if peer not in self.deaf and isinstance(link, PipeLink) and link.has_room()
        ]
        if len(peers) < 2:
            return
        born = self.make()
        if self.random.random() < 0.5:
            born = Held(shmreduce.share(born.array), born.seed, "rw", own=False)
            self.keep(born)
        kind = "value" if born.own else "rw"
        data = pickle_once(("arrays", [(born.array, born.seed, kind)], BROADCAST.decode()))
        for peer in peers:
            link = self.part.outgoing[peer]
            if isinstance(link, PipeLink):
                link.send_pickled(data)
                self.sent[peer] += 1
        self.counts["broadcasts"] += 1

    def forward(self) -> None:
        peer = self.find_room()
        if peer is None or not self.held:
            return
        held = self.random.choice(self.held)
        array, seed = held.array, held.seed
        if self.random.random() < 0.4:
            start = self.random.randrange(0, len(array) // 2)
            array, seed = array[start:], seed_of_slice(seed, start)
        is_shared = held.kind in ("rw", "ro", "cow") and shmreduce.is_shared(array)
        part = Held(array, seed, held.kind, own=held.own)
        self.send(peer, [part], shared=is_shared)
        held.own = part.own
        self.counts["forwarded"] += 1
        if held.own and self.random.random() < 0.5:
            self.rewrite_one(held)

    def pass_on(self) -> None:
        """Send on what was received, and keep nothing of it."""
        peer = self.find_room()
        received = [place for place, held in enumerate(self.held) if held.kind == "value"]
        if peer is None or not received:
            return
        held = self.held.pop(self.random.choice(received))
        message = [("arrays", [(held.array, held.seed, "value")])]
        del held
        self.part.outgoing[peer].pass_on(message)
        self.sent[peer] += 1
        self.counts["passed on"] += 1

    def receive_some(self) -> None:
        peers = list(self.part.incoming)
        self.random.shuffle(peers)
        for peer in peers[:2]:
            self.receive(peer)

    def receive_all(self) -> None:
        for peer in self.part.incoming:
            self.receive(peer)

    def receive(self, peer: int) -> None:
        link = self.part.incoming[peer]
        if peer in self.ended or not link.is_ready():
            return
        message: Any = None
        try:
            message = link.receive()
        except AlreadyLoadedError:
            # Another reader of a broadcast was first.
            self.counts["already loaded"] += 1
        except StaleHandleError:
            self.counts["stale"] += 1
        except ProducerDied as error:
            if isinstance(link, PipeLink) and link.was_broadcast():
                # Another reader was first, and then the producer ended.
                self.counts["too late"] += 1
            else:
                self.tell("producer died", producer=error.pid)
        except EOFError:
            self.ended.add(peer)
            return
        except (OSError, pickle.UnpicklingError, shmreduce.ShmreduceError) as error:
            self.tell("error", error=f"{type(error).__name__}: {error}", peer=peer)
        else:
            if message is None:
                return
            if message[0] == "end":
                self.ended.add(peer)
                if message[1] != self.received[peer]:
                    self.tell("lost", peer=peer, sent=message[1], got=self.received[peer])
                return
            self.take(message[1])
        self.received[peer] += 1

    def take(self, items: list[tuple[Any, int, str]]) -> None:
        for array, seed, kind in items:
            held = Held(array, seed, kind, own=kind in ("value", "cow"))
            self.check(held, "on arrival")
            if self.random.random() < 0.6:
                self.keep(held)
            if held.own and self.random.random() < 0.3:
                self.rewrite_one(held)

    def keep(self, held: Held) -> None:
        self.held.append(held)
        while len(self.held) > _MOST_HELD:
            self.held.pop(self.random.randrange(len(self.held)))

    def drop(self) -> None:
        if self.held:
            held = self.held.pop(self.random.randrange(len(self.held)))
            self.check(held, "when dropped")

    def rewrite(self) -> None:
        if self.held:
            self.rewrite_one(self.random.choice(self.held))

    def rewrite_one(self, held: Held) -> None:
        if held.own and held.array.flags.writeable:
            held.seed = self.random.getrandbits(64)
            fill(held.array, held.seed)

    def check_one(self) -> None:
        if self.held:
            self.check(self.random.choice(self.held), "while held")

    # Forking

    def fork(self) -> None:
        if len(self.children) >= _MOST_CHILDREN or not self.held:
            return
        reader, writer = Pipe(duplex=False)
        choice = self.random.getrandbits(64)
        live = runtime.current().live
        with warnings.catch_warnings():
            # Queues have threads, and CPython 3.12 warns of every fork beside one.
            warnings.simplefilter("ignore", DeprecationWarning)
            # The child is told, too, and does as one is advised to.
            warnings.simplefilter("ignore", shmreduce.ShmreduceWarning)
            pid = os.fork()
        if pid == 0:
            if live.exposed:
                os._exit(0)
            try:
                reader.close()
                self.be_child(choice, writer)
            except BaseException:
                self.tell("error", error=traceback.format_exc()[-1500:], peer=-1)
            finally:
                os._exit(0)
        writer.close()
        self.children[pid] = reader
        self.counts["forks"] += 1

    def be_child(self, choice: int, writer: Connection) -> None:
        """Live on with inherited arrays for a while, then end in one way or another."""
        self.depth += 1
        self.random = random.Random(choice)
        self.children.clear()
        for held in self.held:
            # Every process has pages of its own now; see fork() of the parent.
            held.own = held.own or held.kind == "value"
        end = time.monotonic() + self.random.uniform(0.02, self.child_seconds)
        sent = False
        while time.monotonic() < end:
            self.check_everything("in a forked child")
            if self.random.random() < 0.3:
                self.rewrite()
            if not sent and self.held and self.random.random() < 0.3:
                sent = True
                held = self.random.choice(self.held)
                kind = held.kind if shmreduce.is_shared(held.array) else "value"
                try:
                    writer.send(("arrays", [(held.array, held.seed, kind)]))
                except BrokenPipeError:
                    # The parent was killed.
                    self.counts["orphans"] += 1
            if self.depth == 1 and self.random.random() < 0.03:
                self.fork()
            if self.random.random() < 0.05:
                self.drop()
        # What children of this one send is not to stay unread.
        end = time.monotonic() + 1.0
        while self.children and time.monotonic() < end:
            self.reap()
            self.rest()
        self.check_everything("at a forked child's end")
        if self.random.random() < 0.3:
            os.kill(os.getpid(), signal.SIGKILL)

    def reap(self) -> None:
        for pid, reader in list(self.children.items()):
            try:
                ended, _ = os.waitpid(pid, os.WNOHANG)
            except ChildProcessError:
                ended = pid
            self.hear_child(reader)
            if ended:
                self.hear_child(reader)
                reader.close()
                del self.children[pid]

    def hear_child(self, reader: Connection) -> None:
        try:
            if reader.poll(0):
                self.take(reader.recv()[1])
                self.counts["from children"] += 1
        except EOFError:
            return
        except (ProducerDied, StaleHandleError):
            # The child was killed, or its message was about a block of the past.
            self.counts["children died"] += 1


def end_by_alarm(seconds: float) -> None:
    """Die with a traceback of all threads after so many seconds."""
    # Not dump_traceback_later(): a forked child waits for its parent's thread.
    faulthandler.enable()
    # A forked child has its parent's registration; a second one would do nothing.
    faulthandler.unregister(signal.SIGALRM)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    faulthandler.register(signal.SIGALRM, chain=True)
    signal.alarm(int(seconds))


def play(part: Part, news: Connection, report: Any, strategy: str) -> None:
    """Be an actor; what a child process runs."""
    end_by_alarm(part.seconds + 3 * _DRAIN_SECONDS)
    breaking.apply_break()
    shmreduce.install(strategy=strategy, inline_limit=INLINE_LIMIT)
    descriptor = report.fileno()
    actor = Actor(part, news, descriptor)
    try:
        actor.play()
    except BaseException:
        actor.tell("error", error=traceback.format_exc()[-1500:], peer=-1)
        raise
