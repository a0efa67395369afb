"""The stand-in for the driver, and processes that use it."""

from __future__ import annotations

import os
import shutil
import subprocess
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import shmreduce
from tests.cuda.actors import Actor, actors, connect, device_state, drop, nothing_is_out, stats

if TYPE_CHECKING:
    from collections.abc import Iterator

collect_ignore = ["mimics"]
SOURCES = Path(__file__).parent / "standin"


class Standin:
    """A stand-in driver with a folder of its own.

    Attributes
    ----------
    folder : Path
        Where its memory and its log are.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()

    def log(self) -> list[str]:
        """Return the lines of the log so far."""
        path = self.folder / "log"
        return path.read_text().splitlines() if path.exists() else []

    def violations(self) -> list[str]:
        """Return what a driver would have left undefined."""
        return [line for line in self.log() if "VIOLATION" in line]

    def calls(self, pid: int, since: int = 0) -> list[str]:
        """Return the names of the functions that a process has called."""
        words = [line.split() for line in self.log()[since:]]
        return [each[1] for each in words if each[0] == str(pid)]


@pytest.fixture(scope="package")
def standin_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a freshly compiled ``libcuda.so.1``."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("there is no C compiler for the stand-in driver (cc, gcc or clang)")
    folder = tmp_path_factory.mktemp("standin")
    options = ["-std=gnu11", "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
    options += ["-fvisibility=hidden", "-pthread", "-Wl,-soname,libcuda.so.1"]
    sources = sorted(str(path) for path in SOURCES.glob("*.c"))
    target = str(folder / "libcuda.so.1")
    done = subprocess.run(
        [compiler, *options, "-o", target, *sources],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return folder


@contextmanager
def standing_in(library: Path, folder: Path) -> Iterator[Standin]:
    """A stand-in, in a folder of its own, for the processes that are started meanwhile."""
    path = os.environ.get("LD_LIBRARY_PATH")
    with pytest.MonkeyPatch.context() as patch:
        # Read by the loader when a process starts: for those that are spawned.
        patch.setenv("LD_LIBRARY_PATH", f"{library}:{path}" if path else str(library))
        patch.setenv("STANDIN_CUDA_FOLDER", str(folder))
        yield Standin(folder)


@pytest.fixture
def standin(standin_library: Path, tmp_path: Path) -> Iterator[Standin]:
    """A stand-in for the processes that the test starts; the test fails if it was misused."""
    with standing_in(standin_library, tmp_path / "device") as standin:
        yield standin
        assert not standin.violations()


@pytest.fixture(scope="package")
def _session(
    standin_library: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Standin, Actor, Actor]]:
    with (
        standing_in(standin_library, tmp_path_factory.mktemp("session") / "device") as standin,
        actors(2) as (sender, receiver),
    ):
        connect(sender, receiver)
        yield standin, sender, receiver


class Pair:
    """Two connected processes and their stand-in."""

    def __init__(self, standin: Standin, sender: Actor, receiver: Actor) -> None:
        self.standin = standin
        self.sender = sender
        self.receiver = receiver


@pytest.fixture
def pair(_session: tuple[Standin, Actor, Actor]) -> Iterator[Pair]:
    """Two processes that live through all tests; the test fails if it leaves anything in them."""
    standin, sender, receiver = _session
    violations = len(standin.violations())
    with shmreduce.install():
        yield Pair(standin, sender, receiver)
    for actor in (receiver, sender):
        actor.ask(drop)
    nothing_is_out(sender)
    nothing_is_out(receiver)
    for actor in (sender, receiver):
        found = actor.ask(stats)
        assert (found.mappings, found.arrays, found.offers, found.stuck) == (0, 0, 0, 0)
        assert found.opened == found.closed
        assert found.fault == ""
    state = sender.ask(device_state)
    assert (state["bytes"], state["imports"]) == (0, 0)
    assert standin.violations()[violations:] == []
