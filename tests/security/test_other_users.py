"""Another user of the machine can neither read nor spoil what is shared here.

Most of these tests have to become somebody else, which root alone can.
"""

from __future__ import annotations

import fcntl
import os
import re
import socket
import stat
import time
from multiprocessing import Pipe
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import shmreduce
from shmreduce.contracts import SegmentFile
from shmreduce.memory import runtime
from shmreduce.memory.layout import Layout, SegmentHeader
from shmreduce.memory.loading import discard_message
from shmreduce.memory.mapping import PAGE_SIZE
from shmreduce.memory.message import Message
from shmreduce.memory.segment import Segment
from shmreduce.memory.sweep import sweep
from shmreduce.strategies import find_strategy
from shmreduce.testing import OtherProcess

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

NOBODY = 65534
TOKEN = re.compile(r"[0-9a-f]{32}")
only_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")


@pytest.fixture(autouse=True)
def _nothing_is_left(shmreduce_no_leaks: None) -> None:
    """No test leaves a segment."""


@pytest.fixture(params=["file_descriptor", "file_system"])
def strategy(request: pytest.FixtureRequest) -> Iterator[str]:
    with shmreduce.install(strategy=request.param, inline_limit=4096):
        yield request.param


@pytest.fixture
def directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A directory for segments in which everybody may make files, as /dev/shm is."""
    shared = tmp_path / "shm"
    shared.mkdir()
    shared.chmod(0o1777)
    for parent in shared.parents:
        if not parent.stat().st_mode & stat.S_IXOTH:
            parent.chmod(parent.stat().st_mode | stat.S_IXGRP | stat.S_IXOTH)
    monkeypatch.setenv("SHMREDUCE_DIRECTORY", str(shared))
    return shared


def become_nobody() -> None:
    """Give up everything that root has."""
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)


def as_nobody(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return what a function returns in a process of another user, or raise what it raises."""
    with OtherProcess("fork") as other:
        other.ask(become_nobody)
        return other.ask(function, *arguments)


def segments() -> list[Segment]:
    """Return what this process has made."""
    return [each for each in runtime.current().directory.values() if each.owner]


# What is seen from outside


def test_segments_are_their_users_alone(strategy: str) -> None:
    """Nobody else may open them: mode 0600 whatever the umask; and memfds keep their size."""
    before = os.umask(0)
    try:
        block = shmreduce.allocate(100)
        made = [each for each in segments() if each.strategy.name == strategy]
    finally:
        os.umask(before)
    assert made
    for segment in made:
        assert stat.S_IMODE(os.fstat(segment.fd).st_mode) == 0o600
        if strategy == "file_descriptor":
            seals = fcntl.fcntl(segment.fd, fcntl.F_GET_SEALS)
            assert seals & (fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL) == 7
    del block


def test_names_cannot_be_guessed() -> None:
    """What is not user and process in a name are 128 bits from the system's random numbers."""
    with shmreduce.install(strategy="file_system"):
        block = shmreduce.allocate(100)
        by_value = Message()
        _ = by_value.allocate(10_000)
        names = [each.file.name for each in segments() if each.file.name is not None]
        by_value.rollback()
        del block
    tokens = {name.rpartition("-")[2] for name in names}
    assert len(tokens) == len(names) >= 2
    assert all(TOKEN.fullmatch(token) for token in tokens)


def test_sockets_have_no_names() -> None:
    """Nobody can connect to a pipe, a queue or the family's mailbox."""
    here, there = shmreduce.Pipe()
    numbers = [here.fileno(), there.fileno()]
    numbers += [each.fileno() for each in runtime.current().family.mailbox]
    for number in numbers:
        with socket.socket(fileno=os.dup(number)) as end:
            assert not end.getsockname()
            assert not end.getpeername()
    here.close()
    there.close()


def open_through_proc(pid: int, number: int) -> None:
    os.close(os.open(f"/proc/{pid}/fd/{number}", os.O_RDONLY))


