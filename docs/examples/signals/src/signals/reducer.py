"""Sends signals by shared memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shmreduce import Reducer, allocate, find_block, import_block
from signals import Signal

if TYPE_CHECKING:
    from shmreduce import Block, Message, Mode


class SignalReducer(Reducer):
    """The reducer of Signal."""

    # By name: programs that never import signals need not load it.
    types = ("signals.Signal",)

    def reduce(self, obj: Signal, message: Message) -> Any:
        # Shared memory is named, other memory copied; few bytes are pickled.
        handle = message.carry(obj.samples)
        if handle is None:
            return NotImplemented
        return rebuild_signal, (handle, obj.rate)

    def buffer_of(self, obj: Signal, at_least: int) -> Any:
        # The same in short, for a message that is one signal.
        if obj.samples.nbytes < at_least:
            return None
        return obj.samples, rebuild_signal, (obj.rate,)

    def share(self, obj: Signal, mode: Mode) -> Signal:
        block = allocate(obj.samples.nbytes, mode)
        block.buffer[:] = obj.samples.cast("B")
        return Signal.over(block.buffer, obj.rate)

    def find_block(self, obj: Signal) -> Block | None:
        return find_block(obj.samples)


def rebuild_signal(handle: bytes, rate: float) -> Signal:
    """Called where the message is unpickled. Its name is written in messages."""
    return Signal.over(import_block(handle).buffer, rate)
