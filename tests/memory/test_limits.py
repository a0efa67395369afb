"""Limits that are reached: a named error, nothing lost, nothing left."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import functools
import importlib
import io
import mmap
import multiprocessing
import os
import pickle
import re
import resource
import struct
import subprocess
import sys
import traceback
from contextlib import contextmanager, redirect_stdout
from multiprocessing import Pipe
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import shmreduce
from shmreduce import handle_calls, unpickling
from shmreduce.cli import main
from shmreduce.compiled import BLOCKS
from shmreduce.memory import mapping, runtime
from shmreduce.memory.heap import Heap
from shmreduce.memory.inspection import process_state
from shmreduce.memory.layout import BY_VALUE, LOCK_OWNER
from shmreduce.memory.mapping import PAGE_SIZE, Mapping
from shmreduce.memory.segment_creation import create_segment
from shmreduce.memory.sweep import sweep
from shmreduce.strategies import find_strategy
from shmreduce.testing.processes import OtherProcess
from tests.compiler import needs_module
from tests.memory.waiting import PATIENCE, eventually, in_forked_child, receive, wait_for_exit
from tests.open_files import open_files

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from shmreduce.memory.owned_segment import OwnedSegment

LENGTH = 300_000


@contextmanager
def no_descriptors_left(but: int = 0) -> Iterator[None]:
    """Make attempts to open something fail for a while, while ``but`` others are open."""
    # Modules that are not imported yet could not be either.
    ForkingPickler.loads(ForkingPickler.dumps([np.ones(LENGTH), shmreduce.ones(LENGTH)]))
    # Segments that other tests have left open would be closed to get descriptors.
    runtime.current().attachments.close_idle(0)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = [os.open(os.devnull, os.O_RDONLY) for _ in range(but + 1)]
    for each in free:
        os.close(each)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free[-1], limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def dumps_of_new_process() -> bytes:
    """Return a message whose segments the reader cannot have open."""
    _kept.append(shmreduce.ones(LENGTH, np.uint8))
    return bytes(ForkingPickler.dumps([np.full(LENGTH, 2, np.uint8), _kept[-1]]))


_kept: list[Any] = []


@pytest.mark.usefixtures("strategy")
def test_a_reader_without_descriptors_can_load_later() -> None:
    """With no descriptor left, loading is an ``AttachError`` that keeps the message,
    which loads once there are descriptors again.
    """
    with OtherProcess("fork") as other:
        data = other.ask(dumps_of_new_process)
        with no_descriptors_left(), pytest.raises(shmreduce.AttachError) as caught:
            ForkingPickler.loads(data)
        assert caught.value.errno == errno.EMFILE
        assert "ulimit -n" in str(caught.value)
        first, second = ForkingPickler.loads(caught.value.message_bytes or b"")
        assert (first == 2).all()
        assert (second == 1).all()
        del first, second


def test_private_pages_that_are_refused_leave_the_shared_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where the kernel has unmapped them by then, as before Linux 6.12."""
    fd = os.memfd_create("pages")
    os.ftruncate(fd, PAGE_SIZE)
    os.pwrite(fd, b"there", 0)
    pages = Mapping(fd, 0, PAGE_SIZE)
    map_pages = mapping._mmap

    def older_kernel(where: int, size: int, access: int, flags: int, *file: int) -> Any:
        if flags & mmap.MAP_PRIVATE:
            # Not unmapped, but as good as: nothing can be read there.
            map_pages(where, size, 0, flags | mmap.MAP_ANONYMOUS, -1, 0)
            ctypes.set_errno(errno.ENOMEM)
            return None
        return map_pages(where, size, access, flags, *file)

    monkeypatch.setattr(mapping, "_mmap", older_kernel)
    with pytest.raises(shmreduce.SegmentError, match="Cannot allocate memory"):
        pages.cover(fd, 0, PAGE_SIZE, private=True)
    os.pwrite(fd, b"shown", 0)

    # In a child, which else would end the tests with it.
    child = in_forked_child(lambda: ctypes.string_at(pages.address, 5) == b"shown")
    assert wait_for_exit(child) == 0
    os.close(fd)


