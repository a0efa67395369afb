"""The fork server imports what children of shmreduce need, once for all of them."""

from __future__ import annotations

import json
import subprocess
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from shmreduce import children
from tests.channels.channels import PATIENCE

if TYPE_CHECKING:
    from pathlib import Path

PROGRAM = """
import json, os, sys
import multiprocessing
import shmreduce

def tell(queue):
    imported = [name in sys.modules for name in ("shmreduce.preload", "colorsys")]
    queue.put([os.getppid(), *imported])

def ask(context):
    queue = context.SimpleQueue()
    process = context.Process(target=tell, args=(queue,))
    process.start()
    found = queue.get()
    process.join()
    return found

if __name__ == "__main__":
    own, standard = shmreduce.get_context("forkserver"), multiprocessing.get_context("forkserver")
    steps, names = sys.argv[1].split(), {"own": own, "standard": standard}
    found = []
    for step in steps:
        if step == "install":
            shmreduce.install()
        elif step == "user":
            own.set_forkserver_preload(["colorsys"])
        else:
            found.append(ask(names[step]))
    print(json.dumps(found))
"""


def told(folder: Path, steps: str) -> Any:
    """Return what each child tells: its parent, and which modules it has."""
    (folder / "program.py").write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, folder / "program.py", steps],
        capture_output=True,
        text=True,
        timeout=2 * PATIENCE,
        check=True,
    )
    assert not done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("steps", ["own own", "install standard own", "own standard"])
def test_it_has_imported_them(tmp_path: Path, steps: str) -> None:
    """For a context of shmreduce, and for the standard ones after ``install()``."""
    found = told(tmp_path, steps)
    assert [imported for _, imported, _ in found] == [True, True]
    assert len({server for server, _, _ in found}) == 1


def test_without_shmreduce_it_imports_nothing_of_it(tmp_path: Path) -> None:
    """A program may import shmreduce and not use it for these children."""
    assert [imported for _, imported, _ in told(tmp_path, "standard standard own")] == [False] * 3


def test_what_the_program_has_it_import_stays(tmp_path: Path) -> None:
    """The modules that the program has named are imported, too."""
    assert [imported for _, *imported in told(tmp_path, "user own")] == [[True, True]]


@pytest.mark.parametrize(
    ("state", "names_it"),
    [
        ({}, True),
        ({"_forkserver_pid": 1}, False),
        ({"_preload_on_error": "fail"}, False),
        ({"_preload_on_error": "ignore"}, True),
        ({"_preload_modules": ["shmreduce.preload"]}, False),
        ({"_preload_modules": None}, False),
    ],
)
def test_it_is_named_only_where_that_helps(
    state: dict[str, Any], names_it: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not to a server that runs, nor if the program wants to be told of what is missing there,
    as it can from Python 3.15 on; and the program's own list is not changed.
    """
    mine = ["__main__"]
    server = SimpleNamespace(**{"_preload_modules": mine, "_forkserver_pid": None, **state})
    monkeypatch.setattr("multiprocessing.forkserver._forkserver", server)
    monkeypatch.setattr(
        children, "get_spawning_popen", lambda: SimpleNamespace(method="forkserver")
    )
    before = server._preload_modules
    children.preload_in_fork_server()
    assert mine == ["__main__"]
    assert server._preload_modules == ([*mine, "shmreduce.preload"] if names_it else before)
