"""A real process that does what the model's processes do, one thing at a time, when told."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, NamedTuple

import shmreduce
from shmreduce.memory import lending, runtime
from shmreduce.memory.handle import Handle
from shmreduce.memory.layout import BY_VALUE, SHARED
from shmreduce.memory.lease_slots import MESSAGE, NONCE_MASK
from shmreduce.memory.lending import Lender
from shmreduce.memory.loading import Loading, discard_message, here, import_block
from shmreduce.memory.message import Message
from shmreduce.memory.owned_segment import OwnedSegment
from shmreduce.moving import Moves

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from shmreduce.memory.record import Record

__all__ = ["SIZE", "Seen", "act"]

SIZE = 300_000
"""Bytes of a block; enough for a received one to be sent on without a copy."""
_NEVER = float("inf")


class Seen(NamedTuple):
    """What the maker's tables show of one block."""

    out: bool
    chain: tuple[str, ...]


class Actor:
    """The views of one process, by the keys that the test gives them."""

    def __init__(self, *, shared: bool) -> None:
        self.kind = SHARED if shared else BY_VALUE
        self.views: dict[Any, Any] = {}
        self.lender = Lender(lambda: None)
        self.passing: tuple[Message, Moves, bytes] | None = None

    def allocate(self, key: Any, value: int) -> tuple[bytes, int]:
        """Make a shared block full of ``value``; return segment and number."""
        block = shmreduce.allocate(SIZE)
        block.buffer[:] = bytes([value]) * SIZE
        self.views[key] = block
        return block._record.segment.token, block._record.block

    def post(self, key: Any, value: int) -> tuple[bytes, tuple[bytes, int]]:
        """Send a by-value block; return its handle, segment and number. The view stays."""
        message = Message()
        given = message.allocate(SIZE)
        if given is None:
            raise RuntimeError("no memory")
        view, handle = given
        view[:] = bytes([value]) * SIZE
        self.views[key] = view
        message.commit()
        what = Handle.unpack(handle)
        return handle, (what.token, what.block)

    def forward(self, key: Any) -> bytes | None:
        """Send a block on; return the handle."""
        message = Message()
        handle = message.refer(self.views[key], SIZE)
        message.commit()
        return handle

    def pass_on(self, key: Any) -> bool:
        """Pickle a block that may be dropped before the message is complete."""
        moves = Moves()
        message = Message(mover=moves)
        handle = message.refer(self.views[key], SIZE)
        if handle is None:
            return False
        self.passing = message, moves, handle
        # To be decided when the message is completed.
        return not self.views[key]._record.private

    def keep(self) -> bytes:
        """Complete that message, with the view still there; return the handle."""
        if self.passing is None:
            raise RuntimeError("there is no such message")
        message, moves, handle = self.passing
        self.passing = None
        settled: bytes = moves.settle(handle)
        message.commit()
        return settled

    def let_go(self, key: Any) -> bytes:
        """Complete that message when the view has gone; return the handle."""
        del self.views[key]
        return self.keep()

    def lend(self, key: Any) -> bytes | None:
        """Let a view go whose block somebody else is to fill; return the handle, if it may be."""
        record = self.views[key]._record
        self.lender.watch([self.views[key]])
        del self.views[key]
        return self._lend(record)

    def let_go_and_lend(self, key: Any) -> tuple[bytes, bytes | None]:
        """Complete a message when the view has gone, and lend the block; return both handles."""
        record = self.views[key]._record
        self.lender.watch([self.views[key]])
        return self.let_go(key), self._lend(record)

    def _lend(self, record: Record) -> bytes | None:
        # Nor when forked children have gone.
        record.keep = None
        given = self.lender.lend(None)
        if given is None:
            return None
        message, (handle,) = given
        message.commit()
        return handle

    def give_back_lent(self, key: Any, value: int) -> bytes:
        """Fill a block that was lent, and send it; return the handle."""
        block = self.views.pop(key)
        nbytes, lent = block.nbytes, [block]
        del block
        message = Message(mover=Moves(lent=lent))
        given = message.allocate(nbytes)
        if given is None or lent:
            raise RuntimeError("it was not filled")
        view, handle = given
        view[:] = bytes([value]) * nbytes
        del view, given
        message.commit()
        return handle

    def load(self, key: Any, handle: bytes) -> str | int:
        """Load a message; return what the bytes are, or the error's name."""
        try:
            block = import_block(handle)
        except shmreduce.ShmreduceError as error:
            return type(error).__name__
        self.views[key] = block
        return self.read(key)

    def load_and_undo(self, handle: bytes) -> None:
        """Load a message, and take it back as if something else in it could not be loaded."""
        loading = here.loading = Loading()
        try:
            import_block(handle)
        except shmreduce.ShmreduceError:
            return
        finally:
            loading.undo()
            here.loading = None
            loading.close()

    def discard(self, handle: bytes) -> None:
        """Give a message back."""
        discard_message(handle)

    def read(self, key: Any) -> int:
        """Return the value that all bytes of a view have, -1 if they differ."""
        view = self.views[key]
        # One that was lent is named whole.
        seen = bytes(view if isinstance(view, memoryview) else view.buffer)[:SIZE]
        return seen[0] if seen == seen[:1] * SIZE else -1

    def drop(self, key: Any) -> None:
        """Let a view go."""
        del self.views[key]

    def settle(self) -> None:
        """Try again to end leases that could not be ended at once."""
        runtime.current().live.settle()

    def waiting(self) -> int:
        """Return how many dead blocks wait for forked children."""
        return runtime.current().live.unsettled

    def look_after(self, name: str) -> None:
        """Collect or reap."""
        heap = runtime.current().heap(self.kind)
        # Not by itself, too, when a second has passed.
        heap._reaped = _NEVER
        getattr(heap, name)()
        heap._reaped = _NEVER

    def look(self, token: bytes, block: int) -> Seen:
        """Return what the tables show of a block."""
        segment = runtime.current().directory[token]
        out = isinstance(segment, OwnedSegment) and block in segment.out
        words = segment.leases(block)
        return Seen(
            out, tuple("message" if word & ~NONCE_MASK == MESSAGE else "holder" for word in words)
        )

    def fork(self, connection: Connection) -> int:
        """Fork a child that acts on the other connection; return its pid."""
        pid = os.fork()
        if pid:
            return pid
        # Inherited views are told apart from those of the child's own.
        self.views = {(*key[:2], True): view for key, view in self.views.items()}
        self.passing = None
        try:
            self.serve(connection)
        finally:
            os._exit(1)
        return 0

    def serve(self, connection: Connection) -> None:
        """Do what comes until there is an end."""
        while True:
            try:
                name, arguments = connection.recv()
            except EOFError:
                os._exit(0)
            connection.send(getattr(self, name)(*arguments))
            del arguments


def act(connection: Connection, spare: Connection, *, shared: bool) -> None:
    """Be one process of the model; ``spare`` is for a child that it may fork."""
    # Large enough for everybody.
    patched: Any = lending
    patched._SMALLEST = SIZE
    with shmreduce.install():
        actor = Actor(shared=shared)
        actor.look_after("reap")
        # Closing them is the test's way of ending whoever still reads.
        fork = actor.fork
        vars(actor)["fork"] = lambda: fork(spare)
        actor.serve(connection)
