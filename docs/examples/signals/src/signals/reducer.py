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
        nbytes = obj.samples.nbytes
        block = self.find_block(obj)
        if block is not None and (block.shared or nbytes >= message.inline_limit):
            # It lies in shared memory already: send where.
            handle = message.refer(block, nbytes)
            if handle is not None:
                return rebuild_signal, (handle, obj.rate)
        if nbytes < message.inline_limit:
            return NotImplemented
        # By value: copy it into a block that travels with the message.
        taken = message.allocate(nbytes)
        if taken is None:
            return NotImplemented
        memory, handle = taken
        memory[:] = obj.samples.cast("B")
        return rebuild_signal, (handle, obj.rate)

    def share(self, obj: Signal, mode: Mode) -> Signal:
        block = allocate(obj.samples.nbytes, mode)
        block.buffer[:] = obj.samples.cast("B")
        return Signal.over(block.buffer, obj.rate)

    def find_block(self, obj: Signal) -> Block | None:
        return find_block(obj.samples)


def rebuild_signal(handle: bytes, rate: float) -> Signal:
    """Called where the message is unpickled. Its name is written in messages."""
    return Signal.over(import_block(handle).buffer, rate)