def load_first_without_descriptors(kind: str, start: Any, news: Any) -> None:
    """Receive the first array that this process ever sees, with no descriptor for its imports."""
    start[1].close()
    news[0].close()
    assert start[0].poll(PATIENCE)
    filler = []
    with contextlib.suppress(OSError):
        while True:
            filler.append(os.open(os.devnull, os.O_RDONLY))
    try:
        array = start[0].recv()
    except shmreduce.AttachError as error:
        outcome, data = [type(error).__name__, errno.errorcode[error.errno]], error.message_bytes
    else:
        outcome, data = ["loaded", kind], pickle.dumps(array)
    for each in filler:
        os.close(each)
    news[1].send((*outcome, float(pickle.loads(data or b"").sum())))


@pytest.mark.parametrize("length", [10, LENGTH])
@pytest.mark.parametrize("kind", ["standard", "ours"])
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_the_first_array_may_lack_descriptors_for_imports(
    method: str, kind: str, length: int
) -> None:
    """It is an ``AttachError`` that keeps the message, as in a process that has imported all."""
    if method == "fork":
        # A small array needs no descriptor where its module is there already.
        importlib.import_module("shmreduce_numpy.rebuild")
    made = shmreduce if kind == "ours" else multiprocessing
    context: Any = made.get_context(method)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with shmreduce.install() if kind == "standard" else contextlib.nullcontext():
        start, news = context.Pipe(duplex=False), context.Pipe(duplex=False)
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, limits[1]))
        try:
            reader = context.Process(
                target=load_first_without_descriptors, args=(kind, start, news)
            )
            reader.start()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        start[1].send(np.ones(length))
        what, code, total = receive(news[0])
        reader.join(PATIENCE)
        needs_nothing = method == "fork" and length < 100
        assert (what, code) == (("loaded", kind) if needs_nothing else ("AttachError", "EMFILE"))
        assert total == length
        assert reader.exitcode == 0
        for each in (*start, *news):
            each.close()


@pytest.mark.usefixtures("strategy")
def test_a_child_without_descriptors_cannot_send_what_it_inherited() -> None:
    """The error is a named one, so queues raise it and lose nothing; it works afterwards."""
    array = shmreduce.ones(LENGTH, np.uint8)

    def child() -> bool:
        ForkingPickler.loads(ForkingPickler.dumps(np.ones(LENGTH, np.uint8)))
        with no_descriptors_left(), pytest.raises(shmreduce.SegmentError, match="ulimit -n"):
            ForkingPickler.dumps(array)
        return bool(ForkingPickler.loads(ForkingPickler.dumps(array)).all())

    assert wait_for_exit(in_forked_child(child)) == 0


def grow_without_descriptors(left: int) -> list[str]:
    """Return the names of the errors of a sender that can open nothing but ``left`` files."""
    errors = []
    large = 300 * LENGTH
    with no_descriptors_left(left):
        for make in (
            lambda: shmreduce.zeros(large, np.uint8),
            lambda: ForkingPickler.dumps(np.ones(large, np.uint8)),
        ):
            try:
                make()
            except shmreduce.ShmreduceError as error:
                errors.append(type(error).__name__)
                errors.append(errno.errorcode[error.errno])
                errors += re.findall("ulimit -n", str(error))
    assert shmreduce.zeros(LENGTH, np.uint8).sum() == 0
    assert ForkingPickler.loads(ForkingPickler.dumps(np.ones(LENGTH, np.uint8))).sum() == LENGTH
    return errors


@pytest.mark.usefixtures("strategy")
@pytest.mark.parametrize("left", [0, 1])
def test_a_sender_without_descriptors_gets_a_named_error(left: int) -> None:
    """With no descriptor left, or one where two are needed, making memory is a
    ``SegmentError`` with EMFILE; it works once there are descriptors again.
    """
    with OtherProcess("fork") as other:
        found = other.ask(grow_without_descriptors, left)
    assert found == ["SegmentError", "EMFILE", "ulimit -n"] * 2


