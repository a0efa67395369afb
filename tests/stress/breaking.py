"""Breaks the rules of reuse on purpose, so that tests can see the stress notice.

Never part of what is shipped: the processes of a stress run apply a break to
themselves when the environment asks for one.
"""

from __future__ import annotations

import os
from typing import Any

from shmreduce.errors import AlreadyLoadedError
from shmreduce.memory import lending, message
from shmreduce.memory.blocks import LiveBlocks
from shmreduce.memory.borrowing import Borrowed
from shmreduce.memory.ledger import Fork, ForkLedger
from shmreduce.memory.lending import Lender
from shmreduce.memory.message import Message
from shmreduce.memory.segment import Segment
from shmreduce.moving import Moves

__all__ = ["BREAKS", "VARIABLE", "apply_break"]

VARIABLE = "SHMREDUCE_STRESS_BREAK"


def ignore_forks() -> None:
    """Reuse what a forked child still sees, and let it see later writes."""

    def before_fork(live: LiveBlocks, fork: Fork) -> None:
        live.ledger.announce(fork)
        live.ledger.before_fork(fork, guarded=False)

    patch: Any = LiveBlocks
    patch.before_fork = before_fork
    ledger: Any = ForkLedger
    ledger.visible = lambda _ledger, _birth, _death: False


def free_at_export() -> None:
    """Take a by-value block back as soon as its message has been pickled."""
    patch: Any = Message
    commit = patch.commit

    def commit_and_free(message: Any, **options: Any) -> None:
        taken = list(message._taken)
        commit(message, **options)
        for each in taken:
            if each.filling is not None:
                segment: Any = each.segment
                segment.records.pop(each.block, None)
                segment.out.pop(each.block, None)
                each.filling._heap._keep_warm(segment, each.block)

    patch.commit = commit_and_free


def load_twice() -> None:
    """Let everybody who has a by-value message load it."""
    patch: Any = Segment
    claim = patch.claim

    def claim_again(
        segment: Any, block: int, generation: int, slot: int, nonce: int, *, shared: bool
    ) -> tuple[int, bool]:
        try:
            claimed: tuple[int, bool] = claim(
                segment, block, generation, slot, nonce, shared=shared
            )
        except AlreadyLoadedError:
            slot, _ = claim(segment, block, generation, slot, nonce, shared=True)
            return slot, True
        return claimed

    patch.claim = claim_again


def release_at_once() -> None:
    """End the lease of a received array while the array is alive."""
    patch: Any = LiveBlocks
    expose = patch.expose

    def expose_and_release(live: Any, record: Any, **options: Any) -> Any:
        block = expose(live, record, **options)
        if record.slot is not None:
            record.segment.try_release(record.block, record.slot)
        return block

    patch.expose = expose_and_release


def keep_what_is_passed_on() -> None:
    """Leave who still has an array that was sent on as it is with the block."""
    patch: Any = Moves
    patch.settle = lambda _moves, data: data


def lend_what_is_seen() -> None:
    """Lend the memory of a pool's results while there are views of them."""
    patch: Any = Lender

    def watch(lender: Any, blocks: Any) -> None:
        for block in blocks:
            record = block._record
            if lending._is_worth_it(record):
                record.keep = lender
                record.live._release(record)

    patch.watch = watch


def lend_what_is_sent() -> None:
    """Lend the memory of a pool's results, and fill it, though others have a message about it."""
    patch: Any = LiveBlocks

    def hand_over(_live: LiveBlocks, record: Any, keeper: Any) -> bool:
        if record.slot is None or record.ended or record.cutting or keeper.closed:
            return False
        record.ended = True
        keeper.holds.append(record)
        keeper.on_kept()
        return True

    def write_and_finish(borrowed: Borrowed) -> None:
        borrowed._write()
        borrowed.end()

    patch._hand_over = hand_over
    patch = message
    patch.can_be_filled = lambda _block, _live: True
    patch = Borrowed
    patch.finish = write_and_finish


BREAKS = {
    "ignore forks": ignore_forks,
    "free at export": free_at_export,
    "load twice": load_twice,
    "release at once": release_at_once,
    "keep what is passed on": keep_what_is_passed_on,
    "lend what is seen": lend_what_is_seen,
    "lend what is sent": lend_what_is_sent,
}


def apply_break() -> None:
    """Break this process as the environment asks, once."""
    name = os.environ.get(VARIABLE)
    if name and _broken.setdefault("by", name) == name and "done" not in _broken:
        _broken["done"] = name
        BREAKS[name]()


_broken: dict[str, str] = {}
