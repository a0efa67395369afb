"""Pools, executors and managers under faults: one process asks, the others do and die."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import time
import traceback
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.faults.actor import prepare
from tests.faults.systems import find_system
from tests.faults.tally import CORRUPTED, ENDED, INTACT, KILLED, MESSAGES, SENT, TRYING, Tally
from tests.stress.pattern import complaint, fill

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.faults.leader import Leader
    from tests.faults.plan import Plan

__all__ = ["play_executor", "play_manager", "play_pool"]

_PATIENCE = 15.0
_MOST_WAITING = 6
_WORDS = (300, 2000, 40_000, 140_000)


def _enlist(plan: Plan, folder: str) -> None:
    """Get a worker ready: the first ones are those that faults are meant for."""
    for index in range(1, 32):
        with contextlib.suppress(FileExistsError):
            os.close(os.open(f"{folder}/worker-{index}", os.O_CREAT | os.O_EXCL))
            prepare(plan, index, folder)
            return


def _answer(plan: Plan, what: Any, seed: int) -> tuple[str | None, Any]:
    """Check an array in a worker; return what is wrong, and another array."""
    system = find_system(plan.system, plan.strategy)
    array = system.incoming(what)
    wrong = complaint(array, seed)
    answer = np.empty(len(array), np.uint64)
    fill(answer, seed + 1)
    return wrong, system.outgoing(answer)


def _ask(
    leader: Leader,
    submit: Callable[..., Any],
    result: Callable[[Any], Any],
    timeouts: tuple[type[Exception], ...],
) -> None:
    """Have arrays answered for a while, some at a time."""
    plan, tally = leader.plan, leader.tally
    chooser = random.Random(f"{plan.key}/tasks")
    end = time.monotonic() + plan.seconds + 0.1
    waiting: list[tuple[int, int, Any]] = []
    number = 0
    tally.begun[0] = time.monotonic()
    while time.monotonic() < end or waiting:
        while time.monotonic() < end and len(waiting) < _MOST_WAITING and number < MESSAGES:
            array = np.empty(chooser.choice(_WORDS), np.uint64)
            seed = chooser.getrandbits(63)
            fill(array, seed)
            tally.sent[0, number] = TRYING
            asked = submit(_answer, plan, leader.system.outgoing(array), seed)
            tally.sent[0, number] = SENT
            waiting.append((number, seed, asked))
            number += 1
        if not waiting:
            return
        which, seed, asked = waiting.pop(0)
        try:
            wrong, answer = result(asked)
            array = leader.system.incoming(answer)
        except timeouts:
            leader.tell("hang", index=which)
            return
        except Exception as error:
            # A worker was killed: this call says so, others go on.
            tally.named[0] += 1
            leader.note_named(error)
            continue
        wrong = wrong or complaint(array, seed + 1)
        tally.got[0, which] = CORRUPTED if wrong else INTACT
        if wrong:
            leader.tell("mismatch", when="in a pool", kind="", wrong=wrong, depth=0)


def play_pool(leader: Leader) -> None:
    """Ask a Pool."""
    plan = leader.plan
    pool = leader.context.Pool(plan.actors - 1, _enlist, (plan, leader.folder))
    try:
        _ask(
            leader,
            lambda function, *arguments: pool.apply_async(function, arguments),
            lambda asked: asked.get(_PATIENCE),
            (multiprocessing.TimeoutError,),
        )
    finally:
        pool.terminate()
        pool.join()


def play_executor(leader: Leader) -> None:
    """Ask an executor."""
    import shmreduce

    plan = leader.plan
    executor = shmreduce.ProcessPoolExecutor(
        plan.actors - 1,
        mp_context=leader.context,
        initializer=_enlist,
        initargs=(plan, leader.folder),
    )

    def result(asked: Future[Any]) -> Any:
        return asked.result(_PATIENCE)

    try:
        _ask(leader, executor.submit, result, (FutureTimeoutError,))
    finally:
        executor.shutdown(wait=True, cancel_futures=True)


def play_manager(leader: Leader) -> None:
    """Let processes keep arrays in a manager, which may be killed like everybody."""
    plan = leader.plan
    try:
        manager = leader.context.Manager()
    except EOFError:
        # Killed as it began.
        return
    server = manager._process
    leader.tally.enter(plan.actors, server.pid)
    try:
        table = manager.dict()
    except (OSError, EOFError):
        table = None
    if table is not None:
        for index in range(1, plan.actors):
            leader.start(_keep, plan, index, leader.folder, table, leader.report)
        leader.tally.begun[0] = time.monotonic()
        leader.wait()
    del table
    manager.shutdown()
    if server.exitcode is None:
        leader.tell("hang", process=server.pid)
        server.kill()


def _keep(plan: Plan, index: int, folder: str, table: Any, report: Any) -> None:
    """Put arrays into a manager's dictionary, and look at one's own and the others'."""
    tally = prepare(plan, index, folder)
    chooser = random.Random(f"{plan.key}/{index}")
    end = time.monotonic() + plan.seconds
    number = 0
    try:
        while time.monotonic() < end and number < MESSAGES:
            array = np.empty(chooser.choice(_WORDS), np.uint64)
            seed = chooser.getrandbits(63)
            fill(array, seed)
            tally.sent[index, number] = TRYING
            table[index] = (array, seed)
            tally.sent[index, number] = SENT
            mine, its_seed = table[index]
            wrong = complaint(mine, its_seed)
            tally.got[index, number] = CORRUPTED if wrong or its_seed != seed else INTACT
            number += 1
            other, its_seed = table.get(chooser.randrange(1, plan.actors), (array, seed))
            wrong = wrong or complaint(other, its_seed)
            if wrong:
                os.write(report.fileno(), _line("mismatch", index, wrong))
    except (OSError, EOFError):
        # The manager was killed, or the other whose array it was.
        tally.named[index] += 1
        if tally.status[plan.actors] < ENDED and _is_there(tally, plan.actors):
            os.write(report.fileno(), _line("error", index, traceback.format_exc()[-1500:]))


def _is_there(tally: Tally, index: int) -> bool:
    if tally.status[index] == KILLED:
        return False
    stat = Path(f"/proc/{tally.pids[index]}/stat")
    with contextlib.suppress(OSError):
        return stat.read_bytes().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    return False


def _line(what: str, index: int, text: str) -> bytes:
    import json

    told = {"what": what, "actor": index, "pid": os.getpid(), "error": text, "wrong": text}
    return json.dumps(told).encode()[:4000] + b"\n"
