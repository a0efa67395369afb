"""The strategy ``file_system``: the contract, and what is its own."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import secrets
import subprocess
import sys
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import shmreduce
from shmreduce.testing import OtherProcess, StrategyContract
from shmreduce_filesystem.strategy import FileSystemStrategy

if TYPE_CHECKING:
    from shmreduce import SharingStrategy


class TestContract(StrategyContract):
    def make_strategy(self) -> SharingStrategy:
        return FileSystemStrategy()


class TestContractInAnotherDirectory(StrategyContract):
    @pytest.fixture(autouse=True)
    def _directory(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setenv("SHMREDUCE_DIRECTORY", str(tmp_path))

    def make_strategy(self) -> SharingStrategy:
        return FileSystemStrategy()


@pytest.fixture
def directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A directory of this test's own for segments."""
    monkeypatch.setenv("SHMREDUCE_DIRECTORY", str(tmp_path))
    return tmp_path


def segment_path(directory: Path, uid: int | None = None) -> Path:
    owner = os.geteuid() if uid is None else uid
    return directory / f"shmreduce-{owner}-{os.getpid()}-{secrets.token_hex(16)}"


def test_the_name_says_user_process_and_token(directory: Path) -> None:
    """A file's name is shmreduce-UID-PID-TOKEN, in the directory that was chosen."""
    file = FileSystemStrategy().create(mmap.PAGESIZE, "ab" * 16)
    os.close(file.fd)
    expected = directory / f"shmreduce-{os.geteuid()}-{os.getpid()}-{'ab' * 16}"
    assert file.name == str(expected)
    assert expected.exists()


def test_the_default_directory_is_dev_shm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without SHMREDUCE_DIRECTORY files are made in /dev/shm."""
    monkeypatch.delenv("SHMREDUCE_DIRECTORY", raising=False)
    strategy = FileSystemStrategy()
    file = strategy.create(mmap.PAGESIZE, secrets.token_hex(16))
    os.close(file.fd)
    assert file.name is not None
    assert Path(file.name).parent == Path("/dev/shm")
    strategy.unlink(file.name)


def test_without_dev_shm_the_temporary_directory_is_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Systems without /dev/shm have a temporary directory."""
    monkeypatch.delenv("SHMREDUCE_DIRECTORY", raising=False)
    monkeypatch.setattr(
        "shmreduce_filesystem.strategy._SHARED_MEMORY_DIRECTORY", tmp_path / "missing"
    )
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    file = FileSystemStrategy().create(mmap.PAGESIZE, secrets.token_hex(16))
    os.close(file.fd)
    assert file.name is not None
    assert Path(file.name).parent == tmp_path


def test_an_existing_file_is_never_taken_over(directory: Path) -> None:
    """If the name is taken, by a file or a link, create() fails and leaves it alone."""
    token = secrets.token_hex(16)
    target = directory / "target"
    target.write_text("precious")
    path = directory / f"shmreduce-{os.geteuid()}-{os.getpid()}-{token}"
    path.symlink_to(target)
    with pytest.raises(FileExistsError):
        FileSystemStrategy().create(mmap.PAGESIZE, token)
    assert target.read_text() == "precious"
    assert path.is_symlink()