@only_root
def test_another_user_opens_no_descriptor(strategy: str) -> None:
    """/proc/PID/fd does not lead another user to a segment, to the family or to a pipe."""
    block = shmreduce.allocate(100)
    family = runtime.current().family
    numbers = [family.fd, *(number for each in segments() for number in each.descriptors())]
    with OtherProcess("fork") as other:
        other.ask(become_nobody)
        for number in numbers:
            with pytest.raises(PermissionError):
                other.ask(open_through_proc, os.getpid(), number)
    del block


def give_out() -> tuple[shmreduce.Block, bytes]:
    """Return a block, and a handle of it in a message."""
    block = shmreduce.allocate(5000)
    message = Message()
    handle = message.refer(block, 5000)
    assert handle is not None
    message.commit()
    return block, handle


def load_as_nobody(handle: bytes) -> None:
    # Later there may be no way to the files of the interpreter.
    find_strategy("file_descriptor")
    find_strategy("file_system")
    runtime.current()
    become_nobody()
    shmreduce.import_block(handle)


@only_root
def test_a_handle_is_of_no_use_to_another_user(strategy: str) -> None:
    """Who has a message's bytes, but is another user, gets an error that says so."""
    block, handle = give_out()
    with OtherProcess("spawn") as other, pytest.raises(shmreduce.AttachError) as caught:
        other.ask(load_as_nobody, handle)
    if strategy == "file_system":
        assert isinstance(caught.value, shmreduce.ForeignSegmentError)
    else:
        assert "same user" in str(caught.value)
    discard_message(handle)
    del block


def size_that_a_child_reads() -> Any:
    """Return the size of a block as a child of this process reads it, or the child's error."""
    here, there = Pipe()
    pid = os.fork()
    if not pid:
        try:
            here.close()
            handle = there.recv_bytes()
            try:
                there.send(shmreduce.import_block(handle).nbytes)
            except shmreduce.AttachError as error:
                there.send(error)
        finally:
            os._exit(0)
    there.close()
    # Made after the fork, so the child has not inherited its descriptor.
    block, handle = give_out()
    here.send_bytes(handle)
    answer = here.recv()
    here.close()
    os.waitpid(pid, 0)
    discard_message(handle)
    del block
    return answer


@only_root
def test_a_child_that_changes_its_user_is_told_why_it_may_not_read(strategy: str) -> None:
    """A forked child has inherited the segment, but cannot open it again as another user."""
    block, handle = give_out()
    with pytest.raises(shmreduce.AttachError, match="must be of the same user"):
        as_nobody(shmreduce.import_block, handle)
    discard_message(handle)
    del block


@only_root
def test_a_sender_that_changed_its_user_is_told_of_file_system() -> None:
    """Its own child, of the same user, may not inspect it, and says what helps."""
    with shmreduce.install(strategy="file_descriptor"):
        error = as_nobody(size_that_a_child_reads)
    assert isinstance(error, shmreduce.AttachError)
    assert "changed its user" in str(error)
    with shmreduce.install(strategy="file_system"):
        assert as_nobody(size_that_a_child_reads) == 5000


# What another user puts in the way


def plant(directory: str, victim: str, uid: int) -> list[str]:
    """Put everything there is where a segment could be; runs as another user."""
    os.umask(0)
    names = [f"{directory}/shmreduce-{uid}-1-{n:032x}" for n in range(6)]
    Path(names[0]).symlink_to(victim)
    os.mkfifo(names[1], 0o666)
    Path(names[2]).mkdir(0o777)
    plan = Layout.plan(8, 512)
    size = plan.data_offset + PAGE_SIZE
    # One that is made as well as can be.
    header = SegmentHeader(2, bytes(15) + b"\3", bytes(16), bytes(16), 1, 2, size, 8, 512, "any")
    for name, content in ((names[3], header.pack()), (names[4], b"")):
        with Path(name).open("xb") as file:
            file.write(content)
            file.truncate(size)
    Path(names[5]).symlink_to(names[3])
    long_ago = time.time() - 1000
    for name in names[1:5]:
        os.utime(name, (long_ago, long_ago))
    return names


