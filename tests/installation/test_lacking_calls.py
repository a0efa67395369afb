"""Pythons and sandboxes that lack calls of which there is another way."""

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


@pytest.mark.parametrize(
    ("how", "number"), [("missing", "0"), ("forbidden", "1"), ("forbidden", "38")]
)
def test_without_memfd_all_goes_by_files(how: str, number: str) -> None:
    """Where ``os.memfd_create``, and the names of the locks, are missing, as in Pythons that are
    built for old C libraries, or the call is forbidden, the other strategy does everything.
    """
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROGRAM, how, number],
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.split("\n") == ["file_system", "100000", "100000", "[(0, 0)]", "True", ""]
    assert done.stderr == ""
