"""Runs the stress: ``python -m tests.stress.run --seed 1 --seconds 60``.

The process that runs it takes part in every round as the actor that is never
killed, so its memory is the one that is reused most. It has a pool, and lends its
workers the memory of the results that it has dropped. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import collections
import gc
import multiprocessing
import os
import random
import signal
import sys
import time
import traceback
from typing import TYPE_CHECKING, Any

import shmreduce
from shmreduce.memory import lending, runtime
from shmreduce.memory.inspection import list_segments, process_state
from shmreduce.memory.lease_slots import MESSAGE, NONCE_MASK
from tests.stress import breaking
from tests.stress.actor import INLINE_LIMIT, Actor, Part, end_by_alarm, play
from tests.stress.links import KINDS, WEIGHTS, make_link
from tests.stress.pooled import LENT_FROM, PoolUser, make_pool
from tests.stress.reports import Reports, leave

if TYPE_CHECKING:
    from shmreduce.pool import Pool

__all__ = ["main"]

_ACTORS = 4
_PATIENCE = 20.0
_BAD = ("mismatch", "lost", "error", "silent", "left")


class Stress:
    """One run.

    Parameters
    ----------
    seed : int
        Of everything that is chosen.
    strategy, method : str
        Sharing strategy and start method.
    """

    def __init__(self, seed: int, strategy: str, method: str) -> None:
        self.seed = seed
        self.strategy = strategy
        self.context: Any = multiprocessing.get_context(method)
        self.seconds = 1.2 if method == "fork" else 3.0
        self.bad: list[dict[str, Any]] = []
        self.counts: collections.Counter[str] = collections.Counter()
        self.pids: set[int] = {os.getpid()}
        self.killed: set[int] = set()
        self.producers: list[dict[str, Any]] = []
        # Two ends with names, so that spawned children can have them.
        self._reader, self._writer = self.context.Pipe(duplex=False)
        self._reports = Reports(self._reader.fileno())
        self._forks = method == "fork"
        self._began = time.monotonic()
        self._pool: Pool | None = None

    def _get_pool(self) -> Pool:
        """Return the hub's pool: one for each round where its workers have what the hub had."""
        if self._pool is None:
            self._pool = make_pool(self.context.get_start_method())
        self.pids.update(each.pid for each in self._pool._pool if each.pid is not None)
        return self._pool

    def close(self) -> None:
        """End the pool."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.terminate()
            pool.join()

    def end_actors(self) -> None:
        """Kill those of a round that broke off: what they still have is not left behind."""
        actors = multiprocessing.active_children()
        if self._pool is not None:
            # It would start workers in the place of those that are killed.
            self._pool.terminate()
        for process in actors:
            process.kill()
        for process in actors:
            process.join(_PATIENCE)

    def round(self, number: int) -> None:
        """Play one round and look at what it left."""
        chooser = random.Random(f"{self.seed}/{number}")
        parts = self._make_parts(chooser, number)
        processes: dict[int, Any] = {}
        news: dict[int, Any] = {}
        for part in parts[1:]:
            ear, news[part.index] = self.context.Pipe(duplex=False)
            process = self.context.Process(
                target=play, args=(part, ear, self._writer, self.strategy), daemon=True
            )
            process.start()
            self.pids.add(process.pid)
            processes[part.index] = process
            ear.close()
        victims = chooser.sample(range(1, _ACTORS), chooser.choice((0, 1, 1, 2)))
        deaths = [(chooser.uniform(0.05, self.seconds), victim) for victim in victims]
        pool = self._get_pool()
        start = time.monotonic()
        hub = PoolUser(parts[0], None, self._writer.fileno(), pool=pool)
        announced: set[int] = set()

        def each_turn() -> None:
            for moment, victim in list(deaths):
                if time.monotonic() - start >= moment:
                    deaths.remove((moment, victim))
                    processes[victim].kill()
                    self.killed.add(processes[victim].pid)
                    self.counts["kills"] += 1
            for index, process in processes.items():
                if index not in announced and process.exitcode is not None:
                    announced.add(index)
                    self._announce(index, process, parts[index], news, hub)
            self.read_reports()

        hub.play(each_turn)
        end = time.monotonic() + _PATIENCE
        while len(announced) < len(processes) and time.monotonic() < end:
            each_turn()
            time.sleep(0.005)
        for process in processes.values():
            process.join(1.0)
            if process.exitcode is None:
                self.bad.append({"what": "left", "hangs": process.pid, "round": number})
                process.kill()
                process.join(_PATIENCE)
            process.close()
        if self._forks:
            self.close()
        self.read_reports()
        self.counts["rounds"] += 1
        self._look_at_hub(number)

    def _announce(
        self, index: int, process: Any, part: Part, news: dict[int, Any], hub: Actor
    ) -> None:
        self.read_reports()
        if process.exitcode == -signal.SIGKILL:
            self.killed.add(process.pid)
        elif process.exitcode != 0:
            self.bad.append({"what": "error", "exit": process.exitcode, "actor": index})
        killed = process.exitcode != 0
        if not killed and not part.leaves_early:
            # It has said goodbye to everybody itself.
            return
        hub.learn(index, killed)
        for each in news.values():
            try:
                each.send((index, killed))
            except BrokenPipeError:
                continue

    def _make_parts(self, chooser: random.Random, number: int) -> list[Part]:
        early = chooser.randrange(1, _ACTORS) if chooser.random() < 0.5 else 0
        suicidal = chooser.randrange(1, _ACTORS) if chooser.random() < 0.5 else 0
        parts = [
            Part(
                index,
                f"{self.seed}/{number}/{index}",
                self.seconds * (0.4 if index == early and early else 1.0),
                leaves_early=bool(early) and index == early,
                kills_itself=bool(suicidal) and index == suicidal,
            )
            for index in range(_ACTORS)
        ]
        for sender in parts:
            for receiver in parts:
                if sender is not receiver:
                    kind = chooser.choices(list(KINDS), WEIGHTS)[0]
                    link = make_link(kind, self.context)
                    sender.outgoing[receiver.index] = link
                    receiver.incoming[sender.index] = link
        return parts

    def read_reports(self) -> None:
        """Take in what actors have told so far."""
        for told in self._reports.read():
            self._note(told)

    def _note(self, told: dict[str, Any]) -> None:
        what = told["what"]
        self.counts[what] += 1
        self.pids.add(told["pid"])
        if what in _BAD:
            self.bad.append(told)
        elif what == "done":
            self.counts.update(told["counts"])
        elif what == "producer died":
            self.producers.append(told)

    def _look_at_hub(self, number: int) -> None:
        """Nothing may be alive here after a round but what dead readers never read."""
        end = time.monotonic() + 5.0
        while True:
            gc.collect()
            state = process_state()
            held = _held_elsewhere()
            if not state.arrays and not state.waiting and not held:
                return
            if time.monotonic() > end:
                facts = {"round": number, "state": repr(state), "held": held}
                self.bad.append({"what": "left", **facts})
                return
            time.sleep(0.01)

    def result(self) -> dict[str, Any]:
        """Return the report, after looking for what is left of others."""
        for told in self.producers:
            if told["producer"] not in self.killed and not self._was_child(told["producer"]):
                self.bad.append(told)
        end = time.monotonic() + _PATIENCE
        # Forked children of killed actors live on for a moment.
        while (left := self._left()) and time.monotonic() < end:
            time.sleep(0.01)
        self.bad.extend({"what": "left", "segment": each} for each in left)
        return {
            "seed": self.seed,
            "bad": self.bad[:20],
            "found": dict(collections.Counter(each["what"] for each in self.bad)),
            "counts": dict(self.counts),
            "pids": sorted(self.pids),
        }

    def _left(self) -> list[str]:
        """Return the segments of dead actors that somebody else has open."""
        # Not those of before: another process may have had an actor's number then.
        seconds = time.monotonic() - self._began
        return [
            repr(state)
            for state in list_segments()
            if state.owner in self.pids
            and state.age < seconds
            and state.owner != os.getpid()
            and not state.owner_alive
            and not set(state.holders) <= {os.getpid()}
        ]

    def _was_child(self, pid: int) -> bool:
        # Forked children of actors kill themselves; only actors report a birth.
        return pid not in self.pids


def _held_elsewhere() -> list[str]:
    """Return this process's blocks that are out for anything but an unread message.

    Messages on their way to a killed reader, or lost with a killed sender's
    pipe, keep their blocks for as long as this process lives.
    """
    return [
        f"{segment} block {block} leases {list(map(hex, segment.leases(block)))}"
        for heap in runtime.current().heaps
        for segment in heap.segments
        for block in list(segment.out)
        if not _is_unread(segment.leases(block))
    ]


def _is_unread(words: list[int]) -> bool:
    return bool(words) and all(word & ~NONCE_MASK == MESSAGE for word in words)


def main() -> int:
    """Run, print the report, and say by the exit code whether all was well."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--strategy", default="file_descriptor")
    parser.add_argument("--method", default="fork")
    parser.add_argument("--until-bad", action="store_true")
    options = parser.parse_args()
    end_by_alarm(options.seconds + 60.0)
    breaking.apply_break()
    shmreduce.install(strategy=options.strategy, inline_limit=INLINE_LIMIT)
    patch: Any = lending
    patch._SMALLEST = LENT_FROM
    stress = Stress(options.seed, options.strategy, options.method)
    end = time.monotonic() + options.seconds
    number = 0
    while time.monotonic() < end and not (options.until_bad and stress.bad):
        try:
            stress.round(number)
        except Exception:
            stress.bad.append({"what": "error", "error": traceback.format_exc()[-2000:]})
            stress.end_actors()
            break
        number += 1
    if not stress.bad:
        stress.close()
    return leave(stress.result())


if __name__ == "__main__":
    sys.exit(main())
