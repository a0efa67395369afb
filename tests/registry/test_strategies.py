"""Choosing the sharing strategy by name."""

from __future__ import annotations

import os
import subprocess
import sys
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any

import pytest

import shmreduce
from shmreduce import (
    PluginError,
    SegmentFile,
    SharingStrategy,
    StrategyUnusableError,
    UnknownStrategyError,
    get_all_sharing_strategies,
    get_sharing_strategy,
    set_sharing_strategy,
)
from shmreduce.cli import main
from shmreduce.cli.doctor import installation
from shmreduce.memory import inspection
from shmreduce.memory.headroom import Machine
from shmreduce.process_registry import get_registry
from shmreduce.strategies import DEFAULT_ORDER, current_strategy, find_strategy
from shmreduce.testing import OtherProcess, find_leaks, take_census
from shmreduce_fd.strategy import FileDescriptorStrategy
from tests.conftest import PATIENCE

if TYPE_CHECKING:
    from collections.abc import Iterator


class Broken(SharingStrategy):
    name = "broken"

    def unusable_reason(self) -> str | None:
        return "the moon is full"

    def create(self, size: int, token: str) -> SegmentFile:
        raise NotImplementedError

    def locator(self, file: SegmentFile) -> str:
        raise NotImplementedError

    def open(self, locator: str) -> SegmentFile:
        raise NotImplementedError


@pytest.fixture(autouse=True)
def _strategy_that_does_not_work() -> Iterator[None]:
    strategy = Broken()
    registry = get_registry()
    registry.register_strategy(strategy, "test")
    yield
    registry.unregister_strategy(strategy)


def test_unknown_strategy_lists_what_there_is() -> None:
    """An unknown name is an error with the usable ones, and why others are unusable."""
    with pytest.raises(UnknownStrategyError, match="broken is not: the moon is full") as caught:
        find_strategy("teleport")
    assert caught.value.name == "teleport"
    assert "file_system" in caught.value.available
    assert caught.value.unusable["broken"] == "the moon is full"


def test_variable_that_names_an_unknown_strategy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with any setting: the field ``variable``, only where the name came from there."""
    monkeypatch.setenv("SHMREDUCE_STRATEGY", " teleport ")
    with pytest.raises(UnknownStrategyError, match="SHMREDUCE_STRATEGY") as caught:
        find_strategy("teleport")
    assert caught.value.variable == "SHMREDUCE_STRATEGY"
    with pytest.raises(UnknownStrategyError) as caught:
        find_strategy("telepathy")
    assert "variable" not in caught.value.fields


def test_unusable_strategy_says_why() -> None:
    """A strategy that does not work here is an error with its reason."""
    with pytest.raises(StrategyUnusableError, match="the moon is full; usable here") as caught:
        set_sharing_strategy("broken")
    assert caught.value.reason == "the moon is full"


@pytest.mark.parametrize("name", ["broken", "teleport"])
def test_failed_choice_changes_nothing(name: str) -> None:
    """After an error the strategy is that of before, and nothing is installed."""
    before = get_sharing_strategy()
    with pytest.raises((UnknownStrategyError, StrategyUnusableError)):
        set_sharing_strategy(name)
    with pytest.raises((UnknownStrategyError, StrategyUnusableError)):
        shmreduce.install(strategy=name)
    assert get_sharing_strategy() == before
    shmreduce.uninstall()


def test_unusable_strategies_are_not_offered() -> None:
    """``get_all_sharing_strategies`` lists those that work."""
    assert "broken" not in get_all_sharing_strategies()
    assert {"file_descriptor", "file_system"} <= get_all_sharing_strategies()


def test_a_strategy_that_cannot_be_asked_takes_nobody_down(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One whose ``unusable_reason`` raises does not work, and the others do."""

    def fail(_: object) -> None:
        raise RuntimeError("no such moon")

    monkeypatch.setattr(Broken, "unusable_reason", fail)
    assert "file_system" in get_all_sharing_strategies()
    with pytest.raises(StrategyUnusableError, match=" raised RuntimeError: no such moon; us"):
        set_sharing_strategy("broken")
    assert isinstance(inspection.leftovers(), list)
    assert isinstance(inspection.list_segments(), list)
    assert "strategy broken" in [each.name for each in installation.strategies(Machine())]


ONE_IS_FREE = """
import os
import resource
import shmreduce

# Everything is imported and found: only the trial needs descriptors.
assert shmreduce.get_sharing_strategy() == "file_descriptor"
shmreduce.strategies._chosen = None
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
free = os.open(os.devnull, os.O_RDONLY)
resource.setrlimit(resource.RLIMIT_NOFILE, (free + 1, hard))
os.close(free)
try:
    print(shmreduce.get_sharing_strategy())
except shmreduce.SegmentError as error:
    print(error)
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
print(shmreduce.get_sharing_strategy())
"""


