"""Real processes walk along paths of the model, and their memory is as the model says.

Paths are random, of fixed seeds. Each step is done by the model and by real
processes: allocate, send, send on, lend, load, load in vain, discard, drop, fork, kill.
After each the chains of all blocks, what waits for forked children, and the
bytes of every view are compared. ``SHMREDUCE_MODEL_WALKS`` asks for more paths.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from typing import TYPE_CHECKING, Any

import pytest

from tests.conftest import is_running
from tests.model.actor import Seen, act
from tests.model.world import INHERITED, MAKER, Handle, Scope, State, View, World

if TYPE_CHECKING:
    from collections.abc import Iterator

WALKS = int(os.environ.get("SHMREDUCE_MODEL_WALKS", "4"))
STEPS = 30
PATIENCE = 30.0
SCOPE = Scope(
    shared=True,
    slots=12,
    allocations=20,
    messages=30,
    births=3,
    started=2,
    cut_short=False,
    deaths=False,
    lends=True,
)
_OFTEN = {
    "kill": 0.1,
    "fork": 0.2,
    "reap": 0.3,
    "drop": 0.3,
    "discard": 0.2,
    "load and undo": 0.2,
    "lend": 5.0,
    "give back lent": 5.0,
}
"""How often something is done that can be; else 1. After some there is little left to do."""
SPARE = 2
"""The place of the one process that is forked."""


def key_of(view: View) -> tuple[int, int, bool]:
    """Return what a process calls a view."""
    return view.block, view.life, view.slot == INHERITED


class Crew:
    """The real processes."""

    def __init__(self, *, shared: bool) -> None:
        context = multiprocessing.get_context("spawn")
        self.ends: dict[int, Any] = {}
        pipes = {place: context.Pipe() for place in range(SPARE + 1)}
        self.processes = {}
        for place in range(SPARE):
            theirs, spare = pipes[place][1], pipes[SPARE][1]
            process = context.Process(
                target=act, args=(theirs, spare), kwargs={"shared": shared}, daemon=True
            )
            process.start()
            self.processes[place] = process
        for place, (ours, theirs) in pipes.items():
            self.ends[place] = ours
            theirs.close()
        self.pids = {place: process.pid for place, process in self.processes.items()}

    def tell(self, place: int, name: str, *arguments: Any) -> Any:
        """Have a process do something; return what that returns."""
        self.ends[place].send((name, arguments))
        if not self.ends[place].poll(PATIENCE):
            pytest.fail(f"process {place} did not {name} within {PATIENCE} s")
        return self.ends[place].recv()

    def kill(self, place: int) -> None:
        """Kill a process and wait until the kernel has taken its locks."""
        pid = self.pids.pop(place)
        if pid is None:
            pytest.fail(f"process {place} was not started")
        os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + PATIENCE
        # One that is just ending may have its locks yet.
        while is_running(pid):
            if time.monotonic() > deadline:
                pytest.fail(f"process {place} does not end")
            time.sleep(0.001)

    def close(self) -> None:
        """End all of them."""
        for place in list(self.pids):
            self.kill(place)
        for end in self.ends.values():
            end.close()
        for process in self.processes.values():
            process.join(PATIENCE)
            process.close()


class Walk:
    """One path, in the model and in the world."""

    def __init__(self, crew: Crew, seed: int, *, shared: bool) -> None:
        self.crew = crew
        self.world = World(SCOPE._replace(shared=shared))
        self.state = self.world.initial()
        self.choose = random.Random(seed)
        self.real: dict[int, tuple[bytes, int]] = {}
        self.handles: dict[Handle, bytes] = {}
        self.done: list[str] = []

    def path(self) -> str:
        """Return what was done so far, one thing a line."""
        return "\n".join(self.done)

    def choices(self) -> list[tuple[int, str, tuple[Any, ...]]]:
        """Return all that could be next: who, what, with what."""
        found: list[tuple[int, str, tuple[Any, ...]]] = []
        for place, who in enumerate(self.state.people):
            if not who.alive:
                continue
            found += [(place, *choice) for choice in self.world.choices(self.state, place)]
            if place != MAKER:
                found.append((place, "kill", ()))
            if not self.state.people[SPARE].alive and SPARE not in self.crew.pids:
                found.append((place, "fork", ()))
        return sorted(found, key=repr)

    def step(self) -> None:
        """Do one thing, here and there."""
        found = self.choices()
        names = sorted({name for _, name, _ in found})
        weights = [_OFTEN.get(name, 1.0) for name in names]
        (chosen,) = self.choose.choices(names, weights)
        place, name, arguments = self.choose.choice([each for each in found if each[1] == chosen])
        self.done.append(f"{place}: {name} {arguments}")
        if name == "kill":
            self.state = self.world.die(self.state, place)
            self.crew.kill(place)
        elif name == "fork":
            number = SPARE + 1
            if self.state.people[SPARE].born == number:
                # It was forked before, and is dead.
                return
            self.state = self.world.fork(self.state, place, SPARE, number)
            self.crew.pids[SPARE] = self.crew.tell(place, "fork")
        elif name in ("collect", "reap"):
            self.look_after(name)
            self.crew.tell(MAKER, "look_after", name)
        else:
            self.settle(place)
            if name in ("allocate", "post"):
                self.look_after("collect")
                # What was free may have changed.
                arguments = (self.state.out.index(False),)
            self.do(place, name, arguments)

    def settle(self, place: int) -> None:
        """Most calls begin with that."""
        for view in sorted(self.state.people[place].limbo, key=repr):
            if not self.world.visible_to_children(self.state, view):
                self.model(place, "settle", (view,))
        self.crew.tell(place, "settle")

    def look_after(self, name: str) -> None:
        """Collect or reap all blocks in the model."""
        for block, out in enumerate(self.state.out):
            if out:
                self.model(MAKER, name, (block,))

    def model(self, place: int, name: str, arguments: tuple[Any, ...]) -> None:
        """Do one thing in the model."""
        begun, doing = self.world.begin(self.state, place, name, arguments)
        if doing is None:
            self.state = begun
        else:
            ((_, self.state),) = self.world.all_at_once(begun, place, doing, "")

    def do(self, place: int, name: str, arguments: tuple[Any, ...]) -> None:
        """Do one thing that is not looking after blocks, in both."""
        before = self.state
        argument = arguments[0]
        if isinstance(argument, View) and argument not in (
            before.people[place].views | before.people[place].limbo
        ):
            # It has been settled just now.
            return
        self.model(place, name, arguments)
        tell = self.crew.tell
        if name in ("allocate", "post"):
            life = self.state.lives[argument]
            key, value = (argument, life, False), self.value(argument, life)
            if name == "allocate":
                self.real[argument] = tell(place, "allocate", key, value)
            else:
                handle, self.real[argument] = tell(place, "post", key, value)
                self.sent(before, handle)
        elif name == "forward":
            self.sent(before, tell(place, "forward", key_of(argument)))
        elif name == "pass on":
            assert tell(place, "pass_on", key_of(argument)), self.path()
        elif name == "keep":
            self.sent(before, tell(place, "keep"))
        elif name == "let go":
            self.sent(before, tell(place, "let_go", key_of(argument)))
        elif name == "lend":
            self.lent(before, tell(place, "lend", key_of(argument)))
        elif name == "let go and lend":
            handle, lent = tell(place, "let_go_and_lend", key_of(argument))
            self.lent(before, lent)
            self.handles[arguments[1]] = handle
        elif name == "give back lent":
            value = self.value(argument.block, self.state.lives[argument.block])
            self.sent(before, tell(place, "give_back_lent", key_of(argument), value))
        elif name == "drop":
            tell(place, "drop", key_of(argument))
        elif name == "load":
            key = (argument.block, argument.life, False)
            found = tell(place, "load", key, self.handles[argument])
            assert (found == self.value(*key[:2])) == (
                key in {key_of(view) for view in self.state.people[place].views}
            ), f"{found}: {self.path()}"
        elif name in ("load and undo", "discard"):
            tell(place, name.replace(" ", "_"), self.handles[argument])

    def sent(self, before: State, handle: bytes | None) -> None:
        """Take note of a message's bytes."""
        (new,) = self.state.mail - before.mail
        assert handle is not None
        self.handles[new] = handle

    def lent(self, before: State, handle: bytes | None) -> None:
        """Take note of the bytes of a message to a borrower, if there is one."""
        new = [each for each in self.state.mail - before.mail if each.lent]
        assert (handle is not None) == bool(new), self.path()
        for each in new:
            self.handles[each] = handle or b""

    @staticmethod
    def value(block: int, life: int) -> int:
        """Return what the bytes of a block are in one of its lives."""
        return 1 + 100 * block + life

    def compare(self) -> None:
        """Compare everything."""
        for place in range(SPARE + 1):
            if not self.state.people[place].alive:
                continue
            # What has ended meanwhile is noticed at any time: here it is now.
            self.settle(place)
            if place == MAKER:
                self.look_after("collect")
                self.crew.tell(place, "look_after", "collect")
            who = self.state.people[place]
            assert self.crew.tell(place, "waiting") == len(who.limbo), self.path()
            for view in who.views:
                key = key_of(view)
                assert self.crew.tell(place, "read", key) == self.value(*key[:2]), self.path()
        for block, real in list(self.real.items()):
            if not self.state.out[block]:
                del self.real[block]
                if real in self.real.values():
                    # The code prefers the warmest block, the model the first.
                    continue
            seen = self.crew.tell(MAKER, "look", *real)
            assert seen == self.seen(block), self.path()

    def seen(self, block: int) -> Seen:
        """Return what the model's tables show of a block."""
        words = self.world.table(self.state, "words")
        slots = self.world.chain(self.state, block)
        chain = tuple("message" if words[slot] > 0 else "holder" for slot in slots)
        return Seen(self.state.out[block], chain)


@pytest.fixture(params=[True, False], ids=["shared", "by value"])
def shared(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture
def crew(shared: bool, shmreduce_no_leaks: None) -> Iterator[Crew]:
    made = Crew(shared=shared)
    yield made
    made.close()


@pytest.mark.parametrize("seed", range(WALKS))
def test_real_processes_are_where_the_model_is(crew: Crew, seed: int, shared: bool) -> None:
    """After every step of a random path the tables, the limbo and all bytes are the model's."""
    walk = Walk(crew, seed, shared=shared)
    for _ in range(STEPS):
        walk.step()
        walk.compare()
    assert len(walk.done) == STEPS