@pytest.mark.usefixtures("strategy", "long_way")
def test_what_the_kernel_has_no_lock_for_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """While the kernel has no memory for locks (ENOLCK), calls wait for it, and an array
    that dies then is released later.
    """
    refusals: list[int] = []

    def refuse_sometimes(fd: int, command: int, argument: Any = 0) -> Any:
        if command != fcntl.F_OFD_SETLK or not refusals:
            return real(fd, command, argument)
        kind, _, start = struct.unpack_from("@hhq", argument)
        if kind == fcntl.F_WRLCK and start in (places or {start}):
            raise OSError(refusals.pop(), "no locks available")
        return real(fd, command, argument)

    real, places = fcntl.fcntl, set[int]()
    shared = shmreduce.ones(LENGTH, np.uint8)
    with OtherProcess("fork") as other:
        array = other.ask(np.ones, LENGTH, np.uint8)
        monkeypatch.setattr(fcntl, "fcntl", refuse_sometimes)
        refusals += [errno.ENOLCK] * 2
        del array
        assert len(refusals) == 1
        refusals += [errno.ENOLCK] * 2
        assert ForkingPickler.loads(ForkingPickler.dumps(shared)) is not None
        assert not refusals
        eventually(lambda: process_state().waiting == 0, "the array is released")
        refusals += [errno.ENOLCK]
        # The owner's own lock must not be missing.
        places.add(LOCK_OWNER)
        with pytest.raises(shmreduce.OutOfSharedMemoryError) as caught:
            segment_for(heap_of_its_own())
        assert caught.value.errno == errno.ENOLCK


def heap_of_its_own() -> Heap:
    return Heap(BY_VALUE, runtime.current().heap(BY_VALUE).strategy, runtime.current())


def segment_for(heap: Heap) -> OwnedSegment:
    return create_segment(heap.kind, 1 << 20, 1 << 20, heap.strategy, heap._host)


