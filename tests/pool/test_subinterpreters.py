"""Pools in a subinterpreter, as programs have it that run inside a web server."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.conftest import PATIENCE

# Their names have changed; ``legacy`` ones share the lock of the main interpreter.
RUNNER = """
import sys
if sys.version_info >= (3, 13):
    import _interpreters as interpreters
    made = interpreters.create("legacy")
else:
    import _xxsubinterpreters as interpreters
    made = interpreters.create(isolated=False)
failed = interpreters.run_string(made, sys.argv[1])
interpreters.destroy(made)
sys.exit(failed and failed.formatted)
"""

MAP = """
import shmreduce
with shmreduce.get_context("spawn").Pool(1) as pool:
    print(pool.map(len, [bytes(1_000_000)]))
"""
SUBMIT = """
import shmreduce
with shmreduce.ProcessPoolExecutor(1, shmreduce.get_context("spawn")) as executor:
    print([executor.submit(len, bytes(1_000_000)).result()])
"""
SPAWN = """
import shmreduce
print(shmreduce.spawn(hash, nprocs=1, results=True) and [1_000_000])
"""


@pytest.mark.parametrize("program", [MAP, SUBMIT, SPAWN], ids=["map", "submit", "spawn"])
def test_processes_are_spawned_from_a_subinterpreter(program: str) -> None:
    """There signal.signal() refuses to set handlers, and Ctrl-C needs not be held back."""
    run = subprocess.run(
        [sys.executable, "-c", RUNNER, program],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert (run.stdout, run.returncode) == ("[1000000]\n", 0), run.stderr
