"""Bytes are copied whole, by whichever way: compiled or not, through the caches or past them."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import threading
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from shmreduce import ConfigurationError, copy_bytes, copy_in_parts, copying, processors
from shmreduce.compiled import COPIES
from shmreduce.copy_trials import Trials
from tests.compiler import needs_module
from tests.conftest import PATIENCE
from tests.faults.injection import no_descriptors

if TYPE_CHECKING:
    from types import FrameType

TASKS = Path("/proc/self/task")
PIECE = 256 << 10
"""Bytes that a thread of the compiled module copies at a time."""
LENGTHS = [0, 1, 63, 64, 65, 1000, 4096, 100_003, 3 * PIECE + 17]


def random_bytes(length: int) -> bytes:
    return random.Random(length).randbytes(length)


@pytest.fixture(params=["through caches", "past caches", "by trial", "plainly"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes are copied in one of the ways, whatever their number."""
    if request.param == "plainly":
        monkeypatch.setattr(copying, "_COMPILED", None)
        return
    needs_module(COPIES)
    kept = 1 << 40 if request.param == "through caches" else -1
    monkeypatch.setattr(copying, "_kept_in_cache", lambda: kept)
    monkeypatch.setattr(copying, "_trials", defaultdict(Trials))
    if request.param == "past caches":
        monkeypatch.setattr(Trials, "choose", lambda _: True)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("length", LENGTHS)
