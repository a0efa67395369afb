"""Places with little room: a limited cgroup, a small /dev/shm, few descriptors, few mappings."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import resource
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["few_descriptors", "few_mappings", "limited_cgroup", "run_script", "small_tmpfs"]

_ROOT = Path(__file__).parent.parent.parent
_CGROUP = Path("/sys/fs/cgroup")


def run_script(
    script: str, *before: str, patience: float = 60.0, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a program in a fresh process, behind other commands if there are any."""
    return subprocess.run(
        [*before, sys.executable, "-W", "error", "-c", script],
        cwd=_ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=patience,
        check=False,
    )


@contextmanager
def limited_cgroup(nbytes: int) -> Iterator[Path]:
    """Make a cgroup whose processes may have so much memory; yield where its members are named."""
    unified = (_CGROUP / "cgroup.controllers").exists()
    folder = (_CGROUP if unified else _CGROUP / "memory") / f"shmreduce-test-{os.getpid()}"
    limit = folder / ("memory.max" if unified else "memory.limit_in_bytes")
    try:
        folder.mkdir()
        limit.write_text(str(nbytes))
    except OSError as error:
        with contextlib.suppress(OSError):
            folder.rmdir()
        pytest.skip(f"may not make a cgroup with a limit here: {error}")
    try:
        yield folder / "cgroup.procs"
    finally:
        folder.rmdir()


def small_tmpfs(folder: Path, megabytes: int) -> list[str]:
    """Return the command in front of one that is to see a small tmpfs at a folder."""
    mount = f"mount -t tmpfs -o size={megabytes}m tmpfs {folder}"
    try:
        subprocess.run(
            ["unshare", "-m", "sh", "-c", mount],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"may not mount a tmpfs here: {getattr(error, 'stderr', error)}")
    return ["unshare", "-m", "sh", "-c", f'{mount} && exec "$@"', "sh"]


@contextmanager
def few_descriptors(count: int) -> Iterator[None]:
    """Let this process and its children have so many descriptors at most."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (count, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@contextmanager
def few_mappings(left: int) -> Iterator[None]:
    """Leave this process so many mappings of those that vm.max_map_count allows."""
    protect: Any = ctypes.CDLL(None, use_errno=True).mprotect
    protect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    most = int(Path("/proc/sys/vm/max_map_count").read_text())
    held: Any = mmap.mmap(-1, mmap.PAGESIZE * (most + 2))
    start = ctypes.addressof(ctypes.c_char.from_buffer(held))
    # Every second page of a range with other rights is two mappings more.
    pages = range(1, most + 1, 2)
    done = 0
    for page in pages:
        if protect(start + page * mmap.PAGESIZE, mmap.PAGESIZE, mmap.PROT_READ):
            break
        done += 1
    for page in pages[done - left // 2 : done]:
        protect(start + page * mmap.PAGESIZE, mmap.PAGESIZE, mmap.PROT_READ | mmap.PROT_WRITE)
    try:
        yield
    finally:
        del held
