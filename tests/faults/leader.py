"""The process of a run that starts the others, takes part itself, and is killed only with all."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import signal
import time
import traceback
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import shmreduce
from shmreduce.memory.inspection import process_state
from shmreduce.testing.leaks import find_leaks, take_census
from tests.faults.actor import CountedLink, FaultActor, FaultPart, perform, play_part, prepare
from tests.faults.pools import play_executor, play_manager, play_pool
from tests.faults.systems import System, find_system
from tests.faults.tally import ENDED, KILLED, Tally

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.faults.plan import Plan

__all__ = ["PRIVATE_PIDS", "Channels", "Leader", "lead", "make_channels"]

_PATIENCE = 40.0
_LAST_PID = Path("/proc/sys/kernel/ns_last_pid")
PRIVATE_PIDS = "SHMREDUCE_FAULTS_PRIVATE_PIDS"
"""Set in an environment whose pids belong to the run alone."""


@dataclass
class Channels:
    """Who is connected to whom.

    Parameters
    ----------
    links : list of CountedLink
    common : queue or None
        That everybody writes and reads.
    common_row : int
        Its first row in the tally.
    """

    links: list[CountedLink] = field(default_factory=list)
    common: Any = None
    common_row: int = 0


def make_channels(plan: Plan, system: System | None) -> Channels:
    """Return the channels of a plan; without a system only what they are called."""
    chooser = random.Random(f"{plan.key}/channels")
    found = Channels()
    if plan.scenario != "mesh":
        return found
    for sender in range(plan.actors):
        others = [each for each in range(plan.actors) if each != sender]
        receivers = {(sender + 1) % plan.actors, *chooser.choices(others, k=2)}
        for receiver in sorted(receivers):
            kind = chooser.choice(plan.channels)
            link: Any = system.make_link(kind, plan.method) if system is not None else _NoLink()
            found.links.append(CountedLink(link, len(found.links), kind, sender, receiver))
    found.common_row = len(found.links)
    if plan.common and system is not None:
        found.common = system.context(plan.method).Queue()
    return found


class _NoLink:
    pickles_at_once = True


def lead(plan: Plan, folder: str, report: Any, leak_seconds: float) -> None:
    """Play a whole run; what the watcher starts."""
    tally = prepare(plan, 0, folder)
    before = _census(plan)
    leader = Leader(plan, folder, report, tally)
    try:
        leader.play()
        leader.look_for_leaks(before, leak_seconds)
        leader.tell("led")
    except BaseException:
        leader.tell("error", error=traceback.format_exc()[-1500:])
        raise


class Leader:
    """The process that starts the others.

    Parameters
    ----------
    plan : Plan
    folder : str
        Of the run.
    report : Connection
        That lines of JSON are written to.
    tally : Tally
    """

    def __init__(self, plan: Plan, folder: str, report: Any, tally: Tally) -> None:
        self.plan = plan
        self.system = find_system(plan.system, plan.strategy)
        self.context = self.system.context(plan.method)
        self.tally = tally
        self.processes: dict[int, Any] = {}
        self.decoys: list[int] = []
        self.folder = folder
        self.report = report
        self._channels = make_channels(plan, self.system)
        self._parts = self._make_parts()
        self.hub = FaultActor(self._parts[0], tally, report.fileno())

    def tell(self, what: str, **facts: Any) -> None:
        self.hub.tell(what, **facts)

    def note_named(self, error: BaseException) -> None:
        """Take note of an error that stands for a task of a killed worker."""
        known: tuple[type[BaseException], ...] = (
            shmreduce.WorkerDied,
            shmreduce.ProducerDied,
            BrokenProcessPool,
        )
        if self.plan.system == "shmreduce" and not isinstance(error, known):
            self.tell("error", error=f"{type(error).__name__}: {error}")

    def start(self, function: Callable[..., object], *arguments: Any) -> None:
        """Start the next actor."""
        index = len(self.processes) + 1
        process = self.context.Process(target=function, args=arguments)
        process.start()
        self.processes[index] = process

    def play(self) -> None:
        """Let the run happen, and wait for everybody's end."""
        others = {"pool": play_pool, "executor": play_executor, "manager": play_manager}
        if self.plan.scenario in others:
            others[self.plan.scenario](self)
        else:
            for part in self._parts[1:]:
                self.start(play_part, part, self.report)
            self.tally.begun[0] = time.monotonic()
            perform(self.hub, self.look_around)
            self.wait()
        for pid in self.decoys:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        self._close()

    def wait(self) -> None:
        """Wait for the ends of all actors, boundedly."""
        end = time.monotonic() + _PATIENCE
        while self._running() and time.monotonic() < end:
            self.look_around()
            time.sleep(0.001)
        for index in self._running():
            self.tell("hang", process=self.processes[index].pid, index=index)
            self.processes[index].kill()
            self.processes[index].join()
        self.look_around()
        for process in self.processes.values():
            process.close()
        self.processes.clear()

    def _make_parts(self) -> list[FaultPart]:
        plan = self.plan
        parts = [
            FaultPart(
                index,
                f"{plan.key}/{index}",
                plan.seconds * (0.5 if index and index == plan.leaver else 1.0),
                leaves_early=bool(index) and index == plan.leaver,
                kills_itself=False,
                plan=plan,
                folder=self.folder,
                common=self._channels.common,
                common_row=self._channels.common_row,
            )
            for index in range(plan.actors)
        ]
        for link in self._channels.links:
            parts[link.sender].outgoing[link.receiver] = link
            parts[link.receiver].incoming[link.sender] = link
        return parts

    def _running(self) -> list[int]:
        return [index for index, each in self.processes.items() if each.exitcode is None]

    def look_around(self) -> None:
        """Take note of who has ended."""
        for index, process in self.processes.items():
            code = process.exitcode
            if code is None or self.tally.status[index] >= ENDED:
                continue
            pid = process.pid
            self.tally.status[index] = ENDED if code == 0 else KILLED
            if code not in (0, -signal.SIGKILL):
                self.tell("error", error=f"actor {index} ended with {code}")
            if code and self.plan.reuse_pids:
                self._reuse(pid)

    def _reuse(self, pid: int) -> None:
        """Give a killed process's pid to one whose descriptors mean something else."""
        if PRIVATE_PIDS not in os.environ or self.hub.failures is not None:
            return
        _LAST_PID.write_text(str(pid - 1))
        child = os.fork()
        if child == 0:
            with contextlib.suppress(BaseException):
                kept: list[Any] = [shmreduce.ones(100_000, "u1")]
                kept += [os.memfd_create("decoy") for _ in range(20)]
                signal.alarm(20)
                signal.pause()
            os._exit(0)
        self.decoys.append(child)
        if child == pid:
            self.hub.counts["reused pids"] += 1
            self.tell("reused", pid_of=pid)

    def _close(self) -> None:
        self.hub.part.outgoing.clear()
        self.hub.part.incoming.clear()
        for link in self._channels.links:
            link.close()
        common = self._channels.common
        if common is not None:
            common.close()
            common.cancel_join_thread()
            common._reader.close()
            common._writer.close()
        self._channels, self._parts = Channels(), []
        self.hub.part.common = None

    def look_for_leaks(self, before: Any, patience: float) -> None:
        """Tell of what is left in this process, which has outlived all the others."""
        gc.collect()
        if self.plan.system != "shmreduce":
            left = _left_of(before, _descriptors())
        else:
            # What those have not read who were killed, nobody is going to read.
            everything_was_read = not (self.tally.status == KILLED).any() and not self.plan.leaver
            timeout = None if everything_was_read else 0.001
            with shmreduce.install(message_timeout=timeout):
                left = find_leaks(before, patience)
                end = time.monotonic() + patience
                while process_state().out and time.monotonic() < end:
                    time.sleep(0.005)
                if process_state().out:
                    left.append(f"leases: {process_state()!r}")
        if left:
            self.tell("left", leaks=left[:10])


def _census(plan: Plan) -> Any:
    if plan.system == "shmreduce":
        return take_census()
    return _descriptors()


def _descriptors() -> dict[str, str]:
    found = {}
    for each in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found[each.name] = str(each.readlink())
    return found


def _left_of(before: dict[str, str], now: dict[str, str]) -> list[str]:
    return [
        f"descriptor {number} is still open: {target}"
        for number, target in now.items()
        # Sockets and pipes are what the libraries talk to their servants by.
        if before.get(number) != target and target.startswith(("/dev/shm", "/memfd"))
    ]
