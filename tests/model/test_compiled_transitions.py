"""The compiled transitions are the model's, too: the same writes in the same order, or none.

They are compiled anew so that they take note of each write. What the model says
of a process that is killed after any of its writes holds for them as for the
long way.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from shmreduce.compiled import SLOTS
from shmreduce.memory import quick_slots
from tests.compiler import changed_module
from tests.model.test_transitions import WORLDS, Bench, transitions_of
from tests.model.world import World

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shmreduce.memory.quick_slots import QuickSlots
    from shmreduce.memory.segment import Segment
    from tests.model.test_transitions import Expected, Write

STORING = "#define STORE(place, value) __atomic_store_n(&(place), (value), __ATOMIC_RELEASE)"
NOTING = """
__attribute__((visibility("default"))) uint64_t shmreduce_notes[129];
#define STORE(place, value) do { \\
    shmreduce_notes[1 + 2 * shmreduce_notes[0]] = (uintptr_t)&(place); \\
    shmreduce_notes[2 + 2 * shmreduce_notes[0]++] = (uint64_t)(value); \\
    __atomic_store_n(&(place), (value), __ATOMIC_RELEASE); \\
} while (0)
"""


class Watched:
    """The compiled transitions, which take note of what they write."""

    def __init__(self, folder: Path, *changes: tuple[str, str]) -> None:
        self.module = changed_module(SLOTS, folder, (STORING, NOTING), *changes)
        library = ctypes.CDLL(str(folder / Path(SLOTS.library).name))
        self._notes = (ctypes.c_uint64 * 129).in_dll(library, "shmreduce_notes")

    def quick_slots(self, segment: Segment) -> QuickSlots:
        """Return those of a segment."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(quick_slots, "_module", self.module)
            tables, layout = segment.tables.pages, segment.layout
            return quick_slots.quick_slots(tables, layout, segment._busy, segment._identity)

    def writes(self, segment: Segment) -> tuple[Write, ...]:
        """Return what was written since the last call, by table and index."""
        layout, start = segment.layout, segment.tables.address
        tables = {
            layout.generations: ("generations", 8),
            layout.heads: ("heads", 4),
            layout.hints: ("hints", 1),
            layout.slot_words: ("words", 8),
            layout.slot_next: ("next", 4),
            layout.slot_previous: ("previous", 4),
        }
        found = []
        for number in range(self._notes[0]):
            place, value = self._notes[1 + 2 * number] - start, self._notes[2 + 2 * number]
            offset = max(each for each in tables if each <= place)
            name, width = tables[offset]
            found.append((name, (place - offset) // width, value))
        self._notes[0] = 0
        return tuple(found)


def compared(scope: str, watched: Watched) -> Iterator[tuple[Expected, bool, bool]]:
    """Yield all transitions of a world, whether the short way was gone, and whether it differs."""
    world = World(WORLDS[scope])
    bench = Bench(shared=world.scope.shared)
    try:
        importer: Any = bench.importer
        importer._quick = watched.quick_slots(importer)
        for expected in transitions_of(world):
            the_long_way, result = bench.run(expected)
            writes = watched.writes(importer)
            # Undoing a load goes the long way, after the short one.
            is_same = (writes + the_long_way, result) == (expected.writes, expected.result)
            yield expected, bool(writes), not is_same
    finally:
        bench.close()


@pytest.mark.parametrize("scope", WORLDS)
def test_the_compiled_code_does_what_the_model_does_or_nothing(scope: str, tmp_path: Path) -> None:
    """Each transition that goes the short way makes the model's writes in the model's order."""
    short = set()
    for expected, is_short, is_different in compared(scope, Watched(tmp_path)):
        assert not is_different, expected
        if is_short:
            short.add(expected.doing.name)
    # Shared blocks are named to others by one more message.
    posted = set() if WORLDS[scope].shared else {"post"}
    assert short >= {"end", "load", "load and undo", "discard"} | posted


CHANGES = {
    "a link less": (
        """\
    if (links.following)
        STORE(self->previous[links.following - 1], links.before);
""",
        "",
    ),
    "unlinked as a message": (
        "    STORE(self->words[of[SLOT]], of[HOLDER]);\n    unlink_slot",
        "    unlink_slot",
    ),
    "linked while it is free": (
        """\
    STORE(self->words[of[SLOT]], of[WORD]);
    STORE(self->heads[of[BLOCK]], link);
""",
        """\
    STORE(self->heads[of[BLOCK]], link);
    STORE(self->words[of[SLOT]], of[WORD]);
""",
    ),
    "begun while it is free": (
        """\
    STORE(self->words[of[SLOT]], of[WORD]);
    STORE(self->heads[of[BLOCK]], (uint32_t)of[SLOT] + 1);
""",
        """\
    STORE(self->heads[of[BLOCK]], (uint32_t)of[SLOT] + 1);
    STORE(self->words[of[SLOT]], of[WORD]);
""",
    ),
    "consumed whatever it is": (
        """\
        || LOAD(self->words[of[SLOT]]) != of[WORD]
        || !find_links""",
        "        || !find_links",
    ),
    "shared, whatever it is": (
        """\
        || LOAD(self->words[of[SLOT]]) != of[WORD])
        return 0;
    STORE(self->words[of[SLOT]], of[HOLDER]);
    return 1;""",
        """\
        )
        return 0;
    STORE(self->words[of[SLOT]], of[HOLDER]);
    return 1;""",
    ),
    "never alone": (
        "        || LOAD(self->heads[of[BLOCK]]) != of[SLOT] + 1 || LOAD(self->next[of[SLOT]]))",
        "        )",
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_compiled_code_that_does_otherwise_is_noticed(change: str, tmp_path: Path) -> None:
    """A write too early or too few, and a condition less, is a difference from the model."""
    watched = Watched(tmp_path, CHANGES[change])
    assert any(is_different for scope in WORLDS for _, _, is_different in compared(scope, watched))
