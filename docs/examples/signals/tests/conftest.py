"""Every test of the project fails if it leaks shared memory."""

from pathlib import Path

import pytest

pytest_plugins = ["shmreduce.testing.pytest_plugin"]


@pytest.fixture(autouse=True)
def _no_leaks(shmreduce_no_leaks: None) -> None:
    pass


@pytest.fixture(autouse=True)
def _runtime_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
