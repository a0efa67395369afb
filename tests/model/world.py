"""Processes that use the lease protocol: what each may do next, and what then is.

A *state* is all there is: the segment's tables, the processes, the handles that
exist. :func:`successors` gives every next state, in one of two grains:

- *coarse*: a transition happens at once, or its process is killed after any of
  its writes. Enough for what is done under a block's lock.
- *fine*: transitions of several processes interleave, request by request.

Handles never go away: any process may load any handle at any time, again too, as
somebody may who has the bytes of a message.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from tests.model.protocol import TRANSITIONS, Caller

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.model.protocol import Request, Steps

__all__ = ["OWN", "Handle", "Process", "Scope", "State", "View", "World"]

OWN = -1
"""The slot of a view that needs no lease: its process has made the block."""
INHERITED = -2
"""The slot of a view that came with a fork: the lease is the parent's."""
MAKER = 0
_OF_THE_DEAD = -1000
_HONOUR = frozenset({"generation", "raise", "message once"})


class View(NamedTuple):
    """What one process sees of one block.

    ``life`` counts how often the block was allocated: the truth, which the
    protocol does not know. ``seen`` are the births of the children that were
    forked meanwhile, ``private`` says that writes here do not reach the block.
    ``lent`` that the process is not to look at it, but to fill it.
    """

    block: int
    life: int
    generation: int
    slot: int
    private: bool
    seen: frozenset[int] = frozenset()
    lent: bool = False


class Handle(NamedTuple):
    """A message, and whose bytes it is about; ``lent`` if these are of no use any more."""

    block: int
    generation: int
    slot: int
    nonce: int
    life: int
    lent: bool = False


class Doing(NamedTuple):
    """A transition under way: which, and the answers that it has had."""

    name: str
    arguments: tuple[Any, ...]
    answers: tuple[int, ...] = ()


class Process(NamedTuple):
    """One place in the table of processes.

    ``born`` is the number of the birth, which says place and epoch. ``lineage``
    are the births whose locks it keeps: its own and its forked ancestors'.
    ``limbo`` are views that are gone, but whose lease could not be ended yet.
    ``passing`` is a message that is complete but for what becomes of the view it
    is about: nobody else can see it yet.
    """

    born: int
    alive: bool = False
    lineage: frozenset[int] = frozenset()
    views: frozenset[View] = frozenset()
    limbo: frozenset[View] = frozenset()
    doing: Doing | None = None
    passing: Handle | None = None


class State(NamedTuple):
    """Everything.

    ``memory`` are the tables of the segment and what the kernel knows of it;
    ``out`` says which blocks are not free, and is known to the maker alone;
    ``maimed`` whether a process was killed inside a transition.
    """

    memory: tuple[int, ...]
    people: tuple[Process, ...]
    out: tuple[bool, ...]
    lives: tuple[int, ...]
    mail: frozenset[Handle] = frozenset()
    sent: int = 0
    maimed: bool = False


class Scope(NamedTuple):
    """How much is explored: numbers of things, and how often things may happen.

    ``deaths`` are those of processes, ``cut_short`` those inside a transition of
    the coarse grain. ``started`` processes are there from the beginning.
    """

    shared: bool
    processes: int = 3
    blocks: int = 2
    slots: int = 4
    allocations: int = 3
    messages: int = 2
    births: int = 3
    fine: bool = False
    deaths: bool = True
    cut_short: bool = True
    started: int = 1
    lends: bool = False


