"""Watches one run from outside: sends the signals, bounds the wait, counts what is left."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import gc
import importlib
import json
import multiprocessing
import os
import shutil
import signal
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from shmreduce.descriptor import Descriptor
from shmreduce.memory.sweep import sweep
from shmreduce.process_registry import get_registry
from shmreduce.strategies import find_strategy
from tests.faults.leader import PRIVATE_PIDS, lead, make_channels
from tests.faults.systems import PLUGIN_MODULES, find_system
from tests.faults.tally import KILLED, Tally
from tests.stress.reports import Reports

if TYPE_CHECKING:
    from tests.faults.actor import CountedLink
    from tests.faults.plan import Plan

__all__ = ["Outcome", "Watcher"]

_TICK = 0.001
_LAST_WORDS_SECONDS = 0.3
_SHARED_MEMORY = Path("/dev/shm")
_PR_SET_CHILD_SUBREAPER = 36
_NAMES = {"torch": "torch_", "shared_memory": "psm_"}
"""How names in /dev/shm begin; runs of shmreduce have a directory of their own."""
_IMPORTED = (
    "multiprocessing.managers",
    "multiprocessing.pool",
    "multiprocessing.popen_fork",
    "multiprocessing.resource_sharer",
    "multiprocessing.shared_memory",
    "shmreduce.context",
    "shmreduce.executor",
    "shmreduce.forking",
    "shmreduce.pool",
    "shmreduce.queues",
)
"""What the processes of every run would otherwise import for themselves."""
_PASSING = ("suicide", "done", "led", "reused")
"""What actors tell without anything being wrong."""


@dataclass
class Outcome:
    """What came of one run.

    ``lost_with_killed`` counts messages whose sender or receiver was killed,
    or whose reader had ended on purpose; ``lost`` all others.
    """

    seed: int
    number: int
    system: str
    strategy: str
    method: str
    scenario: str
    processes: int = 0
    killed: int = 0
    stopped: int = 0
    errors_injected: int = 0
    group_killed: bool = False
    sent: int = 0
    received: int = 0
    lost_with_killed: int = 0
    lost: int = 0
    corrupted: int = 0
    hangs: int = 0
    leaks: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    semaphores: int = 0
    """Names of semaphores of the standard library that its killed tracker left."""
    swept: int = 0
    seconds: float = 0.0
    stderr: str = ""

    @property
    def clean(self) -> bool:
        """Whether nothing happened that must not."""
        return not (self.lost or self.corrupted or self.hangs or self.leaks or self.errors)


class Watcher:
    """Plays runs, one after another.

    A context manager, which removes its folder. Orphans of its runs become
    children of this process.

    Parameters
    ----------
    run_seconds : float
        After how long a run counts as stuck.
    leak_seconds : float
        How long what is left at its end may take to go.
    """

    def __init__(self, run_seconds: float = 60.0, leak_seconds: float = 5.0) -> None:
        self._limits = (run_seconds, leak_seconds)
        self.folder = Path(tempfile.mkdtemp(prefix="faults-", dir=_SHARED_MEMORY))
        libc = ctypes.CDLL(None, use_errno=True)
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self._context = multiprocessing.get_context("fork")
        for name in (*_IMPORTED, *PLUGIN_MODULES):
            importlib.import_module(name)
        get_registry()
        self._directory = os.environ.get("SHMREDUCE_DIRECTORY")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        gc.unfreeze()
        if self._directory is None:
            del os.environ["SHMREDUCE_DIRECTORY"]
        else:
            os.environ["SHMREDUCE_DIRECTORY"] = self._directory
        shutil.rmtree(self.folder, ignore_errors=True)

    def run(self, plan: Plan) -> Outcome:
        """Play one run and count."""
        # What has to be imported is imported once, here.
        find_system(plan.system, plan.strategy)
        folder = Path(tempfile.mkdtemp(dir=self.folder))
        (folder / "segments").mkdir()
        names = set(_names(plan.system))
        os.environ["SHMREDUCE_DIRECTORY"] = str(folder / "segments")
        # What is there already is not to be looked through by every process.
        gc.collect()
        gc.freeze()
        run = _Run(plan, folder, self._context, *self._limits)
        run.watch()
        run.count()
        run.look_for_leaks(names)
        shutil.rmtree(folder, ignore_errors=True)
        return run.outcome


class _Run:
    def __init__(
        self, plan: Plan, folder: Path, context: Any, run_seconds: float, leak_seconds: float
    ) -> None:
        self._run_seconds = run_seconds
        self._leak_seconds = leak_seconds
        self.plan = plan
        self.folder = folder
        self.tally = Tally(folder / "tally")
        self.outcome = Outcome(
            plan.seed, plan.number, plan.system, plan.strategy, plan.method, plan.scenario
        )
        self._reader, self._writer = context.Pipe(duplex=False)
        self._reports = Reports(self._reader.fileno())
        self._process = context.Process(
            target=_begin, args=(plan, str(folder), self._writer, leak_seconds), daemon=False
        )
        self._session = -1
        self._began = time.monotonic()
        self._due: dict[int, float] = {}
        """When stopped processes go on, by pid."""
        self._wet: dict[int, Descriptor] = {}
        """Descriptors of the processes that are sent signals, by pid."""
        self._instants = [each for each in plan.strikes if not each.point]

    def watch(self) -> None:
        """Let it happen, and send what has to come from outside."""
        self._process.start()
        self._session = self._process.pid
        self._writer.close()
        deadline = self._began + self._run_seconds
        # Not by its sentinel, which processes that it leaves behind would keep open.
        while self._process.exitcode is None:
            time.sleep(_TICK)
            self._read_reports()
            self._strike()
            self._let_go_on()
            if time.monotonic() > deadline:
                self._end_hang()
        self._process.join()
        self.outcome.seconds = round(time.monotonic() - self._began, 3)
        code = self._process.exitcode
        self._process.close()
        self._wait_for_the_others()
        self._read_reports()
        self._reader.close()
        if code == -signal.SIGKILL:
            self.outcome.group_killed = True
        elif code != 0:
            self.outcome.errors.append(f"the leader ended with {code}")
        self.outcome.stderr = (self.folder / "stderr").read_text(errors="replace")[-6000:]

    def _strike(self) -> None:
        now = time.monotonic()
        begun = float(self.tally.begun[0]) or now
        for strike in list(self._instants):
            pid = int(self.tally.pids[strike.actor])
            since = self._began - strike.after if strike.after < 0 else begun + strike.after
            if now < since or not pid or (strike.after >= 0 and begun == now):
                continue
            self._instants.remove(strike)
            if strike.act == "kill group":
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._process.pid, signal.SIGKILL)
            elif strike.act == "kill":
                self.outcome.killed += self._signal(pid, signal.SIGKILL)
            else:
                self._due[pid] = now + strike.seconds
                self.outcome.stopped += self._signal(pid, signal.SIGSTOP)
        # Copies: who is counted writes meanwhile, and NumPy refuses to look at that.
        for index in self.tally.in_rain.copy().nonzero()[0]:
            pid = int(self.tally.pids[index])
            # Looked at again: the pid may be that of another who plays the part.
            if self.tally.in_rain[index]:
                self._rain_on(pid)

    def _signal(self, pid: int, number: signal.Signals) -> bool:
        """Signal a process of this run; return False if the pid is not one's any more.

        It may be that of a process of another run, which has it used again.
        """
        try:
            process = Descriptor(os.pidfd_open(pid))
            if os.getsid(pid) != self._session:
                return False
            # What was looked at, or it has ended since.
            signal.pidfd_send_signal(process.fileno(), number)
        except (ProcessLookupError, FileNotFoundError):
            # None has it any more, or a thread has (ENOENT, since Linux 6.16).
            return False
        return True

    def _rain_on(self, pid: int) -> None:
        # Not by the pid, which may be another's as soon as this one was killed.
        with contextlib.suppress(ProcessLookupError, FileNotFoundError):
            if pid not in self._wet:
                self._wet[pid] = Descriptor(os.pidfd_open(pid))
            signal.pidfd_send_signal(self._wet[pid].fileno(), signal.SIGUSR1)

    def _let_go_on(self) -> None:
        now = time.monotonic()
        for index in self.tally.stopped.copy().nonzero()[0]:
            self._due[int(self.tally.stopped[index])] = now + float(self.tally.seconds[index])
            self.tally.stopped[index] = 0
            self.outcome.stopped += 1
        for pid, when in list(self._due.items()):
            if now >= when:
                del self._due[pid]
                self._signal(pid, signal.SIGCONT)

    def _end_hang(self) -> None:
        self.outcome.hangs += 1
        with contextlib.suppress(ProcessLookupError):
            # They have faulthandler print where they are.
            for each in self._members():
                os.kill(each, signal.SIGCONT)
                os.kill(each, signal.SIGABRT)
        self._process.join(1.0)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _members(self) -> list[int]:
        """Return the living processes of the run's session, zombies left out."""
        found = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            with contextlib.suppress(OSError):
                fields = (entry / "stat").read_bytes().rpartition(b")")[2].split()
                if int(fields[3]) == self._session and fields[0] not in (b"Z", b"X"):
                    found.append(int(entry.name))
        return found

    def _wait_for_the_others(self) -> None:
        """Wait until no process of the run is left; name those that stay."""
        end = time.monotonic() + self._leak_seconds
        while True:
            self._let_go_on()
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    continue
            left = self._members()
            if not left:
                return
            if time.monotonic() > end:
                break
            time.sleep(_TICK)
        for pid in left:
            with contextlib.suppress(OSError):
                command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")
                self.outcome.leaks.append(f"process {pid}: {command.decode()[-200:]}")
                # Where it is goes to the run's standard error.
                os.kill(pid, signal.SIGABRT)
        time.sleep(_LAST_WORDS_SECONDS)
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _read_reports(self) -> None:
        for told in self._reports.read():
            self._note(told)

    def _note(self, told: dict[str, Any]) -> None:
        what = told["what"]
        if what == "hang":
            self.outcome.hangs += 1
            self.outcome.errors.append(json.dumps(told))
        elif what == "left":
            self.outcome.leaks.append(json.dumps(told))
        elif what == "mismatch":
            self.outcome.corrupted += 1
            self.outcome.errors.append(json.dumps(told))
        elif what not in _PASSING:
            self.outcome.errors.append(json.dumps(told))

    # Afterwards

    def count(self) -> None:
        """Say of each message what became of it."""
        tally, outcome, plan = self.tally, self.outcome, self.plan
        outcome.processes = int((tally.pids != 0).sum())
        outcome.errors_injected = int(tally.faults.sum())
        outcome.killed = max(outcome.killed, int((tally.status == KILLED).sum()))
        channels = make_channels(plan, None)
        everything = outcome.group_killed
        for index, link in enumerate(channels.links):
            excused = everything or self._may_lose(link)
            self._count_row(index, link.kind, excused=excused)
        rows = len(channels.links)
        a_death = everything or bool((tally.status == KILLED).any()) or bool(outcome.killed)
        for index in range(rows, rows + plan.actors):
            # Through queues with several readers, pools and managers.
            in_pool = plan.scenario in ("pool", "executor") and tally.named[index] > 0
            self._count_row(index, plan.scenario, excused=a_death or in_pool or bool(plan.leaver))

    def _may_lose(self, link: CountedLink) -> bool:
        """Whether what was sent through a link may be lost with the ends of processes."""
        is_killed = self.tally.status == KILLED
        if is_killed[link.receiver] or _leaves(self.plan, link.receiver):
            return True
        if not is_killed[link.sender]:
            return False
        # What was sent through our own pipes is there, whoever dies: if there was
        # a descriptor free on both sides for what brings it along, and the receiver
        # could lock it at the first try. Later it would have to ask the sender.
        return (
            link.kind not in ("own pipe", "own simple queue")
            or any(_lacks_descriptors(self.plan, actor) for actor in (link.sender, link.receiver))
            or _fails(self.plan, link.receiver, errno.ENOLCK)
        )

    def _count_row(self, index: int, kind: str, *, excused: bool) -> None:
        row = self.tally.row(index)
        outcome = self.outcome
        outcome.sent += row.sent
        outcome.received += row.received
        outcome.corrupted += row.corrupted
        if excused:
            outcome.lost_with_killed += row.missing
        else:
            outcome.lost += row.missing
            if row.missing:
                outcome.errors.append(f"{kind} {index}: {row}")
        if row.unwanted:
            outcome.errors.append(f"{kind} {index}: {row.unwanted} failed sends arrived")

    def look_for_leaks(self, names: set[str]) -> None:
        """Count what no process has in its hands any more."""
        end = time.monotonic() + self._leak_seconds
        strategy = find_strategy("file_system")
        while True:
            # As the next program that uses the strategy does by itself.
            self.outcome.swept += len(sweep(strategy))
            left = [each.name for each in (self.folder / "segments").iterdir()]
            left += sorted(
                each for each in set(_names(self.plan.system)) - names if each[:4] != "sem."
            )
            if not left:
                break
            if time.monotonic() > end:
                break
            time.sleep(0.01)
        self.outcome.leaks += [f"file {name}" for name in left]
        for name in set(_names(self.plan.system)) - names:
            self.outcome.semaphores += name.startswith("sem.")
            (_SHARED_MEMORY / name).unlink(missing_ok=True)


def _leaves(plan: Plan, actor: int) -> bool:
    return bool(plan.leaver) and plan.leaver == actor


def _lacks_descriptors(plan: Plan, actor: int) -> bool:
    return actor in plan.starved or _fails(plan, actor, errno.EMFILE, errno.ENFILE)


def _fails(plan: Plan, actor: int, *numbers: int) -> bool:
    """Whether calls of an actor fail with one of these numbers of errors."""
    return any(each.actor == actor and each.errno in numbers for each in plan.injections)


def _names(system: str) -> list[str]:
    """Return the names in /dev/shm that may be a run's."""
    prefixes = [_NAMES[system]] if system in _NAMES else []
    if PRIVATE_PIDS in os.environ:
        # Nobody else is here. Otherwise these may be anybody's.
        prefixes += ["sem.mp-", "shmreduce-"]
    return [
        each.name for each in _SHARED_MEMORY.iterdir() if each.name.startswith(tuple(prefixes))
    ]


def _begin(plan: Plan, folder: str, report: Any, leak_seconds: float) -> None:
    """Be the leader, in a session of its own."""
    os.setsid()
    errors = os.open(f"{folder}/stderr", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(errors, 2)
    os.close(errors)
    lead(plan, folder, report, leak_seconds)
