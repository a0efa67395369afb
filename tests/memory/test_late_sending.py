"""What is sent and shared when the process has begun to end, and what goes wrong then."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
import warnings
from multiprocessing import Pipe
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING

import numpy as np
import pytest

import shmreduce
from shmreduce.memory import runtime
from shmreduce.memory.family import Family
from shmreduce.memory.inspection import all_names
from shmreduce.memory.segment import Segment
from shmreduce.memory.size_classes import FIRST_SEGMENT
from shmreduce.testing.processes import OtherProcess
from tests.conftest import letters
from tests.memory.waiting import PATIENCE, in_forked_child, wait_for_exit

if TYPE_CHECKING:
    from pathlib import Path

    from shmreduce import SharingStrategy
    from shmreduce.memory.mailbox import Letter
    from shmreduce.memory.segment import Sent

LENGTH = 300_000
PROGRAM = """
import atexit

late = []
# Before those of multiprocessing, so it is called after them.
atexit.register(lambda: [function() for function in late])

import multiprocessing
import os
import sys

import numpy as np
import shmreduce

shmreduce.install(strategy=sys.argv[1])
reader, writer = multiprocessing.Pipe(duplex=False)
reader_lives, writer_lives = os.pipe()
if sys.argv[2] == "read" and not os.fork():
    writer.close()
    os.close(writer_lives)
    os.read(reader_lives, 1)
    print(*(int(reader.recv().sum()) for _ in range(3)), flush=True)
    os._exit(0)
kept = []
late.append(lambda: kept.append(shmreduce.ones(300_000)))
late.append(lambda: [writer.send(each) for each in (np.ones(300_000), kept[0], np.ones(9))])
"""


def run(*arguments: str, directory: Path) -> str:
    """Run the program and return what its reader tells."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROGRAM, *arguments],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=True,
        env={**os.environ, "SHMREDUCE_DIRECTORY": str(directory), "SHMREDUCE_INLINE_LIMIT": "0"},
    )
    assert done.stderr == ""
    return done.stdout


@pytest.mark.parametrize("strategy", ["file_descriptor", "file_system"])
def test_what_exit_functions_send_is_read_when_the_sender_has_ended(
    strategy: str, tmp_path: Path
) -> None:
    """Messages of a function that is called after those of multiprocessing are handed over."""
    assert run(strategy, "read", directory=tmp_path) == "300000 300000 9\n"


def test_what_exit_functions_make_has_no_name_left(tmp_path: Path) -> None:
    """Segments that are made at the very end leave no file, also if nobody comes after."""
    run("file_system", "alone", directory=tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("fault", ["mailbox", "unlink", "unlink of a plugin"])
def test_a_warning_at_the_end_comes_when_all_is_done(
    fault: str, strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where warnings are errors, and handing over or removing one name fails, the rest is done."""

    def refuse(*_: object) -> None:
        raise OSError(errno.EAGAIN, "the mailbox is full")

    def refuse_one(self: SharingStrategy, name: str) -> None:
        # Others' that were killed are swept on the way.
        if f"-{os.getpid()}-" in name:
            refused.append(name)
            if len(refused) == 1 and fault == "unlink":
                raise PermissionError(errno.EACCES, "not to be removed", name)
            if len(refused) == 1:
                raise RuntimeError("of its own")
        unlink(self, name)

    def child() -> bool:
        if fault == "mailbox":
            monkeypatch.setattr(Family, "post", refuse)
        else:
            monkeypatch.setattr(type(heap_strategy), "unlink", refuse_one)
        here, there = Pipe()
        here.send([np.ones(LENGTH), shmreduce.ones(LENGTH)])
        # Nothing is left to others by a child that may hand over.
        kept = [] if fault == "mailbox" else there.recv()
        # Each needs a segment.
        kept += [shmreduce.empty(FIRST_SEGMENT, np.uint8) for _ in range(2)]
        mine = f"-{os.getpid()}-"
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            try:
                runtime.current().leave()
            except shmreduce.ShmreduceWarning as warning:
                told = str(warning)
        left = [name for name in all_names() if mine in name]
        del kept
        there.close()
        if fault == "mailbox":
            return not left and told.count("lost") == 2
        return len(left) == 1 and len(refused) >= 4 and "shmreduce gc" in told

    if fault != "mailbox" and strategy == "file_descriptor":
        pytest.skip("segments of this strategy have no names")
    refused: list[str] = []
    heap_strategy = shmreduce.strategies.current_strategy()
    unlink = type(heap_strategy).unlink
    assert wait_for_exit(in_forked_child(child)) == 0


def dump_ones() -> bytes:
    return bytes(ForkingPickler.dumps(np.ones(LENGTH)))


@pytest.mark.usefixtures("installed")
def test_nobody_is_warned_of_what_is_read_while_the_process_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another thread reads what was sent on to it, and closes its segment, of another process,
    when that was found to have an unread message.
    """
    unread = Segment.unread

    def child() -> bool:
        here, there = Pipe()
        here.send(ForkingPickler.loads(data))
        state = runtime.current()

        def read_and_close() -> None:
            there.recv()
            state.attachments.close_idle(0)

        def unread_before(segment: Segment) -> list[Sent]:
            found = unread(segment)
            if found and not segment.owner:
                monkeypatch.setattr(Segment, "unread", unread)
                thread = threading.Thread(target=read_and_close)
                thread.start()
                thread.join(PATIENCE)
            return found

        monkeypatch.setattr(Segment, "unread", unread_before)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            state.leave()
        return Segment.unread is unread

    with OtherProcess("fork") as owner:
        data = owner.ask(dump_ones)
        assert wait_for_exit(in_forked_child(child)) == 0


@pytest.mark.usefixtures("strategy")
def test_what_is_sent_late_takes_one_letter() -> None:
    """However many messages exit functions send, the mailbox has each segment once, and the
    letter names them all; when they have been read it has none.
    """

    def mine() -> list[Letter]:
        own = {segment.token for segment in runtime.current().directory.values()}
        return [letter for letter in letters() if letter.token in own]

    def child() -> bool:
        here, there = Pipe()
        here.send(np.ones(LENGTH))
        runtime.current().leave()
        for _ in range(9):
            here.send(np.ones(LENGTH))
        found = mine()
        kept = [there.recv() for _ in range(10)]
        return (
            len(found) == len({letter.token for letter in found})
            and sum(len(letter.unread) for letter in found) == 10
            and len(kept) == 10
            and mine() == []
        )

    assert wait_for_exit(in_forked_child(child)) == 0


@pytest.mark.usefixtures("strategy")
def test_a_shared_array_that_is_sent_late_is_in_the_mailbox() -> None:
    """Also one that is a message by itself: its reader may have no descriptor free."""

    def is_there() -> bool:
        own = {segment.token for segment in runtime.current().directory.values()}
        return any(letter.token in own for letter in letters())

    def child() -> bool:
        here, there = shmreduce.Pipe()
        shared = shmreduce.ones(LENGTH)
        here.send([shared])
        there.recv()
        runtime.current().leave()
        before = is_there()
        here.send(shared)
        between = is_there()
        there.recv()
        return (before, between, is_there()) == (False, True, False)

    assert wait_for_exit(in_forked_child(child)) == 0
