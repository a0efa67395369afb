"""The strategy holds the strategy contract, and says why it cannot be used."""

import pytest
from signals.strategy import RuntimeDirectoryStrategy

from shmreduce.testing import StrategyContract


class TestRuntimeDirectory(StrategyContract):
    def make_strategy(self) -> RuntimeDirectoryStrategy:
        return RuntimeDirectoryStrategy()


def test_without_a_runtime_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nobody has logged in the reason says so, and what to do."""
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert "XDG_RUNTIME_DIR is not set" in RuntimeDirectoryStrategy().unusable_reason()
