"""The strategy contract fails strategies that break it: one for each of its tests."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING

from shmreduce.testing import StrategyContract

if TYPE_CHECKING:
    import pytest

pytest_plugins = "pytester"

MODULE = '''
import errno
import os
import posix
import shutil
from pathlib import Path

import pytest
from shmreduce import SegmentFile, SharingStrategy, open_process_descriptor
from shmreduce.testing import StrategyContract


class Good(SharingStrategy):
    """Keeps the contract."""

    name = "good"
    folder = Path({folder!r})

    def unusable_reason(self):
        return None

    def create(self, size, token):
        path = self.folder / token
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.fchmod(fd, 0o600)
            os.ftruncate(fd, size)
        except OSError:
            os.close(fd)
            path.unlink()
            raise
        return SegmentFile(fd, str(path))

    def locator(self, file):
        return file.name or f"{os.getpid()}:{file.fd}"

    def open(self, locator):
        if Path(locator).is_absolute():
            if Path(locator).parent != self.folder:
                raise FileNotFoundError(locator)
            flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
            return SegmentFile(os.open(locator, flags), locator)
        pid, _, fd = locator.partition(":")
        return SegmentFile(open_process_descriptor(int(pid), int(fd)), None)

    def unlink(self, name):
        Path(name).unlink(missing_ok=True)

    def names(self):
        return [str(path) for path in self.folder.glob(32 * "[0-9a-f]")]


class TestGood(StrategyContract):
    def make_strategy(self):
        return Good()
'''

BROKEN = """

class Bad_{rule}(Good):
{bad}


class Test_{rule}(StrategyContract):
    def make_strategy(self):
        return Bad_{rule}()
"""

BAD = {
    "test_has_a_short_name": """
    name = "two words"
    """,
    "test_says_whether_it_works_here": """
    def unusable_reason(self):
        return ""
    """,
    "test_create_makes_exactly_the_size": """
    def create(self, size, token):
        return super().create(size + 4096, token)
    """,
    "test_create_takes_no_memory_yet": """
    def create(self, size, token):
        file = super().create(size, token)
        os.posix_fallocate(file.fd, 0, size)
        return file
    """,
    "test_create_makes_zeros": """
    def create(self, size, token):
        file = super().create(size, token)
        os.pwrite(file.fd, b"header", 0)
        return file
    """,
    "test_create_is_for_the_owner_alone": """
    def create(self, size, token):
        file = super().create(size, token)
        os.fchmod(file.fd, 0o640)
        return file
    """,
    "test_create_is_exclusive": """
    def create(self, size, token):
        path = self.folder / token
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        os.ftruncate(fd, size)
        return SegmentFile(fd, str(path))
    """,
    "test_create_that_fails_leaves_nothing": """
    def create(self, size, token):
        path = self.folder / token
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(fd, size)
        except OSError:
            os.close(fd)
            raise
        return SegmentFile(fd, str(path))
    """,
    "test_a_name_has_the_token": """
    def create(self, size, token):
        return super().create(size, token[::-1])
    """,
    "test_open_opens_no_other_file": """
    def open(self, locator):
        if not Path(locator).is_absolute():
            return super().open(locator)
        return SegmentFile(os.open(locator, os.O_RDWR | os.O_CLOEXEC), locator)
    """,
    "test_descriptors_are_closed_on_exec": """
    def open(self, locator):
        file = super().open(locator)
        os.set_inheritable(file.fd, True)
        return file
    """,
    "test_open_finds_the_same_memory": """
    def open(self, locator):
        copy = self.folder / "copy"
        shutil.copyfile(locator, copy)
        return super().open(str(copy))
    """,
    "test_open_makes_a_new_description": """
    def locator(self, file):
        return str(file.fd)

    def open(self, locator):
        try:
            return SegmentFile(os.dup(int(locator)), None)
        except OSError as error:
            raise FileNotFoundError from error
    """,
    "test_another_process_can_open_it": """
    opened = {}

    def locator(self, file):
        self.opened[file.name] = file.name
        return file.name

    def open(self, locator):
        if locator not in self.opened:
            raise FileNotFoundError(locator)
        return super().open(locator)
    """,
    "test_another_process_can_pass_it_on": """
    made = {}

    def create(self, size, token):
        file = super().create(size, token)
        self.made[file.fd] = file.name
        return file

    def locator(self, file):
        return self.made.get(file.fd, "unknown")
    """,
    "test_a_locator_does_without_the_name": """
    def locator(self, file):
        return file.name
    """,
    "test_open_of_what_is_gone": """
    def open(self, locator):
        return SegmentFile(os.open(locator, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC), locator)
    """,
    "test_open_of_what_a_killed_process_made": """
    def create(self, size, token):
        file = super().create(size, token)
        Path(file.name).unlink()
        return file
    """,
    "test_names_are_paths_and_are_listed": """
    def names(self):
        return [path.name for path in self.folder.iterdir()]
    """,
    "test_names_lists_segments_alone": """
    def names(self):
        return [str(path) for path in self.folder.iterdir()]
    """,
    "test_unlink_again_is_no_error": """
    def unlink(self, name):
        Path(name).unlink()
    """,
    "test_a_segment_outlives_its_name": """
    def unlink(self, name):
        path = Path(name)
        if path.exists():
            fd = os.open(path, os.O_RDWR)
            os.ftruncate(fd, 0)
            os.close(fd)
            path.unlink()
        for fd in range(3, 100):
            try:
                if os.readlink(f"/proc/self/fd/{fd}") == f"{name} (deleted)":
                    os.close(fd)
            except OSError:
                pass
    """,
}


LOOSE_NAMES = {
    "any_end": """
    def names(self):
        return [str(path) for path in self.folder.glob(32 * "[0-9a-f]" + "*")]
    """,
    "any_length": """
    def names(self):
        paths = self.folder.iterdir()
        return [str(path) for path in paths if not path.name.strip("0123456789abcdef")]
    """,
    "prefix": """
    def create(self, size, token):
        return super().create(size, f"segment-{token}")

    def names(self):
        return [str(path) for path in self.folder.glob("segment-*")]
    """,
}


UNUSABLE = """
    def unusable_reason(self):
        return "no such thing here"
