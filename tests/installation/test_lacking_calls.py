"""Pythons, sandboxes and systems that lack calls, of which there may be another way."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import errno, fcntl, os, sys

def refuse(*_):
    raise OSError(int(sys.argv[2]), "refused")

if sys.argv[1] == "forbidden":
    os.memfd_create = refuse
else:
    del os.memfd_create
    for name in [each for each in dir(fcntl) if "F_OFD_" in each or "SEAL" in each]:
        delattr(fcntl, name)

import multiprocessing

import numpy as np
import shmreduce
from shmreduce.memory.inspection import process_state

if __name__ == "__main__":
    shmreduce.install()
    print(shmreduce.get_sharing_strategy())
    kept = [shmreduce.ones(100_000)]
    for made in (multiprocessing, shmreduce):
        with made.get_context("fork").Pool(1) as pool:
            print(int(pool.apply(np.sum, (np.ones(100_000),))))
    print(shmreduce.start_processes(divmod, (7,), start_method="fork", results=True))
    # What no child sees any more is used again.
    before = process_state().reserved
    for _ in range(3):
        kept[0] = shmreduce.ones(5_000_000)
    print(process_state().reserved - before < 100_000_000)
"""


def output_of(program: str, *arguments: str) -> str:
    """Return what a program prints, which must not print anything on standard error."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program, *arguments],
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stderr == ""
    return done.stdout


@pytest.mark.parametrize(
    ("how", "number"), [("missing", "0"), ("forbidden", "1"), ("forbidden", "38")]
)
def test_without_memfd_all_goes_by_files(how: str, number: str) -> None:
    """Where ``os.memfd_create``, and the names of the locks, are missing, as in Pythons that are
    built for old C libraries, or the call is forbidden, the other strategy does everything.
    """
    assert output_of(PROGRAM, how, number).split("\n") == [
        "file_system",
        "100000",
        "100000",
        "[(0, 0)]",
        "True",
        "",
    ]


NO_FORK = """
import os, sys

del os.fork, os.register_at_fork
for name in ("fcntl", "resource", "termios"):
    sys.modules[name] = None
try:
    import shmreduce as mp
except ImportError as error:
    print(error.name, error)
    import multiprocessing as mp
print(mp.__name__)
"""


def test_without_fork_the_import_says_so() -> None:
    """As on Windows: a program that catches the ImportError can use multiprocessing there."""
    said, used = output_of(NO_FORK).splitlines()
    assert said.startswith("shmreduce shmreduce needs an operating system with fork()")
    assert used == "multiprocessing"
