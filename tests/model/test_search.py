"""Every state of the model keeps the promises; without one of its guards some state does not.

The promises (:func:`tests.model.search.fault_in`): a block is never reused while
anybody sees it; nobody is given other bytes than those sent; what is written to a
by-value array shows nowhere else; what nobody holds and nobody forwarded is
reclaimed; the maker is told of a release.

``SHMREDUCE_MODEL=large`` visits larger worlds too, some millions of steps.
"""

from __future__ import annotations

import os

import pytest

from tests.model.protocol import GUARDS
from tests.model.search import search
from tests.model.world import Scope

SHARED = Scope(shared=True)
BY_VALUE = Scope(shared=False)
LENT = BY_VALUE._replace(blocks=1, allocations=2, messages=3, slots=3, started=2, lends=True)
COARSE = {
    "by value, a birth": BY_VALUE._replace(allocations=2, slots=3, started=2),
    "by value, one block, lent, a birth": LENT,
    "shared, no forks": SHARED._replace(messages=1, started=3, slots=2),
    "shared, one block, forks": SHARED._replace(blocks=1, allocations=2, messages=1, slots=2),
    "shared, two processes": SHARED._replace(
        processes=2, allocations=2, messages=1, births=2, slots=3
    ),
}
"""Three processes and two blocks, unless it says otherwise."""
FINE = {
    "by value, three processes": BY_VALUE._replace(
        blocks=1, allocations=1, messages=1, slots=2, fine=True, started=3, deaths=False
    ),
    "by value, lent": LENT._replace(processes=2, births=2, messages=2, fine=True, deaths=False),
    "shared, deaths": SHARED._replace(
        processes=2,
        blocks=1,
        allocations=1,
        messages=1,
        births=2,
        slots=2,
        fine=True,
        started=2,
    ),
}
LARGE = {
    "shared, forks": SHARED._replace(allocations=2, messages=1, slots=2),
    "shared, one block, forks, three leases": SHARED._replace(
        blocks=1, allocations=1, messages=1, slots=3
    ),
    "shared, three leases": SHARED._replace(allocations=2, messages=1, started=3, slots=3),
    "by value, two births": BY_VALUE._replace(allocations=2, slots=3),
    "by value, lent, two births": LENT._replace(births=4, messages=4),
    "fine, by value, lent twice": FINE["by value, lent"]._replace(messages=3),
    "fine, shared, reuse": FINE["shared, deaths"]._replace(allocations=2, deaths=False),
    "fine, by value, forwarded": FINE["by value, three processes"]._replace(
        processes=2, started=2, births=2, allocations=2, messages=2
    ),
}
_TWO_SHARE = SHARED._replace(processes=2, blocks=1, allocations=2, messages=1, births=2, slots=2)
_TWO_LOAD_ONE = FINE["by value, three processes"]
_ONE_REUSES = FINE["shared, deaths"]._replace(allocations=2, deaths=False)
SHOWN_BY = {
    "lock": _TWO_LOAD_ONE,
    "generation": _TWO_SHARE,
    "raise": _TWO_SHARE,
    "chain again": _ONE_REUSES,
    "hint first": _ONE_REUSES,
    "undo": _TWO_SHARE,
    "link check": COARSE["shared, two processes"],
    "chunk": _TWO_LOAD_ONE._replace(
        processes=2, started=2, births=2, blocks=2, allocations=2, messages=3, slots=3
    ),
    "alone to lend": LENT,
    "views to lend": LENT,
    "private to fill": LENT,
    "lend first": FINE["by value, lent"],
}
"""Where the lack of a guard shows; else in the first of the coarse worlds."""


def assert_no_fault(scope: Scope) -> None:
    found = search(scope)
    assert found.fault is None, "\n".join([found.fault or "", *found.way])
    # Something has been visited.
    assert found.states > 1000


@pytest.mark.parametrize("name", COARSE)
def test_no_state_breaks_a_promise(name: str) -> None:
    """Whatever processes do, in whatever order, and after whatever write one is killed."""
    assert_no_fault(COARSE[name])


@pytest.mark.parametrize("name", FINE)
def test_no_interleaving_breaks_a_promise(name: str) -> None:
    """The same with the single accesses of several processes in every order."""
    assert_no_fault(FINE[name])


@pytest.mark.skipif(
    os.environ.get("SHMREDUCE_MODEL") != "large", reason="takes minutes: SHMREDUCE_MODEL=large"
)
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", LARGE)
def test_no_state_of_a_larger_world_breaks_a_promise(name: str) -> None:
    """As above, with more of everything."""
    assert_no_fault(LARGE[name])


@pytest.mark.parametrize("guard", GUARDS)
def test_every_guard_is_needed(guard: str) -> None:
    """Without the guard the search finds a broken promise, and the steps that lead to it."""
    found = search(SHOWN_BY.get(guard, COARSE["by value, a birth"]), frozenset({guard}))
    assert found.fault is not None, f"not needed: {GUARDS[guard]}"
    assert found.way
