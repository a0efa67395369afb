"""Programs whose standard streams are closed, as daemons' are."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from shmreduce.memory import standard_streams
from tests.memory.waiting import PATIENCE

if TYPE_CHECKING:
    from pathlib import Path

STREAMS = """
import os


def what_has_their_numbers():
    found = []
    for number in range(3):
        try:
            found.append(os.readlink(f"/proc/self/fd/{number}"))
        except FileNotFoundError:
            pass
    return [name for name in found if "shmreduce" in name or name.startswith("socket")]
"""
PROGRAM = """
# libffi may keep a file open, which would take one of the numbers.
import ctypes
import os
import sys

for number in range(3):
    os.close(number)

import numpy as np
import shmreduce
from streams import what_has_their_numbers


def answer(connection):
    array = connection.recv()
    connection.send([array + 1, shmreduce.ones(300_000), what_has_their_numbers()])


if __name__ == "__main__":
    shmreduce.install(strategy=sys.argv[1])
    method, kind = sys.argv[2:4]
    import multiprocessing

    context = (shmreduce if kind == "ours" else multiprocessing).get_context(method)
    here, there = context.Pipe()
    child = context.Process(target=answer, args=(there,))
    child.start()
    here.send(np.ones(300_000))
    array, shared, seen = here.recv()
    here.close()
    child.join()
    if kind == "standard":
        # Its own pipes are its own affair.
        seen = [name for name in seen if "socket" not in name]
    seen += [name for name in what_has_their_numbers() if kind == "ours" or "socket" not in name]
    right = (array == 2).all() and (shared == 1).all()
    with open(sys.argv[4], "w") as file:
        print(*seen, "right" if right else "wrong", file=file)
"""


@pytest.mark.parametrize(
    ("method", "kind"),
    # Without these streams the standard library's pipes do not reach children of spawn,
    # and its fork server starts no process at all.
    [("fork", "ours"), ("spawn", "ours"), ("fork", "standard")],
)
def test_nothing_of_ours_takes_their_numbers(
    method: str, kind: str, strategy: str, tmp_path: Path
) -> None:
    """Whatever a library prints there goes nowhere, instead of into an array."""
    (tmp_path / "streams.py").write_text(STREAMS)
    program, result = tmp_path / "program.py", tmp_path / "result"
    program.write_text(PROGRAM)
    subprocess.run(
        [sys.executable, str(program), strategy, method, kind, str(result)],
        timeout=PATIENCE,
        check=True,
        env={**os.environ, "SHMREDUCE_DIRECTORY": str(tmp_path)},
    )
    assert result.read_text() == "right\n"


LOUD = """
# libffi may keep a file open, which would take one of the numbers.
import ctypes
import os
import sys

for number in range(3):
    os.close(number)

import numpy as np
import shmreduce


class Loud:
    def __init__(self, array):
        self.array = array

    def __setstate__(self, state):
        self.__dict__ = state
        for number in range(3):
            try:
                os.write(number, b"what a library prints")
            except OSError:
                pass


if __name__ == "__main__":
    here, there = shmreduce.Pipe()
    here.send(Loud(np.ones(300_000)))
    there.recv()
    here.send(np.ones(300_000))
    # A process that opens the segment now looks at what it begins with.
    context = shmreduce.get_context("fork")
    reader, writer = shmreduce.Pipe()
    child = context.Process(target=lambda: writer.send(there.recv().sum()))
    child.start()
    with open(sys.argv[1], "w") as file:
        print(reader.recv() if reader.poll(30) else "lost", file=file)
    child.join()
"""


def test_what_is_printed_while_a_message_is_loaded_goes_nowhere(tmp_path: Path) -> None:
    """The descriptors that came with a message do not have the numbers, either."""
    program, result = tmp_path / "program.py", tmp_path / "result"
    program.write_text(LOUD)
    subprocess.run([sys.executable, str(program), str(result)], timeout=PATIENCE, check=True)
    assert result.read_text() == "300000.0\n"


PRINTS = """
# libffi may keep a file open, which would take one of the numbers.
import ctypes
import os
import sys

for number in range(3):
    os.close(number)

import shmreduce
from shmreduce.interrupts import Interrupts


def wait(index, line):
    line.send("here")
    assert line.poll(30)


if __name__ == "__main__":
    here, there = shmreduce.Pipe()
    context = shmreduce.start_processes(wait, (there,), join=False, start_method="fork")
    assert here.poll(30)
    with Interrupts() as interrupts:
        number_of_ours = interrupts.fileno()
    for number in range(3):
        try:
            os.write(number, b"what a library prints")
        except OSError:
            pass
    here.send("go on")
    try:
        while not context.join():
            pass
        outcome = "ended well"
    except shmreduce.ProcessException as error:
        outcome = str(error)
    with open(sys.argv[1], "w") as file:
        print(outcome, number_of_ours > 2, file=file)
"""


def test_what_is_printed_is_not_taken_for_the_death_of_the_parent(tmp_path: Path) -> None:
    """The pipes of a process and its children do not have the numbers, either: a child gets a
    signal when something is written to its one.
    """
    program, result = tmp_path / "program.py", tmp_path / "result"
    program.write_text(PRINTS)
    subprocess.run([sys.executable, str(program), str(result)], timeout=PATIENCE, check=True)
    assert result.read_text() == "ended well True\n"


def test_a_pipe_that_cannot_be_moved_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a free number above the streams' there is an error, and neither end is left."""
    reader, writer = os.pipe()
    monkeypatch.setattr(standard_streams, "_STANDARD_ERROR", writer)
    monkeypatch.setattr(os, "pipe", lambda: (reader, writer))

    def refuse(*_: object) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(fcntl, "fcntl", refuse)
    with pytest.raises(OSError, match=os.strerror(errno.EMFILE)):
        standard_streams.pipe()
    for end in (reader, writer):
        with pytest.raises(OSError, match=os.strerror(errno.EBADF)):
            os.fstat(end)


def test_of_several_files_those_that_cannot_be_moved_are_closed() -> None:
    """What comes after the first of them is closed, too: they are known by their places."""
    moved, refused, last = (os.open(os.devnull, os.O_RDONLY) for _ in range(3))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(standard_streams, "_STANDARD_ERROR", last)
        tries = iter([os.open(os.devnull, os.O_RDONLY)])

        def once(*_: object) -> int:
            for number in tries:
                return number
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

        patch.setattr(fcntl, "fcntl", once)
        found = [moved, refused, last]
        standard_streams.all_clear_of_streams(found)
    assert len(found) == 1
    os.close(found[0])
    for each in (moved, refused, last):
        with pytest.raises(OSError, match=os.strerror(errno.EBADF)):
            os.fstat(each)


def test_a_file_that_has_such_a_number_is_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number is free again, also if there is no other one; the file is the same."""
    number = os.open(os.devnull, os.O_RDONLY)
    monkeypatch.setattr(standard_streams, "_STANDARD_ERROR", number)
    file = os.fstat(number)
    clear = standard_streams.clear_of_streams(number)
    assert clear > number
    assert os.fstat(clear).st_ino == file.st_ino
    assert fcntl.fcntl(clear, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
    with pytest.raises(OSError, match=os.strerror(errno.EBADF)):
        os.fstat(number)

    def refuse(*_: object) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(standard_streams, "_STANDARD_ERROR", clear)
    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "fcntl", refuse)
        with pytest.raises(OSError, match=os.strerror(errno.EMFILE)):
            standard_streams.clear_of_streams(clear)
    with pytest.raises(OSError, match=os.strerror(errno.EBADF)):
        os.fstat(clear)
