"""Arrays of more processes than the limit of open files allows to keep open."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

SECONDS = 100
"""How long a program may take that starts so many processes, one after the other."""

PROGRAM = """
import multiprocessing
import os
import resource
import sys

import numpy as np
import shmreduce
from shmreduce.memory import runtime


def send(connection, number):
    array = np.full(50_000, number)
    connection.send([array, {"again": array[:20_000].reshape(100, 200)}])
    # Not before it is read: what is tested is not the mailbox. Nor for ever: a starter that is
    # killed closes nothing that its child has, too.
    assert connection.poll(60) and connection.recv()


def held():
    segments = runtime.current().directory.values()
    return sum(bool(segment.holds) for segment in segments if not segment.owner)


if __name__ == "__main__":
    strategy, kind = sys.argv[1:3]
    senders, files, others, most = map(int, sys.argv[3:])
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
    shmreduce.install(strategy=strategy)
    context = (shmreduce if kind == "ours" else multiprocessing).get_context("fork")
    opened = [os.open(os.devnull, os.O_RDONLY) for _ in range(others)]
    kept = []
    for number in range(senders):
        here, there = context.Pipe()
        child = context.Process(target=send, args=(there, number))
        child.start()
        there.close()
        kept.append(here.recv())
        here.send("read")
        child.join()
        here.close()
        assert held() <= most, held()
    for number, (array, found) in enumerate(kept):
        assert (array == number).all() and (found["again"] == number).all(), number
        assert array.flags.writeable and shmreduce.is_shared(array) is False
        array += 1
        assert (found["again"] == number).all(), number
    # As any array that was received.
    here, there = context.Pipe()
    here.send(kept[-1][0])
    kept[-1][0][:] = 0
    assert (there.recv() == senders).all()
    del array, found
    kept.clear()
    runtime.current().attachments.close_idle(0)
    assert all(segment.owner for segment in runtime.current().directory.values())
    print("right")
"""


def check(text: str, folder: Path, *arguments: str) -> None:
    """Run a program that says at its end that all was right, and nothing else."""
    program = folder / "program.py"
    program.write_text(text)
    done = subprocess.run(
        [sys.executable, "-W", "error", str(program), *arguments],
        timeout=SECONDS,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "SHMREDUCE_DIRECTORY": str(folder)},
    )
    assert (done.stdout, done.stderr, done.returncode) == ("right\n", "", 0)


@pytest.mark.parametrize("kind", ["ours", "standard"])
@pytest.mark.parametrize(
    ("senders", "files", "others", "most"),
    [(150, 160, 0, 160 // 8 + 1), (40, 1000, 900, 18)],
    ids=["few may be open", "most are used by others"],
)
def test_a_program_can_keep_arrays_of_more_processes_than_it_may_open_files(
    kind: str, strategy: str, senders: int, files: int, others: int, most: int, tmp_path: Path
) -> None:
    """The senders have ended: each array is there, whole, and independent of all others, and
    only so many are not copies.
    """
    check(PROGRAM, tmp_path, strategy, kind, *map(str, (senders, files, others, most)))


BYTES_PROGRAM = """
import multiprocessing
import os
import resource
import sys

import numpy as np
import shmreduce
from shmreduce import packets

SENDERS, FILES, SIZE = 40, 160, 5 << 20


def send(connection, number):
    connection.send(np.full(50_000, number))
    # Not for ever: a starter that is killed closes nothing that its child has, too.
    assert connection.poll(60) and connection.recv()


def send_bytes(connection, what):
    connection.send_bytes(b"a" * SIZE)
    if what == "sends the next":
        assert connection.poll(60) and connection.recv()
        # It lies where the last one did.
        connection.send_bytes(b"b" * SIZE)
        connection.send("sent")
        assert connection.poll(60) and connection.recv()


def contents_later(block):
    packets.contents_of = contents_of
    if what == "sends the next":
        here.send("go on")
        assert here.poll(60)
    return contents_of(block)


if __name__ == "__main__":
    strategy, what = sys.argv[1:]
    resource.setrlimit(resource.RLIMIT_NOFILE, (FILES, FILES))
    shmreduce.install(strategy=strategy)
    context = shmreduce.get_context("fork")
    kept = []
    for number in range(SENDERS):
        here, there = context.Pipe()
        child = context.Process(target=send, args=(there, number), daemon=True)
        child.start()
        there.close()
        kept.append(here.recv())
        here.send("read")
        child.join()
        here.close()
    here, there = context.Pipe()
    sender = context.Process(target=send_bytes, args=(there, what), daemon=True)
    sender.start()
    there.close()
    if what == "ends":
        sender.join()
    contents_of, packets.contents_of = packets.contents_of, contents_later
    assert here.recv_bytes() == b"a" * SIZE
    if what == "sends the next":
        assert here.recv_bytes() == b"b" * SIZE
        assert here.recv() == "sent"
        here.send("read")
        sender.join()
    assert all((array == number).all() for number, array in enumerate(kept))
    print("right")
"""


@pytest.mark.parametrize("what", ["sends the next", "ends"])
def test_bytes_that_were_copied_as_they_came_are_those_that_were_sent(
    what: str, strategy: str, tmp_path: Path
) -> None:
    """Whatever their sender does with the memory in which they came, which is its own again."""
    check(BYTES_PROGRAM, tmp_path, strategy, what)
