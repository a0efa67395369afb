"""The processes that the stress of threads has to do with, and what they have in common."""

from __future__ import annotations

import collections
import os
import random
import signal
import time
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

import shmreduce
from shmreduce.memory import lending
from tests.stress.actor import INLINE_LIMIT, end_by_alarm
from tests.stress.pattern import complaint, fill
from tests.stress.pooled import LENT_FROM

if TYPE_CHECKING:
    from tests.stress.links import Link

__all__ = ["END", "MISMATCH_EXIT", "Item", "echo", "join_in", "made", "make", "produce", "shared"]

END = "end"
"""The last message of a link."""
MISMATCH_EXIT = 33
_WORDS = (600, 600, 2000, 9000, 33_000, 40_000)
"""The largest are passed on by private pages, and lent."""
_MODES: tuple[Literal["rw", "ro", "cow"], ...] = ("rw", "ro", "cow")
_SECONDS = 60.0
"""For how long a producer lives at most."""
_MOST_SENT = 12
_MOST_KEPT = 3


class Item(NamedTuple):
    """An array on its way, and what it must look like."""

    array: Any
    seed: int
    own: bool
    """Whether nobody else sees what its receiver writes to it."""


def join_in(strategy: str, **settings: Any) -> None:
    """Let this process send arrays as all of them do."""
    shmreduce.install(strategy=strategy, inline_limit=INLINE_LIMIT, **settings)
    patch: Any = lending
    patch._SMALLEST = LENT_FROM


def make(chance: random.Random) -> Item:
    """Return a new array."""
    array = np.empty(chance.choice(_WORDS), np.uint64)
    seed = chance.getrandbits(64)
    fill(array, seed)
    return Item(array, seed, own=True)


def shared(item: Item, chance: random.Random) -> Item:
    """Return a shared copy of an array."""
    array = shmreduce.share(item.array, mode=chance.choice(_MODES))
    return Item(array, item.seed, own=False)


def made(seeds: list[int]) -> list[Item]:
    """Return arrays, of one size; what a worker of the pool does."""
    items = []
    for seed in seeds:
        array = np.empty(_WORDS[-1], np.uint64)
        fill(array, seed)
        items.append(Item(array, seed, own=True))
    return items


def produce(link: Link, seed: str, strategy: str) -> None:
    """Send some arrays, and end in one way or another."""
    end_by_alarm(_SECONDS)
    join_in(strategy)
    chance = random.Random(seed)
    kept = []
    for _ in range(chance.randrange(_MOST_SENT)):
        item = make(chance)
        if chance.random() < 0.3:
            item = shared(item, chance)
            if chance.random() < 0.5:
                link.send([item])
        link.send([item])
        if chance.random() < 0.3:
            kept.append(item)
    if chance.random() < 0.3:
        # What it has sent is read while it lives.
        time.sleep(chance.uniform(0.0, 0.05))
    if chance.random() < 0.3:
        os.kill(os.getpid(), signal.SIGKILL)
    link.send(END)


def echo(there: Link, back: Link, strategy: str, seconds: float) -> None:
    """Send back what comes, and keep some of it."""
    end_by_alarm(seconds)
    join_in(strategy)
    chance = random.Random(seconds)
    kept: collections.deque[list[Item]] = collections.deque(maxlen=_MOST_KEPT)
    while (message := there.receive()) != END:
        if message is None:
            continue
        for item in message:
            wrong = complaint(item.array, item.seed)
            if wrong is not None:
                os.write(2, f"in the echo: {wrong}\n".encode())
                os._exit(MISMATCH_EXIT)
        if chance.random() < 0.3:
            kept.append(message)
        back.send(message)
        del message, item
    back.send(END)
