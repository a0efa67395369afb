"""Pools where /dev/shm is as small as in a container: 64 MiB."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

MOUNT = "mount -t tmpfs -o size=64m tmpfs /dev/shm"
"""What Docker does, in a mount namespace of its own."""
PROGRAM = """
import os, sys, time
import numpy as np
import shmreduce

SIZE = 16 << 20
COUNT = 8


def fill(number):
    return np.full(SIZE, number, np.uint8)


def check(array):
    return int(array[0]) if (array == array[0]).all() else -1


if __name__ == "__main__":
    assert os.statvfs("/dev/shm").f_blocks * os.statvfs("/dev/shm").f_frsize == 64 << 20
    shmreduce.set_sharing_strategy(sys.argv[1])
    with shmreduce.get_context(sys.argv[2]).Pool(2) as pool:
        # One after another, any number fits.
        for number in range(COUNT):
            array = pool.apply(fill, (number,))
            assert check(array) == number
            assert pool.apply(check, (array,)) == number
            del array
        # At once they are twice as much as there is room for.
        try:
            arrays = pool.map(fill, range(COUNT), chunksize=1)
        except shmreduce.OutOfSharedMemoryError as error:
            assert "doctor" in str(error)
            print("no room")
        else:
            print(sum(check(each) == number for number, each in enumerate(arrays)), "fit")
            del arrays
        # What the workers keep warm is given back soon.
        deadline = time.monotonic() + 60
        while True:
            try:
                assert pool.apply(check, (fill(7),)) == 7
            except shmreduce.OutOfSharedMemoryError:
                assert time.monotonic() < deadline
            else:
                break
    pool.join()
"""


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.parametrize(
    ("strategy", "outcome"), [("file_descriptor", "8 fit\n"), ("file_system", "no room\n")]
)
def test_pool_in_a_container(tmp_path: Path, strategy: str, outcome: str, method: str) -> None:
    """``file_descriptor`` is not bounded by it; ``file_system`` says so, and goes on."""
    probe = subprocess.run(
        ["unshare", "-m", "sh", "-c", MOUNT],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    if probe.returncode:
        pytest.skip(f"may not mount a tmpfs here: {probe.stderr.strip()}")
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    command = f"{MOUNT} && exec {sys.executable} {script} {strategy} {method}"
    finished = subprocess.run(
        ["unshare", "-m", "sh", "-c", command],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(sys.path),
            "SHMREDUCE_IDLE_SECONDS": "0.1",
            "SHMREDUCE_IDLE_KEEP": "0",
        },
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert finished.stdout == outcome, finished.stderr[-2000:]
    assert finished.returncode == 0


WITHOUT_ROOM = """
import errno, os, sys

def forbidden(*_):
    raise OSError(errno.EPERM, "forbidden")

os.memfd_create = forbidden
import shmreduce

if __name__ == "__main__":
    shmreduce.set_sharing_strategy("file_system")
    try:
        shmreduce.get_context("fork").Pool(2)
    except shmreduce.SegmentError as error:
        assert "TMPDIR" in str(error)
        print(errno.errorcode[error.errno])
"""


def test_a_full_directory_for_temporary_files_is_a_named_error(tmp_path: Path) -> None:
    """Where there are no memfds: a page for which there is no room would kill the process."""
    mount = f"mount -t tmpfs -o size=256k tmpfs {tmp_path}"
    probe = subprocess.run(
        ["unshare", "-m", "sh", "-c", mount], capture_output=True, timeout=60, check=False
    )
    if probe.returncode:
        pytest.skip(f"may not mount a tmpfs here: {probe.stderr!r}")
    program = tmp_path.with_name("without_room.py")
    program.write_text(WITHOUT_ROOM)
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", f"{mount} && {sys.executable} {program}"],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "ENOSPC\n"), done.stderr
