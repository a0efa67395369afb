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
from shmreduce.cli.doctor import installation
from shmreduce.memory import inspection
from shmreduce.memory.headroom import Machine
from shmreduce.process_registry import get_registry
from shmreduce.strategies import DEFAULT_ORDER, current_strategy, find_strategy
from shmreduce.testing import find_leaks, take_census
from shmreduce_fd.strategy import FileDescriptorStrategy

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
    with pytest.raises(StrategyUnusableError, match="it raised RuntimeError: no such moon; us"):
        set_sharing_strategy("broken")
    assert isinstance(inspection.leftovers(), list)
    assert isinstance(inspection.list_segments(), list)
    assert "strategy broken" in [each.name for each in installation.strategies(Machine())]


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
        with shmreduce.install(strategy="mute"):
            before = take_census()
            with pytest.raises(PluginError, match="'mute' returned None"):
                ForkingPickler.dumps(memoryview(bytearray(1_000_000)))
            assert find_leaks(before) == []
    finally:
        get_registry().unregister_strategy(strategy)
