"""Signals hold the reducer contract."""

from signals import Signal

from shmreduce.testing import ReducerContract


class TestSignals(ReducerContract):
    def make(self, nbytes: int) -> Signal:
        return Signal(range(nbytes // 8), rate=48_000.0)

    def write(self, obj: Signal) -> None:
        obj.amplify(2.0)
        obj.samples[0] = -1.0
