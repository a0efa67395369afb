"""The contract suite for sharing strategies.

May import public names of :mod:`shmreduce`, ``guard`` and ``processes`` of this
package, and pytest.
"""

from __future__ import annotations

import fcntl
import gc
import mmap
import os
import resource
import secrets
import stat
import struct
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from shmreduce import SegmentFile, ShmreduceError
from shmreduce.testing.guard import no_leaks
from shmreduce.testing.processes import OtherProcess

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shmreduce import SharingStrategy

__all__ = ["StrategyContract"]

_PAGE = mmap.PAGESIZE


class StrategyContract:
    """The tests that every sharing strategy must pass. Derive a test class that makes one.

    Only :meth:`make_strategy` must be defined. The tests look at files and descriptors;
    the strategy need not be installed.

    Examples
    --------
    >>> from shmreduce_fd.strategy import FileDescriptorStrategy
    >>> class TestFileDescriptorStrategy(StrategyContract):
    ...     def make_strategy(self):
    ...         return FileDescriptorStrategy()
    """

    def make_strategy(self) -> SharingStrategy:
        """Return the strategy to test; a test class must define it.

        Returns
        -------
        SharingStrategy
            Another process must be able to unpickle it.
        """
        raise NotImplementedError(f"{type(self).__qualname__} must define make_strategy()")

    @pytest.fixture(autouse=True)
    def _nothing_is_left(self, request: pytest.FixtureRequest) -> Iterator[None]:
        with no_leaks(request):
            yield

    @pytest.fixture
    def strategy(self) -> SharingStrategy:
        """Return the strategy if it works on this machine; skip the test if not."""
        strategy = self.make_strategy()
        reason = strategy.unusable_reason()
        if reason is not None:
            pytest.skip(f"strategy {strategy.name!r} does not work here: {reason}")
        return strategy

    @pytest.fixture
    def segment(self, strategy: SharingStrategy) -> Iterator[SegmentFile]:
        """Make a segment of four pages, and remove it after the test."""
        file = strategy.create(4 * _PAGE, secrets.token_hex(16))
        yield file
        _remove(strategy, file)

    def test_has_a_short_name(self) -> None:
        """The name is an identifier of at most 32 characters."""
        name = self.make_strategy().name
        assert name.isidentifier()
        assert len(name.encode()) <= 32

    def test_says_whether_it_works_here(self) -> None:
        """unusable_reason() returns None or a sentence, and leaves nothing behind."""
        strategy = self.make_strategy()
        reason = strategy.unusable_reason()
        assert reason is None or (isinstance(reason, str) and reason)

    @pytest.mark.parametrize("pages", [1, 3, 16384])
    def test_create_makes_exactly_the_size(self, strategy: SharingStrategy, pages: int) -> None:
        """A new file has the size that was asked for."""
        file = strategy.create(pages * _PAGE, secrets.token_hex(16))
        try:
            assert os.fstat(file.fd).st_size == pages * _PAGE
        finally:
            _remove(strategy, file)

    def test_create_takes_no_memory_yet(self, strategy: SharingStrategy) -> None:
        """A new file is sparse: the core reserves memory when it is needed."""
        file = strategy.create(64 << 20, secrets.token_hex(16))
        try:
            assert os.fstat(file.fd).st_blocks * 512 < 1 << 20
        finally:
            _remove(strategy, file)

    def test_create_makes_zeros(self, segment: SegmentFile) -> None:
        """A new file reads as zeros."""
        assert os.pread(segment.fd, 4 * _PAGE, 0) == bytes(4 * _PAGE)

    @pytest.mark.parametrize("mask", [0, 0o777])
    def test_create_is_for_the_owner_alone(self, strategy: SharingStrategy, mask: int) -> None:
        """The mode is 0600 whatever the umask, and the owner is this user."""
        before = os.umask(mask)
        try:
            file = strategy.create(_PAGE, secrets.token_hex(16))
        finally:
            os.umask(before)
        try:
            status = os.fstat(file.fd)
            assert stat.S_IMODE(status.st_mode) == 0o600
            assert status.st_uid == os.geteuid()
        finally:
            _remove(strategy, file)

    def test_create_is_exclusive(self, strategy: SharingStrategy) -> None:
        """A second create() with the same token raises, or makes another file."""
        token = secrets.token_hex(16)
        first = strategy.create(_PAGE, token)
        try:
            try:
                second = strategy.create(_PAGE, token)
            except FileExistsError:
                return
            assert os.fstat(first.fd).st_ino != os.fstat(second.fd).st_ino
            _remove(strategy, second)
        finally:
            _remove(strategy, first)

    def test_a_name_has_the_token(self, strategy: SharingStrategy) -> None:
        """The token, which nobody can guess, is a part of the file's name."""
        token = secrets.token_hex(16)
        file = strategy.create(_PAGE, token)
        try:
            assert file.name is None or token in Path(file.name).name
        finally:
            _remove(strategy, file)

    def test_create_that_fails_leaves_nothing(self, strategy: SharingStrategy) -> None:
        """If the system refuses the size, neither descriptor nor name stays."""
        token = secrets.token_hex(16)
        # Otherwise garbage of other tests might close descriptors between the two lists.
        gc.collect()
        descriptors = set(Path("/proc/self/fd").iterdir())
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (_PAGE, limits[1]))
        try:
            with pytest.raises(OSError, match="too large"):
                strategy.create(2 * _PAGE, token)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert not [name for name in strategy.names() if token in name]
        assert set(Path("/proc/self/fd").iterdir()) == descriptors

    def test_descriptors_are_closed_on_exec(
        self, strategy: SharingStrategy, segment: SegmentFile
    ) -> None:
        """Descriptors of create() and open() are not inherited by other programs."""
        opened = strategy.open(strategy.locator(segment))
        try:
            assert not os.get_inheritable(segment.fd)
            assert not os.get_inheritable(opened.fd)
        finally:
            os.close(opened.fd)

    def test_open_finds_the_same_memory(
        self, strategy: SharingStrategy, segment: SegmentFile
    ) -> None:
        """What is written through a mapping of one descriptor can be read through the other."""
        opened = strategy.open(strategy.locator(segment))
        try:
            with mmap.mmap(segment.fd, _PAGE) as ours, mmap.mmap(opened.fd, _PAGE) as theirs:
                ours[:5] = b"hello"
                assert theirs[:5] == b"hello"
                theirs[:5] = b"world"
                assert ours[:5] == b"world"
        finally:
            os.close(opened.fd)

    def test_open_makes_a_new_description(
        self, strategy: SharingStrategy, segment: SegmentFile
    ) -> None:
        """A lock of one descriptor excludes the other, as they are different descriptions."""
        opened = strategy.open(strategy.locator(segment))
        try:
            _lock_first_byte(segment.fd)
            with pytest.raises(BlockingIOError):
                _lock_first_byte(opened.fd)
        finally:
            os.close(opened.fd)

    @pytest.mark.parametrize("start_method", ["fork", "spawn"])
    def test_another_process_can_open_it(
        self, strategy: SharingStrategy, segment: SegmentFile, start_method: str
    ) -> None:
        """Another process can open the same memory by a locator."""
        os.pwrite(segment.fd, b"question", 0)
        with OtherProcess(start_method) as other:
            found = other.ask(_exchange, strategy, strategy.locator(segment), b"answer")
        assert found == b"question"
        assert os.pread(segment.fd, 6, 0) == b"answer"

    def test_another_process_can_pass_it_on(
        self, strategy: SharingStrategy, segment: SegmentFile
    ) -> None:
        """A locator that was made by a process which opened the segment works, too."""
        with OtherProcess("spawn") as other:
            locator, descriptor = other.ask(_open_and_keep, strategy, strategy.locator(segment))
            opened = strategy.open(locator)
            try:
                assert os.fstat(opened.fd).st_ino == os.fstat(segment.fd).st_ino
            finally:
                os.close(opened.fd)
                other.ask(os.close, descriptor)

    def test_a_locator_does_without_the_name(
        self, strategy: SharingStrategy, segment: SegmentFile
    ) -> None:
        """A process that has the file, but not its name, can make a locator of it."""
        locator = strategy.locator(SegmentFile(segment.fd, None))
        assert isinstance(locator, str)
        with OtherProcess("spawn") as other:
            number = other.ask(_inode, strategy, locator)
        assert number == os.fstat(segment.fd).st_ino

    def test_open_of_what_is_gone(self, strategy: SharingStrategy) -> None:
        """After a segment is closed and unlinked, open() raises FileNotFoundError."""
        file = strategy.create(_PAGE, secrets.token_hex(16))
        locator = strategy.locator(file)
        _remove(strategy, file)
        with pytest.raises(FileNotFoundError):
            strategy.open(locator)

    @pytest.mark.parametrize("way", ["path", "link"])
    def test_open_opens_no_other_file(
        self, strategy: SharingStrategy, tmp_path: Path, way: str
    ) -> None:
        """Neither at any path in a locator, nor through a symbolic link in a segment's place."""
        file = strategy.create(_PAGE, secrets.token_hex(16))
        locator = strategy.locator(file)
        _remove(strategy, file)
        if file.name is None:
            return
        # In a folder of its own, as the strategy's may be the test's.
        other, segment = tmp_path / "elsewhere" / "other", Path(file.name)
        other.parent.mkdir()
        other.touch(0o600)
        os.truncate(other, _PAGE)
        try:
            if way == "link":
                segment.symlink_to(other)
            elif file.name in locator:
                locator = locator.replace(file.name, str(other))
            else:
                there = os.path.relpath(other, segment.parent)
                locator = locator.replace(segment.name, there)
            assert not _opens(strategy, locator, other)
        finally:
            segment.unlink(missing_ok=True)

    def test_open_of_what_a_killed_process_made(self, strategy: SharingStrategy) -> None:
        """A killed process's segment is gone, or can be opened until its name is removed."""
        with OtherProcess("spawn") as other:
            name, locator = other.ask(_create_and_keep, strategy, secrets.token_hex(16))
            other.kill()
            if name is not None:
                assert name in set(strategy.names())
                os.close(strategy.open(locator).fd)
                strategy.unlink(name)
            with pytest.raises(FileNotFoundError):
                strategy.open(locator)

    def test_names_are_paths_and_are_listed(
        self, strategy: SharingStrategy, segment: SegmentFile
    ) -> None:
        """A name is the file's absolute path, and names() lists it until it is removed."""
        if segment.name is None:
            return
        assert Path(segment.name).is_absolute()
        assert Path(segment.name).stat().st_ino == os.fstat(segment.fd).st_ino
        assert segment.name in set(strategy.names())
        strategy.unlink(segment.name)
        assert segment.name not in set(strategy.names())

    def test_names_lists_segments_alone(self, strategy: SharingStrategy) -> None:
        """names() lists no other files, since the core may remove the files that it lists."""
        token = secrets.token_hex(16)
        file = strategy.create(_PAGE, token)
        others: list[Path] = []
        try:
            if file.name is not None:
                others = _make_neighbours(Path(file.name), token)
            listed = set(strategy.names())
            assert not [path for path in others if str(path) in listed]
        finally:
            for path in others:
                path.unlink(missing_ok=True)
            _remove(strategy, file)

    def test_unlink_again_is_no_error(
        self, strategy: SharingStrategy, segment: SegmentFile
    ) -> None:
        """Removing a name that was removed already does nothing."""
        if segment.name is None:
            return
        strategy.unlink(segment.name)
        strategy.unlink(segment.name)
        assert not Path(segment.name).exists()

    def test_a_segment_outlives_its_name(
        self, strategy: SharingStrategy, segment: SegmentFile
    ) -> None:
        """A segment that is open can be used after its name was removed."""
        if segment.name is not None:
            strategy.unlink(segment.name)
        os.pwrite(segment.fd, b"still here", 0)
        assert os.pread(segment.fd, 10, 0) == b"still here"