@pytest.mark.parametrize("call", range(4))
@pytest.mark.usefixtures("strategy")
def test_a_segment_that_cannot_be_mapped_leaves_no_descriptor(
    call: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever mapping of a new segment the kernel refuses, all that was opened is closed."""
    heap = heap_of_its_own()
    calls = iter(range(100))

    def refuse_one(*arguments: Any) -> Any:
        if next(calls) == call:
            return ctypes.c_void_p(-1).value
        return real(*arguments)

    real = mapping._mmap
    before = open_files()
    monkeypatch.setattr(mapping, "_mmap", refuse_one)
    try:
        segment = segment_for(heap)
    except shmreduce.SegmentError:
        assert call < 2
    else:
        heap._host.directory[segment.token] = segment
        heap.segments.append(segment)
        with heap.exclusive():
            heap.cool(0)
    assert not open_files() - before


FULL = """
import errno, os, sys
import numpy as np
import shmreduce
from multiprocessing.reduction import ForkingPickler

shmreduce.install(strategy="file_system", inline_limit=4096)
kept = []
try:
    while True:
        kept.append(shmreduce.ones(300_000, np.uint8))
except shmreduce.OutOfSharedMemoryError as error:
    assert error.errno == errno.ENOSPC, error
    assert error.requested > 0
    assert "doctor" in str(error)
assert 1 < len(kept) < 60
count = len(kept)
for _ in range(3):
    try:
        ForkingPickler.dumps(np.ones(2_000_000, np.uint8))
    except shmreduce.OutOfSharedMemoryError:
        pass
    else:
        raise SystemExit("there is no room for this")
assert all((each == 1).all() for each in kept)
with shmreduce.install(on_exhausted="pickle"):
    data = ForkingPickler.dumps(np.ones(2_000_000, np.uint8))
    assert (ForkingPickler.loads(data) == 1).all()
kept.clear()
again = [shmreduce.ones(300_000, np.uint8) for _ in range(count)]
print("all well")
"""


@pytest.mark.parametrize("megabytes", [4, 9, 16])
def test_a_full_file_system_is_an_error_and_no_signal(tmp_path: Path, megabytes: int) -> None:
    """On a small tmpfs the error names what was asked for; memory that was handed out
    before stays good, and there is no SIGBUS.
    """
    script = tmp_path / "full.py"
    script.write_text(FULL)
    folder = tmp_path / "small"
    folder.mkdir()
    mount = f"mount -t tmpfs -o size={megabytes}m tmpfs {folder}"
    probe = subprocess.run(
        ["unshare", "-m", "sh", "-c", mount],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    if probe.returncode:
        pytest.skip(f"may not mount a tmpfs here: {probe.stderr.strip()}")
    finished = subprocess.run(
        ["unshare", "-m", "sh", "-c", f"{mount} && exec {sys.executable} {script}"],
        env={
            **os.environ,
            "SHMREDUCE_DIRECTORY": str(folder),
            "PYTHONPATH": os.pathsep.join(sys.path),
        },
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert finished.stdout == "all well\n", finished.stderr[-2000:]
    assert finished.returncode == 0


REFUSED = """
import resource

import numpy as np
import shmreduce
from multiprocessing.reduction import ForkingPickler

shmreduce.install(strategy="file_system", on_exhausted="pickle")
_, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
data = ForkingPickler.dumps(np.ones(2_000_000, np.uint8))
assert (ForkingPickler.loads(data) == 1).all()
here, there = shmreduce.Pipe()
here.send(np.ones(160_000, np.uint8))
assert (there.recv() == 1).all()
here.send_bytes(bytes(160_000))
assert len(there.recv_bytes()) == 160_000
with shmreduce.install(on_exhausted="raise"):
    try:
        ForkingPickler.dumps(np.ones(2_000_000, np.uint8))
    except shmreduce.SegmentError as error:
        print(error.operation)
"""


def test_where_no_segment_can_be_made_arrays_are_pickled_if_asked_for() -> None:
    """``on_exhausted="pickle"`` is for limits of the process as for a full file system."""
    finished = subprocess.run(
        [sys.executable, "-c", REFUSED],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert finished.stdout == "create\n", finished.stderr[-2000:]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.usefixtures("strategy")
def test_another_users_segment_is_refused() -> None:
    """A process of another user gets a ``ForeignSegmentError``, or is not let near the
    segment by the kernel, and nothing is claimed.
    """
    array = shmreduce.ones(LENGTH, np.uint8)
    data = bytes(ForkingPickler.dumps([array]))
    nobody = 65534

    def load_as_nobody() -> bool:
        # Without what was inherited, as an unrelated process would be.
        from shmreduce.memory import runtime

        runtime.current().attachments._inherited.clear()
        os.setgroups([])
        os.setgid(nobody)
        os.setuid(nobody)
        try:
            ForkingPickler.loads(data)
        except shmreduce.ForeignSegmentError as error:
            return bool(error.expected == nobody and error.uid == 0)
        except shmreduce.AttachError as error:
            return error.errno in (errno.EACCES, errno.EPERM)
        return False

    assert wait_for_exit(in_forked_child(load_as_nobody)) == 0
    assert process_state().unread == 1
    assert ForkingPickler.loads(data)[0].sum() == LENGTH


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.filterwarnings("ignore::shmreduce.ShmreduceWarning")
@pytest.mark.usefixtures("strategy")
def test_who_has_become_another_user_makes_segments_of_that_user() -> None:
    """Those from before are closed to the user's other processes, and are not used again; that
    their names cannot be removed costs no message.
    """
    nobody = 65534

    def child() -> bool:
        heap = runtime.current().heap(BY_VALUE)
        received = ForkingPickler.loads(ForkingPickler.dumps(np.ones(LENGTH)))
        os.seteuid(nobody)
        data = ForkingPickler.dumps(np.ones(LENGTH))
        users = {os.fstat(each.fd).st_uid for each in runtime.current().heap(BY_VALUE).segments}
        assert users == {nobody}
        del received
        heap.collect()
        with heap.exclusive():
            heap.cool(0)
        return not heap.segments and bool(ForkingPickler.loads(data).all())

    assert wait_for_exit(in_forked_child(child)) == 0
    sweep(find_strategy("file_system"))


@pytest.mark.usefixtures("installed")
def test_a_segment_of_another_user_in_our_hands_is_refused() -> None:
    """A descriptor of another user's segment is not mapped even if it can be opened."""
    if os.geteuid() != 0:
        pytest.skip("only root can give files away")
    with OtherProcess("fork") as other:
        data = other.ask(dumps_and_give_away)
        with pytest.raises(shmreduce.ForeignSegmentError) as caught:
            ForkingPickler.loads(data)
        assert caught.value.uid == 65534


def dumps_and_give_away() -> bytes:
    data = dumps_of_new_process()
    for fd in process_state().segments.values():
        os.fchown(fd, 65534, 65534)
    return data


MANY = 100_000
FEW_DESCRIPTORS = 32
FEW_MAPPINGS = 64


def count_resources() -> tuple[int, int]:
    """Return how many descriptors and mappings of ours this process has."""
    process = Path("/proc/self")
    descriptors = 0
    for each in (process / "fd").iterdir():
        try:
            descriptors += "shmreduce-" in str(each.readlink())
        except FileNotFoundError:
            # The listing's own.
            continue
    mappings = sum("shmreduce-" in line for line in (process / "maps").read_text().splitlines())
    return descriptors, mappings


def hold_many(reader: Any, writer: Any) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, limits[1]))
    held: list[Any] = []
    while len(held) < MANY:
        held.extend(receive(reader))
    wrong = sum(int(array[0]) != number % 251 for number, array in enumerate(held))
    writer.send((wrong, *count_resources()))
    assert receive(reader) == "end"


