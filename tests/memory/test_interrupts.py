"""Ctrl-C at any instant leaves no lock taken."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import shmreduce
from shmreduce.memory import locks, runtime
from shmreduce.memory.family import _LOCK_BUDGET
from shmreduce.memory.layout import LOCK_BLOCK

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROUNDS = 300
_AGAIN = 0.05
"""Seconds until the next interrupt: Python ignores one that strikes in a destructor."""


def interrupt_often(action: Callable[[], object]) -> Iterator[None]:
    """Call a function until KeyboardInterrupt is raised in it, and yield; many times."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGVTALRM, interrupt)
    try:
        for number in range(ROUNDS):
            # Processor time, so that the load of the machine makes no difference.
            signal.setitimer(signal.ITIMER_VIRTUAL, 0.001 + 0.00001 * number, _AGAIN)
            # Not pytest.raises: the frames that were interrupted are not to be kept.
            with contextlib.suppress(KeyboardInterrupt):
                while True:
                    action()
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def test_the_family_can_be_locked_after_an_interrupt() -> None:
    """Other threads, and other processes, can reserve memory."""
    family = runtime.current().family
    everything = 1 << 40
    taken: list[str] = []

    def look() -> None:
        if not family._threads.acquire(timeout=0):
            taken.append("the lock of the threads")
            return
        family._threads.release()
        if locks.first_locked(stranger, _LOCK_BUDGET) is not None:
            taken.append("the lock of the processes")

    stranger = locks.reopen(family.fd)
    try:
        for _ in interrupt_often(lambda: family.reserve(0, everything)):
            other = threading.Thread(target=look)
            other.start()
            other.join()
            assert taken == []
    finally:
        os.close(stranger)


def test_a_block_can_be_locked_after_an_interrupt() -> None:
    """Other threads, and other processes, can send and load its arrays."""
    # In a process of its own: messages that are interrupted before they are
    # loaded are left unread.
    code = f"from {__name__} import blocks_taken; print(blocks_taken())"
    finished = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert finished.stdout.strip() == "[]", finished.stderr[-2000:]


def blocks_taken() -> list[Any]:
    """Return the blocks of which a lock was taken after an interrupt."""
    shared = shmreduce.ones(1000)
    found = []

    def send() -> None:
        ForkingPickler.loads(ForkingPickler.dumps(np.ones(100)))
        ForkingPickler.loads(ForkingPickler.dumps(shared))

    with shmreduce.install(inline_limit=0):
        for _ in interrupt_often(send):
            for segment in runtime.current().directory.values():
                stranger = locks.reopen(segment.fd)
                taken = locks.first_locked(stranger, LOCK_BLOCK, LOCK_BLOCK)
                os.close(stranger)
                if taken is not None or segment._busy:
                    found.append((segment.token, taken))
    return found
