"""The steps of a message in C do what those in Python do, or nothing."""

from __future__ import annotations

import gc
import mmap
import os
import pickle
import random
import subprocess
import sys
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

import shmreduce
from shmreduce import Message, allocate, import_block
from shmreduce.compiled import BLOCKS
from shmreduce.memory import quick_blocks, runtime
from shmreduce.memory.handle import Handle
from shmreduce.memory.layout import BY_VALUE
from shmreduce.memory.loading import Loading, here
from shmreduce.memory.message import next_nonce
from tests.compiler import changed_module, needs_module
from tests.long_ways import list_slots
from tests.memory.waiting import in_forked_child, wait_for_exit

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.conftest import Children

pytestmark = pytest.mark.usefixtures("compiled", "installed")

SIZE = 20_000
"""Bytes: five pages."""


@pytest.fixture
def compiled() -> None:
    needs_module(BLOCKS)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    return Calls(monkeypatch)


class Calls:
    """Counts the calls of the steps in C: those that did it, and those that declined."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        list_slots()
        self.done: dict[str, int] = {}
        self.declined: dict[str, int] = {}
        for name in ("take_block", "lend_block", "give_shared", "import_block"):
            monkeypatch.setattr(quick_blocks, name, self._counted(name))

    def _counted(self, name: str) -> Callable[..., Any]:
        function = getattr(quick_blocks, name)

        def counted(*arguments: Any) -> Any:
            found = function(*arguments)
            table = self.declined if found is None else self.done
            table[name] = table.get(name, 0) + 1
            return found

        return counted


def sent(contents: bytes) -> bytes:
    """Return the handle of a message that carries bytes by value."""
    message = Message()
    given = message.allocate(SIZE)
    assert given is not None
    view, handle = given
    view[: len(contents)] = contents
    del view, given
    message.commit()
    return handle


def referred(block: shmreduce.Block) -> bytes:
    """Return the handle of a message that names a block."""
    message = Message()
    handle = message.refer(block, block.nbytes)
    assert handle is not None
    message.commit()
    return handle


def warm_up() -> None:
    """Have a block of the size that is warm, and in both heaps slots that are at hand."""
    import_block(sent(b"warm"))
    import_block(referred(allocate(SIZE)))
    # Or the thread that gives idle memory back does it, at some moment in the test.
    for heap in runtime.current().heaps:
        heap.collect()


class Look(NamedTuple):
    """What there is of blocks in this process, whatever their numbers."""

    chains: tuple[tuple[str, ...], ...]
    records: tuple[str, ...]
    held: int
    pinned: int
    unread: int
    out: int
    warm: int
    roots: int
    shared: int
    fillings: int


def look() -> Look:
    """Look at all segments and tables."""
    state = runtime.current()
    segments = list(state.directory.values())
    heaps = state.heaps
    chains: list[tuple[str, ...]] = []
    records: list[str] = []
    for segment in segments:
        for block in range(getattr(segment, "unused", 0)):
            words = segment.leases(block)
            if words:
                chains.append(tuple("hold" if word >> 63 else "message" for word in words))
        records += [type(each).__name__ for each in segment.records.values()]
    return Look(
        tuple(sorted(chains)),
        tuple(sorted(records)),
        sum(len(segment.holds) for segment in segments),
        sum(len(segment.pins) for segment in segments),
        sum(len(segment.unread()) for segment in segments),
        sum(len(each.out) for heap in heaps for each in heap.segments),
        sum(len(stack) for heap in heaps for stack in heap.warm.values()),
        len(state.live),
        len(state.live._shared),
        len(state.live.fillings),
    )


class Player:
    """Sends, shares, receives and drops as chance has it.

    Parameters
    ----------
    seed : int
        Of chance.
    """

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.messages: list[tuple[bytes, bytes]] = []
        """Handles that nobody has loaded, and what they bring."""
        self.held: list[tuple[shmreduce.Block, bytes]] = []

    def play(self, steps: int) -> list[Look]:
        """Return what there was after each step."""
        doings = (self.send, self.share, self.pass_on, self.receive, self.receive, self.drop)
        looks = []
        for step in range(steps):
            self.chance.choice((*doings, self.take_back))(step.to_bytes(4, "little"))
            assert all(bytes(block.buffer[:4]) == contents for block, contents in self.held)
            looks.append(look())
        for handle, _ in self.messages:
            import_block(handle)
        return looks

    def send(self, contents: bytes) -> None:
        self.messages.append((sent(contents), contents))

    def share(self, contents: bytes) -> None:
        block = allocate(SIZE)
        block.buffer[:4] = contents
        self.held.append((block, contents))

    def pass_on(self, _: bytes) -> None:
        shared = [each for each in self.held if each[0].shared]
        if shared:
            block, contents = self.chance.choice(shared)
            self.messages.append((referred(block), contents))

    def receive(self, _: bytes) -> None:
        if not self.messages:
            return
        handle, contents = self.messages.pop(self.chance.randrange(len(self.messages)))
        loading = here.loading = Loading()
        try:
            block = import_block(handle)
            if self.chance.random() < 0.2:
                # What comes after it fails: the message is there again.
                del block
                loading.undo()
                self.messages.append((handle, contents))
            else:
                self.held.append((block, contents))
        finally:
            here.loading = None
            loading.close()

    def drop(self, _: bytes) -> None:
        if self.held:
            del self.held[self.chance.randrange(len(self.held))]

    def take_back(self, _: bytes) -> None:
        message = Message()
        message.allocate(SIZE)
        message.rollback()


def fresh(seed: int) -> list[Look]:
    """Play in a process of its own, where nothing is warm."""
    reader, writer = os.pipe()

    def child() -> bool:
        with os.fdopen(writer, "wb") as file:
            pickle.dump([tuple(each) for each in Player(seed).play(150)], file)
        return True

    pid = in_forked_child(child)
    os.close(writer)
    with os.fdopen(reader, "rb") as file:
        data = file.read()
    assert wait_for_exit(pid) == 0
    return [Look(*each) for each in pickle.loads(data)]


@pytest.mark.parametrize("seed", range(6))
def test_the_state_is_that_of_the_long_way(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """After each of 150 steps there are the same messages, holds, blocks, views and pins."""
    quick = fresh(seed)
    with monkeypatch.context() as patch:
        decline(patch)
        slow = fresh(seed)
    assert quick == slow


def decline(patch: pytest.MonkeyPatch) -> None:
    """Have every step go the long way."""
    for name in ("take_block", "lend_block", "give_shared", "import_block", "commit"):
        patch.setattr(quick_blocks, name, quick_blocks._decline)
    for name in ("make_root", "root_died"):
        patch.setattr(quick_blocks, name, None)


def test_the_usual_case_goes_the_short_way(calls: Calls) -> None:
    """A block that is warm, one that is shared, their messages, and one that is here already."""
    warm_up()
    block = allocate(SIZE)
    calls.done.clear()
    calls.declined.clear()
    import_block(sent(b"quick"))
    handle = referred(block)
    loading = here.loading = Loading()
    again = import_block(handle)
    here.loading = None
    loading.close()
    assert again.shared
    assert again._root is block._root
    assert calls.done == {"take_block": 1, "lend_block": 1, "import_block": 2}
    assert calls.declined == {}


def giving(root: Any, nbytes: int, taken: list[Any]) -> tuple[Any, ...]:
    return runtime.current().live, root, nbytes, next_nonce(), taken


def test_a_shared_block_is_found_by_its_root_and_lent() -> None:
    """As by Message.refer(), in one call."""
    warm_up()
    block = allocate(SIZE)
    before = look()
    sent_before = referred(block)
    after = look()
    import_block(sent_before)
    expected = Handle.unpack(sent_before)
    taken: list[Any] = []
    handle, lease = quick_blocks.give_shared(*giving(block._root, SIZE, taken))
    assert taken == [lease]
    found = Handle.unpack(handle)
    assert found._replace(slot=0, nonce=0) == expected._replace(slot=0, nonce=0)
    assert (found.slot, found.nonce) == (lease.slot, lease.nonce)
    assert look().chains == after.chains != before.chains
    lease.undo()
    assert look().chains == before.chains


@pytest.mark.parametrize(
    "what", ["part", "by value", "cow", "no root", "in a child", "never sent"]
)
def test_any_other_block_is_not_lent_by_its_root(what: str) -> None:
    """It is left to the long way: nothing has changed."""
    warm_up()
    block = allocate(SIZE, mode="cow" if what == "cow" else "rw")
    if what != "never sent":
        import_block(referred(block))
    if what == "by value":
        block = import_block(sent(b"by value"))
    root = bytearray(SIZE) if what == "no root" else block._root
    nbytes = SIZE - 1 if what == "part" else SIZE

    def declines() -> bool:
        before = look()
        taken: list[Any] = []
        declined = quick_blocks.give_shared(*giving(root, nbytes, taken)) is None
        return declined and not taken and look() == before

    if what == "in a child":
        assert wait_for_exit(in_forked_child(declines)) == 0
    else:
        assert declines()


def is_imported_quickly(before: bytes, handle: bytes) -> bool:
    kept = import_block(before)
    state = runtime.current()
    block = quick_blocks.import_block(handle, state.live, state.attachments, None)
    del kept
    return block is not None


def test_a_shared_block_that_others_have_too_goes_the_short_way(children: Children) -> None:
    """Its other messages and holders make no difference."""
    first, block = allocate(SIZE), allocate(SIZE)
    of_others = [referred(block) for _ in range(2)]
    assert children.call(is_imported_quickly, referred(first), referred(block))
    for handle in of_others:
        import_block(handle)


def test_nothing_is_taken_while_a_fork_is_prepared(calls: Calls) -> None:
    """What is born then counts as seen by the child, which the long way sees to."""
    warm_up()
    handle = sent(b"before")
    pending = runtime.current().live.ledger.pending
    before = look()
    pending[1_000_000] = None
    try:
        assert quick_blocks.import_block(*importing(handle)) is None
        assert quick_blocks.take_block(*taking([])) is None
    finally:
        del pending[1_000_000]
    assert look() == before
    assert bytes(import_block(handle).buffer[:6]) == b"before"


def test_what_a_child_may_see_is_not_freed_the_short_way() -> None:
    """A view that dies after a fork leaves its block to the child as long as that lives."""
    warm_up()
    held = [import_block(sent(b"seen"))]
    reader, writer = os.pipe()
    pid = in_forked_child(lambda: os.read(reader, 1) == b"x" and held[0].buffer[0] == ord("s"))
    count = look().held
    held.clear()
    assert look().held == count
    os.write(writer, b"x")
    assert wait_for_exit(pid) == 0
    os.close(reader)
    os.close(writer)
    runtime.current().live.settle()
    assert look().held == count - 1


BEGINNING = """
import gc, os, sys
from importlib.util import module_from_spec, spec_from_file_location
name = "shmreduce.memory._quick_blocks"
spec = spec_from_file_location(name, sys.argv[1])
sys.modules[name] = module_from_spec(spec)
spec.loader.exec_module(sys.modules[name])
from shmreduce import Message, allocate, import_block
from shmreduce.memory import quick_blocks, runtime
from shmreduce.memory.handle import Handle
from shmreduce.memory.layout import BY_VALUE
assert quick_blocks._module is sys.modules[name]

