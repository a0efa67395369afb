"""The lease transitions of one segment, one access to shared memory at a time.

Written down once more, apart from the code in ``shmreduce/memory``, so that they
can be interleaved and cut short at will. A transition is a generator. It yields
*requests*, which are what others can notice or what can be interrupted, and is
sent the answers; it returns what became of it.

Words of lease slots: 0 is free, a positive number a message, a negative one a
holder (minus the number of the process's birth). Links are slot numbers plus
one, 0 for none.

``without`` names the guards that are left out, for the tests which show that
the search notices.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

__all__ = ["GUARDS", "TRANSITIONS", "Caller", "Request", "Steps"]

Request: TypeAlias = "tuple[str, str, int, int]"
"""Kind (read, write, lock, try, unlock, take, alive), table, index, value."""
Steps: TypeAlias = "Generator[Request, int, Any]"

GUARDS = {
    "lock": "transitions of a block exclude each other",
    "generation": "a handle is honoured in the life of the block that it names, only",
    "raise": "a block that becomes free gets another generation",
    "chain": "a block with leases is not freed",
    "chain again": "... which is looked at under the lock, too",
    "records": "a block that its maker has a view of is not freed",
    "forks": "what a forked child may see is not released",
    "heirs": "a holder lives as long as a forked child of it",
    "epoch": "a holder is not taken for the next process with its index",
    "unlink first": "a slot is out of the chain before it is free",
    "word first": "a slot is in use before it is in the chain",
    "link check": "backward links are not believed",
    "message once": "a by-value message is loaded once",
    "alone": "who is not alone with a by-value block gets pages of its own",
    "private to forward": "who sends a by-value block on keeps its pages to itself",
    "private to keep": "... also who was to drop it before anybody sees the message, and did not",
    "private to fork": "who forks keeps the pages of by-value blocks to itself",
    "chunk": "slots are taken by one process at a time",
    "hint first": "the hint of a release is cleared before the chain is looked at",
    "undo": "a load that is undone leaves a message only where it found it",
    "claim to consume": "a message is nobody's any more before it leaves the chain",
    "dead": "leases of killed processes are ended",
    "alone to lend": "a block that others have, or may come to have, is not lent",
    "views to lend": "... nor one of which the lender has a view",
    "lend first": "a block that is lent always has a lease",
    "private to fill": "who is not alone with a lent block, or has forked, leaves it as it is",
}
"""What can be left out, and what it is for."""


class Caller(NamedTuple):
    """Who makes a transition, and what it knows without looking at the segment.

    Parameters
    ----------
    word : int
        By which the process marks its holds.
    shared : bool
        Whether the segment's blocks are shared, not by value.
    slots : int
        How many lease slots the segment has.
    without : frozenset of str
        Guards that are left out.
    """

    word: int
    shared: bool
    slots: int
    without: frozenset[str] = frozenset()


def read(table: str, index: int) -> Request:
    return ("read", table, index, 0)


def write(table: str, index: int, value: int) -> Request:
    return ("write", table, index, value)


def link(caller: Caller, block: int, slot: int, word: int) -> Steps:
    """Put a slot at the head of a block's chain."""
    head = yield read("heads", block)
    yield write("next", slot, head)
    yield write("previous", slot, 0)
    if "word first" not in caller.without:
        yield write("words", slot, word)
    yield write("heads", block, slot + 1)
    if "word first" in caller.without:
        yield write("words", slot, word)
    if head:
        yield write("previous", head - 1, slot + 1)


def unlink(caller: Caller, block: int, slot: int) -> Steps:
    """Take a slot out of a block's chain and free it."""
    following = yield read("next", slot)
    before = yield read("previous", slot)
    if "link check" not in caller.without:
        before = yield from _checked(caller, block, slot, before)
    if before == -1:
        yield write("words", slot, 0)
        return
    if "unlink first" in caller.without:
        yield write("words", slot, 0)
    if following:
        yield write("previous", following - 1, before)
    if before:
        yield write("next", before - 1, following)
    else:
        yield write("heads", block, following)
    if "unlink first" not in caller.without:
        yield write("words", slot, 0)
    if not (yield read("heads", block)):
        yield write("hints", block, 1)


def _checked(caller: Caller, block: int, slot: int, before: int) -> Steps:
    """Return the link before a slot; 0 at the head, -1 if it is not in the chain."""
    if before:
        if (yield read("next", before - 1)) == slot + 1:
            return before
    elif (yield read("heads", block)) == slot + 1:
        return 0
    before, here = 0, (yield read("heads", block))
    for _ in range(caller.slots):
        if here == slot + 1:
            return before
        if not here:
            break
        before, here = here, (yield read("next", here - 1))
    return -1


def drop_dead(caller: Caller, block: int) -> Steps:
    """End the holds of dead processes."""
    here = yield read("heads", block)
    for _ in range(caller.slots):
        if not here:
            return
        slot = here - 1
        here = yield read("next", slot)
        word = yield read("words", slot)
        if word >= 0 or "dead" in caller.without:
            continue
        if not (yield ("alive", "words", slot, word)):
            yield from unlink(caller, block, slot)


def start_message(caller: Caller, block: int, nonce: int) -> Steps:
    """Give a block that nobody can name yet its first message; return the slot, or -1."""
    slot = yield ("take", "words", 0, 0)
    if slot >= 0:
        yield from link(caller, block, slot, nonce)
    return slot


def add_message(caller: Caller, block: int, generation: int, nonce: int) -> Steps:
    """Add a message to a block that is in use; return the slot, or -1."""
    slot = yield ("take", "words", 0, 0)
    if slot < 0:
        return -1
    yield ("lock", "locks", block, 0)
    if (yield from _outdated(caller, block, generation)):
        slot = -1
    else:
        yield from link(caller, block, slot, nonce)
    yield ("unlock", "locks", block, 0)
    return slot


