"""Who moves the arrays of a message: what messages ask of it, and how picklers are told of it.

May import, for its types, ``blocks``, ``lease`` and ``message``.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from shmreduce.memory.blocks import Block
    from shmreduce.memory.lease import Lease
    from shmreduce.memory.message import Message

__all__ = ["Mover", "sending", "take_mover"]


class Mover(Protocol):
    """Lets arrays travel without a copy whose memory nobody else has; see ``shmreduce.moving``."""

    lent: list[Block]
    """Blocks that this process has got to fill, see ``shmreduce.memory.lending``; others' own."""

    def serves(self, obj: object) -> bool:
        """Return whether this is the object whose arrays it moves."""

    @property
    def takes_born(self) -> bool:
        """Whether there can be anything for :meth:`move` here."""

    def move(self, message: Message, address: int, used: int) -> bytes | None:
        """See :meth:`Message.move`."""

    @property
    def passes_on(self) -> bool:
        """Whether :meth:`pass_on` may be called."""

    def cut_off(self) -> None:
        """Let writes to what was passed on so far not reach the message from now on."""

    def pass_on(self, message: Message, block: Block, lease: Lease, handle: bytes) -> None:
        """Take care of a by-value block that a message names though it is not cut off yet.

        Writes of this process must not show in it when somebody can see the message.
        """


class _SendingHere(threading.local):
    """Who moves arrays in the message that the current thread is about to pickle, if anybody."""

    mover: Mover | None = None


sending = _SendingHere()


def take_mover(obj: object) -> Mover | None:
    """Return who moves the arrays of an object that is pickled from now on, if anybody.

    It is nobody's any more then. While the object is pickled its parts may
    pickle and send other messages, a signal handler may. Those are read before
    it is known who has the arrays, so nothing may be moved in them.
    """
    mover = sending.mover
    if mover is None:
        return None
    # Whatever is pickled first: if it is something else, it is in the way of a pickler
    # that is not ours, and what comes next is a part of that.
    sending.mover = None
    return mover if mover.serves(obj) else None
