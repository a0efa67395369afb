"""The compiled allocator: finding it, what is in it, and what there is without it."""

from __future__ import annotations

import ctypes
import pickle
import re
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

import shmreduce
from shmreduce.born import library, moving
from shmreduce.building import build, compile_command
from shmreduce.compiled import ALLOCATOR
from tests.born.allocator import LARGE, in_fresh_interpreter, needs_allocator
from tests.compiler import needs_compiler

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A library that is looked for in an empty folder, and not loaded yet."""
    target = tmp_path / Path(ALLOCATOR.library).name
    monkeypatch.setattr(library, "_library", None)
    monkeypatch.setattr(moving, "started", False)
    monkeypatch.setattr(library, "LIBRARY", str(target))
    return target


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
        [compile_command(ALLOCATOR)[0], "-shared", "-fPIC", "-o", str(path), str(source)],
        check=True,
        timeout=60,
    )


def writable(path: Path) -> None:
    build(ALLOCATOR, path)
    path.chmod(0o777)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (not_a_library, "invalid ELF header|file too short"),
        (something_else, "it is of version 1000, this is version"),
        (writable, "every user may write to it"),
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


WITHOUT_DESCRIPTORS = """
import os, resource
import numpy, shmreduce, shmreduce_numpy.handler
from shmreduce.born.allocations import shared_allocations
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
taken = []
try:
    while True:
        taken.append(os.open(os.devnull, os.O_RDONLY))
except OSError:
    pass
try:
    shared_allocations()
except shmreduce.SegmentError as error:
    print(error)
for each in taken:
    os.close(each)
with shared_allocations():
    print(numpy.ones(1_000_000).sum())
"""


def test_without_a_free_descriptor_it_is_not_said_to_be_missing() -> None:
    """The error names what is missing, and the next try succeeds."""
    needs_allocator()
    done = in_fresh_interpreter(WITHOUT_DESCRIPTORS)
    assert done.returncode == 0, done.stderr
    told, found = done.stdout.splitlines()
    assert "no descriptor is free to load the allocator" in told
    assert found == "1000000.0"


def test_it_has_nothing_of_python_in_it() -> None:
    """No symbol of Python or NumPy is used, so that one library serves all versions."""
    needs_allocator()
    if shutil.which("nm") is None:
        pytest.skip("there is no nm to look with")
    symbols = subprocess.run(
        ["nm", "-D", "--undefined-only", ALLOCATOR.library],
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    ).stdout
    assert "mmap" in symbols
    assert not re.findall(r"\b_?Py\w+|\bnpy_\w+", symbols)


def test_the_tables_are_laid_out_as_the_source_says() -> None:
    """Field by field, in order, and of the same number of entries and version."""
    text = Path(ALLOCATOR.sources[0]).read_text()
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