def send_many() -> None:
    """Make and send 100,000 arrays, and check what it costs."""
    import multiprocessing

    shmreduce.install()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, limits[1]))
    context: Any = multiprocessing.get_context("fork")
    to_child, from_parent = Pipe(duplex=False)
    to_parent, from_child = Pipe(duplex=False)
    child = context.Process(target=hold_many, args=(to_child, from_child))
    child.start()
    kept: list[Any] = []
    for start in range(0, MANY, 1000):
        some = [
            shmreduce.full(4096, number % 251, np.uint8) for number in range(start, start + 1000)
        ]
        from_parent.send(some)
        kept.extend(some)
    wrong, descriptors, mappings = receive(to_parent)
    assert wrong == 0
    assert descriptors <= FEW_DESCRIPTORS, descriptors
    assert mappings <= FEW_MAPPINGS, mappings
    descriptors, mappings = count_resources()
    assert descriptors <= FEW_DESCRIPTORS, descriptors
    assert mappings <= FEW_MAPPINGS, mappings
    from_parent.send("end")
    child.join(PATIENCE)
    assert child.exitcode == 0


@pytest.mark.timeout(240)
def test_a_hundred_thousand_arrays_need_few_descriptors_and_mappings() -> None:
    """100,000 live shared arrays of 4 KiB take at most 32 descriptors and 64 mappings,
    under ``ulimit -n 256``, at the sender and at the receiver.
    """
    finished = subprocess.run(
        [sys.executable, "-c", "from tests.memory.test_limits import send_many; send_many()"],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr[-2000:]


def test_a_sweep_that_finds_no_descriptor_is_left_to_the_next() -> None:
    """Names that cannot be listed at the moment are no error of whoever wants to send."""
    strategy = find_strategy("file_system")
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = []
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, limits[1]))
        with pytest.raises(OSError, match="Too many open files"):
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))
        with pytest.raises(OSError, match="Too many open files"):
            list(strategy.names())
        assert sweep(strategy) == []
    finally:
        for fd in taken:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_what_cannot_be_swept_is_no_error_of_who_sends(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A name that this process must not remove is left; ``gc`` says so."""
    # Of its own: any process of this user sweeps the one that all have.
    monkeypatch.setenv("SHMREDUCE_DIRECTORY", str(tmp_path))
    strategy = find_strategy("file_system")
    left = strategy.create(PAGE_SIZE, "e" * 32)
    os.close(left.fd)
    assert left.name is not None
    os.utime(left.name, (1, 1))

    unlink = type(strategy).unlink

    def refuse_one(self: Any, name: str) -> None:
        if name == left.name:
            raise PermissionError(errno.EPERM, "the file is immutable", name)
        unlink(self, name)

    try:
        with monkeypatch.context() as patched:
            patched.setattr(type(strategy), "unlink", refuse_one)
            assert left.name not in sweep(strategy)
            told = io.StringIO()
            with redirect_stdout(told):
                assert main(["gc"]) == 1
            assert f"could not remove {left.name}: " in told.getvalue()
    finally:
        assert left.name in sweep(strategy)


def test_what_can_never_fit_takes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is refused before a file is made for it, whose tables alone would fill the memory."""
    heap = heap_of_its_own()
    made: list[int] = []
    monkeypatch.setattr(heap.strategy, "create", lambda size, _: made.append(size))
    with pytest.raises(shmreduce.OutOfSharedMemoryError):
        heap.allocate(1 << 50)
    assert made == []


def join_without_descriptors() -> bool:
    """Try to join the family with too few free descriptors; return whether all went well."""
    here, there = Pipe()
    lowest = os.open(os.devnull, os.O_RDONLY)
    os.close(lowest)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    # That of its parent.
    assert runtime.current().known_family is not None
    before = descriptors()
    numbers = []
    # It needs two.
    for room in (0, 1, 1):
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + room, limits[1]))
        try:
            here.send(np.ones(LENGTH, np.uint8))
        except shmreduce.SegmentError as error:
            numbers.append(error.errno)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    if numbers != [errno.EMFILE] * 3 or descriptors() != before:
        return False
    here.send(np.ones(LENGTH, np.uint8))
    # Once, not with each attempt; others of the family may come and go.
    members = [pid for pid, _ in runtime.current().family.members()]
    return bool(members.count(os.getpid()) == 1 and there.recv().sum() == LENGTH)