def sent():
    message = Message()
    _, handle = message.allocate(20_000)
    message.commit()
    return handle

import_block(sent())
"""
A_CHILD_LOOKS = """
block, message = allocate(24), Message()
handle = message.refer(block, 24)
message.commit()
if not os.fork():
    held = [import_block(handle)]
    segment, slot = held[0]._record.segment, held[0]._record.slot
    reader, writer = os.pipe()
    if not os.fork():
        os.close(writer)
        os.read(reader, 1)
        os._exit(0)
    held.clear()
    print("kept" if segment.words[slot] else "freed", flush=True)
    os.close(writer)
    os.wait()
    os._exit(0)
os.wait()
"""
THE_COLLECTOR_FREES = """
waiting, handles = [sent() for _ in range(60)], []
for handle in [sent() for _ in range(100)]:
    import_block(handle)
heap = runtime.current().heap(BY_VALUE)
heap.collect()

def free(phase, _):
    if phase == "start" and waiting:
        gc.disable()
        import_block(waiting.pop())
        heap.collect()
        gc.enable()

gc.callbacks.append(free)
for threshold in range(1, 40):
    gc.set_threshold(threshold)
    message = Message()
    handles.append(message.allocate(20_000)[1])
    message.commit()
gc.set_threshold(0)
assert len(waiting) < 60
blocks = {(each.token, each.block) for each in map(Handle.unpack, handles)}
print("different" if len(blocks) == len(handles) else "the same", flush=True)
os._exit(0)
"""


@pytest.mark.parametrize(
    ("scenario", "right", "wrong", "guard", "instead"),
    [
        (
            A_CHILD_LOOKS,
            "kept",
            "freed",
            "same = birth == NULL ? -1 : PyObject_RichCompareBool(birth, forks, Py_EQ);",
            "same = 1;",
        ),
        pytest.param(
            THE_COLLECTOR_FREES,
            "different",
            "the same",
            "there = last_of(stack) == item && is_last_slot(its, slot, place);",
            "there = 1;",
            marks=pytest.mark.skipif(
                sys.version_info >= (3, 12), reason="the collector never runs in the middle"
            ),
        ),
    ],
)
def test_without_a_guard_it_goes_wrong(
    scenario: str, right: str, wrong: str, guard: str, instead: str, tmp_path: Path
) -> None:
    """Compiled without it, the steps do what they must not."""

    def outcome(library: Path) -> str:
        return subprocess.run(
            [sys.executable, "-c", BEGINNING + scenario, str(library)],
            check=True,
            capture_output=True,
            text=True,
            timeout=60,
        ).stdout.strip()

    changed_module(BLOCKS, tmp_path, (guard, instead))
    assert outcome(Path(BLOCKS.library)) == right
    assert outcome(tmp_path / Path(BLOCKS.library).name) == wrong


def importing(handle: bytes) -> tuple[Any, ...]:
    """Return what the step of that name takes."""
    state = runtime.current()
    return handle, state.live, state.attachments, None


def taking(taken: list[Any], nonce: int = 77) -> tuple[Any, ...]:
    """Return what the step of that name takes."""
    state = runtime.current()
    return state.heap(BY_VALUE), state.live, SIZE, nonce, taken


def with_less_memory(step: Callable[[], Any], undo: Callable[[list[Any]], None]) -> None:
    """Have each allocation of a step fail in turn; nothing has changed after any of them.

    A step has some thirty, of which Python takes a part from what it keeps for that.
    """
    testing = pytest.importorskip("_testcapi")
    failures = 0
    for number in range(60):
        gc.collect()
        before = look()
        found: list[Any] = [None]
        testing.set_nomemory(number, number + 1)
        try:
            found[0] = step()
        except MemoryError:
            failures += 1
        finally:
            testing.remove_mem_hooks()
        if found[0] is not None:
            undo(found)
        del found
        assert look() == before, f"allocation {number}"
    assert failures > 3


def test_a_block_that_cannot_be_taken_for_want_of_memory_is_not() -> None:
    """Whichever allocation fails, it is warm afterwards, its slot free, and nobody has a lease."""
    warm_up()
    taken: list[Any] = []

    def undo(found: list[Any]) -> None:
        found.clear()
        taken.pop().undo()
        assert not taken

    with_less_memory(lambda: quick_blocks.take_block(*taking(taken)), undo)
    assert not taken


def test_a_shared_block_that_cannot_be_lent_for_want_of_memory_is_not() -> None:
    """Whichever allocation fails, there is no lease afterwards."""
    warm_up()
    block = allocate(SIZE)
    import_block(referred(block))
    taken: list[Any] = []

    def undo(found: list[Any]) -> None:
        found.clear()
        taken.pop().undo()
        assert not taken

    with_less_memory(lambda: quick_blocks.give_shared(*giving(block._root, SIZE, taken)), undo)
    assert not taken


def test_a_block_is_warm_once_also_where_the_list_of_them_cannot_shrink() -> None:
    """A list gives memory back as it gets shorter, and asks for less: that may fail, too."""
    warm_up()
    handles = [sent(b"") for _ in range(18)]
    for handle in handles:
        import_block(handle)
    warm_up()
    taken: list[Any] = []
    message = Message()

    def undo(found: list[Any]) -> None:
        found.clear()
        taken.pop().undo()

    for _ in range(16):
        with_less_memory(lambda: quick_blocks.take_block(*taking(taken)), undo)
        for stack in runtime.current().heap(BY_VALUE).warm.values():
            places = [(segment.token, block) for segment, block in stack]
            assert len(set(places)) == len(places)
        # One less. By the long way, if the slots that are at hand are used up.
        assert message.allocate(SIZE) is not None
    message.rollback()


def test_a_message_that_cannot_be_loaded_for_want_of_memory_can_be_later() -> None:
    """Whichever allocation fails, the message is what it was."""
    warm_up()
    handle = sent(b"still here")
    got: list[Any] = []

    def undo(found: list[Any]) -> None:
        # As a load that fails afterwards.
        block = found.pop()
        got.append(bytes(block.buffer[:10]))
        record = block._record
        slot = record.slot
        assert runtime.current().live.take_back(block)
        what = Handle.unpack(handle)
        record.segment.unclaim(record.block, slot, what.nonce, what.slot)

    with_less_memory(lambda: quick_blocks.import_block(*importing(handle)), undo)
    assert set(got) == {b"still here"}
    assert bytes(import_block(handle).buffer[:10]) == b"still here"


def test_a_hold_ends_also_when_there_is_no_memory_at_that_instant() -> None:
    """The last view dies when an allocation fails: the block is given back, then or later."""
    testing = pytest.importorskip("_testcapi")
    warm_up()
    before = look()
    for number in range(20):
        held = [import_block(sent(b"gone"))]
        testing.set_nomemory(number, number + 1)
        try:
            held.clear()
        finally:
            testing.remove_mem_hooks()
        runtime.current().live.settle()
        assert look()._replace(out=0, warm=0) == before._replace(out=0, warm=0), number


def test_the_root_tells_of_the_end_of_the_last_view() -> None:
    """It keeps the mapping, is writable, and is unknown to the garbage collector."""
    pages = mmap.mmap(-1, 4096)
    root = quick_blocks.make_root(pages, 100, 200)
    told: list[Any] = []
    reference = weakref.ref(root, told.append)
    view = memoryview(root)[10:20]
    assert not gc.is_tracked(root)
    del root
    assert not told
    view[0] = 7
    assert pages[110] == 7
    with pytest.raises(BufferError):
        pages.close()
    view.release()
    assert told == [reference]
    pages.close()


@pytest.mark.parametrize(("offset", "nbytes"), [(0, 4097), (4097, 0), (4000, 97), (1, 1 << 63)])
def test_a_root_has_no_bytes_beyond_its_pages(offset: int, nbytes: int) -> None:
    """Whatever the numbers are."""
    with pytest.raises(ValueError, match="no room"):
        quick_blocks.make_root(mmap.mmap(-1, 4096), offset, nbytes)


def test_other_arguments_of_a_root_are_an_error() -> None:
    """What is no number, what cannot be written, and too few."""
    pages = mmap.mmap(-1, 4096)
    for wrong in (("pages", 0, 1), (b"pages", 0, 1), (pages, "0", 1), (pages, 0, -1), (pages, 0)):
        with pytest.raises((TypeError, BufferError, OverflowError)):
            quick_blocks.make_root(*wrong)


def test_tables_without_room_are_refused() -> None:
    """Whatever the numbers are, nothing beyond the tables is looked at."""
    module = needs_module(BLOCKS)
    usual: dict[str, Any] = {
        "shared": False,
        "size": 1 << 20,
        "data_offset": 4096,
        "blocks": 8,
        "slots": 8,
        "generations": 0,
        "offsets": 64,
        "capacities": 128,
        "words": 192,
        "heads": 256,
        "hints": 288,
        "importer": 1,
        "free_slots": [],
        **{name: {} for name in ("holds", "passing", "pins", "outbox", "records", "listed")},
    }
    pages = mmap.mmap(-1, 296)
    assert module.BlockTables(pages, **usual).rest is None
    tables = ("blocks", "slots", "generations", "offsets", "capacities", "words", "heads", "hints")
    for name in tables:
        for other in (usual[name] + 4096, 1 << 62):
            with pytest.raises(ValueError, match="have no room"):
                module.BlockTables(pages, **{**usual, name: other})
    with pytest.raises(BufferError):
        module.BlockTables(bytes(296), **usual)
    with pytest.raises(TypeError):
        module.BlockTables(pages, **{**usual, "holds": []})
