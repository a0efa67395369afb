"""The strategy ``file_descriptor``: the contract, and what is its own."""

from __future__ import annotations

import errno
import fcntl
import mmap
import multiprocessing
import os
import subprocess
import sys
from multiprocessing import Pipe
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import shmreduce
from shmreduce.testing import OtherProcess, StrategyContract
from shmreduce_fd.strategy import FileDescriptorStrategy

if TYPE_CHECKING:
    from shmreduce import SegmentFile, SharingStrategy

TOKEN = "0123456789abcdef" * 2


class TestContract(StrategyContract):
    def make_strategy(self) -> SharingStrategy:
        return FileDescriptorStrategy()


@pytest.fixture
def segment() -> SegmentFile:
    return FileDescriptorStrategy().create(mmap.PAGESIZE, TOKEN)


def test_segments_cannot_be_resized(segment: SegmentFile) -> None:
    """The size is sealed in both directions, and so are the seals."""
    with pytest.raises(PermissionError):
        os.ftruncate(segment.fd, 0)
    with pytest.raises(PermissionError):
        os.ftruncate(segment.fd, 2 * mmap.PAGESIZE)
    with pytest.raises(PermissionError):
        fcntl.fcntl(segment.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    os.close(segment.fd)


def test_the_token_shows_in_the_file_name(segment: SegmentFile) -> None:
    """Whoever looks at /proc sees whose segment it is."""
    target = Path(f"/proc/self/fd/{segment.fd}").readlink()
    assert str(target) == f"/memfd:shmreduce-{TOKEN} (deleted)"
    os.close(segment.fd)


@pytest.mark.parametrize(
    "locator", ["", "1", "1:", ":1", "1:2:3", "-1:2", "a:b", "1:2\n", "1:2:/dev/null"]
)
def test_a_damaged_locator_is_refused(locator: str) -> None:
    """What no locator() made is an InvalidHandleError that shows it."""
    with pytest.raises(shmreduce.InvalidHandleError) as caught:
        FileDescriptorStrategy().open(locator)
    assert repr(locator) in str(caught.value)


def test_a_process_that_nobody_has_waited_for_is_gone() -> None:
    """To whoever is not root, too, who may not look at what is left of it."""
    with OtherProcess("fork") as other, pytest.raises(FileNotFoundError):
        other.ask(_open_of_ended_child)


def _open_of_ended_child() -> None:
    if os.geteuid() == 0:
        os.setresuid(65534, 65534, 65534)
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    try:
        FileDescriptorStrategy().open(f"{pid}:0")
    finally:
        os.waitpid(pid, 0)


@pytest.mark.parametrize("path", ["/", os.path.realpath(sys.executable)])
def test_a_number_that_means_another_file_by_now(path: str) -> None:
    """A directory, or a program that runs, cannot be opened for writing: the segment is gone."""
    number = os.open(path, os.O_RDONLY)
    try:
        with pytest.raises(FileNotFoundError):
            FileDescriptorStrategy().open(f"{os.getpid()}:{number}")
    finally:
        os.close(number)


LOOK = """
import subprocess
import sys

from shmreduce import open_process_descriptor

for pid in map(int, sys.argv[1:]):
    try:
        open_process_descriptor(pid, 0)
    except OSError as error:
        print(type(error).__name__)
"""


def test_a_process_that_proc_does_not_show_is_not_said_to_be_gone() -> None:
    """As with hidepid, or without /proc: it lives, and may not be looked at."""
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait(60)
    hide = "mount -t tmpfs tmpfs /proc"
    probe = subprocess.run(
        ["unshare", "-m", "sh", "-c", hide], capture_output=True, timeout=60, check=False
    )
    if probe.returncode:
        pytest.skip(f"may not hide /proc here: {probe.stderr.decode().strip()}")
    pids = [str(os.getpid()), str(ended.pid)]
    command = ["unshare", "-m", "sh", "-c", f'{hide} && exec "$@"', "sh"]
    found = subprocess.run(
        [*command, sys.executable, "-c", LOOK, *pids],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert found.stdout.split() == ["PermissionError", "FileNotFoundError"], found.stderr


def send_ones(writer: Any) -> None:
    writer.send(np.ones(300_000, np.uint8))


@pytest.mark.usefixtures("shmreduce_no_leaks")
def test_the_mailbox_has_what_a_sender_left_whose_pid_is_another_users(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whose descriptors this process may not look at."""

    def refused(pid: int, fd: int, **_: str) -> int:
        raise PermissionError(errno.EACCES, f"process {pid} is another user's, with its {fd}")

    fork = multiprocessing.get_context("fork")
    with shmreduce.install(strategy="file_descriptor"):
        reader, writer = Pipe(duplex=False)
        sender = fork.Process(target=send_ones, args=(writer,))
        sender.start()
        sender.join(30)
        monkeypatch.setattr("shmreduce_fd.strategy.open_process_descriptor", refused)
        assert reader.poll(30)
        assert reader.recv().sum() == 300_000
        sender.close()
        reader.close()
        writer.close()


def test_older_kernels_lack_the_noexec_seal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where MFD_NOEXEC_SEAL is unknown segments are made without it."""
    create = os.memfd_create
    asked = []

    def old_memfd_create(name: str, flags: int) -> int:
        asked.append(flags)
        if flags & 0x0008:
            raise OSError(errno.EINVAL, "Invalid argument")
        return create(name, flags)

    monkeypatch.setattr(os, "memfd_create", old_memfd_create)
    file = FileDescriptorStrategy().create(mmap.PAGESIZE, TOKEN)
    assert fcntl.fcntl(file.fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
    os.close(file.fd)
    assert asked == [0x000B, 0x0003]


def test_other_refusals_are_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only EINVAL is taken for an old kernel."""

    def refuse(name: str, flags: int) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(os, "memfd_create", refuse)
    with pytest.raises(OSError) as caught:
        FileDescriptorStrategy().create(mmap.PAGESIZE, TOKEN)
    assert caught.value.errno == errno.EMFILE


@pytest.mark.parametrize(
    ("module", "name", "reason"),
    [(os, "memfd_create", "memfd_create"), (fcntl, "F_OFD_SETLK", "F_OFD_SETLK")],
)
def test_says_which_call_is_missing(
    monkeypatch: pytest.MonkeyPatch, module: object, name: str, reason: str
) -> None:
    """Where the system lacks a call the reason names it."""
    monkeypatch.delattr(module, name)
    assert reason in str(FileDescriptorStrategy().unusable_reason())


def test_says_that_proc_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without /proc no other process can open a segment."""
    monkeypatch.setattr(Path, "is_dir", lambda self: False)
    assert "/proc" in str(FileDescriptorStrategy().unusable_reason())


def test_a_trial_that_fails_is_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sandbox that forbids the call is found out by trying."""

    def refuse(name: str, flags: int) -> int:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "memfd_create", refuse)
    assert "Operation not permitted" in str(FileDescriptorStrategy().unusable_reason())