def descriptors() -> int:
    """Return how many descriptors this process has open."""
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.usefixtures("strategy")
def test_joining_the_family_without_descriptors_leaves_nothing() -> None:
    """A forked child that has too few descriptors for it gets a ``SegmentError``, and no
    descriptor and no entry in the family is used up.
    """
    ForkingPickler.loads(ForkingPickler.dumps(np.ones(LENGTH, np.uint8)))
    assert wait_for_exit(in_forked_child(join_without_descriptors)) == 0


@pytest.mark.parametrize("what", ["by value", "shared", "born here", "bytes"])
@pytest.mark.usefixtures("strategy")
def test_the_recursion_limit_leaves_no_block_wherever_it_strikes(what: str) -> None:
    """A send, or a receipt, is as deep as it is; each depth fails whole or not at all."""
    array = np.arange(40_000.0)
    payload = {"by value": array, "shared": shmreduce.share(array), "bytes": b"x" * 1_000_000}
    reader, writer = shmreduce.Pipe(duplex=False)

    def there_and_back() -> Any:
        if what == "born here":
            return shmreduce.share(array)
        writer.send(payload[what])
        return reader.recv()

    there_and_back()
    limit, deep = sys.getrecursionlimit(), len(traceback.extract_stack())
    outcomes = []
    with reader, writer:
        for depth in range(1, 60):
            # What is found out once about such messages needs some stack itself.
            handle_calls._calls.clear()
            arrived = None
            # 3.11 has ctypes tell a RecursionError among its arguments as an error of its own.
            with contextlib.suppress(RecursionError, ctypes.ArgumentError):
                try:
                    sys.setrecursionlimit(deep + depth)
                    arrived = there_and_back()
                finally:
                    sys.setrecursionlimit(limit)
            outcomes.append(arrived is not None)
            if arrived is None and reader.poll(0):
                # What failed was to load it.
                arrived = reader.recv()
            assert arrived is None or np.array_equal(arrived, payload.get(what, array))
    assert not outcomes[0]
    assert outcomes[-1]