def _remove(strategy: SharingStrategy, file: SegmentFile) -> None:
    os.close(file.fd)
    if file.name is not None:
        strategy.unlink(file.name)


def _opens(strategy: SharingStrategy, locator: str, path: Path) -> bool:
    """Return whether a locator opens this file; it may open another one, or none."""
    try:
        opened = strategy.open(locator)
    except (OSError, ShmreduceError):
        return False
    try:
        return os.path.samestat(os.fstat(opened.fd), path.stat())
    finally:
        os.close(opened.fd)


def _make_neighbours(segment: Path, token: str) -> list[Path]:
    """Make empty files beside a segment's, with similar names; return their paths."""
    names = {
        f"{segment.name}.old",
        # One character of the token is missing, not of the name: a name may end with
        # something else, such as a process id, and be a valid one without its last digit.
        segment.name.replace(token, token[:-1]),
        f"data-{secrets.token_hex(8)}.npy",
    } - {segment.name}
    paths = [segment.with_name(name) for name in sorted(names)]
    for path in paths:
        path.touch(0o600, exist_ok=False)
    return paths


def _lock_first_byte(fd: int) -> None:
    # struct flock: l_type, l_whence, l_start, l_len, l_pid (0 for these locks).
    wanted = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 1, 0)
    fcntl.fcntl(fd, getattr(fcntl, "F_OFD_SETLK", 37), wanted)


# Run in other processes


def _exchange(strategy: SharingStrategy, locator: str, answer: bytes) -> bytes:
    file = strategy.open(locator)
    found = os.pread(file.fd, 8, 0)
    os.pwrite(file.fd, answer, 0)
    os.close(file.fd)
    return found


def _open_and_keep(strategy: SharingStrategy, locator: str) -> tuple[str, int]:
    file = strategy.open(locator)
    return strategy.locator(file), file.fd


def _inode(strategy: SharingStrategy, locator: str) -> int:
    file = strategy.open(locator)
    try:
        return os.fstat(file.fd).st_ino
    finally:
        os.close(file.fd)


def _create_and_keep(strategy: SharingStrategy, token: str) -> tuple[str | None, str]:
    file = strategy.create(_PAGE, token)
    return file.name, strategy.locator(file)