@pytest.fixture
def planted(directory: Path, tmp_path: Path) -> Iterator[list[str]]:
    """What another user has planted, and the victim's file behind a link."""
    victim = tmp_path / "precious"
    victim.write_bytes(b"precious" * 1000)
    # As private as a segment, and of the same user: who follows the link would take it for one.
    victim.chmod(0o600)
    names = as_nobody(plant, str(directory), str(victim), os.geteuid())
    yield names
    assert victim.read_bytes() == b"precious" * 1000


@only_root
def test_nothing_that_another_user_made_is_opened(planted: list[str]) -> None:
    """Links are not followed, nothing waits for a FIFO's other end, and another user's segment
    is foreign.
    """
    strategy = find_strategy("file_system")
    for name in planted:
        with pytest.raises((OSError, shmreduce.ForeignSegmentError)):
            strategy.open(name)
    with pytest.raises(shmreduce.ForeignSegmentError) as caught:
        strategy.open(planted[3])
    assert caught.value.uid == NOBODY


@only_root
def test_sweeping_leaves_alone_what_another_user_made(planted: list[str]) -> None:
    """It does not hang, removes none of it, and removes this user's leftovers all the same."""
    strategy = find_strategy("file_system")
    left = strategy.create(PAGE_SIZE, "f" * 32)
    os.close(left.fd)
    assert left.name is not None
    os.utime(left.name, (1, 1))
    assert sweep(strategy) == [left.name]
    assert all(os.path.lexists(name) for name in planted)


_kept: list[Any] = []


def offer() -> bytes:
    """Make a shared block in a process of its own; return a handle to it."""
    shmreduce.install(strategy="file_system", inline_limit=4096)
    block = shmreduce.allocate(5000)
    block.buffer[:5] = b"hello"
    message = Message()
    handle = message.refer(block, 5000)
    message.commit()
    _kept.append(block)
    if handle is None:
        raise RuntimeError("the block does not travel")
    return handle


def read(handle: bytes, count: int) -> bytes:
    return bytes(shmreduce.import_block(handle).buffer[:count])


@only_root
def test_work_goes_on_among_what_another_user_made(planted: list[str]) -> None:
    """A directory full of traps disturbs nobody who makes and sends arrays."""
    with OtherProcess("spawn") as sender, OtherProcess("spawn") as receiver:
        handle = sender.ask(offer)
        assert str(Path(planted[0]).parent).encode() in handle
        assert receiver.ask(read, handle, 5) == b"hello"
    assert all(os.path.lexists(name) for name in planted)


def test_a_name_that_is_taken_is_not_used(directory: Path) -> None:
    """A file, a link to nowhere or a FIFO of the next segment's name: it is not made."""
    strategy = find_strategy("file_system")
    prefix = f"{directory}/shmreduce-{os.geteuid()}-{os.getpid()}-"
    Path(f"{prefix}{'a' * 32}").touch()
    Path(f"{prefix}{'b' * 32}").symlink_to(directory / "made-through-the-link")
    os.mkfifo(f"{prefix}{'c' * 32}")
    for letter in "abc":
        with pytest.raises(FileExistsError):
            strategy.create(PAGE_SIZE, letter * 32)
    assert not (directory / "made-through-the-link").exists()
    for path in directory.iterdir():
        path.unlink()


@only_root
def test_a_file_that_changed_hands_is_foreign(directory: Path) -> None:
    """The owner of the open file counts, not that of the name."""
    strategy = find_strategy("file_system")
    file = strategy.create(PAGE_SIZE, "d" * 32)
    assert file.name is not None
    os.chown(file.name, NOBODY, NOBODY)
    with pytest.raises(shmreduce.ForeignSegmentError):
        Segment.adopt(SegmentFile(os.dup(file.fd), file.name), None, strategy)
    os.close(file.fd)
    Path(file.name).unlink()
