"""What became of each message of a run, in memory that outlives whoever is killed.

Every message has one byte that only its sender writes and one that only its
receiver writes. So what a killed process did until its last instruction is
still there to be counted.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["ACTORS", "MESSAGES", "ROWS", "Row", "Tally"]

ACTORS = 32
"""Most processes of a run that faults are meant for."""
ROWS = 160
"""Most pairs of a channel and one of its senders."""
MESSAGES = 512
"""Most messages of a row."""

# What a sender writes.
TRYING, SENT, REFUSED = 1, 2, 3
# What a receiver writes.
INTACT, CORRUPTED = 1, 2
# What becomes of an actor.
PLAYING, LEFT, ENDED, KILLED = 1, 2, 3, 4


@dataclass
class Row:
    """What became of the messages of one sender in one channel."""

    sent: int
    trying: int
    received: int
    corrupted: int
    missing: int
    """Sent, and never seen by a receiver."""
    unwanted: int
    """Received though the sender got an error."""
    named: int
    """How often a receiver got a named error instead of a message."""


class Tally:
    """The table of one run.

    Parameters
    ----------
    path : Path
        Its file.
    """

    def __init__(self, path: Path) -> None:
        sizes = (
            ("status", np.uint8, (ACTORS,)),
            ("pids", np.uint32, (ACTORS,)),
            ("begun", np.float64, (1,)),
            ("stopped", np.uint32, (ACTORS,)),
            ("seconds", np.float64, (ACTORS,)),
            ("in_rain", np.uint8, (ACTORS,)),
            ("faults", np.uint32, (ACTORS,)),
            ("named", np.uint32, (ROWS,)),
            ("sent", np.uint8, (ROWS, MESSAGES)),
            ("got", np.uint8, (ROWS, MESSAGES)),
        )
        total = sum(int(np.prod(shape)) * np.dtype(kind).itemsize for _, kind, shape in sizes)
        with path.open("a+b") as file:
            file.truncate(total)
            memory = mmap.mmap(file.fileno(), total)
        place = 0
        found = {}
        for name, kind, shape in sorted(sizes, key=lambda each: -np.dtype(each[1]).itemsize):
            count = int(np.prod(shape))
            found[name] = np.frombuffer(memory, kind, count, place).reshape(shape)
            place += count * np.dtype(kind).itemsize
        self.status = found["status"]
        self.pids = found["pids"]
        self.begun = found["begun"]
        """When all actors had been started (monotonic seconds), 0 before."""
        self.stopped = found["stopped"]
        """Pids that stopped themselves, by actor; 0 for none."""
        self.seconds = found["seconds"]
        """For how long."""
        self.in_rain = found["in_rain"]
        """Which actors can take signals."""
        self.faults = found["faults"]
        """How many faults struck each actor from inside."""
        self.named = found["named"]
        self.sent = found["sent"]
        self.got = found["got"]

    def enter(self, actor: int, pid: int) -> None:
        """Take note that an actor has begun."""
        # Before the pid: whoever played the part before may have been killed in the rain.
        self.in_rain[actor] = 0
        self.pids[actor] = pid
        self.status[actor] = PLAYING

    def row(self, index: int) -> Row:
        """Count one row."""
        sent, got = self.sent[index], self.got[index]
        return Row(
            sent=int((sent == SENT).sum()),
            trying=int((sent == TRYING).sum()),
            received=int((got == INTACT).sum()),
            corrupted=int((got == CORRUPTED).sum()),
            missing=int(((sent == SENT) & (got == 0)).sum()),
            unwanted=int(((sent == REFUSED) & (got != 0)).sum()),
            named=int(self.named[index]),
        )
