"""The compiled library: building it, finding it, and what there is without it."""

from __future__ import annotations

import ctypes
import pickle
import re
import shutil
import subprocess
from typing import TYPE_CHECKING

import numpy as np
import pytest

import shmreduce
from shmreduce.born import building, library, moving
from shmreduce.cli import main
from tests.born.allocator import LARGE, needs_allocator

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A library that is looked for in an empty folder, and not loaded yet."""
    target = tmp_path / building.LIBRARY.name
    monkeypatch.setattr(library, "_library", None)
    monkeypatch.setattr(moving, "started", False)
    monkeypatch.setattr(library, "LIBRARY", target)
    return target


def needs_compiler() -> None:
    try:
        building._compiler()
    except shmreduce.AllocatorUnavailableError as error:
        pytest.skip(str(error))


def test_without_it_the_error_says_how_to_get_it(elsewhere: Path) -> None:
    """The error names the file and the command, and survives pickling."""
    with pytest.raises(shmreduce.AllocatorUnavailableError) as caught:
        shmreduce.shared_allocations()
    error = pickle.loads(pickle.dumps(caught.value))
    assert error.path == str(elsewhere)
    assert error.reason == "it was not built"
    assert "shmreduce build-helper" in str(error)


def test_without_it_all_else_works(elsewhere: Path) -> None:
    """Arrays travel as ever."""
    assert not elsewhere.exists()
    here, there = shmreduce.Pipe()
    here.send(np.ones(LARGE))
    assert there.recv().all()
    here.close()
    there.close()


def not_a_library(path: Path) -> None:
    path.write_bytes(b"no library")


def something_else(path: Path) -> None:
    source = path.with_suffix(".c")
    source.write_text("int shmreduce_version(void) { return 1000; }\n")
    subprocess.run(
        [*building._compiler(), "-shared", "-fPIC", "-o", str(path), str(source)],
        check=True,
        timeout=60,
    )


def writable(path: Path) -> None:
    building.build(path)
    path.chmod(0o777)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (not_a_library, "invalid ELF header|file too short"),
        (something_else, "it is of version 1000, this is version"),
        (writable, "anybody may write to it"),
    ],
)
def test_what_is_not_to_be_trusted_is_not_loaded(
    make: Callable[[Path], None], reason: str, elsewhere: Path
) -> None:
    """A damaged file, another version, and a file that anybody may write to are refused."""
    needs_compiler()
    make(elsewhere)
    with pytest.raises(shmreduce.AllocatorUnavailableError, match=reason):
        library.load()


def test_the_command_builds_it(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """``shmreduce build-helper`` puts a library that can be loaded where it is looked for."""
    needs_compiler()
    monkeypatch.setattr(building.build, "__defaults__", (elsewhere,))
    assert main(["build-helper"]) == 0
    assert str(elsewhere) in capsys.readouterr().out
    assert ctypes.PyDLL(str(elsewhere)).shmreduce_version() == library.VERSION
    assert not elsewhere.stat().st_mode & 0o022


@pytest.mark.parametrize("compiler", ["/bin/false", "cc -no-such-option"])
def test_a_compiler_that_fails_is_told_of(
    compiler: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The error has what the compiler said; what was there before stays."""
    needs_compiler()
    monkeypatch.setenv("CC", compiler)
    target = tmp_path / "allocator.so"
    target.write_text("before")
    with pytest.raises(shmreduce.AllocatorUnavailableError, match="ended with status"):
        building.build(target)
    assert target.read_text() == "before"
    assert list(tmp_path.iterdir()) == [target]


def test_no_compiler_is_told_of(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Where there is none the error says what was looked for."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(shmreduce.AllocatorUnavailableError, match="no C compiler"):
        building.build(tmp_path / "allocator.so")


def test_a_folder_that_is_not_there_is_told_of(tmp_path: Path) -> None:
    """As one that this user may not write to: the error names it."""
    needs_compiler()
    with pytest.raises(shmreduce.AllocatorUnavailableError, match="missing"):
        building.build(tmp_path / "missing" / "allocator.so")


def test_it_has_nothing_of_python_in_it() -> None:
    """No symbol of Python or NumPy is used, so that one library serves all versions."""
    needs_allocator()
    if shutil.which("nm") is None:
        pytest.skip("there is no nm to look with")
    symbols = subprocess.run(
        ["nm", "-D", "--undefined-only", str(building.LIBRARY)],
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    ).stdout
    assert "mmap" in symbols
    assert not re.findall(r"\b_?Py\w+|\bnpy_\w+", symbols)


def test_the_tables_are_laid_out_as_the_source_says() -> None:
    """Field by field, in order, and of the same number of entries and version."""
    text = building.SOURCE.read_text()
    for name, kind in (("entry", library.Entry), ("status", library.Status)):
        body = re.search(rf"struct {name} \{{(.*?)\n\}};", text, re.DOTALL)
        assert body is not None
        bare = re.sub(r"/\*.*?\*/", "", body[1])
        fields = [
            (field.strip(), f"c_uint{width}")
            for width, names in re.findall(r"uint(\d+)_t ([\w, ]+);", bare)
            for field in names.split(",")
        ]
        found = [(field, _plain(kind_of)) for field, kind_of in kind._fields_]
        assert found == fields
    assert re.search(rf"ALLOCATOR_VERSION {library.VERSION}\n", text)
    assert re.search(rf"MOST_ENTRIES {library._MOST_ENTRIES}\n", text)


def _plain(kind: type[ctypes._SimpleCData[int]]) -> str:
    return {8: "c_uint64", 4: "c_uint32", 2: "c_uint16"}[ctypes.sizeof(kind)]


def test_the_source_compiles_without_a_warning(tmp_path: Path) -> None:
    """Of those that the usual options ask for."""
    needs_compiler()
    command = [*building._compiler(), *building._OPTIONS, "-Werror", "-o"]
    done = subprocess.run(
        [*command, str(tmp_path / "a.so"), str(building.SOURCE)],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