def _outdated(caller: Caller, block: int, generation: int) -> Steps:
    found = yield read("generations", block)
    return found != generation and "generation" not in caller.without


def claim(caller: Caller, block: int, generation: int, slot: int, nonce: int) -> Steps:
    """Turn a message into a hold; return its slot (or -1) and whether it is alone."""
    yield ("lock", "locks", block, 0)
    if (yield from _outdated(caller, block, generation)):
        yield ("unlock", "locks", block, 0)
        return -1, False
    word = yield read("words", slot)
    if word == nonce:
        yield write("words", slot, caller.word)
    elif caller.shared or "message once" in caller.without:
        # Not the one that the handle names, or undo_claim() would take it for the message's.
        slot = yield ("take", "words", 0, slot + 1)
        if slot >= 0:
            yield from link(caller, block, slot, caller.word)
    else:
        slot = -1
    alone = False
    if slot >= 0:
        alone = yield from _is_alone(block, slot)
        if not alone and not caller.shared:
            yield from drop_dead(caller, block)
            alone = yield from _is_alone(block, slot)
    yield ("unlock", "locks", block, 0)
    return slot, alone or "alone" in caller.without


def _is_alone(block: int, slot: int) -> Steps:
    return (yield read("heads", block)) == slot + 1 and not (yield read("next", slot))


def undo_claim(caller: Caller, block: int, slot: int, nonce: int, named: int) -> Steps:
    """Turn a hold that was just claimed back into what it was; ``named`` is the handle's slot."""
    yield ("lock", "locks", block, 0)
    if (yield read("words", slot)) == caller.word:
        if slot == named or "undo" in caller.without:
            yield write("words", slot, nonce)
        else:
            yield from unlink(caller, block, slot)
    yield ("unlock", "locks", block, 0)


def consume(caller: Caller, block: int, generation: int, slot: int, nonce: int) -> Steps:
    """End a message without taking a hold."""
    yield ("lock", "locks", block, 0)
    if not (yield from _outdated(caller, block, generation)):
        word = yield read("words", slot)
        if word == nonce:
            if "claim to consume" not in caller.without:
                yield write("words", slot, caller.word)
            yield from unlink(caller, block, slot)
    yield ("unlock", "locks", block, 0)


def release(caller: Caller, block: int, slot: int) -> Steps:
    """End a hold without waiting; return whether that worked."""
    if not (yield ("try", "locks", block, 0)):
        return False
    if (yield read("words", slot)) == caller.word:
        yield from unlink(caller, block, slot)
    yield ("unlock", "locks", block, 0)
    return True


def lend(caller: Caller, block: int, generation: int, slot: int, nonce: int) -> Steps:
    """Give a hold to a borrower, as a message, if the block is nobody else's.

    Return the message's slot, or -1, and whether the hold has ended.
    """
    added = -1
    is_lent = "alone to lend" in caller.without or (yield from _is_alone(block, slot))
    if is_lent and "lend first" not in caller.without:
        added = yield from add_message(caller, block, generation, nonce)
    released = yield from release(caller, block, slot)
    if is_lent and "lend first" in caller.without:
        added = yield from add_message(caller, block, generation, nonce)
    return added, released


def give_back_lent(caller: Caller, block: int, generation: int, slot: int, nonce: int) -> Steps:
    """Send a lent block, which has other bytes by now; return as :func:`lend` does."""
    added = yield from add_message(caller, block, generation, nonce)
    released = yield from release(caller, block, slot)
    return added, released


def free(caller: Caller, block: int, has_record: bool) -> Steps:
    """Let the maker have a block that nobody needs; return whether it is free."""
    if "chain" not in caller.without and (yield read("heads", block)):
        return False
    # Who has no lease on a by-value block cannot get one.
    if caller.shared and not (yield ("try", "locks", block, 0)):
        yield write("hints", block, 1)
        return False
    needed = has_record and "records" not in caller.without
    if not needed and not caller.without & {"chain", "chain again"}:
        needed = bool((yield read("heads", block)))
    if not needed and "raise" not in caller.without:
        generation = yield read("generations", block)
        yield write("generations", block, generation + 1)
    if caller.shared:
        yield ("unlock", "locks", block, 0)
    return not needed


def collect(caller: Caller, block: int, has_record: bool) -> Steps:
    """Look after a block whose hint was set; return whether it is free."""
    if not (yield read("hints", block)):
        return False
    if "hint first" not in caller.without:
        yield write("hints", block, 0)
    freed = False
    if not has_record or "records" in caller.without:
        freed = yield from free(caller, block, has_record)
    if "hint first" in caller.without:
        yield write("hints", block, 0)
    return freed


def reap(caller: Caller, block: int, has_record: bool) -> Steps:
    """End the holds of dead processes in a block; return whether it is free now."""
    if (yield read("heads", block)) and (yield ("try", "locks", block, 0)):
        yield from drop_dead(caller, block)
        yield ("unlock", "locks", block, 0)
    if "chain" not in caller.without and (yield read("heads", block)):
        return False
    if has_record and "records" not in caller.without:
        return False
    return (yield from free(caller, block, has_record))


TRANSITIONS: dict[str, Callable[..., Steps]] = {
    "start message": start_message,
    "add message": add_message,
    "claim": claim,
    "undo claim": undo_claim,
    "consume": consume,
    "release": release,
    "lend": lend,
    "give back lent": give_back_lent,
    "free": free,
    "collect": collect,
    "reap": reap,
}
