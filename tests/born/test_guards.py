"""Each guard is needed: without it the scenario that it is for fails."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import pytest

from shmreduce.compiled import ALLOCATOR
from tests.born.allocator import in_fresh_interpreter
from tests.born.scenarios import RUN
from tests.compiler import changed_library, needs_compiler

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("allocator")


class Guard(NamedTuple):
    """A guard, how to take it out, and the scenario that then fails."""

    found: str
    instead: str
    scenario: str


IN_C = {
    "a block that a child may see waits for Python": Guard(
        "!(entry->flags & (SENT | PRIVATE | EXPOSED)) &&\n"
        "                   !status.forking && entry->birth == status.forks",
        "1",
        "a_block_waits_for_the_children_that_may_see_it",
    ),
    "a block that a message has named waits for Python": Guard(
        "        entries[number].flags |= SENT;\n",
        "        ;\n",
        "a_moved_block_waits_for_its_receiver",
    ),
    "pages are made private before a fork": Guard(
        "            if (cover(entry, MAP_PRIVATE)) {",
        "            if (1) {",
        "arrays_are_copied_by_a_fork",
    ),
    "nothing is born while a fork is under way": Guard(
        "if (!enabled || status.forking || ",
        "if (!enabled || ",
        "what_is_made_in_the_middle_of_a_fork_is_apart",
    ),
    "a fork that had begun when the allocator was loaded is prepared for": Guard(
        "    if (depth <= others)\n",
        "    if (0)\n",
        "the_first_array_at_the_beginning_of_a_forks_hooks_is_apart",
    ),
    "a child forgets what lay idle for its parent": Guard(
        "    memset(stacks, 0, sizeof stacks);\n",
        "",
        "a_child_uses_nothing_of_its_parents",
    ),
    "a child leaves its parent's arrays where they are": Guard(
        "            entry->state = INHERITED;\n",
        "            entry->flags = 0, entry->birth = 0;\n",
        "a_child_uses_nothing_of_its_parents",
    ),
    "pages show the file again before they are used again": Guard(
        "    done = cover(&entries[number], MAP_SHARED);\n",
        "    done = 1;\n",
        "a_block_waits_for_the_children_that_may_see_it",
    ),
    "a child forgets the ranges in which it has no array any more": Guard(
        "            if (range->inherited && !range->used)\n",
        "            if (0)\n",
        "a_child_that_frees_all_of_a_range_forgets_it",
    ),
    "a number that is another file's is left alone": Guard(
        "    if (!is_open(range))\n        return 0;\n",
        "",
        "files_with_the_numbers_of_closed_descriptors_are_apart",
    ),
    "what may have to be copied yet keeps its pages": Guard(
        "if (entry->flags & PRIVATE && !(entry->flags & SENT))",
        "if (entry->flags & PRIVATE)",
        "a_fork_in_the_middle_of_a_message",
    ),
    "a range is not added twice": Guard(
        "    found = known_range(&range);\n",
        "    found = -1;\n",
        "an_interrupt_behind_a_range_that_was_added",
    ),
    "a range whose segment is gone makes room": Guard(
        "        if (!range->used)\n            forget_range(range);\n",
        "",
        "ranges_have_no_address_in_common",
    ),
    "zeros are written into used memory": Guard(
        "    if (!zeroed)\n        memset(found, 0, bytes);\n",
        "",
        "a_freed_array_gives_its_memory_back_to_a_later_region",
    ),
}
IN_PYTHON = {
    "the ledger of forks is asked": Guard(
        "BornHeap._seen_by_child",
        "lambda *_: False",
        "a_block_waits_for_the_children_that_may_see_it",
    ),
    "the allocator gets no number that is another file's": Guard(
        "OwnedSegment.is_open",
        "True",
        "a_segment_that_others_have_closed_is_not_registered",
    ),
    "fork hooks are registered once": Guard(
        "library._hooked",
        'type("Empty", (list,), {"append": lambda *_: None})()',
        "another_try_to_load_the_allocator_registers_nothing_twice",
    ),
    "nothing is born before it is known which forks the allocator knows": Guard(
        "BornHeap._enable",
        "enable",
        "the_first_array_at_the_end_of_a_forks_hooks_is_apart",
    ),
    "forks are noted although no received array lives": Guard(
        "BornHeap.__init__",
        "unguarded",
        "a_block_waits_for_the_children_that_may_see_it",
    ),
    "an array that somebody has is copied": Guard(
        "moving.EXPOSED, moving.FREED",
        "0, LIVE",
        "what_is_kept_is_copied",
    ),
    "pages that a fork made private are not moved": Guard(
        "moving.PRIVATE",
        "0",
        "a_fork_in_the_middle_of_a_message",
    ),
    "mappings outlive everything of Python's": Guard(
        "heap._keep_alive",
        "lambda pages: None",
        "arrays_live_to_the_very_end",
    ),
}
UNGUARDED = """
with_guard = BornHeap.__init__
def unguarded(self, kind, strategy, host):
    with_guard(self, kind, strategy, host)
    host.live.guards_forks = False
