"""What a fork server has imported once its children need not import each."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.installation.test_children import output_of

if TYPE_CHECKING:
    from pathlib import Path

PROGRAM = """
import sys

import shmreduce


def imported_since(_=None):
    found = set(sys.modules) - set(sys.modules["preloaded"].NAMES)
    return sorted(name for name in found if name.startswith("shmreduce"))


def put_imported_since(queue):
    queue.put(imported_since())


if __name__ == "__main__":
    context = shmreduce.get_context("forkserver")
    context.set_forkserver_preload(["numpy", "shmreduce.preload", "preloaded"])
    if sys.argv[1] == "Process":
        queue = context.Queue()
        process = context.Process(target=put_imported_since, args=(queue,))
        process.start()
        print(queue.get(timeout=30))
        process.join()
    elif sys.argv[1] == "Pool":
        with context.Pool(1) as pool:
            print(pool.apply(imported_since))
    elif sys.argv[1] == "ProcessPoolExecutor":
        with shmreduce.ProcessPoolExecutor(1, context) as executor:
            print(executor.submit(imported_since).result(30))
    else:
        print(*shmreduce.spawn(imported_since, ctx=context, results=True))
"""


@pytest.mark.parametrize("way", ["Process", "Pool", "ProcessPoolExecutor", "spawn"])
def test_children_of_such_a_server_import_nothing_of_shmreduce(way: str, tmp_path: Path) -> None:
    """``shmreduce.preload`` is all there is to import, however they are started."""
    (tmp_path / "preloaded.py").write_text("import sys\nNAMES = frozenset(sys.modules)\n")
    assert output_of(PROGRAM, tmp_path, way).strip() == "[]"


def test_it_only_imports(tmp_path: Path) -> None:
    """No thread, no segment, no descriptor, no plugin: a process that does so can be forked."""
    program = """
# libffi may keep a file open.
import ctypes
import os
import sys
import threading

before = os.listdir("/proc/self/fd")
import shmreduce.preload
from shmreduce import process_registry

assert threading.active_count() == 1
assert os.listdir("/proc/self/fd") == before
assert process_registry._process.plugins is None
assert "numpy" not in sys.modules
print("as it was")
"""
    assert output_of(program, tmp_path) == "as it was\n"