class World:
    """The rules, for one scope, with or without some guards."""

    def __init__(self, scope: Scope, without: frozenset[str] = frozenset()) -> None:
        self.scope = scope
        self.without = without
        sizes = {
            "generations": scope.blocks,
            "heads": scope.blocks,
            "hints": scope.blocks,
            "locks": scope.blocks,
            "words": scope.slots,
            "next": scope.slots,
            "previous": scope.slots,
            "chunks": scope.slots,
        }
        self.start: dict[str, int] = {}
        self.length = 0
        for table, size in sizes.items():
            self.start[table] = self.length
            self.length += size
        self._composed: dict[str, Callable[..., Steps]] = {
            "post": self._post,
            "load": self._load,
            "load and undo": self._load_and_undo,
            "lend": self._lend,
            "let go and lend": self._let_go_and_lend,
            "give back lent": self._give_back_lent,
        }

    def table(self, state: State, name: str) -> tuple[int, ...]:
        """Return one table of a state's memory."""
        first = self.start[name]
        size = self.scope.slots if name in ("words", "next", "previous", "chunks") else 0
        return state.memory[first : first + (size or self.scope.blocks)]

    def chain(self, state: State, block: int) -> list[int]:
        """Return the slots of a block's chain, newest first."""
        heads, following = self.table(state, "heads"), self.table(state, "next")
        slots: list[int] = []
        here = heads[block]
        while here and len(slots) <= self.scope.slots:
            slots.append(here - 1)
            here = following[here - 1]
        return slots

    def initial(self) -> State:
        """Return the state at the beginning: some processes, nothing allocated."""
        scope = self.scope
        places = range(scope.processes)
        people = [Process(place + 1 - scope.processes) for place in places]
        for place in range(scope.started):
            people[place] = Process(place + 1, alive=True, lineage=frozenset({place + 1}))
        blocks = range(scope.blocks)
        return State(
            (0,) * self.length,
            tuple(people),
            tuple(False for _ in blocks),
            tuple(0 for _ in blocks),
        )

    def simplified(self, state: State) -> State:
        """Return the state without differences that nobody can ever tell."""
        if any(each.doing is not None for each in state.people):
            return state
        memory = state.memory
        words, following, previous = (self.start[name] for name in ("words", "next", "previous"))
        for slot in range(self.scope.slots):
            if memory[words + slot] or not (memory[following + slot] or memory[previous + slot]):
                continue
            if slot + 1 not in (*self.table(state, "heads"), *self.table(state, "next")):
                # Overwritten before it is looked at.
                changed = list(memory)
                changed[following + slot] = changed[previous + slot] = 0
                memory = tuple(changed)
        mail = state.mail
        if mail and not self.without & _HONOUR:
            mail = frozenset(
                each
                for each in mail
                if memory[each.block] == each.generation
                and (self.scope.shared or memory[words + each.slot] == each.nonce)
            )
        return State(memory, *state[1:4], mail, *state[5:])

    def _without_the_dead(self, state: State) -> State:
        """Return the state after a death without what only the dead could tell apart."""
        if any(each.doing is not None for each in state.people):
            return state
        lives = {born for each in state.people if each.alive for born in each.lineage}
        memory = list(state.memory)
        first = self.start["words"]
        for where in range(first, first + self.scope.slots):
            if memory[where] < 0 and -memory[where] not in lives and "epoch" not in self.without:
                memory[where] = _OF_THE_DEAD
        people = tuple(
            self._forgetful(each, lives) if each.views or each.limbo else each
            for each in state.people
        )
        return state._replace(memory=tuple(memory), people=people)

    @staticmethod
    def _forgetful(who: Process, lives: set[int]) -> Process:
        views = frozenset(each._replace(seen=each.seen & lives) for each in who.views)
        limbo = frozenset(each._replace(seen=each.seen & lives) for each in who.limbo)
        return who._replace(views=views, limbo=limbo)

    # Who lives

    @staticmethod
    def maker_lives(state: State) -> bool:
        """Return whether the process that made the segment lives."""
        maker = state.people[MAKER]
        return maker.alive and maker.born == 1

    def heirs_live(self, state: State, born: int) -> bool:
        """Return whether a process or a forked child of it lives: the kernel's answer."""
        return any(born in each.lineage for each in state.people if each.alive)

    def _holder_alive(self, state: State, word: int) -> bool:
        born = -word
        if "heirs" in self.without:
            return any(each.born == born for each in state.people if each.alive)
        if "epoch" in self.without:
            return self._place_taken(state, (born - 1) % self.scope.processes)
        return self.heirs_live(state, born)

    def _place_taken(self, state: State, place: int) -> bool:
        return any(
            (born - 1) % self.scope.processes == place
            for each in state.people
            if each.alive
            for born in each.lineage
        )

    def visible_to_children(self, state: State, view: View) -> bool:
        """Return whether a forked child may still see what a view showed."""
        if "forks" in self.without:
            return False
        return any(self.heirs_live(state, born) for born in view.seen)

    def has_record(self, state: State, block: int) -> bool:
        """Return whether the maker has, or must still count, a view of its own."""
        maker = state.people[MAKER]
        return any(each.slot == OWN and each.block == block for each in maker.views | maker.limbo)

    # What can happen

    def successors(self, state: State) -> Iterator[tuple[str, State]]:
        """Yield every next state, with what has happened."""
        if self.scope.shared and not self.maker_lives(state):
            # Nothing is reused any more, and all goes with the last who has it open.
            return
        for place, who in enumerate(state.people):
            if not who.alive:
                continue
            if who.doing is not None:
                yield from self._step(state, place)
            else:
                yield from self._begin_something(state, place)
            if self.scope.deaths:
                yield f"{place} is killed", self.die(state, place)
        yield from self._births(state)

    def _begin_something(self, state: State, place: int) -> Iterator[tuple[str, State]]:
        for name, arguments in self.choices(state, place):
            label = f"{place}: {name} {arguments}"
            begun, doing = self.begin(state, place, name, arguments)
            if doing is None:
                yield label, begun
            elif self.scope.fine:
                yield label, self._changed(begun, place, doing=doing)
            else:
                yield from self.all_at_once(begun, place, doing, label)

    def choices(self, state: State, place: int) -> Iterator[tuple[str, tuple[Any, ...]]]:
        """Yield what an idle process may do: names and arguments for :meth:`begin`."""
        who, scope = state.people[place], self.scope
        is_maker = place == MAKER and who.born == 1
        may_send = state.sent < scope.messages
        if who.passing is not None:
            view = next(each for each in who.views if each.block == who.passing.block)
            yield "keep", (view, who.passing)
            yield "let go", (view, who.passing)
            if may_send and scope.lends and not is_maker:
                yield "let go and lend", (view, who.passing)
            return
        if is_maker:
            if sum(state.lives) < scope.allocations and not all(state.out):
                if scope.shared:
                    yield "allocate", (state.out.index(False),)
                elif may_send:
                    yield "post", (state.out.index(False),)
            for block in range(scope.blocks):
                if state.out[block]:
                    if state.memory[self.start["hints"] + block]:
                        yield "collect", (block,)
                    yield "reap", (block,)
        for view in who.views:
            yield "drop", (view,)
            if view.lent:
                if may_send and self._may_be_filled(state, view):
                    yield "give back lent", (view,)
            elif may_send and (scope.shared or (view.slot >= 0 and not view.private)):
                yield "forward", (view,)
                if not scope.shared:
                    yield "pass on", (view,)
                # The maker's view of what it sends by value ends with the message.
                if scope.lends and not is_maker and not self.has_record(state, view.block):
                    yield "lend", (view,)
        for view in who.limbo:
            if not self.visible_to_children(state, view):
                yield "settle", (view,)
        for handle in state.mail:
            if not scope.shared and any(each.block == handle.block for each in who.views):
                # One view of a block by each process, to keep the search small.
                continue
            yield "load", (handle,)
            yield "load and undo", (handle,)
            yield "discard", (handle,)

    def _may_be_filled(self, state: State, view: View) -> bool:
        if view.private and "private to fill" not in self.without:
            return False
        return sum(state.lives) < self.scope.allocations

    def _births(self, state: State) -> Iterator[tuple[str, State]]:
        scope = self.scope
        born = sum(1 + (each.born - 1) // scope.processes for each in state.people)
        free = [n for n in range(scope.processes) if not self._place_taken(state, n)]
        if born >= scope.births or not free:
            return
        place = free[0]
        number = state.people[place].born + scope.processes
        if place != MAKER or number != 1:
            child = Process(number, alive=True, lineage=frozenset({number}))
            yield f"{place} is started", self._with(state, place, child)
        for parent, who in enumerate(state.people):
            if who.alive and who.doing is None:
                yield f"{parent} forks {place}", self.fork(state, parent, place, number)

    def fork(self, state: State, parent: int, place: int, number: int) -> State:
        """Return the state in which a process has a child, of this birth at this place."""
        who = state.people[parent]
        cut_off = not self.scope.shared and "private to fork" not in self.without
        views = frozenset(
            each._replace(
                private=each.private or (cut_off and each.slot >= 0),
                seen=each.seen | {number},
            )
            for each in who.views
        )
        inherited = frozenset(
            each._replace(slot=INHERITED, seen=frozenset())
            for each in views
            # By value, the maker's view ends before anybody can refer to it.
            if self.scope.shared or each.slot != OWN
        )
        child = Process(number, alive=True, lineage=who.lineage | {number}, views=inherited)
        return self._with(self._with(state, parent, who._replace(views=views)), place, child)

    def die(self, state: State, place: int) -> State:
        """Return the state in which a process has been killed."""
        who = state.people[place]
        memory = list(state.memory)
        for block in range(self.scope.blocks):
            # The kernel unlocks.
            if memory[self.start["locks"] + block] == place + 1:
                memory[self.start["locks"] + block] = 0
        maimed = state.maimed or who.doing is not None or who.passing is not None
        dead = state._replace(memory=tuple(memory), maimed=maimed)
        return self._without_the_dead(self._with(dead, place, Process(who.born)))

    @staticmethod
    def _with(state: State, place: int, who: Process) -> State:
        people = (*state.people[:place], who, *state.people[place + 1 :])
        return state._replace(people=people)

    def _changed(self, state: State, place: int, **changes: Any) -> State:
        return self._with(state, place, state.people[place]._replace(**changes))

    # Transitions: what a process does to itself before and after

    def begin(
        self, state: State, place: int, name: str, arguments: tuple[Any, ...]
    ) -> tuple[State, Doing | None]:
        """Return what is when a process begins something, and its transition, if there is one."""
        who = state.people[place]
        if name in ("allocate", "post"):
            return self._allocate(state, place, arguments[0], post=name == "post")
        if name == "lend":
            return self._begin_to_lend(state, place, *arguments)
        if name == "let go and lend":
            view, handle = arguments
            state, doing = self._complete(state, place, view, handle, kept=False)
            if doing is None:
                return state, None
            return state._replace(sent=state.sent + 1), Doing(name, (view, handle, state.sent + 1))
        if name == "give back lent":
            return self._fill(state, place, *arguments)
        if name in ("drop", "settle"):
            (view,) = arguments
            state = self._changed(state, place, views=who.views - {view}, limbo=who.limbo - {view})
            if view.slot == INHERITED:
                return state, None
            if self.visible_to_children(state, view):
                return self._wait(state, place, view), None
            return state, Doing("end", (view,))
        if name == "forward":
            (view,) = arguments
            if not self.scope.shared and "private to forward" not in self.without:
                cut_off = view._replace(private=True)
                state = self._changed(state, place, views=who.views - {view} | {cut_off})
            return state._replace(sent=state.sent + 1), Doing("forward", (view, state.sent + 1))
        if name == "pass on":
            (view,) = arguments
            return state._replace(sent=state.sent + 1), Doing(name, (view, state.sent + 1))
        if name in ("keep", "let go"):
            return self._complete(state, place, *arguments, kept=name == "keep")
        if name in ("load", "load and undo"):
            (handle,) = arguments
            known = self.scope.shared and any(
                (each.block, each.life) == (handle.block, handle.life) and each.slot != INHERITED
                for each in who.views
            )
            if known:
                # There is nothing to be claimed; the message ends with the load.
                return state, Doing("discard", arguments) if name == "load" else None
            return state, Doing(name, arguments)
        return state, Doing(name, arguments)

    def _allocate(
        self, state: State, place: int, block: int, *, post: bool
    ) -> tuple[State, Doing | None]:
        lives = (*state.lives[:block], state.lives[block] + 1, *state.lives[block + 1 :])
        out = (*state.out[:block], True, *state.out[block + 1 :])
        generation = state.memory[self.start["generations"] + block]
        view = View(block, lives[block], generation, OWN, private=False)
        views = state.people[place].views | {view}
        state = self._changed(state._replace(lives=lives, out=out), place, views=views)
        if not post:
            return state, None
        return state._replace(sent=state.sent + 1), Doing("post", (view, state.sent + 1))

    def _complete(
        self, state: State, place: int, view: View, handle: Handle, *, kept: bool
    ) -> tuple[State, Doing | None]:
        """Return what is when the sender of a message drops what it passes on, or has kept it."""
        who = state.people[place]
        left = who.views - {view}
        if kept:
            cut_off = view._replace(private=view.private or "private to keep" not in self.without)
            left |= {cut_off}
        state = self._changed(state, place, views=left, passing=None)
        if not kept and not self.visible_to_children(state, view):
            return state, Doing("let go", (view, handle))
        if not kept:
            state = self._wait(state, place, view)
        return state._replace(mail=state.mail | {handle}), None

    def _begin_to_lend(self, state: State, place: int, view: View) -> tuple[State, Doing | None]:
        """Return what is when the view of a process has gone that others want to fill."""
        who = state.people[place]
        if "views to lend" not in self.without:
            state = self._changed(state, place, views=who.views - {view})
        if self.visible_to_children(state, view):
            return self._wait(state, place, view), None
        return state._replace(sent=state.sent + 1), Doing("lend", (view, state.sent + 1))

    def _fill(self, state: State, place: int, view: View) -> tuple[State, Doing | None]:
        """Return what is when a process has written to a block that was lent to it."""
        filled = view._replace(life=state.lives[view.block] + 1)
        views = state.people[place].views - {view}
        if not view.private:
            # Else it has written to pages of its own.
            before, after = state.lives[: view.block], state.lives[view.block + 1 :]
            state = state._replace(lives=(*before, filled.life, *after))
        state = self._changed(state, place, views=views)
        return state._replace(sent=state.sent + 1), Doing(
            "give back lent", (filled, state.sent + 1)
        )

    def _wait(self, state: State, place: int, view: View) -> State:
        return self._changed(state, place, limbo=state.people[place].limbo | {view})

    def steps(self, state: State, place: int, doing: Doing) -> Steps:
        """Return the requests of a transition, from the first on."""
        caller = Caller(
            -state.people[place].born,
            self.scope.shared,
            self.scope.slots,
            self.without,
        )
        name, arguments = doing.name, doing.arguments
        if name in self._composed:
            return self._composed[name](caller, *arguments)
        if name in ("forward", "pass on"):
            view, nonce = arguments
            return TRANSITIONS["add message"](caller, view.block, view.generation, nonce)
        if name == "discard":
            (handle,) = arguments
            return TRANSITIONS["consume"](caller, *handle[:4])
        if name == "let go":
            view, _ = arguments
            return TRANSITIONS["release"](caller, view.block, view.slot)
        if name == "end":
            (view,) = arguments
            if view.slot == OWN:
                return TRANSITIONS["free"](caller, view.block, self.has_record(state, view.block))
            return TRANSITIONS["release"](caller, view.block, view.slot)
        (block,) = arguments
        return TRANSITIONS[name](caller, block, self.has_record(state, block))

    @staticmethod
    def _post(caller: Caller, view: View, nonce: int) -> Steps:
        return TRANSITIONS["start message"](caller, view.block, nonce)

    @staticmethod
    def _load(caller: Caller, handle: Handle) -> Steps:
        return TRANSITIONS["claim"](caller, *handle[:4])

    @staticmethod
    def _load_and_undo(caller: Caller, handle: Handle) -> Steps:
        slot, _ = yield from TRANSITIONS["claim"](caller, *handle[:4])
        if slot >= 0:
            undo = TRANSITIONS["undo claim"]
            yield from undo(caller, handle.block, slot, handle.nonce, handle.slot)

    @staticmethod
    def _lend(caller: Caller, view: View, nonce: int) -> Steps:
        return TRANSITIONS["lend"](caller, view.block, view.generation, view.slot, nonce)

    @staticmethod
    def _let_go_and_lend(caller: Caller, view: View, _: Handle, nonce: int) -> Steps:
        return TRANSITIONS["lend"](caller, view.block, view.generation, view.slot, nonce)

    @staticmethod
    def _give_back_lent(caller: Caller, view: View, nonce: int) -> Steps:
        give_back = TRANSITIONS["give back lent"]
        return give_back(caller, view.block, view.generation, view.slot, nonce)

    def _finish(self, state: State, place: int, doing: Doing, result: Any) -> State:
        name, arguments = doing.name, doing.arguments
        if name in ("lend", "let go and lend", "give back lent"):
            view, nonce = arguments[0], arguments[-1]
            slot, released = result
            if name == "let go and lend":
                state = state._replace(mail=state.mail | {arguments[1]})
            if slot >= 0:
                lent = name != "give back lent"
                handle = Handle(view.block, view.generation, slot, nonce, view.life, lent)
                state = state._replace(mail=state.mail | {handle})
            return state if released else self._wait(state, place, view._replace(seen=frozenset()))
        if name in ("post", "forward", "pass on"):
            view, nonce = arguments
            if result < 0:
                return state
            handle = Handle(view.block, view.generation, result, nonce, view.life)
            if name == "pass on":
                return self._changed(state, place, passing=handle)
            return state._replace(mail=state.mail | {handle})
        if name == "let go":
            view, handle = arguments
            state = state._replace(mail=state.mail | {handle})
            return state if result else self._wait(state, place, view._replace(seen=frozenset()))
        if name == "load":
            slot, alone = result
            if slot < 0:
                return state
            (handle,) = arguments
            alone = alone or (handle.lent and "alone to lend" in self.without)
            view = View(
                handle.block,
                # What is really there, whatever the handle says.
                state.lives[handle.block] if state.out[handle.block] else -1,
                state.memory[self.start["generations"] + handle.block],
                slot,
                private=not self.scope.shared and not alone,
                lent=handle.lent,
            )
            if view.life != handle.life:
                view = view._replace(life=-1)
            return self._changed(state, place, views=state.people[place].views | {view})
        if name == "end":
            (view,) = arguments
            if view.slot == OWN:
                return self._freed(state, view.block) if result else state
            return state if result else self._wait(state, place, view._replace(seen=frozenset()))
        if name in ("collect", "reap") and result:
            return self._freed(state, arguments[0])
        return state

    @staticmethod
    def _freed(state: State, block: int) -> State:
        out = (*state.out[:block], False, *state.out[block + 1 :])
        return state._replace(out=out)

    # Memory

    def answer(self, state: State, memory: list[int], place: int, request: Request) -> int:
        """Do what a transition asks for, to ``memory``, and return the answer."""
        kind, table, index, value = request
        where = self.start[table] + index
        if kind == "read":
            return memory[where]
        if kind == "write":
            memory[where] = value
            return 0
        if kind == "alive":
            return int(self._holder_alive(state, value))
        if kind == "take":
            return self._take_slot(state, memory, place, value - 1)
        if kind == "unlock":
            memory[where] = 0
            return 0
        if "lock" in self.without:
            return 1
        if memory[where]:
            return 0
        memory[where] = place + 1
        return 1

    def _take_slot(self, state: State, memory: list[int], place: int, but: int) -> int:
        """Return a free slot of a chunk that is this process's; here a chunk is one slot."""
        born = state.people[place].born
        for slot in range(self.scope.slots):
            owner = memory[self.start["chunks"] + slot]
            taken = owner not in (0, born) and self.heirs_live(state, owner)
            free = slot != but and not memory[self.start["words"] + slot]
            if free and (not taken or "chunk" in self.without):
                if self.scope.fine:
                    # Else nobody comes in between, and it does not matter whose it is.
                    memory[self.start["chunks"] + slot] = born
                return slot
        return -1

    def all_at_once(
        self, state: State, place: int, doing: Doing, label: str
    ) -> Iterator[tuple[str, State]]:
        """Yield what becomes of a whole transition, and of one cut short after each write."""
        memory = list(state.memory)
        steps = self.steps(state, place, doing)
        answer: int | None = None
        try:
            while True:
                request = next(steps) if answer is None else steps.send(answer)
                answer = self.answer(state, memory, place, request)
                if request[0] == "write" and self.scope.deaths and self.scope.cut_short:
                    cut = self._changed(state._replace(memory=tuple(memory)), place, doing=doing)
                    yield f"{label}, killed after {request[1:]}", self.die(cut, place)
        except StopIteration as end:
            after = state._replace(memory=tuple(memory))
            yield label, self._finish(after, place, doing, end.value)

    def _step(self, state: State, place: int) -> Iterator[tuple[str, State]]:
        """Yield what is after the next request, if that need not wait."""
        who = state.people[place]
        doing = who.doing
        if doing is None:
            return
        memory = list(state.memory)
        steps = self.steps(state, place, doing)
        label = f"{place}: {doing.name} goes on"
        try:
            request = next(steps)
            for answer in doing.answers:
                request = steps.send(answer)
            first = request
            while True:
                answer = self.answer(state, memory, place, request)
                if request[0] == "lock" and not answer:
                    # Taken. Nothing happens.
                    return
                doing = doing._replace(answers=(*doing.answers, answer))
                request = steps.send(answer)
                if not self._is_unseen(memory, place, request):
                    break
        except StopIteration as end:
            after = self._changed(state._replace(memory=tuple(memory)), place, doing=None)
            yield label, self._finish(after, place, doing, end.value)
        else:
            after = state._replace(memory=tuple(memory))
            yield f"{label} {first}", self._changed(after, place, doing=doing)

    def _is_unseen(self, memory: list[int], place: int, request: Request) -> bool:
        """Return whether nobody can tell when a request is answered: a read under a lock."""
        first = self.start["locks"]
        held = memory[first : first + self.scope.blocks]
        return request[0] == "read" and place + 1 in held