def test_another_is_not_taken_for_good_for_want_of_a_descriptor() -> None:
    """With one free, one strategy would say that it does not work: nobody is asked."""
    done = subprocess.run(
        [sys.executable, "-c", ONE_IS_FREE],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=True,
    )
    assert done.stdout.startswith("no descriptor is free to try the sharing strategies: Too many")
    assert done.stdout.endswith("and try again\nfile_descriptor\n")


def test_default_is_the_first_that_works(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a name the first usable one of the documented order is taken."""
    monkeypatch.setattr("shmreduce.strategies._chosen", None)
    assert current_strategy().name == DEFAULT_ORDER[0]
    with monkeypatch.context() as patch:
        patch.setattr(type(find_strategy("file_descriptor")), "unusable_reason", lambda _: "no")
        patch.setattr("shmreduce.strategies._chosen", None)
        assert current_strategy().name == DEFAULT_ORDER[1]
        patch.setattr(type(find_strategy("file_system")), "unusable_reason", lambda _: "no")
        patch.setattr("shmreduce.strategies._chosen", None)
        with pytest.raises(StrategyUnusableError, match=r"^the default .* neither file_desc"):
            current_strategy()
    monkeypatch.setattr("shmreduce.strategies._chosen", None)


def test_choice_holds_until_the_end_of_the_installation() -> None:
    """``set_sharing_strategy`` takes effect at once; the end of a block undoes it."""
    before = get_sharing_strategy()
    with shmreduce.install(strategy="file_descriptor"):
        set_sharing_strategy("file_system")
        assert get_sharing_strategy() == "file_system"
    assert get_sharing_strategy() == before


@pytest.mark.parametrize("name", ["file_descriptor", "file_system"])
def test_environment_chooses(name: str) -> None:
    """``SHMREDUCE_STRATEGY`` chooses the strategy of a program that names none."""
    program = "import shmreduce; shmreduce.install(); print(shmreduce.get_sharing_strategy())"
    output = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "SHMREDUCE_STRATEGY": name},
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    ).stdout
    assert output.strip() == name


class Mute(FileDescriptorStrategy):
    name = "mute"

    def unusable_reason(self) -> str | None:
        return None

    def locator(self, file: SegmentFile) -> Any:
        return file.name


def test_a_locator_that_is_no_text_is_the_plugins_fault() -> None:
    """The error names the strategy and says what it returned; nothing is held."""
    strategy = Mute()
    get_registry().register_strategy(strategy, "test")
    try:
        before = take_census()
        with (
            shmreduce.install(strategy="mute"),
            pytest.raises(PluginError, match="'mute' returned None"),
        ):
            ForkingPickler.dumps(memoryview(bytearray(1_000_000)))
        assert find_leaks(before) == []
    finally:
        get_registry().unregister_strategy(strategy)


class Sloppy(FileDescriptorStrategy):
    """Does all but one thing as it must be done."""

    def __init__(self, call: str, answer: Any) -> None:
        self.call, self.answer = call, answer
        # A process keeps the memory that it has by a strategy's name.
        self.name = f"sloppy_{id(self)}"

    def unusable_reason(self) -> str | None:
        return None

    def create(self, size: int, token: str) -> Any:
        if self.call == "create":
            return self.answer(size)
        return super().create(size, token)

    def names(self) -> Any:
        return self.answer() if self.call == "names" else ()


def _open_nothing(size: int) -> SegmentFile:
    fd = os.memfd_create("gone")
    os.close(fd)
    return SegmentFile(fd, None)


def _make_too_little(size: int) -> SegmentFile:
    return SegmentFile(os.memfd_create("short"), None)


def _open_for_reading(size: int) -> SegmentFile:
    fd = os.memfd_create("read")
    try:
        os.ftruncate(fd, size)
        return SegmentFile(os.open(f"/proc/self/fd/{fd}", os.O_RDONLY), None)
    finally:
        os.close(fd)


def _make_what_has_contents(size: int) -> SegmentFile:
    fd = os.memfd_create("again")
    os.ftruncate(fd, size)
    os.pwrite(fd, b"shmreduc", 0)
    return SegmentFile(fd, None)


def _raise_on_purpose() -> None:
    raise RuntimeError("on purpose")


@pytest.mark.parametrize(
    ("call", "answer", "what"),
    [
        pytest.param("create", lambda _: 7, r"create\(\) .* returned 7", id="a number"),
        pytest.param("create", lambda _: None, r"create\(\) .* returned None", id="nothing"),
        pytest.param("create", lambda _: SegmentFile("x", None), "fd must be", id="no number"),  # type: ignore[arg-type]
        pytest.param("create", _open_nothing, "is not open", id="closed"),
        pytest.param("create", _make_too_little, "a file of 0 bytes: it must", id="too small"),
        pytest.param("create", _open_for_reading, "both reading and writing", id="read-only"),
        pytest.param("create", _make_what_has_contents, "that has contents", id="not new"),
        pytest.param("names", lambda: None, r"names\(\) .* raised TypeError", id="no names"),
        pytest.param("names", lambda: [5], r"names\(\) .* listed 5", id="a name that is none"),
        pytest.param("names", _raise_on_purpose, "raised RuntimeError: on p", id="names raise"),
    ],
)
def test_a_strategy_that_breaks_its_contract_is_told_so(call: str, answer: Any, what: str) -> None:
    """Whoever makes an array is told which strategy did what; nothing is held."""
    strategy = Sloppy(call, answer)
    before = take_census()
    get_registry().register_strategy(strategy, "test")
    try:
        with shmreduce.install(strategy=strategy.name):
            with pytest.raises(PluginError, match=f"strategy {strategy.name!r}") as caught:
                shmreduce.allocate(1_000_000)
            caught.match(what)
    finally:
        get_registry().unregister_strategy(strategy)
        # It is asked once more as the process ends.
        strategy.call = ""
    assert find_leaks(before) == []


@pytest.mark.parametrize(
    ("call", "verdicts", "value"),
    [("create", ("warning", "problem"), "returned None"), ("", ("ok", "ok"), "works")],
)
def test_the_doctor_tries_each_strategy(call: str, verdicts: tuple[str, str], value: str) -> None:
    """One that says it works, and does not, is a warning; a problem if it was chosen."""
    strategy = Sloppy(call, lambda _: None)
    before = take_census()
    get_registry().register_strategy(strategy, "test")
    try:
        with shmreduce.install(strategy=strategy.name):
            found = {each.name: each for each in installation.strategies(Machine())}
    finally:
        get_registry().unregister_strategy(strategy)
    tried, chosen = found[f"strategy {strategy.name}"], found["chosen strategy"]
    assert (tried.verdict, chosen.verdict) == verdicts
    assert value in tried.value
    assert found["strategy file_system"].verdict == "ok"
    assert find_leaks(before) == []


@pytest.mark.parametrize(
    ("answer", "what"),
    [
        pytest.param(lambda _: None, "returned None", id="nothing"),
        pytest.param(_open_nothing, "is not open", id="closed"),
        pytest.param(_open_for_reading, "both reading and writing", id="read-only"),
    ],
)
def test_a_receiver_is_told_what_open_returned(
    answer: Any, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An ``open`` that returns no file is an error that names the strategy; nothing is lost."""
    before = take_census()
    strategy = Sloppy("open", None)
    get_registry().register_strategy(strategy, "test")
    try:
        with shmreduce.install(strategy=strategy.name), OtherProcess("fork") as other:
            handle = other.ask(_send)
            with monkeypatch.context() as patch:
                patch.setattr(Sloppy, "open", lambda *_: answer(4096))
                with pytest.raises(PluginError, match=rf"open\(\) of .* {what}"):
                    ForkingPickler.loads(handle)
            assert len(ForkingPickler.loads(handle)) == 1_000_000
    finally:
        get_registry().unregister_strategy(strategy)
    assert find_leaks(before) == []


def test_a_locator_has_to_fit_into_a_handle(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is too long is the strategy's fault, which is named."""
    strategy = Sloppy("locator", None)
    monkeypatch.setattr(Sloppy, "locator", lambda *_: "x" * 40_000)
    get_registry().register_strategy(strategy, "test")
    try:
        with (
            shmreduce.install(strategy=strategy.name),
            pytest.raises(PluginError, match=r"locator\(\) of .* 40000 bytes"),
        ):
            _send()
    finally:
        get_registry().unregister_strategy(strategy)


def _send() -> bytes:
    return bytes(ForkingPickler.dumps(memoryview(bytearray(1_000_000))))


@pytest.mark.parametrize("answer", ["", True, False, 5])
def test_a_reason_is_a_sentence(answer: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """What ``unusable_reason`` returns besides is quoted: it is no reason to read."""
    monkeypatch.setattr(Broken, "unusable_reason", lambda _: answer)
    with pytest.raises(StrategyUnusableError, match=f" returned {answer!r}, which is neither"):
        set_sharing_strategy("broken")


@pytest.mark.parametrize("command", ["ls", "gc"])
def test_commands_name_the_strategy_that_cannot_list_names(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line on standard error and exit status 1: those of the others are dealt with."""
    monkeypatch.setattr(Broken, "unusable_reason", lambda _: None)
    monkeypatch.setattr(Broken, "names", lambda _: _raise_on_purpose())
    segment = shmreduce.allocate(8)
    assert main([command]) == 1
    told = capsys.readouterr()
    assert "names() of sharing strategy 'broken' raised" in told.err
    assert len(told.err.splitlines()) == 1
    assert (str(os.getpid()) in told.out) == (command == "ls")
    del segment
