"""The family of processes that share a budget: its locks."""

from __future__ import annotations

import contextlib
import os
import signal
import threading

from shmreduce.memory import locks, runtime
from shmreduce.memory.family import _LOCK_BUDGET

ROUNDS = 300


def test_an_interrupted_call_gives_up_the_locks() -> None:
    """After Ctrl-C at any instant other threads, and other processes, can reserve memory."""
    family = runtime.current().family
    everything = 1 << 40
    taken: list[str] = []

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    def reserve_until_interrupted() -> None:
        while True:
            family.reserve(0, everything)

    def look() -> None:
        if not family._threads.acquire(timeout=0):
            taken.append("the lock of the threads")
            return
        family._threads.release()
        if locks.first_locked(stranger, _LOCK_BUDGET) is not None:
            taken.append("the lock of the processes")

    stranger = locks.reopen(family.fd)
    before = signal.signal(signal.SIGVTALRM, interrupt)
    try:
        for number in range(ROUNDS):
            # Processor time, so that the load of the machine makes no difference.
            signal.setitimer(signal.ITIMER_VIRTUAL, 0.001 + 0.00001 * number)
            # Not pytest.raises: the frames that were interrupted are not to be kept.
            with contextlib.suppress(KeyboardInterrupt):
                reserve_until_interrupted()
            other = threading.Thread(target=look)
            other.start()
            other.join()
            assert taken == []
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
        os.close(stranger)
