"""What happens in one run: everything that is chosen, chosen from a seed."""

from __future__ import annotations

import errno
import random
from dataclasses import dataclass, replace

from tests.faults.points import GROUPS

__all__ = ["CALLS", "OWN", "STOCK", "SYSTEMS", "Injection", "Plan", "Strike", "make_plan"]

SYSTEMS: dict[str, tuple[str, ...]] = {
    "shmreduce": ("file_descriptor", "file_system"),
    "torch": ("file_descriptor", "file_system"),
    "shared_memory": ("named",),
}
"""What can be put under test, and the strategies of each."""

STOCK = ("pipe", "simple queue", "queue")
OWN = ("own pipe", "own simple queue", "own queue")

CALLS: dict[str, tuple[int, ...]] = {
    "fallocate": (errno.ENOSPC, errno.ENOMEM, errno.EFBIG),
    "memfd_create": (errno.EMFILE, errno.ENFILE, errno.ENOMEM),
    "open": (errno.EMFILE, errno.ENFILE, errno.ENOMEM),
    "ftruncate": (errno.ENOSPC, errno.EFBIG),
    "mmap": (errno.ENOMEM,),
    "sendmsg": (errno.ENOBUFS, errno.ENOMEM, errno.ETOOMANYREFS),
    "recvmsg": (errno.ENOMEM, errno.ENOBUFS),
    "fcntl": (errno.ENOLCK,),
}
"""System calls that are made to fail, and how."""


@dataclass(frozen=True)
class Strike:
    """A signal for one process.

    Parameters
    ----------
    actor : int
        Which.
    act : {"kill", "stop", "kill group"}
        SIGKILL, SIGSTOP for a while, or SIGKILL to everybody of the run.
    point : str
        Where, see :mod:`tests.faults.points`; empty for an instant.
    after : float
        How many instructions inside the point; or seconds from when all
        actors were started, negative ones from the start of the first.
    seconds : float
        How long a stopped process stays so.
    """

    actor: int
    act: str
    point: str = ""
    after: float = 0.0
    seconds: float = 0.0


@dataclass(frozen=True)
class Injection:
    """A system call that fails in one process, at a share of its calls."""

    actor: int
    call: str
    errno: int
    share: float


@dataclass(frozen=True)
class Plan:
    """One run.

    Parameters
    ----------
    seed, number : int
        Together they replay it.
    system, strategy, method : str
        What is under test, its sharing strategy, and the start method.
    scenario : {"mesh", "pool", "executor", "manager"}
        Who talks to whom.
    actors : int
        Processes, the one that starts the others included.
    seconds : float
        For how long they send.
    companions : int
        Threads of each process besides its own.
    channels : tuple of str
        Kinds of channels to choose from.
    common : bool
        Whether there is a queue that everybody writes and reads.
    strikes : tuple of Strike
    injections : tuple of Injection
    starved : tuple of int
        Actors that have no free descriptor for a while.
    storms : tuple of int
        Actors that get a signal every half millisecond.
    jumps : tuple of int
        Actors whose clock jumps by hours.
    leaver : int
        Actor that ends without reading what others sent; 0 for none.
    idle : bool
        Whether free memory is given back at once, so that heaps shrink.
    reuse_pids : bool
        Whether pids of killed processes are given to others at once.
    long_way : bool
        Whether lease transitions go the long way, where nothing is compiled.
    broken : str
        A guard that is taken away on purpose, see :mod:`tests.faults.breaking`.
    """

    seed: int = 0
    number: int = 0
    system: str = "shmreduce"
    strategy: str = "file_descriptor"
    method: str = "fork"
    scenario: str = "mesh"
    actors: int = 3
    seconds: float = 0.15
    companions: int = 0
    channels: tuple[str, ...] = (*STOCK, *OWN)
    common: bool = False
    strikes: tuple[Strike, ...] = ()
    injections: tuple[Injection, ...] = ()
    starved: tuple[int, ...] = ()
    storms: tuple[int, ...] = ()
    jumps: tuple[int, ...] = ()
    leaver: int = 0
    idle: bool = False
    reuse_pids: bool = False
    long_way: bool = False
    broken: str = ""

    @property
    def key(self) -> str:
        """What the choices inside the run begin with."""
        return f"{self.seed}/{self.number}/{self.system}/{self.strategy}"


