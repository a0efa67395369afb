"""``ls`` shows what is alive, ``gc`` removes what the killed left."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING, Any

import pytest

from tests.cli.commands import PATIENCE, read_json, run, start_python

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Iterator
    from pathlib import Path

OWNER = """
import sys
import numpy as np
import shmreduce

with shmreduce.install(strategy={strategy!r}):
    array = shmreduce.share(np.arange(50_000))
    print("ready", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory for named segments that no other process uses."""
    monkeypatch.setenv("SHMREDUCE_DIRECTORY", str(tmp_path))
    return tmp_path


@pytest.fixture
def owners() -> Iterator[list[subprocess.Popen[str]]]:
    """Processes to end after the test."""
    started: list[subprocess.Popen[str]] = []
    yield started
    for process in started:
        process.kill()
        process.communicate(timeout=PATIENCE)


def segments_of(pid: int) -> list[dict[str, Any]]:
    return [segment for segment in read_json("ls") if segment["owner"] == pid]


@pytest.mark.parametrize("strategy", ["file_descriptor", "file_system"])
def test_ls_shows_a_live_segment(
    strategy: str, directory: Path, owners: list[subprocess.Popen[str]]
) -> None:
    """A segment is listed with its owner, size, strategy and the processes that have it open."""
    owner = start_python(OWNER.format(strategy=strategy))
    owners.append(owner)
    (segment,) = segments_of(owner.pid)
    assert segment["owner_alive"]
    assert segment["strategy"] == strategy
    assert segment["shared"]
    assert segment["reserved"] >= 400_000
    assert segment["size"] >= segment["reserved"]
    assert segment["blocks"] >= 1
    assert (segment["messages"], segment["holds"]) == (0, 0)
    assert segment["holders"][str(owner.pid)] >= 1
    assert segment["leases"] == segment["messages"] + segment["holds"]
    assert segment["fds"] == sum(segment["holders"].values())
    named = strategy == "file_system"
    assert (segment["name"] is not None) == named
    assert f"{owner.pid}" in run("ls").stdout
    assert len(list(directory.iterdir())) == int(named)


def test_a_live_owner_s_segment_is_not_collected(
    directory: Path, owners: list[subprocess.Popen[str]]
) -> None:
    """``gc`` leaves alone what belongs to a process that lives."""
    owners.append(start_python(OWNER.format(strategy="file_system")))
    assert run("gc").stdout == "Nothing is left behind by killed processes.\n"
    assert len(list(directory.iterdir())) == 1


def test_gc_removes_what_a_killed_owner_left(directory: Path) -> None:
    """After SIGKILL ``ls`` says the owner is dead, ``--dry-run`` tells, ``gc`` removes."""
    owner = start_python(OWNER.format(strategy="file_system"))
    owner.send_signal(signal.SIGKILL)
    owner.communicate(timeout=PATIENCE)
    (path,) = directory.iterdir()
    (segment,) = segments_of(owner.pid)
    assert not segment["owner_alive"]
    assert segment["name"] == str(path)
    assert segment["holders"] == {}

    found = read_json("doctor")
    assert "shmreduce gc" in next(
        finding["remedy"] for finding in found if finding["name"] == "left by killed processes"
    )
    would = run("gc", "--dry-run").stdout
    assert would.startswith(f"would remove {path}: ")
    assert path.exists()
    told = read_json("gc")
    assert [segment["name"] for segment in told["segments"]] == [str(path)]
    assert told["segments"][0]["owner"] == owner.pid
    assert not path.exists()
    assert read_json("gc")["segments"] == []


def test_gc_does_not_touch_other_files(directory: Path) -> None:
    """Only files that are segments of this user are removed."""
    strangers = [directory / "data.npy", directory / f"shmreduce-{os.getuid() + 1}-1-abc"]
    for path in strangers:
        path.write_bytes(b"precious")
    run("gc")
    assert all(path.read_bytes() == b"precious" for path in strangers)