def ends_of(how: str) -> tuple[Any, Callable[[Any], None], Callable[[], Any], Callable[[], bool]]:
    """Return what to close, and functions that send, that receive, and that say what is unread."""
    if how == "by a queue":
        # It does not wait, so reading takes the fewest calls.
        queue: Any = shmreduce.Queue()
        return queue, queue.put, functools.partial(queue.get, block=False), queue._reader.poll
    reader, writer = pipe_read(how)
    both = contextlib.ExitStack()
    for end in (reader, writer):
        both.enter_context(end)
    return both, writer.send, reader.recv, reader.poll


def pipe_read(how: str) -> tuple[Any, Any]:
    """Return the ends of a pipe whose reader polls, or sleeps at once."""
    reader, writer = shmreduce.Pipe(duplex=False)
    if how == "asleep":
        # As after waits in which nothing arrived, or where others use all processors.
        reader._waits._sleeps = sys.maxsize
    return reader, writer


@pytest.mark.parametrize("how", ["polling", "asleep", "by a queue"])
@pytest.mark.parametrize("first", [False, True], ids=["later", "first of its segment"])
@pytest.mark.parametrize("what", ["an array", "bytes", "both"])
@pytest.mark.usefixtures("strategy")
def test_a_receipt_that_is_too_deep_for_the_stack_leaves_no_block(
    what: str, first: bool, how: str
) -> None:
    """The sender had more stack. The message is lost where it was read, and given back.

    The first message of a segment has the segment mapped, and needs more stack for that.
    With the compiled modules: without them, a claim is many calls, and what undoes it may lack
    the stack as well.
    """
    needs_module(BLOCKS)
    array = np.arange(40_000.0)
    data = b"x" * 1_000_000
    payload: Any = {"an array": array, "bytes": data, "both": [array, data]}[what]
    limit, deep = sys.getrecursionlimit(), len(traceback.extract_stack())
    received = 0
    channel, send, take, is_unread = ends_of(how)
    with contextlib.closing(channel):
        for depth in range(1, 40):
            handle_calls._calls.clear()
            send(payload)
            if first:
                for heap in runtime.current().heaps:
                    for segment in heap.segments:
                        segment.import_mapping = None
            with contextlib.suppress(RecursionError, ctypes.ArgumentError):
                try:
                    sys.setrecursionlimit(deep + depth)
                    take()
                    received += 1
                finally:
                    sys.setrecursionlimit(limit)
            if is_unread():
                # It was not even read.
                take()
    assert 0 < received < 39


@pytest.mark.parametrize("how", ["polling", "asleep"])
@pytest.mark.parametrize("what", ["an array", "both"])
@pytest.mark.usefixtures("strategy")
def test_bytes_that_cannot_be_kept_for_lack_of_stack_leave_no_block(what: str, how: str) -> None:
    """``recv_bytes`` returns them, or gives back what they refer to."""
    needs_module(BLOCKS)
    array = np.arange(40_000.0)
    payload: Any = {"an array": array, "both": [array, b"x" * 1_000_000]}[what]
    limit, deep = sys.getrecursionlimit(), len(traceback.extract_stack())
    received = 0
    reader, writer = pipe_read(how)
    with reader, writer:
        for depth in range(1, 40):
            writer.send(payload)
            data = None
            with contextlib.suppress(RecursionError, ctypes.ArgumentError):
                try:
                    sys.setrecursionlimit(deep + depth)
                    data = reader.recv_bytes()
                    received += 1
                finally:
                    sys.setrecursionlimit(limit)
            if data is None and reader.poll():
                data = reader.recv_bytes()
            if data is not None:
                pickle.loads(data)
    assert 0 < received < 39


def test_a_load_too_deep_for_the_stack_says_so_where_no_thread_can_be_had(
    installed: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the limit on processes is reached (ulimit -u)."""

    def refuse(*_: Any) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(unpickling, "start_new_thread", refuse)
    with pytest.raises(RecursionError):
        unpickling.load_message(too_deep, b"")


def too_deep(_data: bytes) -> None:
    raise RecursionError
