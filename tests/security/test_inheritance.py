"""Programs that a process runs get none of its shared memory."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import shmreduce
from shmreduce.memory import runtime

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(params=["file_descriptor", "file_system"])
def installed(request: pytest.FixtureRequest, shmreduce_no_leaks: None) -> Iterator[str]:
    with shmreduce.install(strategy=request.param, inline_limit=4096):
        yield request.param


def identity(number: int) -> str:
    status = os.fstat(number)
    return f"{status.st_dev}:{status.st_ino}"


def files_of_a_program() -> set[str]:
    """Return what a program has open that this process runs without closing anything for it."""
    script = (
        "import os\n"
        "for number in range(256):\n"
        "    try:\n"
        "        status = os.fstat(number)\n"
        "    except OSError:\n"
        "        continue\n"
        "    print(f'{status.st_dev}:{status.st_ino}')\n"
    )
    run = subprocess.run(
        [sys.executable, "-S", "-c", script],
        close_fds=False,
        stdout=subprocess.PIPE,
        check=True,
        text=True,
        timeout=60,
    )
    return set(run.stdout.split())


def own_files() -> dict[str, str]:
    """Return the segments, memfds and sockets that this process has open, and what they are."""
    found = {}
    for entry in Path("/proc/self/fd").iterdir():
        number = int(entry.name)
        try:
            target = str(entry.readlink())
            is_socket = stat.S_ISSOCK(os.fstat(number).st_mode)
        except OSError:
            # The descriptor of the listing itself.
            continue
        if number > 2 and ("shmreduce" in target or is_socket):
            found[identity(number)] = target
    return found


def what_a_program_inherits(*held: Any) -> tuple[list[str], list[str]]:
    """Return what this process has open, and what of it a program gets that it runs."""
    block = shmreduce.allocate(5000)
    pipe = shmreduce.Pipe()
    _ = runtime.current().family.fd
    for segment in runtime.current().directory.values():
        _ = segment.transfer_fd
    mine = own_files()
    inherited = [mine[each] for each in files_of_a_program() & mine.keys()]
    for end in pipe:
        end.close()
    del block, held
    return list(mine.values()), inherited


def test_a_program_inherits_nothing(installed: str) -> None:
    """A program that is run with close_fds=False has neither segments, family nor pipes."""
    mine, inherited = what_a_program_inherits()
    assert len(mine) >= 5
    assert any("family" in each for each in mine)
    assert not inherited


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_a_childs_program_inherits_nothing(installed: str, method: str) -> None:
    """Nor has one that a child runs, whatever way the child got its descriptors."""
    context = shmreduce.get_context(method)
    block = shmreduce.allocate(5000)
    queue, sent = context.SimpleQueue(), context.SimpleQueue()
    sent.put(block.buffer[:10])
    child = context.Process(target=report, args=(queue, sent, block.buffer[:100]))
    child.start()
    try:
        assert queue._reader.poll(60)
        mine, inherited = queue.get()
    finally:
        child.join(30)
        queue.close()
        sent.close()
    assert any("family" in each for each in mine)
    assert len(mine) >= 5
    assert not inherited


def report(queue: Any, sent: Any, argument: memoryview) -> None:
    received = sent.get()
    queue.put(what_a_program_inherits(received, argument))
