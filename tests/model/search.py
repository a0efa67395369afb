"""Visits every state there is, and looks whether the promises hold in each."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from tests.model.protocol import TRANSITIONS, Caller
from tests.model.world import MAKER, OWN, Scope, State, World

__all__ = ["Found", "fault_in", "search"]


class Found(NamedTuple):
    """What a search has found: a fault and the way to it, or how much there was to visit."""

    fault: str | None
    way: list[str]
    states: int
    transitions: int


def search(scope: Scope, without: frozenset[str] = frozenset(), most: int = 5_000_000) -> Found:
    """Visit all states breadth first, until one breaks a promise; so the way is the shortest.

    Raises
    ------
    RuntimeError
        If there are more states than ``most``.
    """
    world = World(scope, without)
    first = world.initial()
    met: set[State] = set()
    came_from: dict[State, tuple[State, str] | None] = {first: None}
    waiting = deque([first])
    transitions = 0
    while waiting:
        state = waiting.popleft()
        fault = fault_in(world, state)
        if fault is not None:
            return Found(fault, _way_to(state, came_from), len(came_from), transitions)
        for label, changed in world.successors(state):
            transitions += 1
            if changed in met:
                continue
            met.add(changed)
            after = world.simplified(changed)
            if after not in came_from:
                came_from[after] = (state, label)
                waiting.append(after)
        if len(came_from) > most:
            raise RuntimeError(f"more than {most} states")
    return Found(None, [], len(came_from), transitions)


def _way_to(state: State, came_from: dict[State, tuple[State, str] | None]) -> list[str]:
    way: list[str] = []
    step = came_from[state]
    while step is not None:
        state, label = step
        way.append(label)
        step = came_from[state]
    return way[::-1]


def fault_in(world: World, state: State) -> str | None:
    """Return which promise a state breaks, None if it breaks none."""
    return (
        _reused_while_visible(state)
        or _not_by_value(world, state)
        or _lost_message(world, state)
        or _never_reclaimed(world, state)
        or _unnoticed(world, state)
    )


def _reused_while_visible(state: State) -> str | None:
    """Whoever sees a block sees the life of it that it was given."""
    for place, who in enumerate(state.people):
        for view in who.views:
            if view.life == -1:
                return f"process {place} was given somebody else's bytes"
            if not state.out[view.block] or state.lives[view.block] != view.life:
                return f"block {view.block} was reused while process {place} sees it"
    return None


def _not_by_value(world: World, state: State) -> str | None:
    """Nobody sees what another process writes to a by-value array."""
    if world.scope.shared:
        return None
    for block in range(world.scope.blocks):
        views = [
            view
            for who in state.people
            for view in who.views
            # The maker's own: it has written before the message existed.
            if view.block == block and view.slot != OWN
        ]
        written = any(not view.private for view in views)
        if written and len(views) > 1:
            return f"two processes see what is written to block {block}"
        if written and _messages(world, state, block):
            return f"block {block} can be written while a message has it"
    return None


def _messages(world: World, state: State, block: int) -> list[int]:
    """Return the numbers of a block's messages that somebody can load."""
    words = world.table(state, "words")
    generation = world.table(state, "generations")[block]
    return [
        each.nonce
        for each in state.mail
        if (each.block, each.generation) == (block, generation) and words[each.slot] == each.nonce
    ]


def _lost_message(world: World, state: State) -> str | None:
    """A message that nobody has loaded keeps its block."""
    words = world.table(state, "words")
    passing = {each.passing for each in state.people if each.passing is not None}
    for each in state.mail | passing:
        if words[each.slot] == each.nonce and (
            not state.out[each.block] or state.lives[each.block] != each.life
        ):
            return f"block {each.block} was freed while message {each.nonce} has it"
    return None


def _is_needed(world: World, state: State, block: int) -> bool:
    """Whether somebody sees a block, or may still come to see it: the truth."""
    if any(view.block == block for who in state.people for view in who.views):
        return True
    if any(
        view.block == block and any(world.heirs_live(state, born) for born in view.seen)
        for who in state.people
        for view in who.limbo
    ):
        # A child may have views of it that nobody here knows of.
        return True
    if _messages(world, state, block):
        return True
    words = world.table(state, "words")
    known = {each.nonce for each in state.mail}
    for slot in world.chain(state, block):
        # A sender that was killed before anybody had the handle: it might have been after.
        if words[slot] > 0 and words[slot] not in known:
            return True
        # Its forked children keep a dead process's lease: they may have the view.
        born = -words[slot]
        if born > 0 and not _lives(state, born) and world.heirs_live(state, born):
            return True
    return False


def _lives(state: State, born: int) -> bool:
    return any(each.born == born for each in state.people if each.alive)


def _never_reclaimed(world: World, state: State) -> str | None:
    """A block that nobody needs is free once everybody has settled and the maker has looked."""
    if any(who.doing is not None for who in state.people) or not world.maker_lives(state):
        return None
    for block in range(world.scope.blocks):
        if state.out[block] and not _is_needed(world, state, block):
            settled = _settle(world, state)
            if not _reap(world, settled, block):
                return f"block {block} is never reclaimed"
    return None


def _settle(world: World, state: State) -> State:
    memory = list(state.memory)
    people = list(state.people)
    for place, who in enumerate(people):
        for view in who.limbo:
            if world.visible_to_children(state, view):
                continue
            people[place] = people[place]._replace(limbo=people[place].limbo - {view})
            if view.slot >= 0:
                _run(world, state, memory, place, "release", view.block, view.slot)
    return state._replace(memory=tuple(memory), people=tuple(people))


def _reap(world: World, state: State, block: int) -> bool:
    memory = list(state.memory)
    has_record = world.has_record(state, block)
    return bool(_run(world, state, memory, MAKER, "reap", block, has_record))


def _run(
    world: World, state: State, memory: list[int], place: int, name: str, *arguments: int
) -> object:
    caller = Caller(
        -state.people[place].born,
        world.scope.shared,
        world.scope.slots,
        world.without,
    )
    steps = TRANSITIONS[name](caller, *arguments)
    try:
        request = next(steps)
        while True:
            request = steps.send(world.answer(state, memory, place, request))
    except StopIteration as end:
        return end.value


def _unnoticed(world: World, state: State) -> str | None:
    """The maker is told of a release that leaves a block to it."""
    if state.maimed or not world.maker_lives(state):
        return None
    if any(who.doing is not None for who in state.people):
        return None
    heads, hints = world.table(state, "heads"), world.table(state, "hints")
    for block in range(world.scope.blocks):
        if (
            state.out[block]
            and not heads[block]
            and not hints[block]
            and not world.has_record(state, block)
        ):
            return f"nobody has told the maker that block {block} was released"
    return None
