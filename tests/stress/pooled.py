"""The actor that has a pool, whose large results lie where dropped ones did."""

from __future__ import annotations

import os
import random
import signal
import time
from typing import TYPE_CHECKING, Any

import numpy as np

import shmreduce
from shmreduce.errors import WorkerDied
from tests.stress.actor import Actor
from tests.stress.pattern import complaint, fill

if TYPE_CHECKING:
    from collections.abc import Callable

    from shmreduce.pool import Pool

__all__ = ["LENT_FROM", "PoolUser", "make_pool"]

LENT_FROM = 64 << 10
"""Bytes of the blocks that are lent in a stress."""
_WORDS = (9000, 33_000, 33_000, 140_000)
_MOST_ORDERS = 4
_MOST_KEPT = 3
_MISMATCH_EXIT = 33
_PATIENCE = 30.0

_kept: list[tuple[Any, int]] = []
"""What this worker has returned, and goes on to see."""
_children: list[int] = []
"""Children of this worker that looked at what it was about to return."""


def make_pool(method: str) -> Pool:
    """Return a pool for the actor; its workers leave after a while."""
    pool: Pool = shmreduce.get_context(method).Pool(2, maxtasksperchild=40)
    return pool


def made(seeds: list[int], words: int, choice: int) -> tuple[list[Any], list[str]]:
    """Return arrays, and what was wrong with those of before."""
    wrong = [found for array, seed in _kept if (found := complaint(array, seed)) is not None]
    wrong += _ended_children()
    arrays = []
    for seed in seeds:
        arrays.append(np.empty(words, np.uint64))
        fill(arrays[-1], seed)
    chance = random.Random(choice)
    if chance.random() < 0.2:
        _kept.append((arrays[0], seeds[0]))
        del _kept[:-_MOST_KEPT]
    if chance.random() < 0.1:
        _fork_and_look(arrays, seeds, chance.uniform(0.0, 0.1))
    return arrays, wrong


def _fork_and_look(arrays: list[Any], seeds: list[int], seconds: float) -> None:
    pid = os.fork()
    if pid:
        _children.append(pid)
        return
    end = time.monotonic() + seconds
    code = 0
    while time.monotonic() < end and not code:
        for array, seed in (*zip(arrays, seeds, strict=True), *_kept):
            if complaint(array, seed) is not None:
                code = _MISMATCH_EXIT
    os._exit(code)


def _ended_children() -> list[str]:
    wrong = []
    for pid in list(_children):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            _children.remove(pid)
            if os.waitstatus_to_exitcode(status) == _MISMATCH_EXIT:
                wrong.append("in a forked child of a worker")
    return wrong


class PoolUser(Actor):
    """An actor that has arrays made by the workers of a pool, too.

    It does with them as with those that it receives.
    """

    def __init__(self, *arguments: Any, pool: Pool) -> None:
        super().__init__(*arguments)
        self.pool = pool
        self.orders: list[tuple[list[int], Any]] = []
        self._is_over = False
        self._places: set[int] = set()
        # Only a block of the very size is filled again.
        self._words = self.random.choice(_WORDS)

    def actions(self) -> list[tuple[Callable[[], None], int]]:
        return [
            *super().actions(),
            (self.order, 30),
            (self.fetch, 30),
            (self.drop_made, 8),
            (self.kill_a_worker, 1),
        ]

    def order(self) -> None:
        """Have workers make some arrays."""
        while not self._is_over and len(self.orders) < _MOST_ORDERS:
            seeds = [self.random.getrandbits(64) for _ in range(self.random.choice((1, 1, 2)))]
            arguments = (seeds, self._words, self.random.getrandbits(32))
            self.orders.append((seeds, self.pool.apply_async(made, arguments)))

    def fetch(self) -> None:
        """Take what has been made."""
        for order in list(self.orders):
            seeds, result = order
            if result.ready():
                self.orders.remove(order)
                self._take_made(seeds, result)

    def _take_made(self, seeds: list[int], result: Any) -> None:
        try:
            arrays, wrong = result.get()
        except WorkerDied:
            self.counts["workers died"] += 1
            return
        for each in wrong:
            self.tell("mismatch", when="in a worker", kind="value", wrong=each, depth=self.depth)
        self.counts["made"] += len(arrays)
        for array in arrays:
            address = array.ctypes.data
            self.counts["made where others were"] += address in self._places
            self._places.add(address)
        # Popped: nobody else is to have them.
        items = [(arrays.pop(), seed, "value") for seed in reversed(seeds)]
        del array
        while items and self.random.random() < 0.7:
            peer = self.find_room(own=True)
            if peer is None:
                break
            # While a worker already makes the next ones.
            self.order()
            self.part.outgoing[peer].pass_on([("arrays", [items.pop()])])
            self.sent[peer] += 1
            self.counts["passed on"] += 1
        self.take(items)

    def drop_made(self) -> None:
        """Drop half of what is held, so that there is something to be filled again."""
        for _ in range(len(self.held) // 2):
            self.drop()

    def kill_a_worker(self) -> None:
        """Kill a worker, sometimes."""
        pids = [process.pid for process in self.pool._pool if process.pid is not None]
        if pids and self.random.random() < 0.2:
            try:
                os.kill(self.random.choice(pids), signal.SIGKILL)
            except ProcessLookupError:
                # It has left.
                return

    def be_child(self, *arguments: Any) -> None:
        # The pool is the parent's.
        self.orders.clear()
        super().be_child(*arguments)

    def finish(self, each_turn: Callable[[], None] = lambda: None) -> None:
        self._is_over = True
        super().finish(each_turn)
        end = time.monotonic() + _PATIENCE
        while self.orders and time.monotonic() < end:
            self.fetch()
            each_turn()
            time.sleep(0.001)
        if self.orders:
            self.tell("silent", orders=len(self.orders))
        self.check_everything("after the last order")
        self.held.clear()
