"""Signals travel by the strategy of this very package."""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor

from signals import Signal

import shmreduce


def amplify(signal: Signal) -> Signal:
    signal.amplify(2.0)
    return signal


def test_signals_through_an_executor() -> None:
    """A copy comes back; what was shared is changed in place."""
    context = multiprocessing.get_context("spawn")
    with shmreduce.install(strategy="runtime_directory"):
        original = Signal(range(10_000), rate=1.0)
        shared = shmreduce.share(original)
        with ProcessPoolExecutor(1, mp_context=context) as executor:
            returned = executor.submit(amplify, original).result(30)
            executor.submit(amplify, shared).result(30)
    assert returned.samples[100] == 200.0
    assert original.samples[100] == 100.0
    assert shared.samples[100] == 200.0