def make_plan(
    seed: int, number: int, system: str = "shmreduce", strategy: str = "file_descriptor"
) -> Plan:
    """Choose what happens in one run."""
    chooser = random.Random(f"{seed}/{number}/{system}/{strategy}")
    is_ours = system == "shmreduce"
    # Importing torch in each spawned process would take longer than the rest of a run.
    methods = ("fork", "forkserver", "spawn") if system != "torch" else ("fork",)
    method = chooser.choices(methods, (84, 8, 8)[: len(methods)])[0]
    scenarios = ("mesh", "pool", "executor", "manager") if is_ours else ("mesh", "pool")
    scenario = chooser.choices(scenarios, (80, 8, 6, 6)[: len(scenarios)])[0]
    most = (2, 3, 3, 4, 4, 5, 6, 8, 12, 16) if method == "fork" else (2, 2, 3)
    actors = chooser.choice(most) if scenario == "mesh" else 3
    plan = Plan(
        seed,
        number,
        system,
        strategy,
        method,
        scenario,
        actors,
        seconds=0.12 if method == "fork" else 0.2,
        companions=chooser.choice((0, 0, 1, 2)) if is_ours else 0,
        channels=(*STOCK, *OWN) if is_ours else STOCK,
        common=is_ours and chooser.random() < 0.3,
        leaver=chooser.randrange(1, actors) if is_ours and chooser.random() < 0.15 else 0,
        idle=chooser.random() < 0.4,
    )
    plan = _with_faults(plan, chooser)
    # Calls that fail, and points to be struck at, are on the long way.
    return replace(plan, long_way=bool(plan.injections) or chooser.random() < 0.5)


def _with_faults(plan: Plan, chooser: random.Random) -> Plan:
    """Add one to three kinds of faults."""
    # The process that starts the others is never the only one to be killed:
    # it counts what is left.
    others = range(1, plan.actors)
    faults = ["kill", "kill", "kill group", "stop", "storm", "jump", "reuse pids"]
    if plan.system == "shmreduce":
        faults += ["kill at a point"] * 4 + ["inject"] * 2 + ["starve", "stop at a point"]
    for fault in dict.fromkeys(chooser.choices(faults, k=chooser.choice((1, 1, 2, 3)))):
        if fault in ("storm", "jump", "starve"):
            names = {"storm": "storms", "jump": "jumps", "starve": "starved"}
            chosen = tuple(chooser.sample(range(plan.actors), chooser.randint(1, 2)))
            plan = replace(plan, **{names[fault]: chosen})  # type: ignore[arg-type]
        elif fault == "inject":
            plan = replace(plan, injections=_injections(plan, chooser))
        else:
            strikes = _strikes(fault, plan, others, chooser)
            plan = replace(
                plan,
                strikes=plan.strikes + strikes,
                reuse_pids=plan.reuse_pids or fault == "reuse pids",
            )
    return plan


def _strikes(fault: str, plan: Plan, others: range, chooser: random.Random) -> tuple[Strike, ...]:
    count = min(len(others), chooser.choice((1, 1, 2, 3)))
    victims = chooser.sample(others, count)
    if fault == "kill group":
        return (Strike(0, "kill group", after=_instant(chooser)),)
    if fault == "stop":
        return (Strike(victims[0], "stop", after=_instant(chooser), seconds=_pause(chooser)),)
    if fault.endswith("at a point"):
        act = "stop" if fault.startswith("stop") else "kill"
        if act == "kill" and chooser.random() < 0.15:
            act = "kill group"
        groups = list(GROUPS) if plan.scenario in ("pool", "executor") else list(GROUPS)[:-1]
        found = []
        for victim in victims[: 1 if act == "stop" else None]:
            point = chooser.choice(GROUPS[chooser.choice(groups)])
            after = int(10 ** chooser.uniform(0, 3.5))
            found.append(Strike(victim, act, point, after, _pause(chooser)))
        return tuple(found)
    return tuple(Strike(victim, "kill", after=_instant(chooser)) for victim in victims)


def _instant(chooser: random.Random) -> float:
    early = chooser.random() < 0.15
    return -chooser.uniform(0.01, 0.1) if early else chooser.uniform(0.0, 0.2)


def _pause(chooser: random.Random) -> float:
    """Return for how long to stop a process: rarely for seconds, since runs are many."""
    return chooser.choices((0.15, 0.6, 2.0), (80, 15, 5))[0]


def _injections(plan: Plan, chooser: random.Random) -> tuple[Injection, ...]:
    found = []
    for actor in chooser.sample(range(plan.actors), chooser.randint(1, min(3, plan.actors))):
        call = chooser.choice(list(CALLS))
        # Who waits for a lock waits until there is one.
        share = chooser.choice((0.02, 0.1, 0.3, 0.5 if call == "fcntl" else 1.0))
        found.append(Injection(actor, call, chooser.choice(CALLS[call]), share))
    return tuple(found)