"""
ENABLED = """
def enable(self):
    self._forks_before = self._library.counters.forks - self._ledger.forks
    self._library.enable(1)
"""
WITHOUT = """
from shmreduce.born import heap, library, moving
from shmreduce.born.heap import BornHeap
from shmreduce.born.library import LIVE
from shmreduce.memory.owned_segment import OwnedSegment
"""


def fails(scenario: str, patch: str) -> bool:
    done = in_fresh_interpreter(f"{WITHOUT}{patch}\n{RUN}", scenario)
    if scenario == "arrays_live_to_the_very_end":
        return done.returncode != 0 or len(done.stdout.splitlines()) != 4
    return done.returncode != 0


@pytest.mark.parametrize("name", IN_C)
def test_the_allocator_needs_each_of_its_guards(name: str, tmp_path: Path) -> None:
    """Compiled without the guard, the allocator breaks what the scenario says."""
    guard = IN_C[name]
    needs_compiler()
    library = changed_library(ALLOCATOR, tmp_path, (guard.found, guard.instead))
    assert fails(guard.scenario, f"library.LIBRARY = {str(library)!r}")


@pytest.mark.parametrize("name", IN_PYTHON)
def test_the_heap_needs_each_of_its_guards(name: str) -> None:
    """Without the guard, what the scenario says does not hold."""
    guard = IN_PYTHON[name]
    assert fails(guard.scenario, f"{UNGUARDED}{ENABLED}{guard.found} = {guard.instead}")


REFUSED = """
import os
import numpy as np
import shmreduce
from shmreduce.born import library
library.LIBRARY = sys.argv[1]
with shmreduce.shared_allocations():
    array = np.ones(1 << 20, np.uint8)
child = os.fork()
if child == 0:
    os._exit(0 if (array == 1).all() else 1)
_, status = os.waitpid(child, 0)
assert os.waitstatus_to_exitcode(status) == 0
assert (array == 1).all()
"""


@pytest.mark.parametrize("guarded", [True, False])
def test_private_pages_that_are_refused_leave_the_shared_ones(
    guarded: bool, tmp_path: Path
) -> None:
    """Also where the kernel has unmapped them by then, as before Linux 6.12."""
    needs_compiler()
    covered = "    if (mmap(address, entry->capacity, PROT_READ | PROT_WRITE, MAP_FIXED | flags,"
    unmapped = "mprotect(address, entry->capacity, PROT_NONE) == 0"
    older = covered, f"    if (flags == MAP_PRIVATE && {unmapped})\n        ;\n    else {covered}"
    unguarded = "    if (flags == MAP_PRIVATE)\n        mmap(", "    if (0)\n        mmap("
    library = changed_library(ALLOCATOR, tmp_path, older, *([] if guarded else [unguarded]))
    done = in_fresh_interpreter(f"import sys\n{REFUSED}", str(library))
    assert (done.returncode == 0) == guarded, done.stderr
