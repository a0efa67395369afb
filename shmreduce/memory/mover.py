"""What messages require of the mover of their arrays, and how a pickler gets the mover.

May import, for its types, ``blocks``, ``lease`` and ``message``.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shmreduce.memory.blocks import Block
    from shmreduce.memory.lease import Lease
    from shmreduce.memory.message import Message

__all__ = ["Mover", "sending", "take_mover"]


class Mover(Protocol):
    """Sends arrays without a copy if nobody else has their memory; see ``shmreduce.moving``."""

    lent: list[Block]
    """Blocks of other processes, lent to this one to fill; see ``shmreduce.memory.lending``."""

    def serves(self, obj: object) -> bool:
        """Return whether it moves the arrays of this object."""

    @property
    def takes_born(self) -> bool:
        """Whether there can be memory here for :meth:`move`."""

    def move(self, message: Message, address: int, used: int) -> bytes | None:
        """See :meth:`Message.move`."""

    @property
    def passes_on(self) -> bool:
        """Whether :meth:`pass_on` may be called."""

    @property
    def uncut(self) -> Sequence[object]:
        """What was passed on since the last :meth:`cut_off`; always the same object."""

    def cut_off(self) -> None:
        """Make sure that later writes to blocks passed on so far do not reach the message."""

    def pass_on(self, message: Message, block: Block, lease: Lease, handle: bytes) -> None:
        """Take charge of a by-value block that a message names, but that is not private yet.

        What this process writes must not be seen in it once a receiver can have the message.
        """


class _SendingHere(threading.local):
    """The mover for the message that the current thread is about to pickle, if there is one."""

    mover: Mover | None = None


sending = _SendingHere()


def take_mover(obj: object) -> Mover | None:
    """Return the mover for an object that is pickled from now on, if there is one.

    No other pickling gets it afterwards. While the object is pickled, its parts or a signal
    handler may pickle and send other messages. Those are read before it is known who has the
    arrays, so nothing may be moved in them.
    """
    mover = sending.mover
    if mover is None:
        return None
    # Cleared by the first object that is pickled. If that is another object, a pickler of
    # other code is at work, and what is pickled next is a part of that object.
    sending.mover = None
    return mover if mover.serves(obj) else None