def test_a_file_that_cannot_get_its_size_is_removed(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failure after the file was made takes it away again."""

    def refuse(fd: int, size: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "ftruncate", refuse)
    with pytest.raises(OSError) as caught:
        FileSystemStrategy().create(mmap.PAGESIZE, secrets.token_hex(16))
    assert caught.value.errno == errno.ENOSPC
    assert list(directory.iterdir()) == []


def test_a_name_can_be_opened_as_it_is_listed(directory: Path) -> None:
    """names() lists what open() takes, for those who look after leftovers."""
    strategy = FileSystemStrategy()
    file = strategy.create(mmap.PAGESIZE, secrets.token_hex(16))
    (name,) = strategy.names()
    opened = strategy.open(name)
    assert os.fstat(opened.fd).st_ino == os.fstat(file.fd).st_ino
    assert opened.name == file.name
    os.close(opened.fd)
    os.close(file.fd)


def test_an_unlinked_segment_is_found_through_its_holder(directory: Path) -> None:
    """Who still has a segment open can pass it on after its name was removed."""
    strategy = FileSystemStrategy()
    file = strategy.create(mmap.PAGESIZE, secrets.token_hex(16))
    assert file.name is not None
    strategy.unlink(file.name)
    os.pwrite(file.fd, b"hello", 0)
    with OtherProcess("spawn") as other:
        assert other.ask(_read, strategy.locator(file)) == b"hello"
        nameless = shmreduce.SegmentFile(file.fd, None)
        assert other.ask(_read, strategy.locator(nameless)) == b"hello"
    os.close(file.fd)


def _read(locator: str) -> bytes:
    file = FileSystemStrategy().open(locator)
    data = os.pread(file.fd, 5, 0)
    os.close(file.fd)
    return data


def test_a_number_that_means_another_file_by_now_is_no_segment(directory: Path) -> None:
    """A holder's descriptor number that was used again is as if the segment were gone."""
    strategy = FileSystemStrategy()
    file = strategy.create(mmap.PAGESIZE, "cd" * 16)
    reader, writer = os.pipe()
    assert file.name is not None
    locator = f"{os.getpid()}:{reader}:{file.name}"
    strategy.unlink(file.name)
    with pytest.raises(FileNotFoundError):
        strategy.open(locator)
    for each in (file.fd, reader, writer):
        os.close(each)


@pytest.mark.parametrize(
    "locator",
    [
        "",
        "/etc/passwd",
        "1:2:/etc/passwd",
        "{directory}/../{name}",
        "{directory}/deeper/{name}",
        "{directory}/other-{name}",
        "{directory}",
        "{name}",
        "1:{directory}/{name}",
        "{directory}/{name}\0",
    ],
)
def test_paths_from_elsewhere_are_refused(directory: Path, locator: str) -> None:
    """A forged handle cannot make a process open a file of the forger's choice."""
    name = segment_path(directory).name
    with pytest.raises(shmreduce.InvalidHandleError):
        FileSystemStrategy().open(locator.format(directory=directory, name=name))


def test_links_are_not_followed(directory: Path) -> None:
    """A link in a segment's place is an OSError."""
    target = directory / "target"
    target.touch(mode=0o600)
    path = segment_path(directory)
    path.symlink_to(target)
    with pytest.raises(OSError) as caught:
        FileSystemStrategy().open(str(path))
    assert caught.value.errno == errno.ELOOP


def test_a_pipe_in_a_segments_place_does_not_block(directory: Path) -> None:
    """Opening refuses what is no regular file, at once."""
    path = segment_path(directory)
    os.mkfifo(path, 0o600)
    with pytest.raises(PermissionError) as caught:
        FileSystemStrategy().open(str(path))
    assert caught.value.filename == str(path)


def test_a_file_that_others_can_open_is_refused(directory: Path) -> None:
    """Permissions beyond the owner's mean that shmreduce did not make the file."""
    path = segment_path(directory)
    path.touch()
    path.chmod(0o640)
    with pytest.raises(PermissionError):
        FileSystemStrategy().open(str(path))


@pytest.mark.usefixtures("directory")
def test_a_receiver_is_not_told_to_take_the_strategy_that_it_has() -> None:
    """Where somebody has changed the mode of a segment's file, that is what the error says."""
    with shmreduce.install(strategy="file_system"), OtherProcess("fork") as other:
        message, name = other.ask(_send_and_open_to_all)
        with pytest.raises(shmreduce.AttachError, match="the owner or the mode of") as caught:
            ForkingPickler.loads(message)
        assert "'file_system'" not in str(caught.value)
        Path(name).chmod(0o600)
        assert len(ForkingPickler.loads(message)) == 1_000_000


def _send_and_open_to_all() -> tuple[bytes, str]:
    message = bytes(ForkingPickler.dumps(memoryview(bytearray(1_000_000))))
    (name,) = (each for each in FileSystemStrategy().names() if f"-{os.getpid()}-" in each)
    Path(name).chmod(0o644)
    return message, name


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_another_users_segment_is_refused(directory: Path) -> None:
    """A segment of another user is a ForeignSegmentError that names both users."""
    path = segment_path(directory, uid=12345)
    path.touch(mode=0o600)
    os.chown(path, 12345, -1)
    with pytest.raises(shmreduce.ForeignSegmentError) as caught:
        FileSystemStrategy().open(str(path))
    assert (caught.value.uid, caught.value.expected) == (12345, os.geteuid())


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_another_users_segment_is_refused_without_a_look(directory: Path) -> None:
    """The same holds where the kernel refuses to open the file at all."""
    path = segment_path(directory)
    path.touch(mode=0o600)
    directory.chmod(0o755)
    for parent in directory.parents:
        if not parent.stat().st_mode & 0o001:
            parent.chmod(parent.stat().st_mode | 0o011)
    with OtherProcess("fork") as other, pytest.raises(shmreduce.ForeignSegmentError) as caught:
        other.ask(_open_as_nobody, str(path))
    assert (caught.value.uid, caught.value.expected) == (0, 65534)


def _open_as_nobody(path: str) -> None:
    os.setresuid(65534, 65534, 65534)
    FileSystemStrategy().open(path)


@pytest.mark.parametrize(
    "name",
    [
        "precious",
        f"shmreduce-{{other}}-1-{32 * 'a'}",
        "shmreduce-{user}-1-",
        "shmreduce-{user}-1-ab",
    ],
)
def test_unlink_removes_only_segments(directory: Path, name: str) -> None:
    """unlink() refuses names that are not those of this user's segments."""
    path = directory / name.format(user=os.geteuid(), other=os.geteuid() + 1)
    path.touch()
    with pytest.raises(shmreduce.InvalidHandleError):
        FileSystemStrategy().unlink(str(path))
    assert path.exists()


def test_names_lists_only_this_users_segments(directory: Path) -> None:
    """Other files, and other users' segments, are not listed."""
    (directory / "precious").touch()
    segment_path(directory, uid=os.geteuid() + 1).touch()
    mine = segment_path(directory)
    mine.touch()
    assert FileSystemStrategy().names() == [str(mine)]


@pytest.mark.parametrize(
    ("value", "reason"),
    [("relative", "absolute"), ("/missing/directory", "not a directory"), ("/proc", "/proc")],
)
def test_an_impossible_directory_is_the_reason(
    monkeypatch: pytest.MonkeyPatch, value: str, reason: str
) -> None:
    """unusable_reason() says what is wrong with the directory, and what to set."""
    monkeypatch.setenv("SHMREDUCE_DIRECTORY", value)
    told = str(FileSystemStrategy().unusable_reason())
    assert reason in told
    assert "SHMREDUCE_DIRECTORY" in told


def test_says_that_locks_are_missing(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without open file description locks there are no leases: found out by trying."""

    def refuse(_fd: int, _command: int, _argument: object) -> None:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(fcntl, "fcntl", refuse)
    assert "F_OFD_SETLK" in str(FileSystemStrategy().unusable_reason())
    assert list(directory.iterdir()) == []


def test_says_that_proc_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without /proc no file can be opened once more, for locks of its own."""
    monkeypatch.setattr(Path, "is_dir", lambda self: self != Path("/proc/self/fd"))
    assert "mount /proc" in str(FileSystemStrategy().unusable_reason())


PROGRAM = """
import multiprocessing, shmreduce
shmreduce.install(strategy="file_system")
reader, writer = multiprocessing.Pipe(duplex=False)
writer.send(memoryview(bytes(1 << 20)))
print(len(reader.recv()))
"""


def test_a_directory_whose_name_is_no_text(tmp_path: Path) -> None:
    """Arrays travel by files in it like in any other."""
    directory = tmp_path / os.fsdecode(b"caf\xe9")
    directory.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, "SHMREDUCE_DIRECTORY": str(directory)},
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.strip() == str(1 << 20)