"""


def run(pytester: pytest.Pytester, bad: dict[str, str], *selection: str) -> pytest.RunResult:
    """Run tests of a module with the good strategy and, for each rule, a bad one."""
    folder = pytester.mkdir("folder")
    module = MODULE.replace("{folder!r}", repr(str(folder)))
    for rule, body in bad.items():
        module += BROKEN.replace("{rule}", rule).replace("{bad}", body.strip("\n"))
    path = pytester.makepyfile(test_contract=module)
    chosen = [f"{path}::{each}" for each in selection]
    return pytester.runpytest_subprocess("-p", "no:cacheprovider", "-rA", *chosen, timeout=100)


def test_a_good_strategy_passes(pytester: pytest.Pytester) -> None:
    """A strategy that keeps the contract passes every test of the suite."""
    outcomes = run(pytester, {}).parseoutcomes()
    assert set(outcomes) == {"passed"}
    assert outcomes["passed"] >= len(BAD)


def test_bad_strategies_fail(pytester: pytest.Pytester) -> None:
    """A strategy that breaks one rule fails the test of that rule."""
    result = run(pytester, BAD, *[f"Test_{rule}::{rule}" for rule in BAD])
    failed = {
        line.partition("::")[2].partition("::")[0].removeprefix("Test_")
        for line in result.outlines
        if line.startswith("FAILED ")
    }
    assert failed == set(BAD)


def test_loose_names_fail(pytester: pytest.Pytester) -> None:
    """Names that are like a segment's but longer or shorter are not to be listed."""
    rule = "test_names_lists_segments_alone"
    result = run(pytester, LOOSE_NAMES, *[f"Test_{name}::{rule}" for name in LOOSE_NAMES])
    result.assert_outcomes(failed=len(LOOSE_NAMES))


def test_every_rule_is_broken_once() -> None:
    """No test of the suite is without a strategy that fails it."""
    tests = {
        name
        for name, _ in inspect.getmembers(StrategyContract, inspect.isfunction)
        if name.startswith("test_")
    }
    assert tests == set(BAD)


def test_an_unusable_strategy_is_skipped(pytester: pytest.Pytester) -> None:
    """Where a strategy does not work its tests are skipped, with its reason."""
    result = run(pytester, {"unusable": UNUSABLE}, "Test_unusable")
    assert result.parseoutcomes()["skipped"] > 10
    result.stdout.fnmatch_lines(["*strategy 'good' does not work here: no such thing here*"])