def test_every_byte_is_copied_and_none_beside(
    length: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At every distance from a line of the cache; what stands before and behind stays."""
    for name in ("_PARALLEL_FROM", "_TWO_FROM", "_SPARE_FROM", "_SHARE"):
        monkeypatch.setattr(copying, name, 1)
    monkeypatch.setattr(copying, "usable_processors", lambda: threads + 1)
    source = random_bytes(length)
    for before in (0, 1, 17, 63):
        memory = bytearray(b"." * (length + before + 70))
        copy_bytes(memoryview(memory)[before : before + length], source)
        assert memory == b"." * before + source + b"." * 70


@pytest.mark.usefixtures("way")
def test_the_source_may_start_anywhere() -> None:
    """Source and target need not be aligned alike."""
    source = random_bytes(5000)
    for start in range(0, 70, 7):
        target = bytearray(4000)
        copy_bytes(target, memoryview(source)[start : start + 4000])
        assert target == source[start : start + 4000]


@pytest.mark.usefixtures("way")
def test_elements_of_any_kind_are_bytes() -> None:
    """What counts is the number of bytes, not of elements."""
    table = np.frombuffer(random_bytes(640), dtype=[("a", ">f8"), ("b", "S8")]).reshape(5, 8)
    for source in (table, table[:0], table[0, 0:1]):
        target = bytearray(source.nbytes)
        copy_bytes(target, source)
        assert target == source.tobytes()


BAD: dict[str, tuple[Any, Any, str]] = {
    "a target that is read-only": (b"12", b"34", "target"),
    "a source of another size": (bytearray(2), b"345", "source"),
    "a target with gaps": (memoryview(bytearray(4))[::2], b"34", "target"),
    "a source with gaps": (bytearray(2), memoryview(b"1234")[::2], "source"),
    "a source in another order": (bytearray(4), np.ones((2, 2), np.uint8, order="F"), "source"),
    "a target that is no buffer": (None, b"34", "target"),
    "a source that is no buffer": (bytearray(2), "34", "source"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_copied_is_named(case: str) -> None:
    """The error tells which of the two is wrong, and nothing is written."""
    target, source, name = BAD[case]
    before = None if target is None else bytes(target)
    with pytest.raises(ConfigurationError, match=name) as caught:
        copy_bytes(target, source)
    assert caught.value.setting == name
    assert target is None or bytes(target) == before


def test_parts_are_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """A function of one's own gets slices that together are all, each once."""
    monkeypatch.setattr(copying, "_PARALLEL_FROM", 1)
    monkeypatch.setattr(copying, "usable_processors", lambda: 4)
    lengths = []

    def copy(target: Any, source: Any) -> None:
        lengths.append(len(target))
        target[:] = source

    target = memoryview(bytearray(10))
    copy_in_parts(target, memoryview(b"0123456789"), copy)
    assert bytes(target) == b"0123456789"
    assert sorted(lengths) == [1, 3, 3, 3]


@pytest.mark.parametrize("when", range(1, 4))
def test_no_thread_copies_any_more_where_the_wait_for_them_is_struck(
    when: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The handler of a signal raises as the n-th function of the wait is entered."""
    monkeypatch.setattr(copying, "_PARALLEL_FROM", 1)
    monkeypatch.setattr(copying, "usable_processors", lambda: 2)
    begun, go_on = threading.Event(), threading.Event()
    main = threading.get_ident()
    done = []
    left = when

    def copy(target: Any, source: Any) -> None:
        if threading.get_ident() == main:
            assert begun.wait(PATIENCE)
            sys.settrace(strike)
            return
        begun.set()
        assert go_on.wait(PATIENCE)
        done.append(target)

    def strike(frame: FrameType, event: str, _: Any) -> None:
        nonlocal left
        if frame.f_code.co_filename == copying.__file__ and event == "call":
            left -= 1
            if left == 0:
                threading.Timer(0.1, go_on.set).start()
                raise KeyboardInterrupt

    try:
        with pytest.raises(KeyboardInterrupt):
            copy_in_parts(memoryview(bytearray(2)), memoryview(b"ab"), copy)
        assert len(done) == 1
    finally:
        sys.settrace(None)
        go_on.set()


def rated(trials: Trials, count: int, through: float, past: float) -> list[bool]:
    """Let copies be made that are as fast as this; return which went past the caches."""
    made = []
    for _ in range(count):
        made.append(trials.choose())
        trials.note(made[-1], past if made[-1] else through)
    return made


@pytest.mark.parametrize(("past", "chosen"), [(2.0, True), (0.5, False), (1.05, False)])
def test_the_quicker_way_is_taken(past: float, chosen: bool) -> None:
    """After three trials of each; what is hardly quicker is not worth what it costs the reader."""
    assert rated(Trials(), 20, 1.0, past) == [False, True] * 3 + [chosen] * 14


def test_a_wrong_choice_is_corrected() -> None:
    """The first copies may have been disturbed: one in a hundred is made the other way."""
    trials = Trials()
    rated(trials, 6, through=1.0, past=0.1)
    later = rated(trials, 400, through=1.0, past=2.0)
    assert [number for number, past in enumerate(later, 1) if past] == [
        *range(100, 200),
        *range(201, 300),
        *range(301, 400),
    ]


def test_copies_of_another_size_have_trials_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """One way may be faster for copies that caches nearly keep, the other for larger ones."""
    ways = []

    def copy(target: Any, source: Any, past_caches: bool, threads: int) -> None:
        ways.append((len(target), past_caches, threads))
        target[:] = source

    monkeypatch.setattr(copying, "_trials", defaultdict(Trials))
    monkeypatch.setattr(copying, "_copy", copy)
    for size in (10, 10, 100, 11, 100):
        target = memoryview(bytearray(size))
        copying._copy_large(target, memoryview(random_bytes(size)), 2)
        assert bytes(target) == random_bytes(size)
    assert ways == [(10, False, 2), (10, True, 2), (100, False, 2), (11, False, 2), (100, True, 2)]


@pytest.mark.parametrize(
    ("processors", "mebibytes", "threads"),
    [
        (1, 100, 1),
        (2, 5, 1),
        (2, 6, 2),
        (3, 2, 1),
        (3, 3, 2),
        (4, 100, 3),
        (16, 3, 3),
        (16, 7, 7),
        (16, 8, 8),
        (16, 1000, 8),
    ],
)
def test_threads_are_as_many_as_are_worth_it(
    processors: int, mebibytes: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One for each mebibyte; one processor is left to the reader if there are more than two."""
    monkeypatch.setattr(copying, "usable_processors", lambda: processors)
    assert copying._threads_for(mebibytes << 20) == threads


@pytest.mark.parametrize("threads", [0, 2, 5, 32, 1000])
def test_threads_of_the_compiled_module_copy_all(threads: int) -> None:
    """However many, and whatever is left for the last one; none is there afterwards."""
    needs_module(COPIES)
    before = list(TASKS.iterdir())
    for length in (0, 1, PIECE - 1, PIECE, PIECE + 1, 5 * PIECE, 7 * PIECE + 123):
        for past_caches in (False, True):
            source = random_bytes(length)
            target = bytearray(length)
            copying._copy(target, source, past_caches, threads)
            assert target == source
    assert list(TASKS.iterdir()) == before


GONE = """
import faulthandler, mmap, tempfile
from shmreduce import copying
faulthandler.enable()
with tempfile.TemporaryFile() as file:
    file.truncate(16 << 20)
    source = mmap.mmap(file.fileno(), 16 << 20)
    # Only the last page is gone: a second thread would end the process in the middle of it.
    file.truncate((16 << 20) - mmap.PAGESIZE)
    copying._copy(bytearray(16 << 20), source, False, 8)
"""


def test_a_thread_that_reads_memory_which_is_gone_does_not_die_in_silence() -> None:
    """The signal is not blocked: so the module faulthandler says where it happened."""
    needs_module(COPIES)
    done = subprocess.run(
        [sys.executable, "-c", GONE], capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert done.returncode == -signal.SIGBUS
    assert "Fatal Python error: Bus error" in done.stderr


WITHOUT_THREADS = """
import os, resource
from shmreduce import copying
source = os.urandom(1 << 20) * 4
target = bytearray(len(source))
used = 4096 * int(open("/proc/self/statm").read().split()[0])
resource.setrlimit(resource.RLIMIT_AS, (used, used))
try:
    bytearray(1 << 20)
except MemoryError:
    print("full")
copying._copy(target, source, False, 8)
print(target == source)
"""


def test_where_no_thread_can_be_started_the_caller_copies() -> None:
    """As where the limit of the address space leaves no room for their stacks."""
    needs_module(COPIES)
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_THREADS],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert (done.stdout.split(), done.stderr) == (["full", "True"], "")


@pytest.mark.parametrize(
    ("sizes", "found"),
    [
        (["32K", "1024K", "32M"], 32 << 20),
        (["512K"], 512 << 10),
        (["4096"], 4096),
        (["", "unknown", "xK", "2M"], 2 << 20),
        ([], None),
    ],
)
def test_the_largest_cache_counts(
    sizes: list[str], found: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the kernel writes them; what it does not tell is passed over."""
    for index, size in enumerate(sizes):
        (tmp_path / f"index{index}").mkdir()
        (tmp_path / f"index{index}" / "size").write_text(f"{size}\n")
    monkeypatch.setattr(processors, "_CACHES", str(tmp_path))
    assert processors.cache_size() == found


def test_no_descriptor_is_needed_to_copy() -> None:
    """The first copy asks for the caches' sizes: without a descriptor there is no answer."""
    copying._kept_in_cache.cache_clear()
    target = bytearray(1000)
    try:
        with no_descriptors():
            assert processors.cache_size() is None
            copy_bytes(target, bytes([7]) * 1000)
    finally:
        copying._kept_in_cache.cache_clear()
    assert target == bytes([7]) * 1000


@pytest.mark.parametrize(
    ("found", "kept"),
    [(None, 8 << 20), (1 << 20, 4 << 20), (32 << 20, 8 << 20), (1 << 30, 32 << 20)],
)
def test_a_quarter_of_the_cache_is_kept(
    found: int | None, kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within bounds: other programs, and other virtual machines, have a part in it."""
    monkeypatch.setattr(copying, "cache_size", lambda: found)
    assert copying._kept_in_cache.__wrapped__() == kept
